"""Keep what was decoded, in main memory or on the device: from the second epoch on a batch is a gather.

The cache sits between a backend's reader and the loader and changes neither order nor pixels. The
first epoch goes at the reader's pace and fills it; the reader is asked for what is not there, and rests as
long as everything is. Random crops are taken of what is kept, so that they differ from epoch to epoch. Main
memory is shared with the other ranks of this host: see `loaders.read.host_memory`. What does not fit is
read each time: see `choose_share`.
"""

import hashlib
import logging
import math
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from loaders.augment.cpu import Crops
from loaders.batch import DecodedBatch, Positions, Reader, Request
from loaders.dataset import RAW, SplitData
from loaders.deliver.devices import Lane, upload
from loaders.deliver.threads import Pool
from loaders.read import decoding, host_memory
from loaders.read.filler import BatchFiller, Pictures
from loaders.read.host_memory import HEADER_BYTES
from loaders.settings import LoaderSpec
from precache.dataset.columns import Column
from precache.dataset.index import checksum_of
from precache.errors import DatasetError, ImageError, SettingError, printable
from precache.pictures.jpeg import Pixels
from precache.pictures.kinds import made_by
from precache.pictures.sizes import Size, sides

_KEPT_TAG = 11
_RUN = 64  # positions of a raw tree that are kept together
_MARK_BYTES = 8
_PAGE = 4096
_STATE = struct.Struct("<qqQ")  # size and time of a file, and a checksum
_RESERVED_SHARE = 0.1  # of all memory is left free for others
_AUTO_SHARE = 0.5  # of the free memory is what 'auto' takes
_LEAST_SHARE = 0.1  # of a split; of less 'auto' keeps nothing
_VERSION = 1  # of what lies in shared memory
_LOGGER = logging.getLogger(__name__)
_MOST_IDLE = 256  # batches on their way that the reader has no part in; then it is let go
OpenReader = Callable[[Crops], Reader]
"""Opens the backend's reader, which serves the part of stored pictures that it is told."""


class Places:
    """Where the pictures of a split begin, if all of one split lay one behind the other.

    Attributes:
        picture_bytes: of each; None where each picture has a size of its own.
        total_bytes: of all.
    """

    def __init__(self, data: SplitData, picture_bytes: int | None) -> None:
        self.picture_bytes = picture_bytes
        self._count = len(data.ids)
        if picture_bytes is None:
            lengths = data.shapes_at(slice(None)).prod(axis=1) * data.pixel_bytes
            self._starts = np.concatenate(([0], np.cumsum(lengths)))
        self.total_bytes = int(self.starts(np.array([self._count]))[0])

    def starts(self, positions: Positions) -> Positions:
        """int64 [n]: the byte where each begins; at the number of samples all end."""
        if self.picture_bytes is not None:
            return positions * self.picture_bytes
        starts: Positions = self._starts[positions]
        return starts


@dataclass(frozen=True, slots=True)
class Share:
    """The samples that are kept.

    Attributes:
        samples: how many.
        total_bytes: of their pictures.
        places: of all pictures of the split.
        edges: int64 [runs + 1], the position of the first sample of each run, and behind the last one.
        counts: int64 [runs], how many of each run, the first ones, are kept.
        numbers: int64 [runs], how many samples are kept of the runs before.
        offsets: int64 [runs], the byte where what is kept of each run begins.
    """

    samples: int
    total_bytes: int
    places: Places
    edges: Positions
    counts: Positions
    numbers: Positions
    offsets: Positions

    def find(self, positions: Positions) -> Positions:
        """int64 [n]: each sample's number among those that are kept, -1 if it is not."""
        runs = np.searchsorted(self.edges, positions, side="right") - 1
        rows = positions - self.edges[runs]
        found: Positions = np.where(rows < self.counts[runs], self.numbers[runs] + rows, -1)
        return found

    def starts(self, positions: Positions) -> Positions:
        """int64 [n]: the byte where each picture, one of those that are kept, begins."""
        runs = np.searchsorted(self.edges, positions, side="right") - 1
        first = self.places.starts(self.edges[runs])
        starts: Positions = self.offsets[runs] + self.places.starts(positions) - first
        return starts


