"""Comparison of two results: what got slower, and which results must not be compared."""

from dataclasses import replace
from typing import Any

import pytest

from bench.report.regression import compare_results, find_differing_work, make_difference_table
from bench.report.result import Result, Row
from bench.report.stats import Estimate
from tests.bench.results import around, make_row, rich_result


def make_result(*rows: Row, **settings: Any) -> Result:
    rich = rich_result()
    return replace(rich, rows=rows, settings={**rich.settings, **settings}, best=())


def shards(rate: float, spread: float = 0.02, **values: Any) -> Row:
    return make_row("shards", "shards", loader_images_per_s=around(rate, spread), **values)


@pytest.mark.parametrize(
    ("after", "tolerance", "verdict"),
    [
        (shards(44_000), 0.05, "better"),
        (shards(16_000), 0.05, "regression"),
        (shards(16_000), 0.3, "worse"),
        (shards(20_240), 0.05, "worse"),  # -8%, +-2% on both sides: it may be as little as -4.3%
        (shards(15_000, 0.6), 0.05, "within noise"),
    ],
)
def test_figures_are_judged_by_their_whole_ranges(after: Row, tolerance: float, verdict: str) -> None:
    comparison = compare_results(make_result(shards(22_000)), make_result(after), tolerance)
    (difference,) = comparison.differences
    assert difference.judgement == verdict
    assert bool(comparison.regressions) == (verdict == "regression")
    assert make_difference_table(comparison).rows[0][-1] == verdict


def test_one_repeat_is_no_evidence_of_a_regression() -> None:
    before = make_result(shards(22_000))
    once = compare_results(before, make_result(shards(9_000), repeats=1), 0.05)
    assert [difference.judgement for difference in once.differences] == ["within noise"]


def test_rows_are_paired_by_their_keys_and_missing_ones_named() -> None:
    tree = make_row("pytorch", "raw tree", loader_images_per_s=1_900)
    dali = make_row("dali", "dali", loader_images_per_s=3_000)
    renamed = replace(shards(22_000), name="another name")
    comparison = compare_results(make_result(tree, shards(22_000)), make_result(renamed, dali), 0.05)
    assert [difference.row for difference in comparison.differences] == ["shards on shards"]
    assert (comparison.only_before, comparison.only_after) == (("pytorch on raw tree",), ("dali on dali",))


def test_differing_machine_settings_and_data_are_listed() -> None:
    result = rich_result()
    assert find_differing_work(result, result) == []
    data = {path: {**folder, "digest": "9"} for path, folder in result.settings["data"].items()}
    for changed, mention in (
        (replace(result, machine={**result.machine, "cpu": "Xeon"}), "cpu AMD EPYC, 8 CPUs and Xeon"),
        (replace(result, settings={**result.settings, "trainers": ["a", "b"]}), "emulated:2480 and a, b"),
        (replace(result, settings={**result.settings, "data": data}), "data/shards holds other pictures"),
    ):
        assert mention in "; ".join(find_differing_work(result, changed))
    more = replace(result, settings={**result.settings, "repeats": 9})
    assert find_differing_work(result, more) == []


def test_less_time_is_better() -> None:
    for seconds, verdict in ((0.5, "better"), (2.0, "regression")):
        before, after = make_row("shards", "shards", convert_s=1.0), make_row("shards", "shards")
        after = replace(after, values={"convert_s": Estimate(seconds, seconds, seconds)})
        (difference,) = compare_results(make_result(before), make_result(after), 0.05).differences
        assert difference.judgement == verdict
