"""What a data set costs: the arithmetic, by numbers that can be checked by hand."""

import pytest

from bench.report.cost import PART_BYTES, Layout, Prices, cost, seconds_of_an_epoch

TREE = Layout(name="tree", image_bytes=100_000, object_images=1, cpu_s=0)
SHARDS = Layout(name="shards", image_bytes=200_000, object_images=100, cpu_s=0.004)
PRICES = Prices(gb_month=0.02, get=0.0004, put=0.005, egress_gb=0.1, cpu_hour=0.05)


def test_a_tree_costs_a_request_for_each_picture_of_each_epoch() -> None:
    found = cost(TREE, 1_000_000, 90, cached=False, prices=PRICES)
    assert (found.objects, found.gets) == (1_000_000, 90_000_000)
    assert (found.stored_bytes, found.read_bytes) == (1e11, 9e12)
    assert (found.month, found.requests, found.egress) == pytest.approx((2.0, 36.0, 900.0))
    assert (found.cpu_hours, found.convert) == (0, 0)


def test_shards_cost_a_request_for_each_part_and_a_cache_saves_all_epochs_but_the_first() -> None:
    every = cost(SHARDS, 1_000_000, 90, cached=False, prices=PRICES)
    once = cost(SHARDS, 1_000_000, 90, cached=True, prices=PRICES)
    parts = -(-100 * 200_000 // PART_BYTES)
    assert parts == 3
    assert (every.objects, every.gets, once.gets) == (10_000, 90 * 30_000, 30_000)
    assert every.egress == pytest.approx(90 * once.egress)
    assert once.cpu_hours == pytest.approx(4000 / 3600)
    assert once.convert == pytest.approx(4000 / 3600 * 0.05 + 10 * 0.005)


def test_an_epoch_takes_at_least_its_bytes() -> None:
    assert seconds_of_an_epoch(SHARDS, 1_000_000, 1e8) == pytest.approx(2000)
