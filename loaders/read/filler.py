"""Filling batches on the CPU, by threads, out of whatever pictures lie in; in memory that is used again."""

import math
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loaders.augment import Crops, crop_into
from loaders.batch import DecodedBatch, Request
from loaders.dataset import SplitData
from loaders.threads import Pool, check_exit
from precache.errors import ImageError
from precache.pictures.jpeg import Pixels
from precache.pictures.sizes import Size, sides

_KEPT = 8  # free buffers: more than are ever on their way at a time


@dataclass(frozen=True, slots=True, eq=False)
class _Lent:
    """Memory of a batch, and the array that torch keeps as long as anything shows a part of it."""

    memory: npt.NDArray[np.uint8]
    shown: "weakref.ref[npt.NDArray[np.uint8]]"


class BufferPool:
    """Batch buffers, uint8 [samples, height, width, bytes].

    Fresh memory costs as much as filling it: the system clears each page first. A buffer is used again when
    the last tensor or array that shows a part of it is gone, so that what is served stays the caller's as
    long as he keeps it.
    """

    def __init__(self, samples: int, size: Size, device: torch.device, pixel_bytes: int = 3) -> None:
        self._shape = (samples, *sides(size), pixel_bytes)
        # torch's own allocator of pinned memory keeps a buffer until the copies out of it are done:
        # https://pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers
        self._pinned = device.type == "cuda"
        self._lent: deque[_Lent] = deque(maxlen=_KEPT)  # the latest; of others the memory goes with its users

    def holds(self, samples: int, shape: Sequence[int]) -> bool:
        """Whether buffers have as many samples, of this shape."""
        return samples <= self._shape[0] and self._shape[1:] == tuple(shape)

    def take(self, samples: int) -> torch.Tensor:
        """uint8 [samples, height, width, bytes] of any content; at most as many as the pool has."""
        if self._pinned:
            return torch.empty((samples, *self._shape[1:]), dtype=torch.uint8, pin_memory=True)
        for lent in self._lent:
            if lent.shown() is None:
                memory = lent.memory
                self._lent.remove(lent)
                break
        else:
            memory = np.empty(self._shape, np.uint8)
        shown = memory[:samples]
        self._lent.append(_Lent(memory, weakref.ref(shown)))
        return torch.from_numpy(shown)


class SharedBuffers:
    """Batch buffers that worker processes fill, forked after this is made.

    Otherwise each batch costs them fresh memory, and this process its pages. Anonymous, since /dev/shm is
    small in containers. Memory is taken when a buffer is first used; there are no buffers where the machine
    would not have it.
    """

    def __init__(self, buffers: int, samples: int, size: Size) -> None:
        shape = (buffers, samples, *sides(size), 3)
        try:
            memory = mmap.mmap(-1, max(1, math.prod(shape)))
        except (OSError, OverflowError):  # batches that this machine cannot hold: perhaps none is full
            shape, memory = (0, *shape[1:]), mmap.mmap(-1, 1)
        self.memory = np.frombuffer(memory, np.uint8, math.prod(shape)).reshape(shape)
        self._filling: set[int] = set()
        self._shown: dict[int, weakref.ref[npt.NDArray[np.uint8]]] = {}  # of each that was served

    def take(self) -> int | None:
        """The number of a free buffer, to be filled; None: all are in use."""
        for number in range(len(self.memory)):
            is_served = number in self._shown and self._shown[number]() is not None
            if number not in self._filling and not is_served:
                self._filling.add(number)
                return number
        return None

    def serve(self, number: int, samples: int) -> torch.Tensor:
        """The first `samples` of a filled buffer, which is free when the last tensor of it is gone."""
        self._filling.discard(number)
        shown = self.memory[number][:samples]
        self._shown[number] = weakref.ref(shown)
        return torch.from_numpy(shown)

    def reclaim(self) -> None:
        """Take back what was to be filled; nobody may be filling it."""
        self._filling.clear()