def choose_share(data: SplitData, places: Places, most_bytes: int) -> Share:
    """What is kept of `data` in `most_bytes` of memory, where they do not hold it all.

    It goes by the split and the number of bytes alone, so that all processes keep the same: samples of whole
    shards, drawn by a fixed key, so that who reads shard after shard never opens one of them again, and the
    first ones of a last shard. A raw tree, whose positions go class by class, is cut into runs of positions.
    """
    count = len(data.ids)
    edges = np.append(np.arange(0, count, _RUN), count) if data.kind == RAW else data.shard_starts
    samples, lengths = np.diff(edges), np.diff(places.starts(edges))
    counts = samples.copy()
    if places.total_bytes > most_bytes:
        drawn = np.random.default_rng((len(samples), _KEPT_TAG)).permutation(len(samples))
        ends = np.cumsum(lengths[drawn])
        fitting = int(np.searchsorted(ends, most_bytes, side="right"))
        counts[drawn[fitting:]] = 0
        last = int(drawn[fitting])
        left = most_bytes - (int(ends[fitting - 1]) if fitting else 0)
        rows = np.arange(edges[last], edges[last + 1] + 1)
        ends_in_last = places.starts(rows) - places.starts(rows[:1])
        counts[last] = np.searchsorted(ends_in_last, left, side="right") - 1
    kept_bytes = places.starts(edges[:-1] + counts) - places.starts(edges[:-1])
    return Share(
        int(counts.sum()),
        int(kept_bytes.sum()),
        places,
        edges,
        counts,
        _before(counts),
        _before(kept_bytes),
    )


def _before(lengths: npt.NDArray[np.int64]) -> Positions:
    return np.cumsum(lengths) - lengths


def memory_bytes(share: Share) -> int:
    """What `HostPictures` needs behind the header; 0 where nothing is kept."""
    return _marks_bytes(share) + share.total_bytes if share.samples else 0


