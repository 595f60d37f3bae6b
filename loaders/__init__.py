"""Loaders for training code, one contract over every backend.

import loaders

with loaders.build("data/shards", batch_size=256, device="cuda") as loader:
    for epoch in range(90):
        for images, labels in loader:
            ...
"""

import os
from collections.abc import Callable
from typing import Literal, NoReturn

import torch

from loaders import dali, nvjpeg, pytorch, shards, synthetic, webdataset
from loaders.augment import BatchFunction, CheckedFunction, RandomAugmentation, source_size
from loaders.augment import make as make_augmentation
from loaders.batch import DTYPES, Batch, Loader, LoaderSpec, Reader, Shuffle
from loaders.batched import BatchAugmentation
from loaders.cache import CachedReader
from loaders.crops import Crops
from loaders.dataset import RAW, SplitData, open_split
from loaders.devices import Lane, find_device
from loaders.loader import EpochLoader
from loaders.refusals import refuse
from loaders.transfer import Transfer
from precache.errors import DatasetError, SettingError, check_choice
from precache.executors import available_cpus

BACKENDS: dict[str, Callable[[LoaderSpec, SplitData, Crops], Reader]] = {
    "dali": dali.open_reader,
    "nvjpeg": nvjpeg.open_reader,
    "pytorch": pytorch.open_reader,
    "shards": shards.open_reader,
    "synthetic": synthetic.open_reader,
    "webdataset": webdataset.open_reader,
}
# What each backend reads, the kind it is made for first.
READS: dict[str, tuple[str, ...]] = {
    "dali": ("dali", "webdataset", RAW),
    "nvjpeg": (RAW, "webdataset", "dali"),
    "pytorch": (RAW,),
    "shards": ("shards",),
    "synthetic": (RAW, "shards", "webdataset", "dali"),
    "webdataset": ("webdataset",),
}
_AUTO = {RAW: "pytorch", "shards": "shards", "webdataset": "webdataset", "dali": "dali"}


def build(  # noqa: PLR0913 (each one a choice of the caller, by keyword)
    path: str | os.PathLike[str],
    *,
    backend: str = "auto",
    split: str = "train",
    batch_size: int = 64,
    shuffle: Shuffle = True,
    seed: int = 0,
    device: str | torch.device = "cpu",
    size: int | None = None,
    dtype: str | torch.dtype = torch.uint8,
    last: str = "partial",
    workers: int | Literal["auto"] = "auto",
    threads: int | Literal["auto"] = "auto",
    rank: int | None = None,
    world_size: int | None = None,
    check: str = "first-read",
    cache: str = "none",
    memory_bytes: int | None = None,
    on_error: str = "raise",
    augment: str | RandomAugmentation | BatchFunction | None = None,
    **theirs: NoReturn,
) -> Loader:
    """Build the loader for the raw tree or the converted folder at `path`.

    Args:
        path: a tree of class folders with pictures, or what `precache convert` made of one.
        backend: `pytorch`, `shards`, `webdataset`, `dali`, `nvjpeg` (CUDA only) or `synthetic`; `auto`
            picks the one that the folder is made for.
        split: of the dataset; a raw tree, and a dataset without splits, is one split, `train`.
        batch_size: samples per batch.
        shuffle: `"full"`, a permutation of all samples, for backends with random access;
            `"window"`, shards in random order and samples shuffled within a window of shards;
            True, the better of the two that the backend can do; False, the stored order.
        seed: with the epoch it gives the order.
        device: where `images` and `labels` are put: `"cpu"`, `"cuda"`, the GPU that is the current one when
            this is called, `"cuda:1"`; `"auto"`, a GPU where there is one.
        size: side of the served square in pixels; by default 224, or all that is stored where that is
            less. A raw tree is resized to it as the converter does it; of a converted dataset the centre
            is cropped.
        dtype: of the images: `"uint8"`, or `"float32"`, `"float16"` or `"bfloat16"`, normalised.
        last: of the samples that fill no batch at the end of an epoch: `"partial"` shares them and the
            last whole batch out over two, as evenly as can be, also over the ranks; `"pad"` fills a last
            batch up with samples served before, `"drop"` leaves them out. Every rank serves as many
            batches. Where a rank would have none (more ranks than samples, batches of one), `"partial"`
            fills up, too; `batch.padding` says which samples are such repeats.
        workers: processes that decode (`pytorch`; 0: none, see `threads`), threads that decode or
            copy (others); `"auto"`, one per CPU that this process may use, shared out among the
            ranks that torchrun started on this machine.
        threads: that decode where `pytorch` has no worker processes; `"auto"` as above.
        rank, world_size: which of how many processes share each epoch, every sample served by one
            of them; default those of `torch.distributed` where it is initialised, else 0 and 1.
            `batch_size` is that of one rank.
        check: `"first-read"` compares every sample of a converted folder with its checksum until it was
            right once, and `"always"` whenever it is read; a crop is then cut out of the whole sample.
            `"never"` does not. One that is damaged raises SampleError, which names file, id and source,
            at its batch; see `on_error`.
        cache: `"ram"` keeps every decoded picture of the split in main memory, `"device"` in that of
            `device`: from the second epoch on nothing is decoded. Order and pixels stay the same.
        memory_bytes: bounds what sequential reading (`shuffle="window"` or False) holds of a converted
            folder at a time: the window is as many shards as fit twice, for the next one is read while
            one is served. `shards` also keeps the system's cache of the files within it. Default:
            windows of 8 shards, and the system decides.
        on_error: what to do with a picture that cannot be decoded: `"raise"` its ImageError, or `"skip"`
            it: of a raw tree, what the list of `precache check` names is left out from the start; what
            it does not name is left out of its batch, which is shorter then, with one warning a file.
            A batch of which nothing is left raises. So is a sample of a converted folder that is not what
            was written; a shard that is missing or truncated raises.
        augment: `"train"`, random crops resized to `size` and mirrored every other time, of all that is
            stored; `"crop"`, the same without resizing; a `loaders.RandomAugmentation` with other settings,
            colour jitter among them; `"eval"` or None, the centre; or a function of yours, see
            `loaders.augment.BatchFunction`, which is called in the thread that reads ahead with all that
            is stored; the default `size` is then what it returns.
        theirs: nothing: a setting of torch's DataLoader is refused with the name of the one here.

    Returns:
        An iterable of `Batch`; one iteration is one epoch, a new one the next, see `Loader`. It raises
        DatasetError for a damaged shard, ImageError for a picture that cannot be decoded (see `on_error`).

    Raises:
        SettingError: a value is out of range or unknown, or the cache does not fit.
        TypeError: a setting that is known nowhere.
        DatasetError, SourceError: `path` does not hold what the backend reads.
        MissingDependencyError: the backend's package is not installed.
    """
    refuse(theirs, build)
    check_choice("backend", backend, [*BACKENDS, "auto"])
    rank, world_size = _ranks(rank, world_size)
    spec = LoaderSpec(
        path=path,
        backend=backend,
        split=split,
        batch_size=batch_size,
        shuffle=shuffle,
        seed=seed,
        device=find_device(device),
        size=size,
        dtype=_dtype(dtype),
        last=last,
        workers=_own_cpus() if workers == "auto" else workers,
        threads=_own_cpus() if threads == "auto" else threads,
        rank=rank,
        world_size=world_size,
        check=check,
        cache=cache,
        memory_bytes=memory_bytes,
        on_error=on_error,
    )
    data = open_split(spec.path, spec.split, skip_rejected=spec.on_error == "skip")
    backend = _AUTO[data.kind] if backend == "auto" else backend
    if data.kind not in READS[backend]:
        raise DatasetError(
            f"{path}: holds {_describe(data.kind)}, backend {backend!r} reads "
            f"{' or '.join(_describe(kind) for kind in READS[backend])}; "
            f"use backend {_AUTO[data.kind]!r} for it, or name another folder"
        )
    crops, late = _augmentation(augment, spec, data)
    lane = Lane(spec.device)
    with lane.active():
        reader = _open_reader(backend, spec, data, crops, lane)
    size = None if isinstance(late, CheckedFunction) else data.served_size(spec.size)
    return EpochLoader(spec, data, reader, Transfer(lane, spec.dtype, late), size)


