"""Properties that every backend keeps; `tests/loaders/test_backends.py` runs them over all of them.

`Build` makes a loader of one backend over the same 70 pictures: `build(batch_size=16, ...)`. What a training
does with a loader, in whichever order, is in `tests/loaders/test_state_machine.py`.
"""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import torch

from loaders import Batch, Loader, RandomAugmentation
from loaders.transfer import IMAGENET_MEAN, IMAGENET_STD
from precache import PrecacheError, SettingError
from precache.errors import DatasetError
from precache.pictures import images
from precache.pictures.jpeg import psnr
from precache.pictures.sizes import Size, sides
from precache.sources.tree import scan_tree

Build: TypeAlias = Callable[..., Loader]


def ids_of(batches: Any) -> list[int]:
    return [int(i) for batch in batches for i in batch.ids]


def pairs_of(batches: Any) -> list[tuple[int, int]]:
    """(id, label) of each sample."""
    return [(int(i), int(y)) for batch in batches for i, y in zip(batch.ids, batch.labels, strict=True)]


def check_samples(
    build: Build, raw_tree: Path, size: Size, worst_psnr: float | None, channels: str = "rgb"
) -> None:
    """Each sample once an epoch, in batches as promised, with the pixels that the converter makes of it.

    `worst_psnr`: distance in dB; None: what is served is noise by design.
    """
    scan = scan_tree(raw_tree)
    with build(batch_size=16) as loader:
        batches, samples = list(loader), len(scan.samples)
        assert (loader.samples, loader.size) == (samples, size)
        expected = sorted((sample.id, sample.label) for sample in scan.samples)
        assert sorted(pairs_of(batches)) == sorted(pairs_of(loader)) == expected
        check_batches(batches, size, samples, 1 if channels == "grey" else 3)
        assert len(loader) == len(batches)
    how = images.Rendering(size=size, channels=channels)
    for batch in batches if worst_psnr is not None else ():
        for picture, sample_id in zip(batch.images, batch.ids.tolist(), strict=True):
            path = f"{raw_tree}/{scan.samples[sample_id].path}"
            due = images.render(images.read_bytes(path), path, how)[0]
            assert psnr(picture.permute(1, 2, 0).cpu().numpy(), due) >= worst_psnr, path