def _marks_bytes(share: Share) -> int:
    return -(-share.samples * _MARK_BYTES // _PAGE) * _PAGE


class HostPictures:
    """Pictures in main memory, each with a mark, the checksum of its pixels, which is written behind them.

    Whoever reads a picture that another process has decoded compares it first, once: what was broken off
    midway (`kill -9`), or is not yet to be seen as a whole, does not have its mark. That of a raw tree's
    picture goes by its file's size and time, too: another process may have found another picture there.

    Args:
        memory: header, marks and pictures.
        size: of all pictures; None where each has its own.
    """

    def __init__(
        self, data: SplitData, share: Share, memory: npt.NDArray[np.uint8], size: Size | None, threads: int
    ) -> None:
        self.share = share
        self._data = data
        first = HEADER_BYTES + _marks_bytes(share)
        self._marks = memory[HEADER_BYTES:][: share.samples * _MARK_BYTES].view(np.uint64)
        self._memory = memory[first : first + share.total_bytes]
        self._squares = (
            None if size is None else self._memory.reshape(share.samples, *sides(size), data.pixel_bytes)
        )
        self._known = np.zeros(share.samples, bool)
        self._pool = Pool(max(1, threads), "keep")

    def there(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """Bool [n]: which of these can be had from here; what once could always can."""
        numbers = self.share.find(positions)
        there = (numbers >= 0) & self._known[numbers]
        unknown = np.flatnonzero((numbers >= 0) & ~there)
        marked = unknown[self._marks[numbers[unknown]] != 0]
        for slot, picture in zip(marked.tolist(), self.pictures(positions[marked]), strict=True):
            whole = self._mark(int(positions[slot]), picture) == self._marks[numbers[slot]]
            there[slot] = self._known[numbers[slot]] = whole
        return there

    def free(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """Bool [n]: which of these would be kept, and nothing is in their places yet."""
        numbers = self.share.find(positions)
        free: npt.NDArray[np.bool_] = (numbers >= 0) & (self._marks[numbers] == 0)
        return free

    def keep(self, positions: Positions, images: torch.Tensor) -> None:
        """Keep those of these pictures that are in the share.

        Args:
            images: as of `loaders.batch.DecodedBatch`, one for each position, in the memory they are kept in.
        """
        numbers = self.share.find(positions)
        pictures = pictures_of(self._data, positions, images)
        slots = np.flatnonzero((numbers >= 0) & ~self._known[numbers])

        def keep_one(slot: int, place: Pixels) -> None:
            number = int(numbers[slot])
            mark = self._mark(int(positions[slot]), pictures[slot])
            # what another process has kept there meanwhile may be in use: nothing but the same is put there
            if self._marks[number] in (0, mark):
                np.copyto(place, pictures[slot])
                self._marks[number] = mark
                self._known[number] = True

        places = self.pictures(positions[slots])
        self._pool.map(lambda each: keep_one(*each), list(zip(slots.tolist(), places, strict=True)))

    def pictures(self, positions: Positions) -> list[Pixels]:
        """Where the pictures of these samples, all of the share, are kept: uint8 [height, width, bytes]."""
        if self._squares is not None:
            return [self._squares[number] for number in self.share.find(positions).tolist()]
        shapes = self._data.shapes_at(positions)
        starts, lengths = self.share.starts(positions), shapes.prod(axis=1) * self._data.pixel_bytes
        return [
            self._memory[start : start + length].reshape(height, width, self._data.pixel_bytes)
            for start, length, (height, width) in zip(
                starts.tolist(), lengths.tolist(), shapes.tolist(), strict=True
            )
        ]

    def close(self) -> None:
        """Free the memory: the system has it back when the last process has closed it."""
        self._pool.close()
        self._memory = self._squares = None  # type: ignore[assignment]
        self._marks = np.empty(0, np.uint64)

    def _mark(self, position: int, picture: Pixels) -> int:
        """Never 0."""
        mark = checksum_of(np.ascontiguousarray(picture).reshape(-1))
        if self._data.kind == RAW:
            try:
                state = os.stat(self._data.files[position])
                mark = checksum_of(_STATE.pack(state.st_size, state.st_mtime_ns, mark))
            except OSError:  # it is gone: nobody else can find another picture there
                pass
        return mark or 1


class DevicePictures:
    """Pictures of one size in the memory of `device`, of this process alone."""

    def __init__(self, data: SplitData, share: Share, size: Size, device: torch.device) -> None:
        self.share = share
        self._device = device
        shape = (share.samples, *sides(size), data.pixel_bytes)
        self._images = torch.empty(shape, dtype=torch.uint8, device=device)
        self._known = np.zeros(share.samples, bool)

    def there(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """As of `HostPictures`."""
        numbers = self.share.find(positions)
        there: npt.NDArray[np.bool_] = (numbers >= 0) & self._known[numbers]
        return there

    def free(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """As of `HostPictures`."""
        numbers = self.share.find(positions)
        free: npt.NDArray[np.bool_] = (numbers >= 0) & ~self._known[numbers]
        return free

    def keep(self, positions: Positions, images: torch.Tensor) -> None:
        """As of `HostPictures`."""
        numbers = self.share.find(positions)
        kept = np.flatnonzero(numbers >= 0)
        if len(kept):
            if len(kept) < len(numbers):
                images = images[self._upload(kept)]
            self._images[self._upload(numbers[kept])] = images
            self._known[numbers[kept]] = True

    def gather(self, positions: Positions) -> torch.Tensor:
        """uint8 [n, height, width, bytes] of those that are there."""
        return self._images[self._upload(self.share.find(positions))]

    def close(self) -> None:
        """As of `HostPictures`."""
        self._images = torch.empty(0, dtype=torch.uint8)

    def _upload(self, rows: Positions) -> torch.Tensor:
        return upload(torch.from_numpy(rows), self._device)


Kept: TypeAlias = HostPictures | DevicePictures


def pictures_of(data: SplitData, positions: Positions, images: torch.Tensor) -> list[Pixels]:
    """Each uint8 [height, width, bytes], of `images` as of `loaders.batch.DecodedBatch`, on the CPU."""
    if images.ndim > 1:
        return list(images.numpy())
    shapes = data.shapes_at(positions).tolist()
    lengths = [height * width * data.pixel_bytes for height, width in shapes]
    parts = torch.split(images, lengths)
    return [part.numpy().reshape(*shape, data.pixel_bytes) for part, shape in zip(parts, shapes, strict=True)]


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


def open_cached(
    open_reader: OpenReader, backend: str, spec: LoaderSpec, data: SplitData, crops: Crops, lane: Lane
) -> Reader:
    """What serves `crops`, behind the cache that the settings ask for; where `lane` is active.

    Raises:
        SettingError: as `open_kept`.
    """
    if spec.reading.cache != "none" and crops.random and data.kind == RAW:
        data = with_shapes(data, spec.threads)
    served_crops = crops if crops.random else Crops(crops.size, crops.size)
    kept = open_kept(backend, spec, data, served_crops, crops.crop_ratio)
    if kept is None:
        return open_reader(crops)
    try:
        reader = open_reader(crops.whole if crops.random else crops)
    except BaseException:
        kept.close()
        raise
    return CachedReader(reader, kept, spec, data, served_crops, lane)


def with_shapes(data: SplitData, threads: int) -> SplitData:
    """A raw tree with the sizes of its pictures, as their headers say; each file is read once for that."""
    with closing(Pool(max(1, threads), "header")) as pool:
        shapes = pool.map(lambda path: decoding.read(path).shape, data.files)
    return replace(data, shapes=Column(np.array(shapes, np.int32).reshape(-1, 2)))


class CachedReader:
    """What `reader` decodes, pictures of `crops.stored`, kept and served as `crops` say."""

    def __init__(
        self, reader: Reader, kept: Kept, spec: LoaderSpec, data: SplitData, crops: Crops, lane: Lane
    ) -> None:
        self.random_access = reader.random_access
        self._reader = reader
        self._data = data
        self._kept = kept
        self._lane = lane
        self._refused: dict[int, ImageError] = {}  # what could not be decoded: id -> why
        self._filler = BatchFiller(data, crops, spec.batch_size, spec.workers, spec.device)

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one batch per request; the reader is asked for what it takes."""
        for request in requests:
            if len(self._lacking(request)):
                yield from self._read_some(request, requests)
            else:
                yield self._serve(request)

    def _read_some(self, first: Request, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """`first`, and what follows until the reader has nothing to do for long."""
        waiting: deque[tuple[Request, Positions]] = deque()  # with the slots that the reader was asked for
        coming = np.zeros(self._kept.share.samples, bool)  # of those that are kept
        idle = 0

        def ask() -> Iterator[Request]:
            nonlocal idle
            for request in chain([first], requests):
                slots = self._lacking(request)
                numbers = self._kept.share.find(request.positions[slots])
                free = self._kept.free(request.positions[slots])
                slots = slots[~(free & coming[numbers])]
                waiting.append((request, slots))
                if len(slots):
                    coming[numbers[free]] = True
                    whole = len(slots) == len(request.positions)
                    yield request if whole else request.select(slots.tolist())
                else:
                    idle += 1
                    if idle >= _MOST_IDLE:  # it would look further and further ahead
                        return

        with closing(self._reader.read(ask())) as decoded:  # type: ignore[type-var]
            for batch in decoded:
                while not len(waiting[0][1]):
                    idle -= 1
                    yield self._serve(waiting.popleft()[0])
                request, slots = waiting.popleft()
                numbers = self._kept.share.find(request.positions[slots])
                coming[numbers[numbers >= 0]] = False
                yield self._take_in(request, slots, batch)
        while waiting:
            yield self._serve(waiting.popleft()[0])

    def close(self) -> None:
        """Free the cache."""
        self._filler.close()
        self._reader.close()
        self._kept.close()

    def _lacking(self, request: Request) -> Positions:
        """Which of a batch are neither there nor known to be undecodable."""
        return np.flatnonzero(~self._kept.there(request.positions) & ~self._is_refused(request.positions))

    def _is_refused(self, positions: Positions) -> npt.NDArray[np.bool_]:
        if not self._refused:
            return np.zeros(len(positions), bool)
        return np.isin(self._data.ids[positions], list(self._refused))

    def _take_in(self, request: Request, slots: Positions, batch: DecodedBatch) -> DecodedBatch:
        """Keep what the reader made of some slots of a batch, and serve all of it."""
        for sample_id, error in batch.refused.items():  # without what the error's traceback holds
            self._refused[sample_id] = type(error)(error.path, error.reason)
        slots = slots[~self._is_refused(request.positions[slots])]
        images = self._lane.take(batch.images, batch.ready)
        if isinstance(self._kept, HostPictures):
            images = images.to(torch.device("cpu"))  # of a backend that decodes on a GPU: waited for
        else:
            images = upload(images, self._lane.device)
        self._kept.keep(request.positions[slots], images)
        return self._serve(request, slots, images)

    def _serve(
        self, request: Request, slots: Positions | None = None, images: torch.Tensor | None = None
    ) -> DecodedBatch:
        """A batch of what is kept, and of `images`, those of `slots`."""
        if isinstance(self._kept, HostPictures):
            kept = ~self._is_refused(request.positions)
            pictures: dict[int, Pixels] = {}
            if slots is not None and images is not None:
                kept[slots] = False
                read = pictures_of(self._data, request.positions[slots], images)
                pictures.update(zip(slots.tolist(), read, strict=True))
            self._check_there(request, list(pictures))
            found = self._kept.pictures(request.positions[kept])
            pictures.update(zip(np.flatnonzero(kept).tolist(), found, strict=True))
            picture_of = partial(self._picture, request.positions, pictures)
            return self._filler.fill(Pictures(request, picture_of, in_memory=True))
        assert isinstance(self._kept, DevicePictures)
        refused = self._is_refused(request.positions)
        ids = self._data.ids[request.positions]
        served = request.positions[~refused]
        return DecodedBatch(
            self._gather(request.positions, refused, self._kept, slots, images),
            torch.from_numpy(self._data.labels[served]),
            torch.from_numpy(self._data.ids[served]),
            {i: self._refused[i] for i in ids[refused].tolist()},
        )

    def _gather(
        self,
        positions: Positions,
        refused: npt.NDArray[np.bool_],
        kept: DevicePictures,
        slots: Positions | None,
        images: torch.Tensor | None,
    ) -> torch.Tensor:
        """On the device; `images` are those of `slots`."""
        if slots is None or images is None or not len(slots):
            return kept.gather(positions[~refused])
        from_cache = ~refused
        from_cache[slots] = False
        if not from_cache.any():
            return images
        rows = np.cumsum(~refused) - 1  # of each slot in what is served
        served = torch.empty(
            (int((~refused).sum()), *images.shape[1:]), dtype=torch.uint8, device=self._lane.device
        )
        for chosen, part in (
            (slots, images),
            (np.flatnonzero(from_cache), kept.gather(positions[from_cache])),
        ):
            served[upload(torch.from_numpy(rows[chosen]), self._lane.device)] = part
        return served

    def _check_there(self, request: Request, read: list[int]) -> None:
        """DatasetError if what was on its way has come, but is not what another process has found."""
        lacking = np.setdiff1d(self._lacking(request), read)
        if len(lacking):
            raise DatasetError(
                f"{self._data.file(int(request.positions[lacking[0]]))}: has changed while it was read; "
                f"leave the dataset alone while it is trained with, and build the loader again"
            )

    def _picture(self, positions: Positions, pictures: dict[int, Pixels], slot: int) -> Pixels:
        if slot not in pictures:
            error = self._refused[int(self._data.ids[positions[slot]])]
            raise type(error)(error.path, error.reason)  # that which is kept would hold this frame
        return pictures[slot]
