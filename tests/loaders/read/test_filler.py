"""Filling batch after batch by threads."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from loaders.augment.cpu import Crops
from loaders.batch import Request
from loaders.dataset import SplitData
from loaders.read.filler import BatchFiller, Pictures
from precache.errors import DatasetError, ImageError

SIZE, BATCH, BATCHES = 4, 6, 5


def make(threads: int) -> BatchFiller:
    positions = np.arange(BATCH * BATCHES)
    data = SplitData(
        path=Path("split"),
        kind="shards",
        ids=positions + 100,
        labels=positions % 3,
        shard_samples=np.array([len(positions)]),
        files=("0",),
        shard_bytes=np.array([len(positions)]),
        shards=None,
        index=None,
        classes=("a", "b", "c"),
        size=SIZE,
        digest="",
    )
    return BatchFiller(data, Crops(stored=SIZE, size=SIZE), BATCH, threads, torch.device("cpu"))


@pytest.fixture(params=[1, 2, 5], ids=lambda threads: f"{threads} threads")
def filler(request: pytest.FixtureRequest) -> Iterator[BatchFiller]:
    with closing(make(request.param)) as made:
        yield made


def requests() -> Iterator[Request]:
    return (Request(0, np.arange(start, start + BATCH)) for start in range(0, BATCH * BATCHES, BATCH))


def painted(request: Request) -> Pictures:
    """Each picture in the colour of its position; that of position 8 cannot be decoded."""

    def picture_of(slot: int) -> np.ndarray:
        if request.positions[slot] == 8:
            raise ImageError("eight.jpg", "cannot be decoded")
        return np.full((SIZE, SIZE, 3), request.positions[slot], np.uint8)

    return Pictures(request, picture_of)


def test_batches_come_in_order_without_what_cannot_be_decoded(filler: BatchFiller) -> None:
    for number, batch in enumerate(filler.fill_each(map(painted, requests()))):
        positions = [p for p in range(number * BATCH, (number + 1) * BATCH) if p != 8]
        assert batch.images[:, 0, 0, 0].tolist() == positions
        assert [(n, error.path) for n, error in batch.refused.items()] == [(2, "eight.jpg")] * (number == 1)
    assert number + 1 == BATCHES


@pytest.mark.parametrize("where", ["what is asked for", "the pictures"])
def test_an_error_comes_after_the_batches_before_it(filler: BatchFiller, where: str) -> None:
    def failing(slot: int) -> np.ndarray:
        raise DatasetError("the third")

    def asked() -> Iterator[Pictures]:
        for number, request in enumerate(requests()):
            if number == 2 and where == "what is asked for":
                raise DatasetError("the third")
            yield Pictures(request, failing) if number == 2 else painted(request)

    served = filler.fill_each(asked())
    assert [next(served).images[0, 0, 0, 0].item() for _ in range(2)] == [0, BATCH]
    with pytest.raises(DatasetError, match="the third"):
        next(served)


def test_who_helps_with_a_later_batch_meanwhile_raises_its_error_with_that_one() -> None:
    later = threading.Event()

    def picture_of(slot: int, *, number: int) -> np.ndarray:
        if number == 1:
            later.set()
            raise DatasetError("the second")
        if threading.current_thread().name.startswith("fill"):
            later.wait(timeout=5)
        return np.zeros((SIZE, SIZE, 3), np.uint8)

    with closing(make(2)) as filler:
        batches = (Pictures(r, partial(picture_of, number=n)) for n, r in enumerate(requests()))
        served = filler.fill_each(batches)
        assert len(next(served).images) == BATCH
        with pytest.raises(DatasetError, match="the second"):
            next(served)


def test_nothing_is_read_any_more_once_it_is_closed(filler: BatchFiller) -> None:
    reading, closed = threading.Semaphore(0), threading.Event()
    late = []

    def slowly(slot: int) -> np.ndarray:
        reading.release()
        time.sleep(0.02)
        if closed.is_set():
            late.append(slot)
        return np.zeros((SIZE, SIZE, 3), np.uint8)

    served = filler.fill_each(Pictures(request, slowly) for request in requests())
    next(served)
    reading.acquire(timeout=5)
    served.close()
    closed.set()
    time.sleep(0.1)
    assert not late
