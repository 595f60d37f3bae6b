"""The statistics of trainings: quantiles against tables, intervals that cover, verdicts."""

import math
from typing import Any

import numpy as np
import pytest

from bench.report.accuracy import (
    BETTER,
    CANNOT_TELL,
    SAME,
    WORSE,
    Compared,
    cdf,
    compare,
    costs,
    enough,
    holm,
    interval,
    level,
    p_value,
    quantile,
    sentence,
)


def line(arm: str, seed: int, top1: float, **more: Any) -> dict[str, Any]:
    curve = [[1, top1 / 2, 10.0], [2, top1, 20.0]]
    return {"arm": arm, "seed": seed, "curve": curve, "train_s": 20.0, "energy_j": None, **more}


def beside(baseline: list[float], top1: list[float], margin: float = 1.0) -> Compared:
    both = {"imagefolder": baseline, "crop": top1}
    lines = [line(arm, seed, value) for arm, values in both.items() for seed, value in enumerate(values)]
    (found,) = compare(lines, margin)
    return found


@pytest.mark.parametrize(
    ("share", "degrees", "expected"),
    [
        # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2
        *((0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 4, 2.776), (0.975, 9, 2.262), (0.975, 30, 2.042)),
        *((0.95, 3, 2.353), (0.95, 10, 1.812), (0.995, 4, 4.604), (0.999, 5, 5.893), (0.975, 100, 1.984)),
    ],
)
def test_quantiles_are_those_of_the_tables(share: float, degrees: int, expected: float) -> None:
    assert quantile(share, degrees) == pytest.approx(expected, abs=6e-4)
    assert cdf(quantile(share, degrees), degrees) == pytest.approx(share, abs=1e-9)
    assert cdf(-expected, degrees) == pytest.approx(1 - share, abs=1e-4)


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_interval_covers_what_is_true_in_95_of_100_runs(seeds: int) -> None:
    runs = np.random.default_rng((17, seeds)).normal(0.3, 0.8, (4000, seeds))
    covered = [low <= 0.3 <= high for low, high in (interval(run.tolist()) for run in runs)]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.01)


def test_sources_that_do_not_differ_are_seldom_called_worse_or_better() -> None:
    runs = np.random.default_rng(5).normal(60, 0.7, (1000, 2, 5))
    verdicts = [beside(*run.tolist()).verdict for run in runs]
    assert 0.02 < np.mean([verdict in (WORSE, BETTER) for verdict in verdicts]) < 0.08


def test_p_values_follow_the_interval() -> None:
    values = [0.2, -0.1, 0.4, 0.3, 0.5]
    low, high = interval(values, level=1 - p_value(values))
    assert min(abs(low), abs(high)) == pytest.approx(0, abs=1e-9)
    assert p_value([1.0]) == p_value([0.5, -0.5]) == 1
    assert p_value([1.0, 1.0]) == 0


def test_holm_multiplies_the_smallest_by_the_number_of_comparisons() -> None:
    adjusted = holm({"a": 0.04, "b": 0.01, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"d": 0.02, "b": 0.03, "c": 0.06, "a": 0.06})  # Holm (1979), section 3
    assert holm({"a": 0.9, "b": 0.8}) == {"b": 1.0, "a": 1.0}


@pytest.mark.parametrize(
    ("top1", "verdict"),
    [
        ([60.1, 61.0, 59.9, 60.4, 60.2], SAME),
        ([57.0, 58.4, 57.1, 57.0, 57.9], WORSE),
        ([63.0, 64.4, 63.1, 63.0, 63.9], BETTER),
        ([58.0, 63.0, 59.0, 61.5, 60.0], CANNOT_TELL),
    ],
)
def test_the_verdict_is_that_of_the_interval(top1: list[float], verdict: str) -> None:
    found = beside([60.0, 61.2, 59.8, 60.3, 60.4], top1)
    assert found.verdict == verdict
    assert found.low <= found.difference <= found.high
    assert (found.low > 0) == (verdict == BETTER)
    assert (found.high < 0) == (verdict == WORSE)


def test_differences_are_paired_by_seed() -> None:
    baseline = [50.0, 60.0, 70.0]
    found = beside(
        baseline, [value - 0.5 + noise for value, noise in zip(baseline, (0, 0.01, -0.01), strict=True)]
    )
    assert found.verdict == WORSE  # though seeds differ by 10 points
    assert found.high - found.low < 0.06


def test_as_many_seeds_as_would_do_do() -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(0.2, 1.5, 5)
    asked = enough(values.tolist(), margin=1.0)
    assert asked is not None
    for seeds, does in ((asked, True), (asked - 1, False)):
        drawn = rng.normal(0, 1, seeds)
        like = (drawn - drawn.mean()) / drawn.std(ddof=1) * values.std(ddof=1) + values.mean()
        low, high = interval(like.tolist())
        assert (high < 0 or low > 0 or (low >= -1 and high <= 1)) == does
    assert enough([0.1], 1.0) is None
    assert enough([800.0, -800.0, 0.0], 1.0) is None


def test_one_seed_tells_nothing() -> None:
    found = beside([60.0], [61.0])
    assert (found.verdict, found.low, found.high, found.enough) == (CANNOT_TELL, -math.inf, math.inf, None)
    assert sentence(found) == (
        "Cannot tell with 1 seed whether a model trained on crop is as good as on imagefolder "
        "(+1.00 points); train at least 3."
    )


def test_the_answer_says_by_how_much_and_how_surely() -> None:
    same = sentence(beside([60.0, 60.2, 59.8], [60.1, 60.2, 59.9]))
    assert same == (
        "A model trained on crop is as good as on imagefolder, within ±0.21 points (+0.07 points, 95% "
        "interval -0.08 to +0.21, 3 seeds)."
    )
    assert sentence(beside([60.0, 60.2, 59.8], [50.1, 50.2, 49.9])).startswith(
        "A model trained on crop is worse than on imagefolder, by 9.93 points (-9.93 points, 95% interval"
    )
    assert sentence(beside([60.0, 61.0, 59.0], [61.0, 59.0, 60.0])).endswith(" would do.")


def test_among_many_sources_one_that_is_hardly_worse_may_be_chance() -> None:
    rng = np.random.default_rng(0)
    lines = [line("imagefolder", seed, 60.0) for seed in range(5)]
    for arm in range(9):
        lines += [line(f"same{arm}", seed, 60 + rng.normal(0, 0.3)) for seed in range(5)]
    for seed, difference in enumerate((-0.1, -0.5, -0.2, -0.6, -0.5)):
        lines.append(line("hardly", seed, 60 + difference))
    found = {each.name: each for each in compare(lines, 1.0)}["hardly"]
    assert (found.verdict, found.may_be_chance) == (WORSE, True)
    assert "by chance in" in sentence(found)


def test_costs_are_of_the_level_that_all_reach() -> None:
    slow = [line("imagefolder", seed, 60.4, train_s=40.0, energy_j=500.0) for seed in range(2)]
    quick = [line("crop", seed, 58.7, train_s=10.0, energy_j=100.0 + seed) for seed in range(2)]
    assert level([*slow, *quick]) == 58
    found = costs([*slow, *quick])
    assert (found["crop"].ratio.median, found["crop"].energy_j, found["crop"].level_s) == (0.25, 100.5, 20.0)
    early = [line("crop", seed, 130.0) for seed in range(2)]  # at 65 after the first epoch
    assert costs([*slow, *early])["crop"].level_s == 10.0
