"""Loaders serve the right batches on a GPU, however late its streams are, without needless waits."""

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import loaders
from loaders import device
from loaders.augment.crops import Crops
from loaders.batch import DecodedBatch, Request
from loaders.dataset import SplitData
from loaders.device import Lane, upload
from loaders.read import BACKENDS, decoding
from loaders.settings import LoaderSpec
from precache import Recipe, convert
from precache.example_data.sample_tree import make_sample
from tests.building import build_loader
from tests.cuda.simulator import simulated
from tests.cuda.streams import SCHEDULES

FLOAT = {"dtype": torch.float32}
TRAIN = {"augment": "train", "size": 20}
JITTER = {"augment": loaders.RandomAugmentation(brightness=0.4, saturation=0.4, hue=0.1), "size": 20}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "shards-uint8": ("shards", {}),
    "shards-float": ("shards", FLOAT),
    "shards-train": ("shards", {**FLOAT, **TRAIN}),
    "shards-jitter": ("shards", {**FLOAT, **JITTER}),
    "shards-views": ("shards", {**FLOAT, **TRAIN, "augment": loaders.RandomAugmentation(views=2)}),
    "shards-pad": ("shards", {**FLOAT, "last": "pad", "rank": 1, "world_size": 3}),
    "cache-on-the-device": ("shards", {"cache": "device"}),
    "cache-on-the-device-train": (
        "shards",
        {"cache": "device", **FLOAT, **TRAIN, "augment": loaders.RandomAugmentation(views=2)},
    ),
    "webdataset-float": ("webdataset", FLOAT),
    "pytorch-float": ("raw", {**FLOAT, "workers": 0, "size": 20}),
    "list": ("both", {**FLOAT, **TRAIN}),  # an epoch is twice as long as in the other cases
    "synthetic-float": ("shards", {"backend": "synthetic", **FLOAT}),
    "dali-uint8": ("webdataset", {"backend": "dali"}),
    "dali-float": ("webdataset", {"backend": "dali", **FLOAT}),
    "dali-train": ("webdataset", {"backend": "dali", **FLOAT, **TRAIN}),
    "dali-cache-on-the-device": ("webdataset", {"backend": "dali", "cache": "device", **FLOAT}),
    "share-on-the-device": ("shards", {"cache": "device", **FLOAT}),
    "dali-share-on-the-device": ("webdataset", {"backend": "dali", "cache": "device", **FLOAT}),
}
"""Case -> (key of `paths`, settings)."""
PATH_CASES = [
    "shards-float", "shards-train", "shards-views", "cache-on-the-device-train",
    "webdataset-float", "pytorch-float", "dali-train",
]  # fmt: skip
"""Cases whose pictures take different paths to the device."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Data sets of 22 pictures, two full batches and a short one: simulated operations are slow."""
    root = tmp_path_factory.mktemp("small")
    make_sample(root / "raw", images=22, classes=3, seed=2, like="caltech", workers=0)
    for name in ("shards", "webdataset"):
        recipe = Recipe(format=name, size=24, fit="crop", shard_bytes=4 * 24**2 * 3)
        convert(root / "raw", root / name, recipe, workers=0)
    both = [root / "shards", root / "shards"]
    return {**{path.name: path for path in root.iterdir()}, "both": both}


class OnDevice(decoding.ThreadsReader):
    """Stands for DALI: its batches are on the device, made by work of the current stream."""

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        super().__init__(spec, data, crops)
        self._device = spec.device

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        for decoded in super().read(requests):
            yield replace(decoded, views=tuple(upload(view, self._device) for view in decoded.views))


@pytest.fixture(autouse=True)
def hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "dali", OnDevice)


Parts = list[tuple[torch.Tensor, ...]]


def build(path: Any, device: str = "cuda", **settings: Any) -> loaders.Loader:
    return build_loader(path, **{"batch_size": 8, "workers": 1, "device": device, **settings})


def copy_parts(batch: loaders.Batch) -> tuple[torch.Tensor, ...]:
    """Copy views and labels of a batch, by work that may be done after the batch is dropped."""
    return tuple(part + 0 for part in (*batch.views, batch.labels))


def serve(path: Any, epochs: int = 3, device: str = "cuda", **settings: Any) -> Parts:
    batches = []
    with build(path, device, **settings) as loader:
        for _ in range(epochs):
            for batch in loader:
                batches.append(copy_parts(batch))
                del batch
    if device != "cpu":
        torch.cuda.synchronize(device)
    return [tuple(part.cpu() for part in parts) for parts in batches]


