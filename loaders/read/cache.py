"""Keep what was decoded, in main memory or on the device: from the second epoch on a batch is a gather.

The cache sits between a backend's reader and the loader and changes neither order nor pixels. The
first epoch goes at the reader's pace and fills it; the reader is asked for what is not there, and rests as
long as everything is. Random crops are taken of what is kept, so that they differ from epoch to epoch.

Pictures of `shards` are decoded, and the system keeps files that it has memory for, for all processes: where
they fit, they are not kept a second time.

Of what does not fit the first samples in stored order are kept, so that who reads shard after shard never
opens theirs again. Main memory is shared with the other ranks of this host, see `loaders.read.host_memory`.
Its size alone says how many are kept; in it lie

    bool [samples]      for each sample of the split whether its picture is there, padded to 4,096 bytes
    uint8 [bytes]       the pictures that are kept, one behind the other
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
from precache.dataset.columns import Column
from precache.errors import ImageError, SettingError, os_reason, printable
from precache.pictures.jpeg import Pixels
from precache.pictures.kinds import decoder_versions
from precache.pictures.reading import sizes_and_times
from precache.pictures.sizes import sides

_PAGE = 4096
_FILES = 64  # of a raw tree that a thread looks at
_AUTO_SHARE = 0.5  # of the free memory is what 'auto' takes
_LEAST_SHARE = 0.1  # of a split; of less 'auto' keeps nothing
_VERSION = 2  # of what lies in shared memory
_LOGGER = logging.getLogger(__name__)
_MOST_IDLE = 256  # batches on their way that the reader has no part in; of more it is let go
OpenReader = Callable[[Crops], Reader]
"""Opens the backend's reader, which serves the part of stored pictures that it is told."""
Starts: TypeAlias = Sequence[int] | Positions
"""The byte where each picture begins, if they lie one behind the other, and where the last one ends."""


def find_starts(shapes: Positions, pixel_bytes: int) -> Starts:
    """Of pictures of these `shapes`, int64 [n, 2]."""
    return np.concatenate(([0], np.cumsum(shapes.prod(axis=1) * pixel_bytes)))


def pictures_in(memory: Pixels, shapes: Positions, pixel_bytes: int) -> Callable[[int], Pixels]:
    """Shows each of the pictures that lie in `memory` behind one another, uint8 [height, width, bytes]."""
    starts = find_starts(shapes, pixel_bytes)

    def picture(number: int) -> Pixels:
        return memory[starts[number] : starts[number + 1]].reshape(*shapes[number], pixel_bytes)

    return picture


def kept_starts(data: SplitData, crops: Crops) -> Starts:
    """Of all samples of the split, pictures of `crops.stored`."""
    if crops.stored is None:
        return find_starts(data.shapes_at(slice(None)), data.pixel_bytes)
    picture_bytes = math.prod(sides(crops.stored)) * data.pixel_bytes
    return range(0, (len(data) + 1) * picture_bytes, picture_bytes)  # of large sets nothing is listed


