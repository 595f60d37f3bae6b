"""Checks that every backend has to pass; `tests/loaders/test_backends.py` runs them over all backends.

`Build` makes a loader of one backend over the same pictures: `build(batch_size=16, ...)`. Sequences of calls,
as trainings make them, are in `tests/loaders/test_state_machine.py`.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
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
from precache.pictures.images import Size, sides
from precache.pictures.jpeg import psnr
from precache.sources.tree import scan_tree

Build: TypeAlias = Callable[..., Loader]


def ids_of(batches: Any) -> list[int]:
    """Ids of all samples of some batches, in order."""
    return [int(i) for batch in batches for i in batch.ids]


def pairs_of(batches: Any) -> list[tuple[int, int]]:
    """Id and label of all samples of some batches, in order."""
    return [(int(i), int(y)) for batch in batches for i, y in zip(batch.ids, batch.labels, strict=True)]


def list_samples(trees: Sequence[Path]) -> dict[int, tuple[int, str]]:
    """List the samples of trees that are served one behind the other: id -> label and path of the picture."""
    labels: dict[str, int] = {}
    samples: dict[int, tuple[int, str]] = {}
    for tree in trees:
        scan, first_id = scan_tree(tree), len(samples)
        for name in scan.classes:
            labels.setdefault(name, len(labels))
        for sample in scan.samples:
            samples[first_id + sample.id] = labels[scan.classes[sample.label]], f"{tree}/{sample.path}"
    return samples


def check_samples(
    build: Build, trees: Sequence[Path], size: Size, worst_psnr: float | None, channels: str = "rgb"
) -> None:
    """Check that an epoch has each sample once, in batches of the right form, with the converter's pixels.

    Args:
        worst_psnr: smallest allowed PSNR of a picture, in dB; None: the backend serves noise.
    """
    samples = list_samples(trees)
    with build(batch_size=16) as loader:
        batches = list(loader)
        assert (loader.samples, loader.size) == (len(samples), size)
        expected = [(sample_id, label) for sample_id, (label, _) in samples.items()]
        assert sorted(pairs_of(batches)) == sorted(pairs_of(loader)) == expected
        for sample_id, (_, path) in samples.items():
            assert path.endswith(f"/{loader.path_of(sample_id)}")
        check_batches(batches, size, len(samples), 1 if channels == "grey" else 3)
        assert len(loader) == len(batches)
    if worst_psnr is None:
        return
    rendering = images.Rendering(size=size, channels=channels)
    for batch in batches:
        for picture, sample_id in zip(batch.images, batch.ids.tolist(), strict=True):
            _, path = samples[sample_id]
            due = images.render(images.read_bytes(path), path, rendering)[0]
            assert psnr(picture.permute(1, 2, 0).cpu().numpy(), due) >= worst_psnr, path


def check_batches(batches: list[Any], size: Size, samples: int, channels: int) -> None:
    """Check the form of batches of 16 samples; the last two share the rest."""
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
    with build(workers=1) as loader, build(workers=2) as same_seed, build(seed=1) as other_seed:
        epochs = [ids_of(loader) for _ in range(3)]
        assert [ids_of(same_seed) for _ in range(3)] == epochs
        assert len({tuple(ids) for ids in epochs}) == 3
        assert ids_of(other_seed) != epochs[0]


def check_without_shuffle_the_order_is_the_stored_one(build: Build, stored_ids: list[int]) -> None:
    with build(shuffle=False) as loader:
        assert ids_of(loader) == ids_of(loader) == stored_ids


def check_floats_are_normalised(build: Build) -> None:
    """Check that floats are the normalised integers of the same views, and that ids and labels agree."""

    def darken(images: torch.Tensor, ids: torch.Tensor, epoch: int) -> torch.Tensor:
        assert images.dtype == torch.uint8, "a function gets the stored pixels"
        return images.clamp_(max=100 + 50 * epoch)

    for settings in ({}, {"augment": RandomAugmentation(views=2)}, {"augment": darken}):
        with build(dtype="uint8", **settings) as integers, build(dtype="float32", **settings) as floats:
            for _ in range(2):
                for batch, float_batch in zip(integers, floats, strict=True):
                    check_normalised(batch, float_batch, torch.float32, 1e-5)
    for dtype, tolerance in ((torch.float16, 3e-3), (torch.bfloat16, 2e-2)):
        with build(dtype="uint8") as integers, build(dtype=dtype, normalize="imagenet") as floats:
            for batch, float_batch in zip(integers, floats, strict=True):
                check_normalised(batch, float_batch, dtype, tolerance)


def check_normalised(batch: Batch, float_batch: Batch, dtype: torch.dtype, tolerance: float) -> None:
    """Check that `float_batch` is `batch`, normalised with ImageNet's mean and standard deviation."""
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    for view, floats in zip(batch.views, float_batch.views, strict=True):
        assert (view.dtype, floats.dtype) == (torch.uint8, dtype)
        assert floats.is_contiguous(memory_format=torch.channels_last)
        due = (view.cpu().float() / 255 - mean) / std
        assert torch.allclose(floats.cpu().float(), due, atol=tolerance)
    rest = [(b.ids, b.labels, b.padding, b.fields) for b in (batch, float_batch)]
    torch.testing.assert_close(rest[0], rest[1], rtol=0, atol=0)


