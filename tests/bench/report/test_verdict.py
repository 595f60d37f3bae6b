"""Verdict on the rates of one loader: stages, bottleneck, stalls and changes."""

from dataclasses import replace
from typing import Any

import pytest

from bench.report.change import ChangeKind
from bench.report.result import Activity, Row, Stage, Stall
from bench.report.sentences import describe_row
from bench.report.stats import Estimate, quotient, ratio
from bench.report.verdict import (
    BUSY_SHARE,
    Limit,
    Verdict,
    best_changes,
    bottleneck,
    explain,
    find_changes,
    find_limits,
    find_stalls,
    judge,
    reads_slower_cold,
    stage_seconds,
)
from tests.bench.results import around, make_row


def test_judge_says_keeps_up_waits_or_unclear() -> None:
    for share, verdict in (
        (Estimate(0.50, 0.48, 0.52), Verdict.WAITS),
        (Estimate(1.00, 0.99, 1.01), Verdict.KEEPS_UP),
        (Estimate(0.985, 0.984, 0.986), Verdict.KEEPS_UP),  # beyond noise, but negligible
        (Estimate(0.97, 0.969, 0.971), Verdict.WAITS),
        (Estimate(0.56, 0.34, 1.00), Verdict.UNCLEAR),  # one repeat kept up
    ):
        assert judge(share) == verdict
    assert judge(None) == Verdict.NO_TRAINER


def test_quotient_holds_1_exactly_where_the_ranges_overlap() -> None:
    assert ratio([10.0, 30.0], [20.0, 30.0]) == Estimate(0.75, 0.5, 1.0)
    assert quotient(Estimate(20, 18, 24), Estimate(10, 8, 12)) == Estimate(2, 1.5, 3)
    assert quotient(Estimate(10, 9, 11), Estimate(12, 11, 13)).high == 1
    assert quotient(Estimate(10, 9, 10.9), Estimate(12, 11, 13)).high < 1


def pipeline(backend: str = "pytorch", data: str = "raw tree", **given: float | None) -> Row:
    """Make the row of a loader of 1,150 images/s that feeds a trainer of 2,480; other rates may be given."""
    rates: dict[str, float | None] = {
        "loader": 1_150.0, "trainer": 2_480.0, "fed": 1_140.0, "transfer": 90_000.0,
        "read": 40_000.0, "decode": 1_300.0, **given,
    }  # fmt: skip
    values: dict[str, Any] = {
        f"{name}_images_per_s": around(rate, 0.02) for name, rate in rates.items() if rate is not None
    }
    trainer, fed = rates["trainer"], rates["fed"]
    if trainer is not None and fed is not None:
        values["fed_ratio"] = Estimate(fed / trainer, fed / trainer - 0.01, fed / trainer + 0.01)
        values["wait_share"] = around(1 - fed / trainer, 0)
    return make_row(backend, data, **values)


KEEPING = {"loader": 20_000.0, "decode": 22_000.0, "fed": 2_470.0}


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({}, Stage.DECODE),
        ({"read": 1_300, "decode": 40_000}, Stage.STORAGE),
        ({"read": 40_000, "decode": 6_000}, Stage.COLLATE),
        ({"transfer": 1_300, "decode": 40_000}, Stage.TRANSFER),
        (KEEPING, Stage.COMPUTE),
        ({"loader": 2_450, "decode": 2_700, "fed": 2_400}, None),  # overlaps with the trainer
        ({"read": 2_500, "decode": 2_400}, None),  # two stages alike
        ({"trainer": None, "fed": None}, Stage.DECODE),
        ({"cold": 300}, Stage.STORAGE),
    ],
)
def test_slowest_stage_is_the_bottleneck(rates: dict[str, Any], expected: Stage | None) -> None:
    row = pipeline(**rates)
    slowest = bottleneck(row, stage_seconds(row, Stage.COLLATE))
    assert slowest == expected
    sentence = describe_row(replace(row, bottleneck=slowest))[0]
    assert (expected is None) == ("no stage stands out" in sentence or "no single stage" in sentence)


