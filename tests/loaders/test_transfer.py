"""Memory of batches on the host is reused, but never while a tensor shows it; for GPUs see `tests/cuda`."""

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

from loaders.augment.crops import Crops, View
from loaders.batch import Request
from loaders.dataset import open_split
from loaders.read.filler import BatchFiller, BufferPool, Pictures
from precache.errors import DatasetError
from tests.building import build_loader
from tests.conftest import IMAGES, STORED_SIZE

CPU = torch.device("cpu")
Take = Callable[[], torch.Tensor]


@pytest.fixture
def take() -> Take:
    """Function that takes a buffer [2, 4, 4, 3]."""
    pool = BufferPool(96, CPU)
    return lambda: pool.take(96).view(2, 4, 4, 3)


def addresses(take: Take) -> set[int]:
    """Return the addresses of four buffers that are taken at a time, and overwritten."""
    return {tensor.data_ptr() for tensor in [take().fill_(9) for _ in range(4)]}


def test_a_buffer_is_reused_once_no_view_of_it_is_left(take: Take) -> None:
    """A view is a tensor of a part of it, an array, or a graph that needs it for the backward pass."""
    weight = torch.ones(2, 4, 4, 3, requires_grad=True)
    for make_view in (
        lambda batch: batch[1:].permute(0, 3, 1, 2),
        lambda batch: batch.numpy(),
        lambda batch: (weight * batch).sum(),
    ):
        batch = take().fill_(3)
        address, view = batch.data_ptr(), make_view(batch)
        del batch
        assert address not in addresses(take)
        if getattr(view, "requires_grad", False):
            view.backward()
        del view
        assert address in addresses(take)
    assert weight.grad is not None
    assert (weight.grad == 3).all()


@pytest.mark.parametrize(("kind", "dtype"), [("raw", "uint8"), ("shards", "uint8"), ("shards", "float32")])
def test_dropped_batches_share_buffers_and_kept_ones_stay(
    kind: str, dtype: str, raw_tree: Path, converted: dict[str, Path]
) -> None:
    """The test keeps more batches than there are buffers, and drops iterators and the loader midway."""
    path = {"raw": raw_tree, **converted}[kind]
    settings = {"size": 16, "batch_size": 4, "workers": 2, "dtype": dtype}
    with build_loader(path, **settings) as loader:
        addresses = {batch.images.data_ptr() for _ in range(3) for batch in loader}
        for _ in range(10):
            next(iter(loader))
        loader.set_epoch(3)
        kept_batches = list(loader)
        list(loader)
    del loader
    gc.collect()
    assert len(addresses) <= 12, "of 54 batches"
    with build_loader(path, **{**settings, "workers": 0, "threads": 1}) as other:
        other.set_epoch(3)
        expected = torch.cat([batch.images for batch in other])
    assert torch.equal(torch.cat([batch.images for batch in kept_batches]), expected)
    assert len(expected) == IMAGES


def test_a_filling_thread_raises_its_error_and_ends_in_time(converted: dict[str, Path]) -> None:
    """Half-filled batches, and files read after they were closed, would be the result otherwise."""
    ended, late_rows = threading.Event(), []

    def read_picture(row: int, *, fails: bool) -> np.ndarray:
        if fails and threading.current_thread().name.startswith("fill"):
            raise DatasetError("in a helper")
        time.sleep(0.02)
        if ended.is_set():
            late_rows.append(row)
        return np.zeros((STORED_SIZE, STORED_SIZE, 3), np.uint8)

    data, crops = open_split(converted["shards"], "train"), Crops(STORED_SIZE, (View(STORED_SIZE),))
    with closing(BatchFiller(data, crops, 6, 3, CPU)) as filler:
        for fails in (True, False):
            requests = (
                Pictures(Request(0, np.arange(6)), partial(read_picture, fails=fails)) for _ in range(3)
            )
            batches = filler.fill_each(requests)
            with pytest.raises(DatasetError, match="in a helper") if fails else nullcontext():
                next(batches), next(batches)
            time.sleep(0.01)  # until the third batch is being filled
            batches.close()
        ended.set()
        time.sleep(0.1)
    assert not late_rows
