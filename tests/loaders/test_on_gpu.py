"""Every loader on a real GPU: behind a stalled training stream, and its memory over epochs.

A training that is busy reads its batches late: kernels that take a batch wait in the stream while the loader
goes on. What is not ordered by an event, be it a copy, an augmentation, a gather from the cache or memory
that is used again, then changes what those kernels see. `tests/cuda` simulates such a GPU without one.
"""

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import loaders
from loaders import BACKENDS, Reading
from precache.errors import MissingDependencyError

STALL_CYCLES = 60_000_000  # some 30 ms
MAY_GROW_BYTES = (
    64 << 20
)  # from the second epoch to the last; in the first, libraries allocate and caches fill
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
