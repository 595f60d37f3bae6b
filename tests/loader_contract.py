"""Properties that every backend keeps; `tests/loaders/test_backends.py` runs them over all of them.

`Build` makes a loader of one backend over the same 70 pictures: `build(batch_size=16, ...)`.
"""

import gc
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import psutil
import torch

from loaders import Loader
from loaders.transfer import IMAGENET_MEAN, IMAGENET_STD
from precache import PrecacheError, SettingError
from precache.pictures import images
from precache.pictures.sizes import Size, sides
from precache.sources.tree import scan_tree

Build: TypeAlias = Callable[..., Loader]


def ids_of(batches: Any) -> list[int]:
    return [int(i) for batch in batches for i in batch.ids]


def check_every_sample_once_per_epoch(build: Build, expected: list[tuple[int, int]]) -> None:
    """`expected` holds (id, label) of all samples."""
    with build() as loader:
        for _ in range(3):
            served = [
                (int(i), int(y)) for batch in loader for i, y in zip(batch.ids, batch.labels, strict=True)
            ]
            assert sorted(served) == expected


def check_batches(build: Build, size: Size, samples: int, channels: int = 3) -> None:
    with build(batch_size=16) as loader:
        batches = list(loader)
        assert len(loader) == len(batches) == -(-samples // 16)
        last_two = 16 + samples % 16
        assert [len(batch.labels) for batch in batches] == [
            *[16] * (samples // 16 - 1),
            (last_two + 1) // 2,
            last_two // 2,
        ]
        assert (loader.samples, loader.size) == (samples, size)
        for batch in batches:
            n = len(batch.labels)
            images, labels = batch
            assert images is batch.images
            assert labels is batch.labels
            assert images.shape == (n, channels, *sides(size))
            assert images.dtype == torch.uint8
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert (labels.shape, labels.dtype) == ((n,), torch.int64)
            assert (batch.ids.shape, batch.ids.dtype) == ((n,), torch.int64)
            assert not batch.padding.any()
            assert (batch.padding.shape, batch.padding.dtype) == ((n,), torch.bool)


def check_last_drop(build: Build, samples: int) -> None:
    with build(batch_size=16, last="drop") as loader:
        assert [len(batch.labels) for batch in loader] == [16] * (samples // 16)
        assert len(loader) == samples // 16


def check_order_depends_on_seed_and_epoch_alone(build: Build) -> None:
    with build(workers=1) as one, build(workers=2) as two, build(seed=1) as other:
        epochs = [ids_of(one) for _ in range(3)]
        assert [ids_of(two) for _ in range(3)] == epochs
        assert len({tuple(ids) for ids in epochs}) == 3
        assert ids_of(other) != epochs[0]
        two.set_epoch(1)
        assert ids_of(two) == epochs[1]
        assert ids_of(two) == epochs[2]


def check_without_shuffle_the_order_is_the_stored_one(build: Build, stored_ids: list[int]) -> None:
    with build(shuffle=False) as loader:
        assert ids_of(loader) == stored_ids
        assert ids_of(loader) == stored_ids


def check_pixels(build: Build, raw_tree: Path, size: Size, worst_psnr: float, channels: str = "rgb") -> None:
    """Each picture against the converter's, cropped to `size` as the loader serves it."""
    scan = scan_tree(raw_tree)
    with build() as loader:
        for batch in loader:
            for picture, sample_id in zip(batch.images, batch.ids, strict=True):
                path = f"{raw_tree}/{scan.samples[int(sample_id)].path}"
                how = images.Rendering(size=size, channels=channels)
                expected = images.render(images.read_bytes(path), path, how)[0].astype(float)
                error = np.square(picture.permute(1, 2, 0).cpu().numpy() - expected).mean()
                psnr = np.inf if error == 0 else 10 * np.log10(255**2 / error)
                assert psnr >= worst_psnr, f"{path}: {psnr:.1f} dB"


def check_floats_are_normalised(
    build: Build,
    normalize: str = "imagenet",
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> None:
    means, stds = (torch.tensor(v).view(-1, 1, 1) for v in (mean, std))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)):
        settings = {"shuffle": False, "dtype": dtype, "normalize": normalize}
        with build(shuffle=False) as integers, build(**settings) as floats:
            for ours, theirs in zip(integers, floats, strict=True):
                expected = (ours.images.cpu().float() / 255 - means) / stds
                assert theirs.images.dtype == dtype
                assert theirs.images.is_contiguous(memory_format=torch.channels_last)
                assert torch.allclose(theirs.images.cpu().float(), expected, atol=tolerance)


def check_resume(build: Build) -> None:
    """A state taken in the loop body, as JSON, in another loader: the rest and nothing but the rest."""
    with build(batch_size=8) as loader:
        loader.set_epoch(5)
        whole = [batch.ids.tolist() for batch in loader]
        following = ids_of(loader)
    for served in (0, 1, 4, len(whole)):
        with build(batch_size=8) as loader:
            loader.set_epoch(5)
            iterator = iter(loader)
            for _ in range(served):
                next(iterator)
            state = json.loads(json.dumps(loader.state_dict()))
            del iterator
        with build(batch_size=8, workers=1) as resumed:
            resumed.load_state_dict(state)
            resumed.set_epoch(5)
            assert [batch.ids.tolist() for batch in resumed] == whole[served:]
            assert ids_of(resumed) == following


def check_ranks_share_each_epoch(build: Build, expected: list[int]) -> None:
    """Every sample once over all ranks, in as many batches, apart from what is marked as padding."""
    for batch_size, world_size, last, per_node in (
        (8, 1, "partial", None),
        (8, 3, "partial", None),
        (1, 3, "partial", 1),
        (8, 3, "pad", None),
        (4, 4, "pad", 2),
    ):
        settings = {"batch_size": batch_size, "world_size": world_size, "last": last}
        settings["per_node"] = per_node
        built = [build(rank=rank, **settings) for rank in range(world_size)]
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


def check_a_state_goes_on_with_other_ranks(build: Build, served: int) -> None:
    """In any world of the same global batch, also at the last two batches, which are shorter."""
    with build(batch_size=8, rank=0, world_size=2) as one:
        iterator = iter(one)
        for _ in range(served):
            next(iterator)
        state = json.loads(json.dumps(one.state_dict()))
    with build(batch_size=16) as whole:
        rest = [sorted(batch.ids.tolist()) for batch in whole][served:]
    resumed = [build(batch_size=4, rank=rank, world_size=4) for rank in range(4)]
    for loader in resumed:
        loader.load_state_dict(state)
    assert [sorted(ids_of(batches)) for batches in zip(*resumed, strict=True)] == rest
    for loader in resumed:
        loader.close()


def check_an_iteration_after_a_break_is_the_next_epoch(build: Build) -> None:
    with build() as loader:
        epochs = [ids_of(loader) for _ in range(3)]
    with build() as loader:
        for expected in epochs:
            for batch in loader:
                assert batch.ids.tolist() == expected[: len(batch.ids)]
                break


def check_two_iterations_take_turns(build: Build) -> None:
    """Each gets all of its own epoch, in order, whichever is asked."""
    with build() as loader:
        epochs = [[batch.ids.tolist() for batch in loader] for _ in range(3)]
    with build() as loader:
        first, second = iter(loader), iter(loader)
        served = [[next(first).ids.tolist()], [next(second).ids.tolist()]]
        served[0] += [batch.ids.tolist() for batch in first]
        served[1] += [batch.ids.tolist() for batch in second]
        assert served == epochs[:2]
        assert [batch.ids.tolist() for batch in loader] == epochs[2]


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

    with build(batch_size=4) as loader:
        expected = sorted(ids_of(loader))
        assert [sorted(ids) for ids in serve(loader, loader)] == [expected] * 2
        shared = iter(loader)
        assert sorted(chain(*serve(shared, shared))) == expected
    loader = build(batch_size=4)
    threading.Timer(0.02, loader.close).start()
    for ids in serve(loader, loader):
        assert isinstance(ids, SettingError) or sorted(ids) == expected
    loader.close()


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


def check_targets_and_fields(build: Build, classes: int, target: str, values: Any, fields: Any) -> None:
    """Every sample has what the source says of it; `values`, of the target, and `fields` by id."""
    with build() as loader:
        for batch in (*loader, *loader):
            ids = batch.ids.tolist()
            labels = batch.labels.cpu()
            chosen = [-1] * len(ids) if values is None else [values[i] for i in ids]
            if target == "classes":
                assert labels.shape == (len(ids), classes)
                chosen = [[float(number in values[i]) for number in range(classes)] for i in ids]
            dtype = torch.int64 if target in ("class", "none") else torch.float32
            assert labels.dtype == dtype
            assert torch.equal(labels, torch.tensor(chosen, dtype=dtype))
            assert batch.fields.keys() == fields.keys()
            for name, of_all in fields.items():
                check_field(batch.fields[name], [of_all[i] for i in ids])


def check_field(served: Any, expected: list[Any]) -> None:
    """One field of a batch, whose values are these."""
    if isinstance(expected[0], str):
        assert served == expected
    elif isinstance(served, torch.Tensor):
        assert served.device.type == "cpu"
        assert served.dtype in (torch.int64, torch.float64)
        assert served.tolist() == expected
    else:
        assert [value.tolist() for value in served] == expected


def check_abandoned_iterators_leave_nothing(build: Build) -> None:
    before = running()
    for _ in range(10):
        with build(batch_size=8) as loader:
            for _ in loader:
                break
            assert len(ids_of(loader)) == loader.samples, "the next epoch, whole"
    dropped = build(batch_size=8)
    next(iter(dropped))
    del dropped
    gc.collect()
    deadline = time.monotonic() + 10
    while left(before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left(before)


def running() -> set[threading.Thread | psutil.Process]:
    """Threads of this process started by Python, and child processes."""
    children = {child for child in psutil.Process().children() if "resource_tracker" not in _command(child)}
    return {*threading.enumerate(), *children}


def left(before: set[threading.Thread | psutil.Process]) -> set[threading.Thread | psutil.Process]:
    """What runs now and did not `before`; what another test had left may have ended meanwhile."""
    return running() - before


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
