"""Where decoded pictures are kept, and how much room there is for them."""

import hashlib
import logging
import math
import os

import numpy as np
import torch

from loaders.augment.cpu import Crops
from loaders.backends import host_memory
from loaders.backends.kept import DevicePictures, HostPictures, Kept, memory_bytes
from loaders.backends.share import Places, Share, choose_share
from loaders.dataset import RAW, SplitData
from loaders.settings import LoaderSpec
from precache.errors import SettingError, printable
from precache.pictures.kinds import made_by
from precache.pictures.sizes import sides

_RESERVED_SHARE = 0.1  # of all memory is left free for others
_AUTO_SHARE = 0.5  # of the free memory is what 'auto' takes
_LEAST_SHARE = 0.1  # of a split; of less 'auto' keeps nothing
_VERSION = 1  # of what lies in shared memory
_LOGGER = logging.getLogger(__name__)


def open_kept(
    backend: str, spec: LoaderSpec, data: SplitData, crops: Crops, crop_ratio: float
) -> Kept | None:
    """Room for pictures of `crops.stored`, as the settings ask for it; None where nothing is to be kept.

    `crop_ratio` is that by which they were made.

    Raises:
        SettingError: the device cannot keep them.
    """
    cache = spec.reading.cache
    if cache == "none" or (cache == "auto" and backend == "synthetic"):
        return None
    if cache == "device" and spec.device.type == "cuda":
        return _on_device(spec, data, crops)
    kept = _in_main_memory(backend, spec, data, crops, crop_ratio)
    if kept is None:
        free, _ = host_memory.free_memory()
        _LOGGER.warning(
            "%s: cache %r keeps nothing, %.1f GiB of main memory are free; all samples are read each time",
            *(printable(str(data.path)), cache, free / 2**30),
        )
    return kept


def _on_device(spec: LoaderSpec, data: SplitData, crops: Crops) -> DevicePictures:
    if crops.stored is None:
        raise SettingError(
            f"cache 'device' keeps pictures of one size, and those of {data.path} vary; use cache 'ram'"
        )
    free = int(torch.cuda.mem_get_info(spec.device)[0])
    share = choose_share(data, _places(data, crops), int(free * (1 - _RESERVED_SHARE)))
    if not share.samples:
        raise SettingError(
            f"the cache of {data.path} has no room on {spec.device}, of which {free:,} bytes are free; "
            f"use cache 'none', or a smaller size"
        )
    _say_share(spec, data, share)
    return DevicePictures(data, share, crops.stored, spec.device)


def _in_main_memory(
    backend: str, spec: LoaderSpec, data: SplitData, crops: Crops, crop_ratio: float
) -> HostPictures | None:
    places = _places(data, crops)
    least_bytes = places.total_bytes * _LEAST_SHARE if spec.reading.cache == "auto" else 1

    def most_bytes(promised: int, ranks: int = 1) -> int:
        return min(places.total_bytes, _room(spec, promised) // ranks)

    def size_of(most: int) -> int:
        return memory_bytes(choose_share(data, places, most)) if most >= least_bytes else 0

    try:
        name = _name(backend, spec, data, crops, crop_ratio)
        shared = host_memory.share_memory(name, most_bytes, size_of)
        if shared is None:
            return None
        content, most, joined = shared
    except OSError as error:
        _LOGGER.warning(
            "%s: this process keeps decoded pictures for itself, which others of this host cannot share (%s)",
            *(printable(str(data.path)), error.strerror or error),
        )
        most, joined = most_bytes(0, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))), False
        if not size_of(most):
            return None
        content = host_memory.private_memory(size_of(most))
    share = choose_share(data, places, most)
    if not joined:
        _say_share(spec, data, share)
    return HostPictures(data, share, np.frombuffer(content, np.uint8), crops.stored, spec.workers)


def _places(data: SplitData, crops: Crops) -> Places:
    return Places(data, None if crops.stored is None else math.prod(sides(crops.stored)) * data.pixel_bytes)


def _room(spec: LoaderSpec, promised: int) -> int:
    """Bytes that may be used, if so many are promised to others and not yet used."""
    free, total = host_memory.free_memory()
    if spec.reading.cache == "auto":
        return max(0, int((free - promised) * _AUTO_SHARE))
    return max(0, int(free - promised - total * _RESERVED_SHARE))


def _name(backend: str, spec: LoaderSpec, data: SplitData, crops: Crops, crop_ratio: float) -> str:
    """Of the memory of all who would keep the same pixels, to the last bit."""
    identity = (
        *(_VERSION, data.digest, spec.split, backend, spec.device.type, data.pixel_bytes),
        *(crops.stored, crop_ratio),
        *(spec.reading.check == "never", sorted(made_by().items()), torch.__version__),
        os.path.realpath(str(data.path)) if data.kind == RAW else "",
    )
    return hashlib.sha256(repr(identity).encode()).hexdigest()


def _say_share(spec: LoaderSpec, data: SplitData, share: Share) -> None:
    if share.samples < len(data.ids):
        _LOGGER.warning(
            "%s: cache %r keeps %s of %s samples, %.1f GiB, for which there is room; it reads the others "
            "each time",
            *(printable(str(data.path)), spec.reading.cache, f"{share.samples:,}", f"{len(data.ids):,}"),
            share.total_bytes / 2**30,
        )
