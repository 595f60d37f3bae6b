"""Statistics of trainings, and the result of `bench accuracy`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from bench.report.accuracy import (
    AS_GOOD,
    BETTER,
    LEVEL,
    WITHIN_NOISE,
    WORSE,
    SourceComparison,
    cdf,
    compare,
    count_needed_seeds,
    interval,
    make_result,
    quantile,
)
from bench.report.page import make_page
from bench.report.result import Result, Trial
from bench.report.table import make_table
from tests.bench.results import HOSTILE, MACHINE

SETTINGS: dict[str, Any] = {
    "model": "resnet10", "size": 64, "epochs": 2, "batch_size": 64, "lr": 0.2, "amp": "bf16", "device": "cpu",
    "loader_workers": 2, "threads": 1, "steps": 94, "classes": 102, "baseline": "imagefolder", "margin": 1.0,
}  # fmt: skip


def make_trial(
    source: str, seed: int, percent: float, train_s: float = 20.0, other_cpu: float = 0.01
) -> Trial:
    top1 = percent / 100
    return Trial(
        key={"source": source, "seed": seed},
        numbers={"top1_accuracy": top1, "train_s": train_s, "other_cpu_share": other_cpu},
        series={"epoch": (1, 2), "top1_accuracy": (top1 / 2, top1), "train_s": (train_s / 2, train_s)},
    )


def make_trials(sources: dict[str, Sequence[float]], **more: float) -> list[Trial]:
    """Make a training for each number, which is its top-1 in per cent."""
    return [
        make_trial(name, seed, percent, **more)
        for name, all_percent in sources.items()
        for seed, percent in enumerate(all_percent)
    ]


def result_of(sources: dict[str, Sequence[float]], classes: int = 102, **more: float) -> Result:
    seeds = list(range(max(map(len, sources.values()))))
    data = {name: {"name": f"shards on {name}"} for name in sources}
    settings = {**SETTINGS, "classes": classes, "seeds": seeds, "data": data}
    return make_result(MACHINE, settings, make_trials(sources, **more), {})


def compare_one(baseline: Sequence[float], top1: Sequence[float]) -> SourceComparison:
    (comparison,) = compare(SETTINGS, make_trials({"crop": top1, "imagefolder": baseline}))
    return comparison


def test_quantiles_and_intervals_agree_with_published_tables() -> None:
    # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2
    for share, degrees, expected in ((0.975, 1, 12.706), (0.95, 3, 2.353), (0.975, 100, 1.984)):
        assert quantile(share, degrees) == pytest.approx(expected, abs=6e-4)
        assert cdf(-expected, degrees) == pytest.approx(1 - share, abs=1e-4)
    runs = np.random.default_rng(17).normal(0.3, 0.8, (4000, 3))
    intervals = [interval(run.tolist(), LEVEL) for run in runs]
    assert np.mean([low <= 0.3 <= high for low, high in intervals]) == pytest.approx(0.95, abs=0.01)


def test_verdict_follows_from_the_interval_of_paired_differences() -> None:
    for top1, verdict in (
        ([60.1, 61.0, 59.9, 60.4, 60.2], AS_GOOD),
        ([57.0, 58.4, 57.1, 57.0, 57.9], WORSE),
        ([63.0, 64.4, 63.1, 63.0, 63.9], BETTER),
        ([58.0, 63.0, 59.0, 61.5, 60.0], WITHIN_NOISE),
    ):
        comparison = compare_one([60.0, 61.2, 59.8, 60.3, 60.4], top1)
        assert comparison.verdict == verdict
        assert (comparison.difference.low > 0) == (verdict == BETTER)
        assert (comparison.difference.high < 0) == (verdict == WORSE)


def test_a_small_difference_counts_though_seeds_differ_more() -> None:
    assert compare_one([50.0, 60.0, 70.0], [49.5, 59.51, 69.49]).verdict == WORSE


def test_seeds_that_one_source_lacks_are_left_out() -> None:
    comparison = compare_one([60.0, 61.2, 59.8], [60.1, 61.0, 59.9, 99.0])
    assert comparison.seeds == 3
    assert comparison.difference.median == pytest.approx(0.0, abs=0.1)


def test_equal_sources_seldom_differ_however_many_they_are() -> None:
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(300):
        sources = {f"same{number}": rng.normal(60, 0.3, 5).tolist() for number in range(9)}
        comparisons = compare(SETTINGS, make_trials({"imagefolder": [60.0] * 5, **sources}))
        wrong += any(comparison.verdict in (WORSE, BETTER) for comparison in comparisons)
    assert wrong / 300 == pytest.approx(1 - LEVEL, abs=0.03)


def test_needed_seeds_are_the_fewest_that_give_a_verdict() -> None:
    values = [0.5, -0.1, 0.4, 0.3, -0.2]
    needed = count_needed_seeds(values, 0.3, LEVEL)
    assert needed is not None
    scaled = {}
    for seeds in (needed - 1, needed):  # values with the same mean and deviation
        spread = np.resize([1.0, -1.0], seeds)
        spread = (spread - spread.mean()) / np.std(spread, ddof=1)
        scaled[seeds] = interval((np.mean(values) + np.std(values, ddof=1) * spread).tolist(), LEVEL)
    assert scaled[needed][0] > 0 >= scaled[needed - 1][0]


def test_one_value_names_no_needed_seeds() -> None:
    assert count_needed_seeds([0.5], 1.0, LEVEL) is None


@pytest.mark.parametrize(
    ("classes", "other_cpu", "mention"),
    [(102, 0.01, "is as good as"), (3, 0.01, "Nothing can be told"), (102, 0.4, "took 40%")],
)
def test_answer_mentions_weak_models_and_a_busy_machine(classes: int, other_cpu: float, mention: str) -> None:
    sources = {"imagefolder": [60.0, 60.1, 60.2], "crop": [60.2, 60.1, 60.0]}
    result = result_of(sources, classes, other_cpu=other_cpu)
    assert mention in result.answer[-1][0]


def test_table_and_page_have_every_source_and_training() -> None:
    sources = {"imagefolder": [60.0, 60.1, 60.2], HOSTILE: [60.2, 60.1, 60.0]}
    result = result_of(sources)
    first, second = make_table(result).rows
    assert first == ["imagefolder", "60.10%", "-", "-", "20.0 s"]
    assert second[:2] + second[3:] == [HOSTILE, "60.10%", AS_GOOD, "20.0 s"]
    page = make_page(result)
    assert HOSTILE not in page
    assert page.count('"mode":"lines"') == 2 * (3 + 1)  # each seed and the mean


def test_one_seed_has_a_difference_and_no_interval() -> None:
    result = result_of({"imagefolder": [60.0], "crop": [61.0]})
    assert make_table(result).rows[1][2:4] == ["+1.00", WITHIN_NOISE]
    assert "train at least 3" in result.answer[0][0]
    assert result.to_json()["rows"][1]["values"]["difference_points"]["low"] is None  # JSON has no infinity