@pytest.mark.parametrize(
    ("fed", "wait_share", "ratio", "expected"),
    [
        (1_600, 0.1, 1.5, Stage.LAUNCHING),  # steps of 0.9 / 1,600 s instead of 1 / 2,480 s
        (1_600, 0.3, 1.1, None),  # waiting costs more
        (2_460, 0.0, 1.3, Stage.COMPUTE),  # the device takes longer than launching all the same
        (1_600, 0.1, 1.0, None),
    ],
)
def test_launching_is_the_bottleneck_where_it_costs_more_than_waits(
    fed: float, wait_share: float, ratio: float, expected: Stage | None
) -> None:
    row = pipeline(**{**KEEPING, "fed": fed})
    values = {name: around(value, 0) for name, value in (("wait_share", wait_share), ("launch_ratio", ratio))}
    row = replace(row, values={**row.values, **values, "launch_p95_ratio": around(2.0)})
    slowest = bottleneck(row, stage_seconds(row, Stage.COLLATE))
    assert slowest == expected
    sentence = describe_row(replace(row, bottleneck=slowest))[0]
    assert (expected == Stage.LAUNCHING) == (f"{ratio:.2f} times as long as alone" in sentence)


def test_stages_add_up_to_the_loader_and_stalls_to_the_wait() -> None:
    """Holds whichever rates were measured."""
    for rates in ({}, {"read": None}, {"decode": None}, {"transfer": None}, {"cold": 300.0}):
        row = pipeline(**rates)
        parts = stage_seconds(row, Stage.COLLATE, cold=False)
        assert sum(part.median for part in parts.values()) == pytest.approx(1 / 1_150)
        stalls = find_stalls(row, parts, 64)
        assert (stalls.pop(Stall.COLD_FETCH, None) is not None) == reads_slower_cold(row)
        assert sum(stalls.values()) == pytest.approx(64 / 1_140 - 64 / 2_480)


def test_rows_of_one_trainer_are_compared_with_each_other() -> None:
    noise, dali = pipeline("synthetic", "noise", loader=9_000), pipeline("dali", fed=1_300)
    rows = [pipeline(), pipeline("shards", "shards", **KEEPING), dali, noise]
    raw, shards, _, without = explain(rows, 2, 64, 2, dict.fromkeys(range(4), Stage.COLLATE))
    assert (raw.bottleneck, shards.bottleneck, without.bottleneck) == (Stage.DECODE, Stage.COMPUTE, None)
    assert raw.stages[Stage.COMPUTE] == 2_480
    assert [(change.kind, change.arguments["backend"]) for change in raw.changes] == [
        (ChangeKind.CONVERT, "shards"),
        (ChangeKind.LOADER, "dali"),
    ]
    assert "Converting to shards gave 2,470 (2,421-2,519)." in describe_row(raw)[0]


def test_more_workers_are_suggested_only_where_cpus_are_idle() -> None:
    for busy_share, count in ((0.4, 1), (BUSY_SHARE, 0)):
        row = pipeline(loader=90, trainer=None, fed=None)
        active = replace(row, activity=Activity(series={"cpu_share": (busy_share,)}))
        changes = find_changes(active, [], 2, 8)
        assert [change.arguments for change in changes] == [{"num_workers": 8}] * count
        active = replace(active, changes=tuple(changes))
        assert best_changes(active) == [], "a bound wins nothing"
        assert ("8 workers, one per CPU, would give at most 367" in describe_row(active)[0]) == bool(count)


def test_changes_whose_ranges_overlap_are_all_named_and_none_is_the_best() -> None:
    rows = [pipeline(), pipeline("shards", "shards", fed=2_000), pipeline("dali", "dali", fed=2_050)]
    rows.append(pipeline("webdataset", "webdataset", fed=1_400))
    raw, *_ = explain(rows, 2, 64, 2, dict.fromkeys(range(4), Stage.COLLATE))
    assert [change.arguments["backend"] for change in best_changes(raw)] == ["dali", "shards"]
    assert "the same within noise: Converting to dali gave" in describe_row(raw)[0]


def test_limits_are_full_memory_busy_cores_and_swapping() -> None:
    series: dict[str, tuple[float, ...]] = {
        "gpu_memory_share": (0.5, 0.93),
        "cpu_share": (0.96, 0.98),
        "swap_bytes_per_s": (0.0, 1e7),
    }
    limits = find_limits(Activity((0.1, 0.3), series))
    assert limits == pytest.approx({Limit.GPU_MEMORY: 0.93, Limit.CORES: 0.97, Limit.SWAP: 2e6})
    assert find_limits(Activity((0.1,), {"cpu_share": (0.5,)})) == {}
    sentences = describe_row(replace(pipeline(), activity=Activity((0.1, 0.3), series)))
    assert [word in " ".join(sentences) for word in ("93%", "97%", "MiB")] == [True] * 3