def check_batches(batches: list[Any], size: Size, samples: int, channels: int) -> None:
    """All of 16 but the last two, which share what is left."""
    last_two = 16 + samples % 16
    sizes = [*[16] * (samples // 16 - 1), (last_two + 1) // 2, last_two // 2]
    assert [len(batch.labels) for batch in batches] == sizes
    for batch in batches:
        n = len(batch.labels)
        assert batch[0] is batch.images
        assert batch[1] is batch.labels
        assert batch.images.shape == (n, channels, *sides(size))
        assert batch.images.dtype == torch.uint8
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert (batch.labels.shape, batch.labels.dtype) == ((n,), torch.int64)
        assert (batch.ids.shape, batch.ids.dtype) == ((n,), torch.int64)
        assert (batch.padding.shape, batch.padding.dtype) == ((n,), torch.bool)
        assert not batch.padding.any()


def check_order_depends_on_seed_and_epoch_alone(build: Build) -> None:
    with build(workers=1) as one, build(workers=2) as two, build(seed=1) as other:
        epochs = [ids_of(one) for _ in range(3)]
        assert [ids_of(two) for _ in range(3)] == epochs
        assert len({tuple(ids) for ids in epochs}) == 3
        assert ids_of(other) != epochs[0]


def check_without_shuffle_the_order_is_the_stored_one(build: Build, stored_ids: list[int]) -> None:
    with build(shuffle=False) as loader:
        assert ids_of(loader) == ids_of(loader) == stored_ids


def check_floats_are_normalised(build: Build) -> None:
    """Each view of the same pictures, whatever is done to them; what comes with them is the same."""

    def darken(images: torch.Tensor, ids: torch.Tensor, epoch: int, view: int) -> torch.Tensor:
        assert images.dtype == torch.uint8, "a function gets what is stored"
        return images.clamp_(max=100 + 50 * view)

    several = {"views": 2, "cache": "device"}
    for settings in ({}, {"augment": "train", **several}, {"augment": darken, **several}):
        with build(dtype="uint8", **settings) as integers, build(dtype="float32", **settings) as floats:
            for _ in range(2):
                for ours, theirs in zip(integers, floats, strict=True):
                    check_the_same_but_normalised(ours, theirs, torch.float32, 1e-5)
    for dtype, tolerance in ((torch.float16, 3e-3), (torch.bfloat16, 2e-2)):
        with build(dtype="uint8") as integers, build(dtype=dtype, normalize="imagenet") as floats:
            for ours, theirs in zip(integers, floats, strict=True):
                check_the_same_but_normalised(ours, theirs, dtype, tolerance)


def check_the_same_but_normalised(ours: Batch, theirs: Batch, dtype: torch.dtype, tolerance: float) -> None:
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    for view, floats in zip(ours.views, theirs.views, strict=True):
        assert (view.dtype, floats.dtype) == (torch.uint8, dtype)
        assert floats.is_contiguous(memory_format=torch.channels_last)
        due = (view.cpu().float() / 255 - mean) / std
        assert torch.allclose(floats.cpu().float(), due, atol=tolerance)
    rest = [(b.ids, b.labels, b.padding, b.fields) for b in (ours, theirs)]
    torch.testing.assert_close(rest[0], rest[1], rtol=0, atol=0)


def check_torchs_defaults_change_nothing(build: Build) -> None:
    """What a training sets for its model, where it builds the loader and where it takes the batches."""

    def serve() -> list[tuple[torch.Tensor, ...]]:
        augment = RandomAugmentation(brightness=0.2, saturation=0.2, hue=0.1)
        with build(batch_size=32, dtype="float32", augment=augment, views=2, workers=1) as loader:
            batches = [(*batch.views, batch.labels, batch.ids, batch.padding) for batch in loader]
        with build(batch_size=32, last="pad", workers=0) as loader:
            return [*batches, *((*batch.views, batch.labels, batch.ids, batch.padding) for batch in loader)]

    due = serve()
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            served = serve()
    finally:
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(False)
    for ours, theirs in zip(served, due, strict=True):
        assert all(map(torch.equal, ours, theirs))
        assert [part.dtype for part in ours] == [part.dtype for part in theirs]


def check_resume(build: Build) -> None:
    """A state taken in the loop body, as JSON, in another loader: the rest and nothing but the rest."""
    with build(batch_size=8) as loader:
        loader.set_epoch(5)
        whole = [batch.ids.tolist() for batch in loader]
        following = ids_of(loader)
        loader.set_epoch(5)
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        del iterator
    with build(batch_size=8, workers=1) as resumed:
        resumed.load_state_dict(state)
        assert [batch.ids.tolist() for batch in resumed] == whole[4:]
        assert ids_of(resumed) == following


def check_ranks_share_each_epoch(build: Build, expected: list[int]) -> None:
    """Every sample once over all ranks, in as many batches, apart from what is marked as padding."""
    for world_size, last, per_node in ((3, "pad", None), (4, "partial", 2)):
        settings = {"batch_size": 4, "world_size": world_size, "last": last, "per_node": per_node}
        built = [build(rank=rank, workers=0, **settings) for rank in range(world_size)]
        for _ in range(2):
            ranks = [list(loader) for loader in built]
            assert {len(batches) for batches in ranks} == {len(loader) for loader in built}
            served = [i for batches in ranks for batch in batches for i in batch.ids[~batch.padding].tolist()]
            assert sorted(served) == expected
            for batches in zip(*ranks, strict=True):
                sizes = [len(batch.ids) for batch in batches]
                assert max(sizes) - min(sizes) <= (last == "partial")
                assert min(sizes) > 0
        for loader in built:
            loader.close()


def check_threads_take_turns(build: Build) -> None:
    """Each of two threads has an epoch of its own, or both share one iterator; what is closed says so."""

    def serve(*iterators: Any) -> list[list[int] | PrecacheError]:
        def take(iterator: Any) -> list[int] | PrecacheError:
            ids: list[int] = []
            try:
                for batch in iterator:
                    ids += batch.ids.tolist()
                    time.sleep(0.002)
            except PrecacheError as error:
                return error
            return ids

        with ThreadPoolExecutor(len(iterators)) as pool:
            return list(pool.map(take, iterators))

    with build(batch_size=8) as loader:
        expected = sorted(ids_of(loader))
        assert [sorted(ids) for ids in serve(loader, loader)] == [expected] * 2
        shared = iter(loader)
        assert sorted(chain(*serve(shared, shared))) == expected
        threading.Timer(0.02, loader.close).start()
        for ids in serve(loader, loader):
            assert isinstance(ids, SettingError) or sorted(ids) == expected


def check_ranks_share_what_can_be_decoded(build: Build, expected: list[int]) -> None:
    """Under `on_error="skip"`: each good sample once over all ranks, however many batches are short."""
    for last in ("partial", "pad"):
        built = [build(batch_size=8, rank=rank, world_size=3, last=last) for rank in range(3)]
        batches = [list(loader) for loader in built]
        assert [len(served) for served in batches] == [len(loader) for loader in built]
        served = [i for of_rank in batches for i in ids_of(of_rank)]
        assert sorted(set(served)) == expected
        once = [i for of_rank in batches for batch in of_rank for i in batch.ids[~batch.padding].tolist()]
        assert sorted(once) == expected
        for loader in built:
            loader.close()


def check_a_cache_changes_nothing_but_the_reading(build: Build, cache: str) -> None:
    """Three epochs, the second abandoned midway, batch for batch."""
    with build(batch_size=16) as plain, build(batch_size=16, cache=cache) as cached:
        for epoch in range(4):
            for number, (ours, theirs) in enumerate(zip(plain, cached, strict=True)):
                assert torch.equal(ours.ids, theirs.ids)
                assert torch.equal(ours.labels, theirs.labels)
                assert torch.equal(ours.images, theirs.images)
                if epoch in (0, 2) and number == 1:
                    break


def threads_and_processes() -> set[threading.Thread | psutil.Process]:
    """Threads of this process started by Python, and child processes."""
    children = {child for child in psutil.Process().children() if "resource_tracker" not in _command(child)}
    return {*threading.enumerate(), *children}


def new_threads_and_processes(before: set[threading.Thread | psutil.Process]) -> set[threading.Thread | psutil.Process]:
    """What runs now and did not `before`; what another test had left may have ended meanwhile."""
    return threads_and_processes() - before


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def check_another_dataset_in_its_place_is_never_served(
    build: Build, replace: Callable[[], object], path: Path, *, stays: bool, serves: bool
) -> None:
    """After the first epoch `replace` does something to the folder at `path`, which a loader has open.

    Each epoch serves the dataset as it was, or an error names the folder.

    Args:
        stays: its files are there all the time, so that each epoch is served.
        serves: they are there in the end, so that the last one is.
    """

    def serve() -> dict[int, tuple[int, bytes]]:
        return {
            int(i): (int(label), image.cpu().numpy().tobytes())
            for batch in loader
            for i, label, image in zip(batch.ids, batch.labels, batch.images, strict=True)
        }

    with build() as loader:
        before = serve()
        replace()
        errors: list[DatasetError | None] = []
        for _ in range(3):
            try:
                assert serve() == before
                errors.append(None)
            except DatasetError as error:
                errors.append(error)
    assert all(error is None or str(path) in str(error) for error in errors), errors
    assert not stays or errors == [None] * 3
    assert not serves or errors[-1] is None
