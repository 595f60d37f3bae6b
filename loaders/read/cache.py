"""Cache decoded pictures in main memory or on the device: from the second epoch on a batch is a gather.

The cache sits between a backend's reader and the loader, and changes neither order nor pixels. The first
epoch runs at the reader's pace and fills it; afterwards the reader is asked only for samples that are not
cached. Random crops are cut out of the cached pictures, so that they differ from epoch to epoch.

`shards` of a folder hold decoded pictures already, and the system caches their files for all processes: where
they fit into main memory, this cache makes no second copy.

If the split does not fit, the first samples in stored order are cached: a reader that goes from shard to
shard then never opens their shards again. Main memory is shared with the other ranks of this host, see
`loaders.read.host_memory`; its size alone determines how many pictures are cached. Layout of the shared
memory:

    bool [samples]      whether the picture of each sample of the split is there; padded to 4,096 bytes
    uint8 [bytes]       the cached pictures, one behind the other
"""

import hashlib
import logging
import math
import mmap
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from copy import copy
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from loaders.augment import Crops
from loaders.batch import DecodedBatch, Positions, Reader, Request
from loaders.dataset import RAW, SplitData
from loaders.device import upload
from loaders.read import decoding, host_memory
from loaders.read.filler import BatchFiller, Pictures
from loaders.read.host_memory import HostMemory
from loaders.settings import LoaderSpec, count_local_ranks
from loaders.threads import Pool
from precache.dataset.columns import Column, Ints
from precache.errors import ImageError, SettingError, os_reason, printable
from precache.pictures.jpeg import Pixels
from precache.pictures.kinds import decoder_versions
from precache.pictures.reading import sizes_and_times
from precache.pictures.sizes import sides

_PAGE_BYTES = 4096
_FILES_PER_TASK = 64  # files of a raw tree whose sizes one thread reads at a time
_AUTO_SHARE = 0.5  # share of the free memory that `auto` takes
_MIN_SHARE = 0.1  # share of a split: `auto` caches nothing where less than this fits
_VERSION = 2  # version of the layout of shared memory
_LOGGER = logging.getLogger(__name__)
# Once so many requests wait for which the reader has nothing to decode, it is stopped until a sample is
# missing again: it would otherwise consume requests for epochs ahead.
_MAX_IDLE = 256
OpenReader = Callable[[Crops], Reader]
"""Opens the backend's reader, which serves the given part of the stored pictures."""
Offsets: TypeAlias = Sequence[int] | Ints
"""Byte where each of several contiguous pictures begins, and where the last one ends: int64 [n + 1]."""


def picture_offsets(shapes: Ints, pixel_bytes: int) -> Offsets:
    """Offsets of contiguous pictures of these `shapes`, int64 [n, 2]."""
    return np.concatenate(([0], np.cumsum(shapes.prod(axis=1) * pixel_bytes)))


def picture_getter(memory: Pixels, shapes: Ints, pixel_bytes: int) -> Callable[[int], Pixels]:
    """Function that returns one of the contiguous pictures in `memory`: uint8 [height, width, bytes]."""
    offsets = picture_offsets(shapes, pixel_bytes)

    def picture(number: int) -> Pixels:
        return memory[offsets[number] : offsets[number + 1]].reshape(*shapes[number], pixel_bytes)

    return picture


def split_offsets(data: SplitData, crops: Crops) -> Offsets:
    """Offsets of the pictures of all samples of the split, of the size `crops.stored`."""
    if crops.stored is None:
        return picture_offsets(data.shapes_at(slice(None)), data.pixel_bytes)
    picture_bytes = math.prod(sides(crops.stored)) * data.pixel_bytes
    return range(0, (len(data) + 1) * picture_bytes, picture_bytes)  # no array, however many samples


