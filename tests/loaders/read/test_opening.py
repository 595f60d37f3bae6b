"""Shards are opened ahead of their use: which ones, how many at a time, and that all are closed."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from loaders.batch import Request
from loaders.dataset import SplitData, open_split
from loaders.read.blocks import BlockReader
from loaders.read.opening import OpenShards
from precache.errors import DatasetError
from tests.conftest import IMAGES

BATCH = 7


class Opened:
    """Functions that open and close shards, and count."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.now: set[int] = set()
        self.most = 0

    def open(self, number: int) -> int:
        assert number not in self.now
        self.order.append(number)
        self.now.add(number)
        self.most = max(self.most, len(self.now))
        return number

    def close(self, number: int) -> None:
        self.now.remove(number)


@pytest.fixture
def data(converted: dict[str, Path]) -> SplitData:
    return open_split(converted["shards"], "train")


def requests_for(order: Sequence[int], batch: int = BATCH) -> Iterator[Request]:
    for start in range(0, len(order), batch):
        yield Request(0, np.array(order[start : start + batch], np.int64))


@pytest.mark.parametrize("window", [1, 2, 5])
def test_shards_read_in_order_are_opened_once_and_within_two_windows(data: SplitData, window: int) -> None:
    opened = Opened()
    with closing(OpenShards.in_windows(data, window, opened.open, opened.close)) as shards:
        for request, samples in shards.read(requests_for(range(IMAGES))):
            numbers, rows = data.locate(request.positions)
            assert samples == list(zip(numbers.tolist(), rows.tolist(), strict=True))
            assert set(numbers.tolist()) <= opened.now
    assert opened.order == [*range(len(data.files))]
    assert opened.most <= max(2 * window, 2 + BATCH)
    assert not opened.now


@pytest.mark.parametrize("max_open", [1, 3, 100])
def test_a_full_shuffle_keeps_few_shards_open_and_those_of_two_requests(
    data: SplitData, max_open: int
) -> None:
    opened, order = Opened(), np.random.default_rng(0).permutation(IMAGES).tolist()
    previous: set[int] = set()
    open_shards = OpenShards.at_random(data, max_open, opened.open, opened.close, fetch_samples=0)
    with closing(open_shards) as shards:
        for request, samples in shards.read(requests_for([*order, *order])):
            numbers = {number for number, _ in samples}
            assert numbers | previous <= opened.now
            assert len(opened.now) <= max(max_open, len(numbers | previous)) + BATCH
            assert len(request.positions) == len(samples)
            previous = numbers
    assert not opened.now
    if max_open >= len(data.files):
        assert sorted(opened.order) == [*range(len(data.files))]


def test_no_request_is_taken_past_an_empty_one_that_is_not_served(data: SplitData) -> None:
    request_count = 0

    def requests() -> Iterator[Request]:
        nonlocal request_count
        for positions in ([1], [], [2]):
            request_count += 1
            yield Request(0, np.array(positions, np.int64))

    opened = Opened()
    with (
        closing(BlockReader(data)) as blocks,
        closing(
            OpenShards.at_random(data, 9, opened.open, opened.close, fetch_samples=0, blocks=blocks)
        ) as shards,
    ):
        counts = [(len(samples), request_count) for _, samples in shards.read(requests())]
    assert counts == [(1, 2), (0, 2), (1, 3)]


def test_an_error_of_opening_is_raised_at_its_request_and_all_else_closed(data: SplitData) -> None:
    opened = Opened()

    def fail_at_2(number: int) -> int:
        if number == 2:
            raise DatasetError("damaged")
        return opened.open(number)

    served: list[Request] = []
    with closing(OpenShards.in_windows(data, 2, fail_at_2, opened.close)) as shards:
        located = (request for request, _ in shards.read(requests_for(range(IMAGES), 1)))
        with pytest.raises(DatasetError):
            served.extend(located)
    assert len(served) == int(data.shard_samples[:2].sum())
    assert not opened.now