def check_torchs_defaults_change_nothing(build: Build) -> None:
    """Check that torch's default dtype, device and modes, which trainings set, do not change the batches."""

    def serve() -> list[tuple[torch.Tensor, ...]]:
        augment = RandomAugmentation(brightness=0.2, saturation=0.2, hue=0.1, views=2)
        with build(batch_size=32, dtype="float32", augment=augment, workers=1) as loader:
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
    for parts, due_parts in zip(served, due, strict=True):
        assert all(map(torch.equal, parts, due_parts))
        assert [part.dtype for part in parts] == [part.dtype for part in due_parts]


def check_resume(build: Build) -> None:
    """Check that another loader serves exactly the rest, from a state that was taken in the loop, as JSON."""
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
    """Check that all ranks have as many batches, and together serve each sample once, except for padding."""
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
    """Check that two threads may use one loader or one iterator, and that a closed loader raises."""

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


def check_a_fork_shares_no_batch(build: Build) -> None:
    """Check that a batch stays as it is whatever a forked process, or this one after the fork, writes."""
    for dtype in ("uint8", "float32"):
        with build(batch_size=8, dtype=dtype) as loader:
            batches = list(loader)
            parts = [
                part.cpu().numpy()
                for batch in batches
                for part in (*batch.views, batch.labels, batch.ids, batch.padding)
            ]
            served = [part.copy() for part in parts]
            gone_on, go_on = os.pipe()
            child = os.fork()
            if child == 0:
                os.read(gone_on, 1)
                is_same = all((part == copy).all() for part, copy in zip(parts, served, strict=True))
                for part in parts:
                    part[...] = 1
                os._exit(not is_same)
            for part in parts:
                part[...] = 0
            os.write(go_on, b"1")
            os.close(go_on)
            os.close(gone_on)
            assert os.waitpid(child, 0)[1] == 0, "the child sees what is written here"
            assert not any(part.any() for part in parts), "what the child writes shows here"


def check_ranks_share_what_can_be_decoded(build: Build, expected: list[int]) -> None:
    """Check that with `on_error="skip"` all ranks together serve each good sample once, in equal batches."""
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


def check_a_cache_changes_nothing_but_the_reading(build: Build) -> None:
    """Check that cached epochs, some of them left midway, equal uncached ones, batch by batch."""
    with build(batch_size=8) as plain, build(batch_size=8, cache="device") as cached:
        for epoch in range(4):
            for number, (batch, cached_batch) in enumerate(zip(plain, cached, strict=True)):
                assert torch.equal(batch.ids, cached_batch.ids)
                assert torch.equal(batch.labels.cpu(), cached_batch.labels.cpu())
                for view, cached_view in zip(batch.views, cached_batch.views, strict=True):
                    assert torch.equal(view.cpu(), cached_view.cpu())
                if epoch in (0, 2) and number == 1:
                    break


ThreadOrProcess: TypeAlias = threading.Thread | psutil.Process


def threads_and_processes() -> set[ThreadOrProcess]:
    """Threads of this process that Python has started, and child processes."""
    children = {child for child in psutil.Process().children() if "resource_tracker" not in _command(child)}
    return {*threading.enumerate(), *children}


def new_threads_and_processes(before: set[ThreadOrProcess]) -> set[ThreadOrProcess]:
    """Threads and processes that run now and did not `before`; others may have ended meanwhile."""
    return threads_and_processes() - before


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def check_another_dataset_in_its_place_is_never_served(
    build: Build, replace: Callable[[], object], path: Path, *, stays: bool, serves: bool
) -> None:
    """Check that a loader serves its dataset as it was, or raises, after something replaced the folder.

    Args:
        replace: replaces the folder; called after the first epoch.
        path: the folder, which the loader has open, and which errors have to name.
        stays: the files are there all the time, so that each epoch is served.
        serves: the files are there in the end, so that the last epoch is served.
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
