import pytest

from bench.stats import Estimate, estimate, percentile, ratio


def test_estimate_is_median_and_range() -> None:
    assert estimate([3.0, 1.0, 2.0]) == Estimate(2.0, 1.0, 3.0)


def test_ratio_pairs_repeats() -> None:
    assert ratio([10.0, 30.0], [20.0, 30.0]) == Estimate(0.75, 0.5, 1.0)
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0], [1.0, 2.0])


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(v) for v in range(1, 101)]
    assert [percentile(values, share) for share in (0, 0.5, 0.95, 1)] == [1, 50, 95, 100]
    assert percentile([7.0], 0.95) == 7