_COPIED = 32  # pictures that a thread takes at most where they are only copied


@dataclass(frozen=True, slots=True)
class Pictures:
    """The pictures of a batch, and where they come from.

    Attributes:
        request: at most as many samples as a batch has.
        picture_of: the stored picture of that number in the batch, uint8 [height, width, bytes], which nobody
            writes to; called by several threads at a time. One for which it raises ImageError is left out,
            and named in `refused`.
        shapes: int64 [n, 2], height and width of each, where the data does not know them.
        in_memory: whether `picture_of` shows memory that is there anyway: several are copied by one call.
        compare: given some of them by their numbers: which are not what was written, and why.
    """

    request: Request
    picture_of: Callable[[int], Pixels]
    shapes: npt.NDArray[np.int64] | None = None
    in_memory: bool = False
    compare: Callable[[Mapping[int, Pixels]], Mapping[int, ImageError]] | None = None


@dataclass(frozen=True, slots=True)
class _Filling:
    """A batch that is being filled.

    Attributes:
        boxes, mirrored: what is served of each, rows of `Boxes`; of several views, one behind the other.
        places: of each picture in `images`, uint8 [height, width, bytes], in the order of `boxes`.
        parts: what is left to do; shared, each thread takes what is next.
        helpers: threads at work on it.
        errors: why pictures are left out, by their number in the batch.
    """

    pictures: Pictures
    boxes: list[Any]
    mirrored: list[bool]
    images: torch.Tensor
    places: Pixels | list[Pixels]
    parts: Iterator[range]
    helpers: list[Future[None]] = field(default_factory=list)
    errors: dict[int, ImageError] = field(default_factory=dict)


