"""Loaders for training code, one contract over every backend.

import loaders

with loaders.build("data/shards", batch_size=256, device="cuda") as loader:
    for epoch in range(90):
        for images, labels in loader:
            ...
"""

import os
from collections.abc import Callable

import torch

from loaders import dali, pytorch, shards, synthetic, webdataset
from loaders.batch import Batch, Loader, LoaderSpec, Reader, Shuffle
from loaders.dataset import RAW, SplitData, open_split
from loaders.loader import EpochLoader
from precache.errors import DatasetError, SettingError, check_choice
from precache.executors import available_cpus

BACKENDS: dict[str, Callable[[LoaderSpec, SplitData, int], Reader]] = {
    "dali": dali.open_reader,
    "pytorch": pytorch.open_reader,
    "shards": shards.open_reader,
    "synthetic": synthetic.open_reader,
    "webdataset": webdataset.open_reader,
}
# What each backend reads, the kind it is made for first.
READS: dict[str, tuple[str, ...]] = {
    "dali": ("dali", "webdataset", RAW),
    "pytorch": (RAW,),
    "shards": ("shards",),
    "synthetic": (RAW, "shards", "webdataset", "dali"),
    "webdataset": ("webdataset",),
}
_AUTO = {RAW: "pytorch", "shards": "shards", "webdataset": "webdataset", "dali": "dali"}


def build(
    path: str | os.PathLike[str],
    *,
    backend: str = "auto",
    split: str = "train",
    batch_size: int = 64,
    shuffle: Shuffle = True,
    seed: int = 0,
    device: str | torch.device = "cpu",
    size: int | None = None,
    dtype: torch.dtype = torch.uint8,
    last: str = "partial",
    workers: int | None = None,
) -> Loader:
    """Build the loader for the raw tree or the converted folder at `path`.

    Args:
        path: a tree of class folders with pictures, or what `precache convert` made of one.
        backend: `pytorch`, `shards`, `webdataset`, `dali` or `synthetic`; `auto` picks the one
            that the folder is made for.
        split: of the dataset; a raw tree, and a dataset without splits, is one split, `train`.
        batch_size: samples per batch.
        shuffle: `"full"`, a permutation of all samples, for backends with random access;
            `"window"`, shards in random order and samples shuffled within a window of shards;
            True, the better of the two that the backend can do; False, the stored order.
        seed: with the epoch it gives the order.
        device: where `images` and `labels` are put.
        size: side of the served square in pixels. A raw tree is resized to it (default 224) as
            the converter does it; of a converted dataset the centre is cropped (default: all).
        dtype: of the images: uint8, or float32, float16 or bfloat16, normalised.
        last: of the last, short batch of an epoch: `"partial"` serves it, `"drop"` does not.
        workers: processes that decode (`pytorch`; 0: the calling one), threads that decode or
            copy (others); default one per CPU.

    Returns:
        An iterable of `Batch`; one iteration is one epoch.

    Raises:
        SettingError: a value is out of range or unknown.
        DatasetError, SourceError: `path` does not hold what the backend reads.
        MissingDependencyError: the backend's package is not installed.
    """
    check_choice("backend", backend, [*BACKENDS, "auto"])
    spec = LoaderSpec(
        path=path,
        backend=backend,
        split=split,
        batch_size=batch_size,
        shuffle=shuffle,
        seed=seed,
        device=_device(device),
        size=size,
        dtype=dtype,
        last=last,
        workers=available_cpus() if workers is None else workers,
    )
    data = open_split(spec.path, spec.split)
    backend = _AUTO[data.kind] if backend == "auto" else backend
    if data.kind not in READS[backend]:
        raise DatasetError(
            f"{path}: holds {_describe(data.kind)}, backend {backend!r} reads "
            f"{' or '.join(_describe(kind) for kind in READS[backend])}; "
            f"use backend {_AUTO[data.kind]!r} for it, or name another folder"
        )
    served_size = data.served_size(spec.size)
    reader = BACKENDS[backend](spec, data, served_size)
    return EpochLoader(spec, data, reader, served_size)


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise SettingError(f"unknown device {str(device)!r}; choose from: cpu, cuda, cuda:0, ...")
    return found


def _describe(kind: str) -> str:
    return "a raw image tree" if kind == RAW else f"format {kind!r}"


__all__ = ["BACKENDS", "READS", "Batch", "Loader", "LoaderSpec", "build"]
