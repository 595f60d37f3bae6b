"""Memory of batches on the host: used again, but never while somebody looks at it. Of a GPU: `tests/cuda`."""

import gc
import threading
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from loaders.augment import Crops
from loaders.batch import Request
from loaders.dataset import open_split
from loaders.read.filler import BatchFiller, BufferPool, Pictures, SharedBuffers
from precache.errors import DatasetError
from tests.building import build_loader
from tests.conftest import IMAGES, STORED_SIZE

CPU = torch.device("cpu")
Take = Callable[[], torch.Tensor]


@pytest.fixture(params=["threads", "processes"])
def take(request: pytest.FixtureRequest) -> Take:
    """Gives [2, 4, 4, 3] of memory that is filled by threads, or by processes, which share two such."""
    if request.param == "threads":
        pool = BufferPool(2, 4, CPU)
        return lambda: pool.take(2)
    buffers = SharedBuffers(2, 2, 4)

    def serve() -> torch.Tensor:
        number = buffers.take()
        return torch.zeros(2, 4, 4, 3, dtype=torch.uint8) if number is None else buffers.serve(number, 2)

    return serve


def addresses(take: Take) -> set[int]:
    """Of some that are taken at a time, and overwritten."""
    return {tensor.data_ptr() for tensor in [take().fill_(9) for _ in range(4)]}


def test_a_buffer_is_reused_once_no_view_of_it_is_left(take: Take) -> None:
    """No tensor that shows a part of it, no array, and no graph that wants it for the way back."""
    weight = torch.ones(2, 4, 4, 3, requires_grad=True)
    for look in (
        lambda batch: batch[1:].permute(0, 3, 1, 2),
        lambda batch: batch.numpy(),
        lambda batch: (weight * batch).sum(),
    ):
        batch = take().fill_(3)
        address, looks = batch.data_ptr(), look(batch)
        del batch
        assert address not in addresses(take)
        if getattr(looks, "requires_grad", False):
            looks.backward()
        del looks
        assert address in addresses(take)
    assert weight.grad is not None
    assert (weight.grad == 3).all()


@pytest.mark.parametrize(("kind", "dtype"), [("raw", "uint8"), ("shards", "uint8"), ("shards", "float32")])
def test_dropped_batches_share_buffers_and_kept_ones_stay(
    kind: str, dtype: str, raw_tree: Path, converted: dict[str, Path]
) -> None:
    """More of them than there are buffers; iterators dropped in the middle lose none, nor does a loader."""
    path = {"raw": raw_tree, **converted}[kind]
    settings = {"size": 16, "batch_size": 4, "workers": 2, "dtype": dtype}
    with build_loader(path, **settings) as loader:
        addresses = {batch.images.data_ptr() for _ in range(3) for batch in loader}
        for _ in range(10):
            next(iter(loader))
        loader.set_epoch(3)
        kept = list(loader)
        list(loader)
    del loader
    gc.collect()
    assert len(addresses) <= 12, "of 54 batches"
    with build_loader(path, **{**settings, "workers": 0, "threads": 1}) as other:
        other.set_epoch(3)
        expected = torch.cat([batch.images for batch in other])
    assert torch.equal(torch.cat([batch.images for batch in kept]), expected)
    assert len(expected) == IMAGES


def test_a_filling_thread_raises_its_error_and_ends_in_time(converted: dict[str, Path]) -> None:
    """A batch would be half filled; files are closed by then."""
    ended, late = threading.Event(), []

    def picture_of(slot: int, *, fails: bool) -> np.ndarray:
        if fails and threading.current_thread().name.startswith("fill"):
            raise DatasetError("in a helper")
        time.sleep(0.02)
        if ended.is_set():
            late.append(slot)
        return np.zeros((STORED_SIZE, STORED_SIZE, 3), np.uint8)

    data, crops = open_split(converted["shards"], "train"), Crops(STORED_SIZE, STORED_SIZE)
    with closing(BatchFiller(data, crops, 6, 3, CPU)) as filler:
        for fails in (True, False):
            asked = (Pictures(Request(0, np.arange(6)), partial(picture_of, fails=fails)) for _ in range(3))
            served = filler.fill_each(asked)
            with pytest.raises(DatasetError, match="in a helper") if fails else nullcontext():
                next(served), next(served)
            time.sleep(0.01)  # in the midst of the third batch
            served.close()
        ended.set()
        time.sleep(0.1)
    assert not late
