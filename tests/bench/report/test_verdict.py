"""What the rates of one loader mean: stages, bottleneck, stalls, changes, in figures and in words."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.report.row import BUSY_SHARE, Row, Watched
from bench.report.stats import Estimate, quotient, ratio
from bench.report.verdict import (
    COLD_FETCH,
    KEEPS_UP,
    LOADER_BINDS,
    NO_TRAINER,
    NOT_DISTINGUISHABLE,
    advise,
    analyse,
    bottleneck,
    explained,
    judge,
    known_changes,
    stage_rates,
    stalls,
)
from tests.bench.rich_result import around


def test_a_loader_keeps_up_falls_behind_or_the_runs_cannot_tell() -> None:
    for share, verdict in (
        (Estimate(0.50, 0.48, 0.52), LOADER_BINDS),
        (Estimate(1.00, 0.99, 1.01), KEEPS_UP),
        (Estimate(0.985, 0.984, 0.986), KEEPS_UP),  # told apart, but negligible
        (Estimate(0.97, 0.969, 0.971), LOADER_BINDS),
        (Estimate(0.56, 0.34, 1.00), NOT_DISTINGUISHABLE),  # one repeat kept up
    ):
        assert judge(share) == verdict
    assert judge(None) == NO_TRAINER


def test_ratio_pairs_repeats_and_a_quotient_holds_1_exactly_where_the_ranges_overlap() -> None:
    assert ratio([10.0, 30.0], [20.0, 30.0]) == Estimate(0.75, 0.5, 1.0)
    assert quotient(Estimate(20, 18, 24), Estimate(10, 8, 12)) == Estimate(2, 1.5, 3)
    assert quotient(Estimate(10, 9, 11), Estimate(12, 11, 13)).high == 1
    assert quotient(Estimate(10, 9, 10.9), Estimate(12, 11, 13)).high < 1


def pipeline(backend: str = "pytorch", data: str = "raw tree", **given: Any) -> Row:
    """One that decodes at 1,150 images/s and feeds a trainer of 2,480, unless told otherwise."""
    rates = {
        "loader": 1_150.0, "trainer": 2_480.0, "together": 1_140.0, "transfer": 90_000.0,
        "read": 40_000.0, "decode": 1_300.0, **given,
    }  # fmt: skip
    made = {
        name: around(rate, 0.02) if isinstance(rate, (int, float)) else rate for name, rate in rates.items()
    }
    if made["trainer"] is not None and made["together"] is not None:
        share = made["together"].median / made["trainer"].median
        made.setdefault("ratio", Estimate(share, share - 0.01, share + 0.01))
    return Row(backend=backend, data=data, trainer_name="emulated", **made)


KEEPING = {"loader": 20_000, "decode": 22_000, "together": 2_470}


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        ({}, "decode"),
        ({"read": 1_300, "decode": 40_000}, "storage"),
        ({"read": 40_000, "decode": 6_000}, "collate"),
        ({"transfer": 1_300, "decode": 40_000}, "transfer"),
        (KEEPING, "compute"),
        ({"loader": 2_450, "decode": 2_700, "together": 2_400}, None),  # overlaps with the trainer
        ({"read": 2_500, "decode": 2_400}, None),  # two stages alike
        ({"trainer": None, "together": None}, "decode"),
        ({"cold": 300}, "storage"),
    ],
)
def test_the_narrowest_stage_is_the_bottleneck(rates: dict[str, Any], found: str | None) -> None:
    row = pipeline(**rates)
    assert bottleneck(row) == found
    assert found is None or found in stage_rates(row)
    said = advise(row, [])
    assert (found is None) == ("no stage stands out" in said or "no single stage" in said)


def test_stages_add_up_to_the_loader_and_stalls_to_what_the_trainer_loses() -> None:
    """Whichever of its rates were measured."""
    for rates in ({}, {"read": None}, {"decode": None}, {"transfer": None}, {"cold": 300}):
        row = pipeline(**rates)
        stages = stage_rates(replace(row, cold=None))
        assert stages.pop("compute") == 2_480
        assert sum(1 / rate for rate in stages.values()) == pytest.approx(1 / 1_150)
        lost_s = stalls(row, 64)
        assert (lost_s.pop(COLD_FETCH, None) is not None) == row.reads_cold
        assert sum(lost_s.values()) == pytest.approx(64 / 1_140 - 64 / 2_480)


def test_rows_of_one_trainer_are_explained_beside_one_another() -> None:
    noise, dali = pipeline("synthetic", "noise", loader=9_000), pipeline("dali", together=1_300)
    rows = [pipeline(), pipeline("shards", "shards", **KEEPING), dali, noise]
    raw, shards, _, without = explained(rows, 64, 2, 2)
    assert (raw.binds, shards.binds, without.binds) == ("decode", "compute", None)
    assert [one.what for one in raw.changes] == ["Converting to shards", "Backend dali on raw tree"]
    assert "Converting to shards gave 2,470." in raw.advice
    for busy, offered in ((0.4, ["8 workers, one per CPU,"]), (BUSY_SHARE, [])):
        watched = pipeline(loader=90, trainer=None, together=None, monitor=Watched(mean={"cpu_share": busy}))
        assert [one.what for one in known_changes(watched, [], 2, 8)] == offered


STEP_S = 0.010


def steady(batches: int, wait_s: float = 0.0005) -> np.ndarray:
    """Waits with the jitter of a real clock."""
    return wait_s * (1 + 0.1 * np.random.default_rng((1, batches)).standard_normal(batches))


def test_spikes_are_found_where_they_are_with_their_period_and_its_cause() -> None:
    for spikes, period, said in (
        (range(7, 200, 8), 8, "as many as the loader has workers"),
        (range(0, 200, 16), 16, "not the number of workers (8)"),
        ((7, 11, 48, 90, 93, 151, 199), None, "7 batches waited 50."),
    ):
        waits = steady(200)
        assert analyse(waits, np.full(200, STEP_S), [], 8).explanation == ()
        waits[list(spikes)] += 0.05
        found = analyse(waits, np.full(200, STEP_S), [], 8)
        assert (found.wait_spikes.batches, found.wait_spikes.period) == (tuple(spikes), period)
        (sentence,) = found.explanation
        assert said in sentence


def test_short_waits_slow_steps_and_the_first_batch_of_an_epoch_are_no_spikes_of_the_loader() -> None:
    waits = np.full(100, 1e-6)
    waits[::4] = 200e-6  # 200 times as long, and 2% of a batch
    assert analyse(waits, np.full(100, STEP_S), [], 4).wait_spikes.batches == ()
    steps = np.full(100, STEP_S)
    steps[49::50] = 0.5
    found = analyse(steady(100), steps, [], 2)
    assert (found.wait_spikes.batches, found.step_spikes.batches) == ((), (49, 99))
    assert found.explanation[0].endswith("not the loader's doing.")
    waits = np.full(90, 0.001)
    waits[[0, 30, 60]] = 0.8, 0.201, 0.301
    found = analyse(waits, np.full(90, STEP_S), [60, 0, 30], 2)
    assert found.wait_spikes.batches == ()
    (sentence,) = found.explanation
    assert "first batch of an epoch waits 300 ms more" in sentence