def are_equal(first: Parts, second: Parts) -> bool:
    return all(all(map(torch.equal, a, b)) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_each_batch_is_right_whatever_is_late(case: str, paths: dict[str, Any]) -> None:
    kind, settings = CASES[case]
    due: Parts = []
    free_bytes = 13 * 24 * 24 * 3 if "share-" in case else 2**34
    for schedule in SCHEDULES:
        with simulated(schedule, free_bytes):
            served = serve(paths[kind], epochs=2 if kind == "both" else 3, **settings)
        due = due or served
        assert are_equal(due, served), schedule
    compares_pixels = settings.get("backend") != "synthetic" and "augment" not in settings
    if compares_pixels:
        on_cpu = serve(paths[kind], device="cpu", **{**settings, "backend": "auto", "cache": None})
        for (images, *rest), (cpu_images, *cpu_rest) in zip(due, on_cpu, strict=True):
            assert torch.allclose(images, cpu_images, atol=1e-5)
            assert all(map(torch.equal, rest, cpu_rest))


@pytest.mark.parametrize("way", ["break", "close"])
@pytest.mark.parametrize("case", ["shards-jitter", "cache-on-the-device-train", "dali-float"])
def test_epoch_left_midway_spoils_no_later_batch(case: str, way: str, paths: dict[str, Any]) -> None:
    """Memory of batches on their way is used again, by other loaders and by the training."""
    kind, settings = CASES[case]

    def leave_and_serve() -> Parts:
        tensors = []
        for count in (1, 3):
            loader = build(paths[kind], **settings)
            for batch in itertools.islice(loader, count):
                tensors.append(copy_parts(batch))
                del batch
            if way == "close":
                loader.close()
            for shape, dtype in (((8, 3, 24, 24), torch.float32), ((22, 24, 24, 3), torch.uint8)):
                tensors += [(torch.full(shape, count, dtype=dtype, device="cuda"),) for _ in range(3)]
            if way == "break":
                tensors.append(copy_parts(next(iter(loader))))
            del loader
        torch.cuda.synchronize()
        return [tuple(part.cpu() for part in parts) for parts in tensors]

    with simulated("at once"):
        due = leave_and_serve()
    for schedule in ("loader late", "all late"):
        with simulated(schedule):
            assert are_equal(due, leave_and_serve()), schedule


@pytest.mark.parametrize("case", PATH_CASES)
def test_host_waits_for_no_device(case: str, paths: dict[str, Any]) -> None:
    kind, settings = CASES[case]
    with simulated("all late") as world:
        with build(paths[kind], device="cuda:1", **settings) as loader:
            world.syncs.clear()  # building a loader may wait
            for _ in range(2):
                for _ in loader:
                    pass
        assert world.used == {1}
        assert [wait for wait in world.syncs if wait[0] != "MainThread"] == []


@pytest.mark.parametrize("backend", ["shards", "webdataset"])
def test_pictures_are_read_into_pinned_memory_without_a_copy(backend: str, paths: dict[str, Any]) -> None:
    with simulated("all late") as world:
        with build(paths[backend], **TRAIN) as loader:
            batch_bytes = next(iter(loader)).images.nbytes
        assert world.pinned, "labels and random draws are copied"
        assert max(world.pinned) < batch_bytes / 4


def test_device_is_the_current_one_when_the_loader_is_built(paths: dict[str, Any]) -> None:
    with simulated("all late"):
        torch.cuda.set_device(1)
        with build_loader(paths["shards"], device="cuda", **FLOAT) as loader:
            torch.cuda.set_device(0)
            batch = next(iter(loader))
            assert batch.images.device == torch.device("cuda", 1)
            assert float((batch.images + 0).std()) > 0.5, "the training's stream on that device has waited"
        torch.cuda.set_device(0)


def test_training_stream_only_waits_for_each_batch(paths: dict[str, Any]) -> None:
    """Further work of the loader on that stream would delay the training's."""
    with simulated("all late") as world:
        with build(paths["shards"], **FLOAT, **TRAIN) as loader:
            batches = list(loader)
        assert len(world.defaults[0].queue) == len(batches)


def test_memory_of_dali_is_returned_when_it_has_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """DALI does not know our streams, and overwrites memory as soon as torch drops it."""

    def from_dlpack(number: int) -> torch.Tensor:
        squares = torch.full((8, 24, 24, 3), number, dtype=torch.uint8, device="cuda")
        torch.cuda.current_stream().synchronize()  # DALI's work is done before later work of the stream
        shown = squares.shown  # type: ignore[attr-defined]
        weakref.finalize(squares, shown.fill_, 99).atexit = False
        return squares

    monkeypatch.setattr(device, "from_dlpack", from_dlpack)
    with simulated("all late"):
        lane, training, copies = Lane(torch.device("cuda", 0)), torch.cuda.current_stream(), []
        outputs = device.BorrowedTensors()
        for number in range(6):
            with lane.active():
                squares = outputs.take(number)
            training.wait_event(lane.mark())
            squares.record_stream(training)
            copies.append(squares + 0)
            del squares
        outputs.give_back()
        torch.cuda.synchronize()
        assert [int(squares.cpu()[0, 0, 0, 0]) for squares in copies] == list(range(6))
