"""Memory of batches: used again, but never while somebody still looks at it, on the host or the device.

On a real GPU, every loader behind a stalled training stream: a training that is busy reads its batches late,
and kernels that take a batch wait in the stream while the loader goes on. What is not ordered by an event, be
it a copy, an augmentation, a gather from the cache or memory that is used again, then changes what those
kernels see. `tests/cuda` simulates such a GPU without one.
"""

import gc
import itertools
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import loaders
from loaders import BACKENDS, Reading
from loaders.read.filler import BufferPool, SharedBuffers
from precache.errors import MissingDependencyError
from tests.building import build_loader
from tests.conftest import IMAGES

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


def test_memory_comes_back_when_nobody_looks_at_it_any_more(take: Take) -> None:
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


def test_giving_memory_back_runs_no_python(take: Take) -> None:
    """Ctrl-C would raise its KeyboardInterrupt there, where nobody can catch it, and be lost."""
    served, called = take(), []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        del served
    finally:
        sys.setprofile(None)
    assert called == []


def test_of_buffers_that_come_back_all_at_once_few_are_kept() -> None:
    buffers = BufferPool(4, 512, CPU)  # 3 MiB each
    tracemalloc.start()
    try:
        kept = [buffers.take(4) for _ in range(20)]
        assert tracemalloc.get_traced_memory()[0] > 60 * 2**20
        del kept
        assert tracemalloc.get_traced_memory()[0] < 30 * 2**20
    finally:
        tracemalloc.stop()


def test_batches_larger_than_the_memory_take_none() -> None:
    assert [SharedBuffers(12, samples, 224).take() for samples in (10**9, 10**18)] == [None, None]


@pytest.mark.parametrize("kind", ["raw", "shards"])
def test_batches_that_are_dropped_share_few_buffers_and_those_that_are_kept_stay(
    kind: str, raw_tree: Path, converted: dict[str, Path]
) -> None:
    """More of them than there are buffers; iterators dropped in the middle lose none, nor does a loader."""
    path = {"raw": raw_tree, **converted}[kind]
    settings = {"size": 16, "batch_size": 4, "workers": 2}
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


# On a GPU.

STALL_CYCLES = 60_000_000  # some 30 ms
# from the second epoch to the last; in the first, libraries allocate and caches fill
MAY_GROW_BYTES = 64 << 20
FEEDS = {
    "shards": ("shards", "shards", Reading()),
    "webdataset": ("webdataset", "webdataset", Reading()),
    "pytorch": ("", "pytorch", Reading(workers=2)),
    "nvjpeg of webdataset": ("webdataset", "nvjpeg", Reading()),
    "nvjpeg of a tree": ("", "nvjpeg", Reading()),
    "dali of webdataset": ("webdataset", "dali", Reading()),
    "dali of a tree": ("", "dali", Reading()),
    "synthetic": ("shards", "synthetic", Reading()),
    "shards, cache ram": ("shards", "shards", Reading(cache="ram")),
    "shards, cache device": ("shards", "shards", Reading(cache="device")),
    "nvjpeg, cache device": ("webdataset", "nvjpeg", Reading(cache="device")),
    "dali, cache device": ("webdataset", "dali", Reading(cache="device")),
}
"""Name -> format, or nothing for the tree; backend; reading."""
HALF = loaders.Serving(dtype=torch.bfloat16)
KINDS: list[dict[str, Any]] = [{}, {"serving": HALF}, {"serving": HALF, "augment": "train"}]
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
Sums = list[tuple[list[float], list[int]]]


@pytest.fixture(params=FEEDS)
def feed(request: pytest.FixtureRequest, converted: dict[str, Path], raw_tree: Path) -> dict[str, Any]:
    """What `loaders.build` takes."""
    form, backend, reading = FEEDS[request.param]
    path = converted[form] if form else raw_tree
    return {"path": path, "backend": backend, "reading": reading, "batch_size": 16, "size": 32}


def test_every_backend_and_cache_is_among_the_feeds() -> None:
    assert {backend for _, backend, _ in FEEDS.values()} == set(BACKENDS)
    assert {reading.cache for _, _, reading in FEEDS.values()} == {"none", "ram", "device"}


def build(**settings: Any) -> loaders.Loader:
    try:
        return loaders.build(**settings)
    except MissingDependencyError as error:
        pytest.skip(str(error))


def picture_sums(*, stalled: bool, epochs: int = 1, **settings: Any) -> Sums:
    """Of each batch: the sum of each picture, and the labels, by kernels on the training's stream."""
    gpu = settings["device"] == "cuda"
    found = []
    with build(shuffle=False, **settings) as loader:
        for batch in itertools.chain.from_iterable(loader for _ in range(epochs)):
            if gpu and stalled:
                torch.cuda._sleep(STALL_CYCLES)  # type: ignore[no-untyped-call]
            elif gpu:
                torch.cuda.synchronize()
            found.append((batch.images.double().sum((1, 2, 3)), batch.labels.clone()))
            del batch  # at once, while the kernels still wait
        if gpu:
            torch.cuda.synchronize()
    return [(sums.tolist(), labels.tolist()) for sums, labels in found]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_a_loader_serves_the_same_behind_a_stalled_stream(feed: dict[str, Any], device: str) -> None:
    """On a CPU nothing stalls: there it repeats itself."""
    if device == "cpu" and (feed["backend"] != "shards" or feed["reading"].cache == "device"):
        pytest.skip("one that runs anywhere is enough to try this test")
    epochs = 1 if feed["reading"].cache == "none" else 3  # the first fills it
    for kind in KINDS:
        settings = {**feed, **kind, "device": device, "epochs": epochs}
        idle, stalled = picture_sums(stalled=False, **settings), picture_sums(stalled=True, **settings)
        assert len(idle) == len(stalled) > 1
        differ = sum(one != other for one, other in zip(idle, stalled, strict=True))
        assert differ == 0, f"{differ} of {len(idle)} batches differ with {kind}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_memory_of_the_device_stays_flat_over_epochs(feed: dict[str, Any]) -> None:
    """Of the whole device: nvJPEG and DALI take memory that torch does not count."""
    taken = []
    with build(device="cuda", serving=HALF, augment="train", **feed) as loader:
        for _ in range(8):
            for batch in loader:
                batch.images.sum()
            del batch
            gc.collect()
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            taken.append(total - free)
    assert taken[-1] - taken[1] <= MAY_GROW_BYTES, taken