class HostPictures:
    """Pictures in main memory, of this process alone or shared.

    A picture is marked as cached when all of it is written, so that a process that is killed midway leaves
    nothing that would be served. Processes that decode the same picture at a time write the same bytes.

    Attributes:
        device: the device that holds them.
        count: how many can be cached: those of the first samples.
        is_cached: bool [samples of the split], whether each is cached; a cached one stays so.
    """

    device = torch.device("cpu")

    def __init__(
        self, spec: LoaderSpec, data: SplitData, crops: Crops, offsets: Offsets, memory: HostMemory
    ) -> None:
        flags, content = np.split(memory.content, [_flags_bytes(data)])
        self._memory, self._offsets, self._pictures_start = memory, offsets, len(flags)
        self.is_cached: npt.NDArray[np.bool_] = flags[: len(data)].view(np.bool_)
        self.count = bisect_right(offsets, len(content)) - 1
        self._data = data
        self._picture: Callable[[int], Pixels] | None
        if crops.stored is None:
            shapes = data.shapes_at(slice(self.count))  # only of those that can be cached: 24 bytes each
            self._picture = picture_getter(content, shapes, data.pixel_bytes)
        else:
            self._picture = content.reshape(self.count, *sides(crops.stored), data.pixel_bytes).__getitem__
        self._filler = BatchFiller(data, crops, spec.batch_size, spec.workers, spec.device)

    def serve(self, request: Request, slots: Ints, images: torch.Tensor | None) -> DecodedBatch:
        """Fill a batch with newly decoded `images` at `slots`, and with cached pictures elsewhere.

        New pictures are cached if there is room.

        Args:
            images: decoded pictures as in `DecodedBatch`, on `device`; None where there are no `slots`.
        """
        assert self._picture is not None
        cached_picture, positions = self._picture, request.positions.tolist()
        new_pictures = self._split_images(request, slots, images)

        def picture_at(slot: int) -> Pixels:
            position = positions[slot]
            if slot not in new_pictures:
                return cached_picture(position)
            self._keep(position, new_pictures[slot])
            return new_pictures[slot]

        return self._filler.fill(Pictures(request, picture_at, in_memory=True))

    def _split_images(self, request: Request, slots: Ints, images: torch.Tensor | None) -> dict[int, Pixels]:
        """Return each of the decoded `images`, uint8 [height, width, bytes], by its slot."""
        if images is None:
            return {}
        if images.ndim > 1:
            return dict(zip(slots.tolist(), images.numpy(), strict=True))
        shapes = self._data.shapes_at(request.positions[slots])
        picture = picture_getter(images.numpy(), shapes, self._data.pixel_bytes)
        return {slot: picture(number) for number, slot in enumerate(slots.tolist())}

    def _keep(self, position: int, picture: Pixels) -> None:
        """Cache the picture of the sample at `position`, unless it is cached or there is no room."""
        if position < self.count and not self.is_cached[position]:
            with suppress(OSError):  # no memory left: the sample is read again in the next epoch
                self._memory.write(self._pictures_start + int(self._offsets[position]), picture)
                # Only now that all of it is written: another process may serve it at once.
                self.is_cached[position] = True

    def close(self) -> None:
        """Release the memory; the system frees it when the last process has closed it."""
        self._filler.close()
        self._picture, self.is_cached = None, np.empty(0, np.bool_)
        self._memory.close()


class DevicePictures:
    """Pictures of one size in the memory of a device, of this process alone; attributes as `HostPictures`."""

    def __init__(self, data: SplitData, images: torch.Tensor) -> None:
        self.device, self.count = images.device, len(images)
        self.is_cached = np.zeros(len(data), np.bool_)
        self._images = images

    def serve(self, request: Request, slots: Ints, images: torch.Tensor | None) -> DecodedBatch:
        """Gather a batch on the device; see `HostPictures.serve`."""
        positions = request.positions
        # A sample that is not cached gets some other picture here, which its own one then replaces.
        served = self._images[self._upload(np.minimum(positions, self.count - 1))]
        if images is not None:
            served[self._upload(slots)] = images
            new_positions = positions[slots]
            with_room = np.flatnonzero(new_positions < self.count)
            stored_positions = new_positions[with_room]
            self._images[self._upload(stored_positions)] = images[self._upload(with_room)]
            self.is_cached[stored_positions] = True
        return DecodedBatch(served)

    def close(self) -> None:
        """Free the device's memory."""
        self._images = torch.empty(0, dtype=torch.uint8)

    def _upload(self, indices: Ints) -> torch.Tensor:
        return upload(torch.from_numpy(indices), self.device)


def open_cached(
    open_reader: OpenReader, backend: str, spec: LoaderSpec, data: SplitData, crops: Crops
) -> Reader:
    """Open a reader of `crops` behind the cache that the settings ask for; on CUDA for the current stream.

    Raises:
        SettingError: the device cannot hold the pictures.
    """
    cache = spec.reading.cache
    if cache == "none" or (cache == "auto" and backend == "synthetic"):
        return open_reader(crops)
    on_device = cache == "device" and spec.device.type == "cuda"
    if not on_device and _is_cached_by_system(backend, spec, data):
        return open_reader(crops)
    if crops.random and data.kind == RAW:  # the size of each picture, for which each file is read once
        shapes = _read_shapes(data, spec.threads)
        columns = {"shapes": Column(np.array(shapes, np.int32).reshape(-1, 2))}
        data = replace(data, index=data.index.with_columns(columns))
    # Random crops are cut out of whole pictures, which are cached; fixed crops are cached as they are served.
    if crops.random:
        read_crops, served_crops = Crops(crops.stored, crops.stored), crops
    else:
        read_crops, served_crops = crops, Crops(crops.size, crops.size)
    store: HostPictures | DevicePictures | None
    if on_device:
        store = _device_pictures(spec, data, served_crops)
    else:
        store = _host_pictures(spec, data, served_crops, (backend, crops.crop_ratio))
    if store is None:
        free, _ = host_memory.free_memory()
        _LOGGER.warning(
            "%s: cache %r keeps nothing, %.1f GiB of main memory are free; all samples are read each time",
            printable(str(data.path)),
            cache,
            free / 2**30,
        )
        return open_reader(crops)
    try:
        reader = open_reader(read_crops)
    except BaseException:
        store.close()
        raise
    return CachedReader(reader, store, data)


