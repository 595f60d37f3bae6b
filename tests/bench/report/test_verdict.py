"""What the rates of one loader mean: stages, bottleneck, stalls, changes, in figures and in words."""

import random
from dataclasses import replace
from typing import Any

import pytest

from bench.report.row import BUSY_SHARE, Change, Row, Watched
from bench.report.stats import Estimate
from bench.report.verdict import (
    COLD_FETCH,
    KEEPS_UP,
    LOADER_BINDS,
    NO_TRAINER,
    NOT_DISTINGUISHABLE,
    advise,
    bottleneck,
    explained,
    judge,
    known_changes,
    lost_share,
    predicted,
    stage_rates,
    stalls,
)
from tests.bench.rich_result import around


def test_judge() -> None:
    for ratio, verdict in (
        (Estimate(0.50, 0.48, 0.52), LOADER_BINDS),
        (Estimate(1.00, 0.99, 1.01), KEEPS_UP),
        (Estimate(0.985, 0.984, 0.986), KEEPS_UP),  # told apart, but negligible
        (Estimate(0.97, 0.969, 0.971), LOADER_BINDS),
        (Estimate(0.56, 0.34, 1.00), NOT_DISTINGUISHABLE),  # one repeat kept up
        (Estimate(1.10, 1.09, 1.11), KEEPS_UP),
    ):
        assert judge(ratio) == verdict
        assert lost_share(ratio) == max(0, 1 - ratio.median)
    assert judge(None) == NO_TRAINER


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


ONE_STAGE = {
    "loader": 1_000,
    "trainer": 2_000,
    "together": 990,
    **dict.fromkeys(("transfer", "read", "decode")),
}
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
        ({"loader": 20_000, "decode": 22_000, "together": 1_500}, None),  # the parts contradict the whole
        ({"read": 2_500, "decode": 2_400}, None),  # two stages alike
        ({"trainer": None, "together": None}, "decode"),
        ({"cold": 300}, "storage"),
        ({**KEEPING, "cold": 300}, "storage"),
        ({**ONE_STAGE, "rest": "decode"}, "decode"),
        ({**ONE_STAGE, "rest": "storage or decode"}, "storage or decode"),
    ],
)
def test_the_narrowest_stage_is_the_bottleneck(rates: dict[str, Any], found: str | None) -> None:
    row = pipeline(**rates)
    assert bottleneck(row) == found
    assert found is None or found in stage_rates(row)
    said = advise(row, [])
    assert (found is None) == ("no stage stands out" in said or "no single stage" in said)
    assert ("without --cold" in said) == (found == "storage or decode")


def test_stages_add_up_to_the_loader_and_stalls_to_what_the_trainer_loses() -> None:
    """For whatever rates were measured."""
    rng = random.Random(3)
    for _ in range(100):
        loader, trainer = rng.uniform(100, 9_000), rng.uniform(100, 9_000)
        cold = rng.choice([None, loader * rng.uniform(0.1, 1.1)])
        row = pipeline(
            loader=loader,
            trainer=trainer,
            together=min(loader, trainer) * rng.uniform(0.8, 1),
            read=rng.choice([None, loader * rng.uniform(3, 50)]),
            decode=rng.choice([None, loader * rng.uniform(1.6, 20)]),
            transfer=rng.choice([None, loader * rng.uniform(20, 90)]),
            cold=cold,
        )
        assert row.together is not None
        rates = stage_rates(replace(row, cold=None))
        assert rates.pop("compute") == trainer
        assert sum(1 / rate for rate in rates.values()) == pytest.approx(1 / loader)
        lost_s = stalls(row, 64)
        assert (COLD_FETCH in lost_s) == row.reads_cold
        added_s = lost_s.pop(COLD_FETCH, 0.0)
        assert added_s >= 0
        if cold is not None and cold < min(loader, trainer) and row.reads_cold:
            assert added_s == pytest.approx(64 / cold - 64 / min(loader, trainer))
        assert sum(lost_s.values()) == pytest.approx(64 / row.together.median - 64 / trainer)
        assert predicted(row) == min(
            rate.median for rate in (row.loader, row.trainer, row.transfer) if rate is not None
        )
        assert bottleneck(row) in (None, "compute", *stage_rates(row))


def test_the_largest_gain_is_advised_if_it_can_be_told_from_none() -> None:
    wide, predicted = Change("A", Estimate(1_400, 1_100, 1_900), True), Change("B", around(2_480), False)
    for changes, said in (
        ([Change("A", around(2_300), True), predicted], "B is predicted to give 2,480."),
        ([Change("A", around(2_480), True), predicted], "A gave 2,480."),
        *((none, "Nothing known here would be faster.") for none in ([wide], [])),
    ):
        advice = advise(pipeline(), changes)
        assert advice.startswith("decoding is the bottleneck: 1,150 images/s against 2,480 of the trainer. ")
        assert advice.endswith(said)


def test_rows_of_one_trainer_are_explained_beside_one_another() -> None:
    noise, dali = pipeline("synthetic", "noise", loader=9_000), pipeline("dali", together=1_300)
    raw, shards, other, without = explained(
        [pipeline(), pipeline("shards", "shards", **KEEPING), dali, noise], 64, 2, 2
    )
    assert (raw.binds, shards.binds, without.binds) == ("decode", "compute", None)
    assert [(one.what, one.images_per_s.median, one.measured) for one in raw.changes] == [
        ("Converting to shards", 2_470, True),
        ("Backend dali on raw tree", 1_300, True),
    ]
    assert "Converting to shards gave 2,470." in raw.advice
    assert (other.advice != "", without.advice, without.changes) == (True, "", ())
    for busy, offered in ((0.4, ["8 workers, one per CPU,"]), (BUSY_SHARE, [])):
        watched = pipeline(loader=90, trainer=None, together=None, monitor=Watched(mean={"cpu_share": busy}))
        assert [one.what for one in known_changes(watched, [], 2, 8)] == offered
    cold = pipeline(cold=300)
    better = pipeline("shards", "shards", **{**KEEPING, "cold": 2_000})
    assert [one.images_per_s.median for one in known_changes(cold, [better], 2, 2)] == [2_000]
    assert "from a cold disk" in advise(cold, known_changes(cold, [better], 2, 2))
