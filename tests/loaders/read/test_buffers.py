"""Memory of batches that worker processes fill."""

import multiprocessing
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from loaders.read.filler import BufferPool, SharedBuffers
from tests.building import build_loader
from tests.conftest import IMAGES

SETTINGS = {"backend": "pytorch", "size": 16, "batch_size": 2, "workers": 2}


def test_a_buffer_comes_back_with_the_last_tensor_of_it() -> None:
    buffers = SharedBuffers(2, 3, 4)
    first, second = buffers.take(), buffers.take()
    assert {first, second} == {0, 1}
    assert buffers.take() is None
    assert first is not None
    buffers.memory[first] = 7
    served = buffers.serve(first, 2)
    part = served.permute(0, 3, 1, 2)[1, :, :2]
    del served
    assert buffers.take() is None
    assert bool((part == 7).all())
    del part
    assert buffers.take() == first
    buffers.reclaim()
    assert {buffers.take(), buffers.take()} == {0, 1}


def test_batches_larger_than_the_memory_take_none(raw_tree: Path) -> None:
    """Of which one may still be served: that of all pictures there are."""
    for samples in (10**9, 10**18):
        assert SharedBuffers(12, samples, 224).take() is None
    with build_loader(raw_tree, **{**SETTINGS, "batch_size": 10**9}, last="partial") as loader:
        assert [len(batch.ids) for batch in loader] == [IMAGES]


@pytest.mark.skipif(multiprocessing.get_start_method() != "fork", reason="memory is shared by forking")
def test_workers_fill_the_same_memory_again(raw_tree: Path) -> None:
    with build_loader(raw_tree, **SETTINGS) as loader:
        addresses = [batch.images.data_ptr() for _ in range(3) for batch in loader]
    assert len(addresses) == 3 * IMAGES // 2
    assert len(set(addresses)) <= 12


def test_batches_that_are_kept_stay_what_they_were(raw_tree: Path) -> None:
    """More of them than there are buffers; iterators dropped in the middle lose none."""
    with (
        build_loader(raw_tree, **SETTINGS) as loader,
        build_loader(raw_tree, **{**SETTINGS, "workers": 0, "threads": 1}) as threads,
    ):
        for _ in range(10):
            next(iter(loader))
        loader.set_epoch(3)
        threads.set_epoch(3)
        kept = list(loader)
        expected = torch.cat([batch.images for batch in threads])
        assert torch.equal(torch.cat([batch.images for batch in kept]), expected)
        later = [batch.ids for batch in loader]
        assert np.array_equal(torch.cat([batch.images for batch in kept]).numpy(), expected.numpy())
        assert len(later) == IMAGES // 2


@pytest.mark.parametrize("pool", ["threads", "processes"])
def test_giving_memory_back_runs_no_python(pool: str) -> None:
    """Ctrl-C would raise its KeyboardInterrupt there, where nobody can catch it, and be lost."""
    if pool == "threads":
        buffers = BufferPool(3, 4, torch.device("cpu"))
        served = buffers.take(2)
    else:
        shared = SharedBuffers(2, 3, 4)
        number = shared.take()
        assert number is not None
        served = shared.serve(number, 2)
    called = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        del served
    finally:
        sys.setprofile(None)
    assert called == []


def test_of_buffers_that_come_back_all_at_once_few_are_kept() -> None:
    buffers = BufferPool(4, 512, torch.device("cpu"))  # 3 MiB each
    tracemalloc.start()
    try:
        kept = [buffers.take(4) for _ in range(20)]
        assert tracemalloc.get_traced_memory()[0] > 60 * 2**20
        del kept
        assert tracemalloc.get_traced_memory()[0] < 30 * 2**20
    finally:
        tracemalloc.stop()