def _is_cached_by_system(backend: str, spec: LoaderSpec, data: SplitData) -> bool:
    """Whether the pictures lie decoded in local files that all fit into main memory."""
    if backend != "shards" or data.remote is not None or spec.reading.engine != "local":
        return False
    if spec.reading.memory_bytes is not None:  # the reader then drops files from the system's cache
        return False
    return host_memory.has_room(int(data.shard_bytes.sum()))


def _device_pictures(spec: LoaderSpec, data: SplitData, crops: Crops) -> DevicePictures:
    if crops.stored is None:
        raise SettingError(
            f"cache 'device' keeps pictures of one size, and those of {data.path} vary",
            remedy="use cache 'ram'",
        )
    free = int(torch.cuda.mem_get_info(spec.device)[0])
    max_bytes = int(free * (1 - host_memory.RESERVED_SHARE))
    count = _count_fitting(spec, data, split_offsets(data, crops), max_bytes)
    if not count:
        raise SettingError(
            f"the cache of {data.path} has no room on {spec.device}, of which {free:,} bytes are free",
            remedy="use cache 'none', or a smaller size",
        )
    shape = (count, *sides(crops.stored), data.pixel_bytes)
    return DevicePictures(data, torch.empty(shape, dtype=torch.uint8, device=spec.device))