class HostPictures:
    """Pictures in main memory, of this process alone or shared.

    Each is known to be there when all of it is: who is killed midway leaves nothing that is served. Processes
    that decode the same picture at the same time write the same bytes.

    Attributes:
        device: where they are.
        count: how many are kept: those of the first samples.
        known: bool [samples of the split], which of them are there; what once is stays.
    """

    device = torch.device("cpu")

    def __init__(
        self, spec: LoaderSpec, data: SplitData, crops: Crops, starts: Starts, memory: HostMemory
    ) -> None:
        flags, content = np.split(memory.content, [_flags_bytes(data)])
        self._memory, self._starts, self._pictures_start = memory, starts, len(flags)
        self.known: npt.NDArray[np.bool_] = flags[: len(data)].view(np.bool_)
        self.count = bisect_right(starts, len(content)) - 1
        self._data = data
        self._picture: Callable[[int], Pixels] | None
        if crops.stored is None:
            shapes = data.shapes_at(slice(self.count))  # of what is kept alone: 24 bytes a picture
            self._picture = pictures_in(content, shapes, data.pixel_bytes)
        else:
            self._picture = content.reshape(self.count, *sides(crops.stored), data.pixel_bytes).__getitem__
        self._filler = BatchFiller(data, crops, spec.batch_size, spec.workers, spec.device)

    def serve(self, request: Request, slots: Positions, images: torch.Tensor | None) -> DecodedBatch:
        """A batch: of `images` what is at `slots`, and is kept if there is room; of what is kept the rest.

        Args:
            images: as of `DecodedBatch`, on `device`; None where there are no `slots`.
        """
        assert self._picture is not None
        kept, positions = self._picture, request.positions.tolist()
        rows: dict[int, int] = {}
        read: Callable[[int], Pixels] = kept
        if images is not None:
            rows = {slot: row for row, slot in enumerate(slots.tolist())}
            read = images.numpy().__getitem__
            if images.ndim == 1:
                shapes = self._data.shapes_at(request.positions[slots])
                read = pictures_in(images.numpy(), shapes, self._data.pixel_bytes)

        def picture_of(slot: int) -> Pixels:
            position = positions[slot]
            if slot not in rows:
                return kept(position)
            picture = read(rows[slot])
            if position < self.count and not self.known[position]:
                with suppress(OSError):  # no more memory: it is read again the next time
                    self._memory.write(self._pictures_start + int(self._starts[position]), picture)
                    self.known[position] = True  # not before
            return picture

        return self._filler.fill(Pictures(request, picture_of, in_memory=True))

    def close(self) -> None:
        """Free the memory: the system has it back when the last process has closed it."""
        self._filler.close()
        self._picture, self.known = None, np.empty(0, np.bool_)
        self._memory.close()


class DevicePictures:
    """Pictures of one size in the memory of a device, of this process alone; as `HostPictures`."""

    def __init__(self, data: SplitData, images: torch.Tensor) -> None:
        self.device, self.count = images.device, len(images)
        self.known = np.zeros(len(data), np.bool_)
        self._images = images

    def serve(self, request: Request, slots: Positions, images: torch.Tensor | None) -> DecodedBatch:
        """As of `HostPictures`."""
        positions = request.positions
        served = self._images[self._upload(np.minimum(positions, self.count - 1))]
        if images is not None:
            served[self._upload(slots)] = images
            rows = np.flatnonzero(positions[slots] < self.count)
            positions = positions[slots[rows]]
            self._images[self._upload(positions)] = images[self._upload(rows)]
            self.known[positions] = True
        return DecodedBatch(served)

    def close(self) -> None:
        """Free the memory."""
        self._images = torch.empty(0, dtype=torch.uint8)

    def _upload(self, rows: Positions) -> torch.Tensor:
        return upload(torch.from_numpy(rows), self.device)


def open_cached(
    open_reader: OpenReader, backend: str, spec: LoaderSpec, data: SplitData, crops: Crops
) -> Reader:
    """What serves `crops`, behind the cache that the settings ask for; on CUDA by the current stream.

    Raises:
        SettingError: the device cannot keep the pictures.
    """
    cache = spec.reading.cache
    if cache == "none" or (cache == "auto" and backend == "synthetic"):
        return open_reader(crops)
    on_device = cache == "device" and spec.device.type == "cuda"
    if not on_device and _is_kept_by_system(backend, spec, data):
        return open_reader(crops)
    if crops.random and data.kind == RAW:  # each file is read once for that
        shapes = _look_at_files(data, lambda path: decoding.read(path).shape, spec.threads)
        known = {"shapes": Column(np.array(shapes, np.int32).reshape(-1, 2))}
        data = replace(data, index=data.index.with_columns(known))
    served = crops if crops.random else Crops(crops.size, crops.size)
    kept: HostPictures | DevicePictures | None
    if on_device:
        kept = _on_device(spec, data, served)
    else:
        kept = _in_main_memory(spec, data, served, (backend, crops.crop_ratio))
    if kept is None:
        free, _ = host_memory.free_memory()
        _LOGGER.warning(
            "%s: cache %r keeps nothing, %.1f GiB of main memory are free; all samples are read each time",
            *(printable(str(data.path)), cache, free / 2**30),
        )
        return open_reader(crops)
    try:
        reader = open_reader(Crops(crops.stored, crops.stored) if crops.random else crops)
    except BaseException:
        kept.close()
        raise
    return CachedReader(reader, kept, data)