class BatchFiller:
    """Fills batches with the served parts of pictures, by threads.

    Args:
        memory: uint8 [samples, height, width, bytes], where each batch is to be; else one of ours for each.
    """

    def __init__(
        self,
        data: SplitData,
        crops: Crops,
        batch_size: int,
        threads: int,
        device: torch.device,
        memory: Pixels | None = None,
    ) -> None:
        self._data = data
        self._memory = memory
        self._crops = crops
        self._threads = max(1, threads)
        self._buffers = (
            None
            if crops.size is None
            else BufferPool(batch_size * crops.views, crops.size, device, data.pixel_bytes)
        )
        # the caller's thread is one of them
        self._pool = Pool(max(1, self._threads - 1), "fill")

    def fill_each(self, batches: Iterator[Pictures]) -> Generator[DecodedBatch, None, None]:
        """The batches, in order; threads that are done with one go on with the next.

        What a batch is read from must stay until the second one after it is asked for, and until this
        iterator has ended if `batches` ends or fails.
        """
        running: deque[_Filling] = deque()
        ahead = 0  # the first batch is waited for
        error: Exception | None = None
        try:
            while error is None:
                try:
                    running.append(self._start(next(batches)))
                except Exception as caught:  # of a batch that is not there yet: those before it are
                    error = caught
                    ahead = 0
                while len(running) > ahead:
                    yield self._finish(running.popleft(), running)
                ahead = 1
            if not isinstance(error, StopIteration):
                raise error
        finally:
            error = None  # it would hold this frame, which holds the error: a cycle
            for filling in running:
                _stop_filling(filling)

    def fill(self, pictures: Pictures) -> DecodedBatch:
        """One batch."""
        return self._finish(self._start(pictures))

    def close(self) -> None:
        """End the threads."""
        self._pool.close()

    def _start(self, pictures: Pictures) -> _Filling:
        """Let the threads begin with a batch."""
        request, stored = pictures.request, self._crops.stored
        ids = self._data.ids[request.positions]
        if stored is None:
            varying = pictures.shapes
            if varying is None:
                varying = self._data.shapes_at(request.positions)
            shapes = [(height, width) for height, width in varying.tolist()]
        else:
            varying, shapes = None, [sides(stored)] * len(ids)
        boxes, mirrored = self._crops.boxes_and_flips(request.epoch, ids, varying, request.places)
        images, places = self._space(shapes * self._crops.views)
        slots, most = range(len(ids)), _COPIED if pictures.in_memory else 1
        size = max(1, min(most, len(ids) // self._threads))
        parts = [slots[start : start + size] for start in slots[::size]]
        filling = _Filling(pictures, boxes.tolist(), mirrored.tolist(), images, places, iter(parts))
        for _ in range(min(self._threads, len(parts)) - 1):
            filling.helpers.append(self._pool.submit(self._fill_some, filling))
        return filling

    def _space(self, shapes: list[tuple[int, int]]) -> tuple[torch.Tensor, Pixels | list[Pixels]]:
        """Memory for a batch of pictures of these `shapes`: `images` and `places` of `_Filling`."""
        if self._memory is not None:
            places = self._memory[: len(shapes)]
            return torch.from_numpy(places), places
        if self._buffers is not None:
            images = self._buffers.take(len(shapes))
            return images, images.numpy()
        channels = self._data.pixel_bytes
        lengths = [height * width * channels for height, width in shapes]
        images = torch.empty(sum(lengths), dtype=torch.uint8)
        parts = torch.split(images, lengths)
        return images, [
            part.numpy().reshape(*shape, channels) for part, shape in zip(parts, shapes, strict=True)
        ]

    def _finish(self, filling: _Filling, behind: Iterable[_Filling] = ()) -> DecodedBatch:
        """Help with a batch until it is filled; with those `behind` it while others are at its last parts."""
        try:
            self._fill_some(filling)
            for later in behind:
                while not all(helper.done() for helper in filling.helpers) and (
                    part := next(later.parts, None)
                ):
                    done: Future[None] = Future()
                    later.helpers.append(done)
                    try:
                        self._fill(later, part)
                        done.set_result(None)
                    except BaseException as error:  # raised with its batch
                        done.set_exception(error)
        finally:
            _stop_filling(filling)
        for helper in filling.helpers:
            helper.result()
        images = filling.images
        if errors := filling.errors:
            kept = np.array([slot not in errors for slot in range(len(filling.boxes) // self._crops.views)])
            if isinstance(filling.places, np.ndarray):
                images = images[torch.from_numpy(np.tile(kept, self._crops.views))]
            else:
                left = [place.ravel() for place, whole in zip(filling.places, kept, strict=True) if whole]
                images = torch.from_numpy(np.concatenate([images.numpy()[:0], *left]))
        return DecodedBatch(images, {slot: errors[slot] for slot in sorted(errors)})

    def _fill_some(self, filling: _Filling) -> None:
        for part in filling.parts:
            self._fill(filling, part)

    def _fill(self, filling: _Filling, part: range) -> None:
        check_exit()
        pictures: dict[int, Pixels] = {}
        for slot in part:
            try:
                pictures[slot] = filling.pictures.picture_of(slot)
            except ImageError as error:  # without what its traceback holds
                filling.errors[slot] = type(error)(error.path, error.reason, remedy=error.remedy)
        if pictures and filling.pictures.compare is not None:
            for slot, wrong in filling.pictures.compare(pictures).items():
                del pictures[slot]
                filling.errors[slot] = wrong
        for view in range(0, len(filling.boxes), len(filling.pictures.request.positions)):
            rows = [view + slot for slot in pictures]
            places = filling.places[view + part.start : view + part.stop]
            if len(rows) < len(part):
                places = [filling.places[row] for row in rows]
            boxes, mirrored = [filling.boxes[row] for row in rows], [filling.mirrored[row] for row in rows]
            crop_into([*pictures.values()], boxes, mirrored, places, self._data.dtype)


def _stop_filling(filling: _Filling) -> None:
    """Wait until no thread reads or writes for the batch; what is not begun is not done."""
    for _ in filling.parts:
        pass
    wait(filling.helpers)