def _host_pictures(
    spec: LoaderSpec, data: SplitData, crops: Crops, decoder: tuple[Any, ...]
) -> HostPictures | None:
    """Memory for decoded pictures, shared if possible; None where nothing is to be cached.

    Args:
        decoder: settings that the pixels depend on besides data, crops and versions.
    """
    offsets = split_offsets(data, crops)

    def choose_bytes(promised: int, ranks: int = 1) -> int:
        """Bytes of the memory, if other caches may still use `promised` of the free bytes."""
        free, total = host_memory.free_memory()
        if spec.reading.cache == "auto":
            max_bytes = (free - promised) * _AUTO_SHARE
        else:
            max_bytes = free - promised - total * host_memory.RESERVED_SHARE
        count = _count_fitting(spec, data, offsets, max(0, int(max_bytes)) // ranks)
        return _flags_bytes(data) + int(offsets[count]) if count else 0

    try:
        memory = host_memory.share_memory(_memory_name(spec, data, crops, decoder), choose_bytes)
    except OSError as error:
        _LOGGER.warning(
            "%s: this process keeps decoded pictures for itself, which others of this host cannot share (%s)",
            printable(str(data.path)),
            os_reason(error),
        )
        size = choose_bytes(0, count_local_ranks())
        memory = HostMemory(mmap.mmap(-1, size)) if size else None
    return None if memory is None else HostPictures(spec, data, crops, offsets, memory)


def _flags_bytes(data: SplitData) -> int:
    """Bytes of `is_cached` of all samples, in whole pages."""
    return -(-len(data) // _PAGE_BYTES) * _PAGE_BYTES


def _count_fitting(spec: LoaderSpec, data: SplitData, offsets: Offsets, max_bytes: int) -> int:
    """Count the pictures to cache in `max_bytes`; log a warning where not all of them fit."""
    count = bisect_right(offsets, max_bytes) - 1
    if spec.reading.cache == "auto" and offsets[count] < offsets[-1] * _MIN_SHARE:
        return 0
    if 0 < count < len(data):
        _LOGGER.warning(
            "%s: cache %r keeps %s of %s samples, %.1f GiB, for which there is room; it reads the others "
            "each time",
            printable(str(data.path)),
            spec.reading.cache,
            f"{count:,}",
            f"{len(data):,}",
            offsets[count] / 2**30,
        )
    return count


def _memory_name(spec: LoaderSpec, data: SplitData, crops: Crops, decoder: tuple[Any, ...]) -> str:
    """Name of the shared memory: the same for all processes that would cache the same pixels, bit by bit."""
    tree: tuple[object, ...] = ()
    if data.kind == RAW:  # the digest of a tree is of its names alone; a picture may have been replaced
        sizes, times = sizes_and_times(data.files)
        tree = (os.path.realpath(str(data.path)), sizes.tobytes(), times.tobytes())
    identity = (
        _VERSION,
        data.digest,
        spec.split,
        spec.device.type,
        data.pixel_bytes,
        crops.stored,
        *decoder,
        spec.reading.check == "never",
        sorted(decoder_versions().items()),
        torch.__version__,
        tree,
    )
    return hashlib.sha256(repr(identity).encode()).hexdigest()


def _read_shapes(data: SplitData, threads: int) -> list[tuple[int, int]]:
    """Read height and width of each picture of a raw tree, upright."""
    tasks = [data.files[start : start + _FILES_PER_TASK] for start in range(0, len(data), _FILES_PER_TASK)]

    def read_task(paths: Sequence[str]) -> list[tuple[int, int]]:
        return [decoding.read(path).shape for path in paths]

    with closing(Pool(max(1, threads), "look")) as pool:
        return list(chain.from_iterable(pool.map(read_task, tasks)))


class CachedReader:
    """Serves cached pictures, and caches those that `reader` decodes."""

    def __init__(self, reader: Reader, store: HostPictures | DevicePictures, data: SplitData) -> None:
        self.random_access = reader.random_access
        self._reader = reader
        self._store = store
        self._samples = len(data)
        self._refused: dict[int, ImageError] = {}  # position -> why its picture cannot be decoded

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one batch per request; the reader is asked for the samples that are not cached."""
        for request in requests:
            if len(self._missing_slots(request)):
                yield from self._read_missing(request, requests)
            else:
                yield self._serve(request)

    def _read_missing(self, first: Request, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Serve `first` and the requests after it, until the reader has next to nothing to do."""
        waiting: deque[tuple[Request, Ints]] = deque()  # with the slots that the reader decodes
        # Positions that an earlier request has the reader decode: they will be cached by then.
        coming = np.zeros(self._samples, np.bool_)
        idle = 0  # requests in `waiting` for which it decodes nothing

        def missing_requests() -> Iterator[Request]:
            nonlocal idle
            for request in chain([first], requests):
                slots = self._missing_slots(request)
                slots = slots[~coming[request.positions[slots]]]
                waiting.append((request, slots))
                if len(slots):
                    positions = request.positions[slots]
                    coming[positions[positions < self._store.count]] = True
                    yield request if len(slots) == len(request.positions) else request.select(slots)
                else:
                    idle += 1
                    if idle >= _MAX_IDLE:
                        return

        with closing(self._reader.read(missing_requests())) as decoded:  # type: ignore[type-var]
            for batch in decoded:
                while not len(waiting[0][1]):
                    idle -= 1
                    yield self._serve(waiting.popleft()[0])
                request, slots = waiting.popleft()
                yield self._store_and_serve(request, slots, batch)
        while waiting:
            yield self._serve(waiting.popleft()[0])

    def close(self) -> None:
        """Close the reader, and free the cache."""
        self._reader.close()
        self._store.close()

    def _missing_slots(self, request: Request) -> Ints:
        """Slots of the samples that are not cached, and may be decodable."""
        positions = request.positions
        return np.flatnonzero(~self._store.is_cached[positions] & ~self._is_refused(positions))

    def _is_refused(self, positions: Positions) -> npt.NDArray[np.bool_]:
        if not self._refused:
            return np.zeros(len(positions), np.bool_)
        return np.isin(positions, list(self._refused))

    def _store_and_serve(self, request: Request, slots: Ints, decoded: DecodedBatch) -> DecodedBatch:
        """Cache what the reader decoded of some slots of a batch, and serve all of the batch."""
        for decoded_slot, error in decoded.refused.items():
            self._refused[int(request.positions[slots[decoded_slot]])] = error
        # A sample may be refused in one batch and decoded in a later one, and is then in its `images`.
        decoded_slots = np.delete(slots, list(decoded.refused))
        images = upload(decoded.images, self._store.device)
        return self._serve(request, decoded_slots, images)

    def _serve(
        self, request: Request, slots: Ints | None = None, images: torch.Tensor | None = None
    ) -> DecodedBatch:
        """Serve a batch without the samples that are refused; arguments as of `HostPictures.serve`."""
        slots = np.empty(0, np.int64) if slots is None else slots
        refused = self._is_refused(request.positions)
        refused[slots] = False
        served_slots = np.flatnonzero(~refused)
        batch = self._store.serve(request.select(served_slots), np.searchsorted(served_slots, slots), images)
        errors = {}
        for slot in np.flatnonzero(refused).tolist():
            # Copied, because raising it gives it a traceback, which would keep alive what its frames hold.
            errors[slot] = copy(self._refused[int(request.positions[slot])])
        return replace(batch, refused=errors)