def _is_kept_by_system(backend: str, spec: LoaderSpec, data: SplitData) -> bool:
    """Whether pictures lie decoded in files of this machine that all fit into main memory."""
    if backend != "shards" or data.remote is not None or spec.reading.engine != "local":
        return False
    if spec.reading.memory_bytes is not None:  # then files are dropped from the system's cache
        return False
    return host_memory.has_room(int(data.shard_bytes.sum()))


def _on_device(spec: LoaderSpec, data: SplitData, crops: Crops) -> DevicePictures:
    if crops.stored is None:
        raise SettingError(
            f"cache 'device' keeps pictures of one size, and those of {data.path} vary; use cache 'ram'"
        )
    free = int(torch.cuda.mem_get_info(spec.device)[0])
    count = _fill_room(spec, data, kept_starts(data, crops), int(free * (1 - host_memory.RESERVED_SHARE)))
    if not count:
        raise SettingError(
            f"the cache of {data.path} has no room on {spec.device}, of which {free:,} bytes are free; "
            f"use cache 'none', or a smaller size"
        )
    shape = (count, *sides(crops.stored), data.pixel_bytes)
    return DevicePictures(data, torch.empty(shape, dtype=torch.uint8, device=spec.device))


def _in_main_memory(
    spec: LoaderSpec, data: SplitData, crops: Crops, made: tuple[Any, ...]
) -> HostPictures | None:
    """None where nothing is to be kept; `made` says how the pictures come about that are."""
    starts = kept_starts(data, crops)

    def size_of(promised: int, ranks: int = 1) -> int:
        """Of what is kept, if so many bytes are promised to others and not yet used."""
        free, total = host_memory.free_memory()
        auto = spec.reading.cache == "auto"
        most = (
            (free - promised) * _AUTO_SHARE if auto else free - promised - total * host_memory.RESERVED_SHARE
        )
        count = _fill_room(spec, data, starts, max(0, int(most)) // ranks)
        return _flags_bytes(data) + int(starts[count]) if count else 0

    try:
        memory = host_memory.share_memory(_name(spec, data, crops, made), size_of)
    except OSError as error:
        _LOGGER.warning(
            "%s: this process keeps decoded pictures for itself, which others of this host cannot share (%s)",
            *(printable(str(data.path)), os_reason(error)),
        )
        size = size_of(0, count_local_ranks())
        memory = HostMemory(mmap.mmap(-1, size)) if size else None
    return None if memory is None else HostPictures(spec, data, crops, starts, memory)


def _flags_bytes(data: SplitData) -> int:
    return -(-len(data) // _PAGE) * _PAGE


def _fill_room(spec: LoaderSpec, data: SplitData, starts: Starts, most_bytes: int) -> int:
    """How many pictures are to be kept in so many bytes; said where it is not all of them."""
    count = bisect_right(starts, most_bytes) - 1
    if spec.reading.cache == "auto" and starts[count] < starts[-1] * _LEAST_SHARE:
        return 0
    if 0 < count < len(data):
        _LOGGER.warning(
            "%s: cache %r keeps %s of %s samples, %.1f GiB, for which there is room; it reads the others "
            "each time",
            *(printable(str(data.path)), spec.reading.cache, f"{count:,}", f"{len(data):,}"),
            starts[count] / 2**30,
        )
    return count


def _name(spec: LoaderSpec, data: SplitData, crops: Crops, made: tuple[Any, ...]) -> str:
    """Of the memory of all who would keep the same pixels, to the last bit."""
    tree: tuple[object, ...] = ()
    if data.kind == RAW:  # its digest goes by names: another picture may lie there meanwhile
        sizes, times = sizes_and_times(data.files)
        tree = (os.path.realpath(str(data.path)), sizes.tobytes(), times.tobytes())
    identity = (
        *(_VERSION, data.digest, spec.split, spec.device.type, data.pixel_bytes, crops.stored, *made),
        *(spec.reading.check == "never", sorted(decoder_versions().items()), torch.__version__, tree),
    )
    return hashlib.sha256(repr(identity).encode()).hexdigest()


def _look_at_files(data: SplitData, look: Callable[[str], Any], threads: int) -> list[Any]:
    """What `look` says of each picture of a raw tree."""
    parts = [data.files[start : start + _FILES] for start in range(0, len(data), _FILES)]
    with closing(Pool(max(1, threads), "look")) as pool:
        return [*chain.from_iterable(pool.map(lambda part: [*map(look, part)], parts))]


class CachedReader:
    """What `reader` decodes, kept and served as `kept` does."""

    def __init__(self, reader: Reader, kept: HostPictures | DevicePictures, data: SplitData) -> None:
        self.random_access = reader.random_access
        self._reader = reader
        self._kept = kept
        self._samples = len(data)
        self._refused: dict[int, ImageError] = {}  # what could not be decoded: position -> why

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one batch per request; the reader is asked for what it takes."""
        for request in requests:
            if len(self._lacking(request)):
                yield from self._read_some(request, requests)
            else:
                yield self._serve(request)

    def _read_some(self, first: Request, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """`first`, and what follows until the reader has little to do."""
        waiting: deque[tuple[Request, Positions]] = deque()  # with the slots that the reader was asked for
        coming = np.zeros(self._samples, np.bool_)  # by then known, as an earlier request asks for them

        idle = 0  # of those that wait

        def ask() -> Iterator[Request]:
            nonlocal idle
            for request in chain([first], requests):
                slots = self._lacking(request)
                slots = slots[~coming[request.positions[slots]]]
                waiting.append((request, slots))
                idle += not len(slots)
                if len(slots):
                    asked = request.positions[slots]
                    coming[asked[asked < self._kept.count]] = True
                    yield request if len(asked) == len(request.positions) else request.select(slots)
                elif idle >= _MOST_IDLE:  # it would look further and further ahead, for epochs
                    return

        with closing(self._reader.read(ask())) as decoded:  # type: ignore[type-var]
            for batch in decoded:
                while not len(waiting[0][1]):
                    idle -= 1
                    yield self._serve(waiting.popleft()[0])
                yield self._take_in(*waiting.popleft(), batch)
        while waiting:
            yield self._serve(waiting.popleft()[0])

    def close(self) -> None:
        """Free the cache."""
        self._reader.close()
        self._kept.close()

    def _lacking(self, request: Request) -> Positions:
        """Which of a batch are neither there nor known to be undecodable."""
        positions = request.positions
        return np.flatnonzero(~self._kept.known[positions] & ~self._is_refused(positions))

    def _is_refused(self, positions: Positions) -> npt.NDArray[np.bool_]:
        return np.isin(positions, [*self._refused]) if self._refused else np.zeros(len(positions), np.bool_)

    def _take_in(self, request: Request, slots: Positions, batch: DecodedBatch) -> DecodedBatch:
        """Keep what the reader made of some slots of a batch, and serve all of it."""
        for number, error in batch.refused.items():
            self._refused[int(request.positions[slots[number]])] = error
        slots = np.delete(slots, [*batch.refused])  # left: also one refused meanwhile, `images` has it
        images = upload(batch.images, self._kept.device)
        return self._serve(request, slots, images)

    def _serve(
        self, request: Request, slots: Positions | None = None, images: torch.Tensor | None = None
    ) -> DecodedBatch:
        """A batch without what is refused; see `HostPictures.serve`."""
        slots = np.empty(0, np.int64) if slots is None else slots
        refused = self._is_refused(request.positions)
        refused[slots] = False
        left = np.flatnonzero(~refused)
        served = self._kept.serve(request.select(left), np.searchsorted(left, slots), images)
        errors = {}
        for number in np.flatnonzero(refused).tolist():
            error = self._refused[int(request.positions[number])]
            # who raises it gives it a traceback
            errors[number] = type(error)(error.path, error.reason, remedy=error.remedy)
        return replace(served, refused=errors)
