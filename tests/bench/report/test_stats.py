import pytest

from bench.report.stats import Estimate, percentile, quotient, ratio


def test_ratio_pairs_repeats() -> None:
    assert ratio([10.0, 30.0], [20.0, 30.0]) == Estimate(0.75, 0.5, 1.0)
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0], [1.0, 2.0])


def test_a_quotient_holds_1_exactly_where_the_ranges_overlap() -> None:
    assert quotient(Estimate(20, 18, 24), Estimate(10, 8, 12)) == Estimate(2, 1.5, 3)
    touching = quotient(Estimate(10, 9, 11), Estimate(12, 11, 13))
    assert touching.high == 1
    assert quotient(Estimate(10, 9, 10.9), Estimate(12, 11, 13)).high < 1


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(v) for v in range(1, 101)]
    assert [percentile(values, share) for share in (0, 0.5, 0.95, 1)] == [1, 50, 95, 100]
    assert percentile([7.0], 0.95) == 7