def _open_reader(backend: str, spec: LoaderSpec, data: SplitData, crops: Crops, lane: Lane) -> Reader:
    """That of the backend, behind a cache if there is to be one."""
    caches_on = {"none": None, "ram": torch.device("cpu"), "device": spec.device}[spec.cache]
    if caches_on is None:
        return BACKENDS[backend](spec, data, crops)
    kept = Crops(crops.stored, crops.stored) if crops.random else crops
    reader = BACKENDS[backend](spec, data, kept)
    crops = crops if crops.random else Crops(crops.size, crops.size)
    return CachedReader(reader, spec, data, crops, caches_on, lane)


def _augmentation(
    augment: str | RandomAugmentation | BatchFunction | None, spec: LoaderSpec, data: SplitData
) -> tuple[Crops, BatchFunction | None]:
    """What the backend serves of each picture, and what is left to do with the batch."""
    served = data.served_size(spec.size)
    stored = source_size(served) if data.kind == RAW else data.size
    augmentation = make_augmentation(augment, stored, served)
    if augmentation is None:
        return Crops(served if data.kind == RAW else data.size, served), None
    if not isinstance(augmentation, RandomAugmentation):
        return Crops(stored, stored), CheckedFunction(augmentation, spec.size)
    if spec.device.type == "cuda":
        return Crops(stored, stored), BatchAugmentation(augmentation, spec.seed, served)
    jitter = BatchAugmentation(augmentation, spec.seed, None) if augmentation.jitters else None
    return Crops(stored, served, augmentation, spec.seed), jitter


def _own_cpus() -> int:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun sets it
    return max(1, available_cpus() // ranks)


def _ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise SettingError("rank and world_size belong together; give both or neither")
    if rank is not None and world_size is not None:
        return rank, world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    names = {str(known).removeprefix("torch."): known for known in DTYPES}
    name = str(dtype).removeprefix("torch.")
    check_choice("dtype", name, names)
    return names[name]


def _describe(kind: str) -> str:
    return "a raw image tree" if kind == RAW else f"format {kind!r}"


__all__ = ["BACKENDS", "READS", "Batch", "Loader", "LoaderSpec", "RandomAugmentation", "build"]
