"""Fill batches on the CPU with threads, from pictures of any origin, in memory that is used again."""

import math
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from copy import copy
from dataclasses import dataclass, field
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loaders.augment.applying import Steps, apply_to_picture, plan_steps
from loaders.augment.crops import Crops, carve
from loaders.augment.draws import draw_keys
from loaders.augment.geometry import crop_all_into, crop_into
from loaders.batch import DecodedBatch, Request
from loaders.dataset import RAW, SplitData
from loaders.threads import Pool, check_exit
from precache.engines.processes import open_memory
from precache.errors import ImageError, SettingError, TransformError, open_files_error
from precache.pictures.jpeg import Pixels

_MAX_BUFFERS = 8  # more than a loader has on their way at a time
_PICTURES_PER_PART = 32  # at most, where a thread only copies pictures


@dataclass(frozen=True, slots=True, eq=False)
class _Buffer:
    """Memory of a batch, and the array that torch keeps alive as long as anything shows a part of it."""

    memory: npt.NDArray[np.uint8]
    array: "weakref.ref[npt.NDArray[np.uint8]]"


class BufferPool:
    """Buffers for batches, uint8 [bytes].

    Fresh memory costs as much as filling it, since the system clears each page first. A buffer is used again
    once the last tensor or array that shows a part of it is gone: a batch stays valid as long as the caller
    keeps it. "When memory is used again" of ARCHITECTURE.md has the other rules.

    Args:
        bytes: bytes of a buffer, for the largest batch.
    """

    def __init__(self, bytes: int, device: torch.device) -> None:
        self.bytes = bytes
        # torch's own allocator of pinned memory keeps a buffer until the copies out of it are done:
        # https://pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers
        self._pinned = device.type == "cuda"
        # The latest buffers only: the memory of an older one is freed with the last tensor that shows it.
        self._buffers: deque[_Buffer] = deque(maxlen=_MAX_BUFFERS)

    def take(self, bytes: int) -> torch.Tensor:
        """Return a free buffer, uint8 [bytes], of any content.

        Args:
            bytes: at most as many as the pool was made for.
        """
        if self._pinned:
            return torch.empty(bytes, dtype=torch.uint8, pin_memory=True)
        for buffer in self._buffers:
            if buffer.array() is None:
                memory = buffer.memory
                self._buffers.remove(buffer)
                break
        else:
            memory = np.empty(self.bytes, np.uint8)
        array = memory[:bytes]
        self._buffers.append(_Buffer(memory, weakref.ref(array)))
        return torch.from_numpy(array)


class SharedBuffers:
    """Buffers for batches that worker processes fill, which get the memory when they start.

    Without them each batch costs the workers fresh memory, and this process the mapping of its pages. The
    memory is a file without a name, because /dev/shm is small in containers, and taken when a buffer is first
    used. Where the system has no such files, there are no buffers.

    Attributes:
        memory: uint8 [buffers, bytes]; it changes in every process that has it.

    Raises:
        OpenFilesError: this process has too many open files.
    """

    def __init__(self, buffers: int, bytes: int) -> None:
        shape = (buffers, bytes)
        self.memory = np.empty((0, 0), np.uint8)
        try:
            self._file = open_memory()
            if self._file is not None:
                weakref.finalize(self, self._file.close)
                self.memory = _map_file(self._file.fileno(), shape)
        except (OSError, OverflowError) as error:
            # else it is too large for this machine, though real batches may be smaller
            if (too_many := open_files_error(error)) is not None:
                raise too_many from error
        self._taken: set[int | None] = set()

    def __getstate__(self) -> tuple[Any, tuple[int, ...]] | None:
        """Return what a process that starts needs to find the memory; None if there are no buffers."""
        return (DupFd(self._file.fileno()), self.memory.shape) if self._file and len(self.memory) else None

    def __setstate__(self, state: tuple[Any, tuple[int, ...]] | None) -> None:
        if state is not None:
            descriptor = state[0].detach()
            self.memory = _map_file(descriptor, state[1])
            os.close(descriptor)

    def take(self) -> int | None:
        """Number of a free buffer, which is to be filled; None where there are none."""
        for number in range(len(self.memory)):
            if number not in self._taken:
                self._taken.add(number)
                return number
        return None

    def free(self, number: int | None) -> None:
        """Take back a buffer whose batch has been copied, or was never filled; None is no buffer."""
        self._taken.discard(number)

    def reclaim(self) -> None:
        """Take back the buffers that were to be filled; no worker may be filling one."""
        self._taken.clear()


def _map_file(descriptor: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Map a file as an array of this shape, which every process that maps it shares."""
    size = max(1, math.prod(shape))
    os.ftruncate(descriptor, size)
    return np.frombuffer(mmap.mmap(descriptor, size), np.uint8, math.prod(shape)).reshape(shape)


@dataclass(frozen=True, slots=True)
class Pictures:
    """The pictures of a batch, and where they come from.

    Attributes:
        request: at most as many samples as a batch has.
        picture_at: returns the stored picture of a slot, uint8 [height, width, channels], which nobody writes
            to; several threads call it at a time. A picture for which it raises ImageError is left out of the
            batch, and named in `DecodedBatch.refused`.
        shapes: int64 [n, 2], height and width of each picture, where the data does not know them.
        compare: returns the error of the picture of a slot if it is not as it was written, else None; not
            given where none has to be compared.
        in_memory: whether `picture_at` returns memory that exists anyway: then one call copies several.
    """

    request: Request
    picture_at: Callable[[int], Pixels]
    shapes: npt.NDArray[np.int64] | None = None
    compare: Callable[[int, Pixels], ImageError | None] | None = None
    in_memory: bool = False


@dataclass(frozen=True, slots=True)
class _View:
    """A view of a batch that is being filled.

    Attributes:
        boxes, mirrored: the part of each picture that is served, as in `Boxes`.
        steps: the operations on each picture; empty where the backend does none.
        fill: see `Operations`.
        images: memory of the view, uint8 [n, height, width, channels].
    """

    boxes: list[Any]
    mirrored: list[bool]
    steps: list[Steps]
    fill: tuple[int, ...]
    images: Pixels


@dataclass(frozen=True, slots=True)
class _Filling:
    """A batch that is being filled.

    Attributes:
        keys: number of each picture for the random draws of `Crops.per_picture`.
        views: the views of the batch; empty where a function of the caller makes what is served.
        served: the tensors of the views.
        made: what that function has made so far, by slot.
        parts: slots that are still to be filled; the threads share the iterator, each takes the next part.
        threads: results of the threads at work on it.
        errors: the reason why a picture is left out, by its slot.
    """

    pictures: Pictures
    keys: list[int]
    views: list[_View]
    served: Sequence[torch.Tensor]
    parts: Iterator[range]
    made: dict[int, torch.Tensor] = field(default_factory=dict)
    threads: list[Future[None]] = field(default_factory=list)
    errors: dict[int, ImageError] = field(default_factory=dict)


class BatchFiller:
    """Fills batches with the served parts of pictures, with threads."""

    def __init__(
        self, data: SplitData, crops: Crops, batch_size: int, threads: int, device: torch.device
    ) -> None:
        self._data = data
        self._crops = crops
        self._threads = max(1, threads)
        self._buffers = BufferPool(batch_size * crops.pixels * data.channels, device)
        # The thread that calls is one of them.
        self._pool = Pool(max(1, self._threads - 1), "fill")

    def fill_each(self, batches: Iterator[Pictures]) -> Generator[DecodedBatch, None, None]:
        """Yield the filled batches in order; threads that have finished one go on with the next.

        What a batch is read from must stay until the second batch after it is asked for; if `batches` ends or
        fails, until this iterator has ended.
        """
        running: deque[_Filling] = deque()
        ahead = 0  # the first batch is not held back for a second one
        error: Exception | None = None
        try:
            while error is None:
                try:
                    running.append(self._start(next(batches)))
                except Exception as caught:  # the end, or a fault: the batches before it are still served
                    error = caught
                    ahead = 0
                while len(running) > ahead:
                    yield self._finish(running.popleft())
                ahead = 1
            if not isinstance(error, StopIteration):
                raise error
        finally:
            error = None  # or a reference cycle: its traceback holds this frame, which holds the error
            for filling in running:
                _stop_filling(filling)

    def close(self) -> None:
        """End the threads."""
        self._pool.close()

    def _prepare(self, pictures: Pictures) -> _Filling:
        """Draw what is served of each picture of a batch, and take memory for it."""
        request = pictures.request
        ids = self._data.ids[request.positions]
        shapes = pictures.shapes
        if self._crops.stored is None and shapes is None:
            shapes = self._data.shapes_at(request.positions)
        crops, samples = self._crops, len(ids)
        slots = range(samples)
        max_size = _PICTURES_PER_PART if pictures.in_memory and crops.per_picture is None else 1
        size = max(1, min(max_size, samples // self._threads))
        parts = iter([slots[start : start + size] for start in slots[::size]])
        if crops.per_picture is not None:
            return _Filling(pictures, draw_keys(ids, places=request.places).tolist(), [], (), parts)
        if request.memory is None:
            memory = self._buffers.take(samples * crops.pixels * self._data.channels)
        else:
            memory = torch.from_numpy(request.memory)
        images = carve(memory, samples, crops.views, self._data.channels)
        views = []
        for draws, space in zip(crops.draw(request.epoch, ids, shapes, request.places), images, strict=True):
            operations, steps = draws.operations, []
            if crops.operates and operations.codes.any():
                steps = plan_steps(operations, (space.shape[1], space.shape[2]))
            boxes, mirrored = draws.boxes.tolist(), draws.mirrored.tolist()
            views.append(_View(boxes, mirrored, steps, operations.fill, space.numpy()))
        return _Filling(pictures, [], views, images, parts)

    def _start(self, pictures: Pictures) -> _Filling:
        """Queue a batch for the threads."""
        filling = self._prepare(pictures)
        for _ in range(min(self._threads, len(pictures.request.positions)) - 1):
            filling.threads.append(self._pool.submit(self._fill_parts, filling))
        return filling

    def _finish(self, filling: _Filling) -> DecodedBatch:
        """Help to fill a batch until it is done, and return it without the pictures that have errors."""
        try:
            self._fill_parts(filling)
            for thread in filling.threads:
                thread.result()
        finally:
            _stop_filling(filling)
        errors = {slot: filling.errors[slot] for slot in sorted(filling.errors)}
        if self._crops.per_picture is not None:
            made = [filling.made[slot] for slot in sorted(filling.made)]
            return DecodedBatch((self._crops.per_picture.stack(made),), errors)
        views = tuple(filling.served)
        if errors:
            is_decoded = [slot not in errors for slot in range(len(filling.pictures.request.positions))]
            views = tuple(view[torch.tensor(is_decoded, device="cpu")] for view in views)
        return DecodedBatch(views, errors)

    def _fill_parts(self, filling: _Filling) -> None:
        """Fill the parts of a batch that no other thread has taken."""
        for part in filling.parts:
            check_exit()
            self._fill(filling, part)

    def _fill(self, filling: _Filling, part: range) -> None:
        """Decode the pictures of these slots, put their crops into the batch, and compare them.

        They are compared last, while the cache has them: a batch is served once all are right.
        """
        pictures: dict[int, Pixels] = {}
        for slot in part:
            try:
                pictures[slot] = filling.pictures.picture_at(slot)
            except ImageError as error:
                # Copied without its traceback, which would keep alive what its frames hold.
                filling.errors[slot] = copy(error)
        if self._crops.per_picture is not None:
            _compare(filling, pictures)  # first: the caller's function gets no damaged picture
            for slot, picture in pictures.items():
                if slot not in filling.errors:
                    filling.made[slot] = self._transform(filling, slot, picture)
            return
        for view in filling.views:
            _fill_view(view, part, pictures)
        _compare(filling, pictures)

    def _transform(self, filling: _Filling, slot: int, picture: Pixels) -> torch.Tensor:
        """Return what the caller's function makes of the picture of a slot.

        Raises:
            SettingError: that is no picture.
            TransformError: the function raised an exception.
        """
        per_picture, request = self._crops.per_picture, filling.pictures.request
        assert per_picture is not None
        try:
            return per_picture.apply(picture, self._crops.seed, request.epoch, filling.keys[slot])
        except SettingError:
            raise
        except Exception as error:  # not an ImageError either, which would leave the picture out
            position = int(request.positions[slot])
            path = self._data.file_at(position)
            if self._data.kind != RAW:
                path = f"{path}: sample {self._data.ids[position]} ({self._data.path_at(position)})"
            reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
            raise TransformError(
                f"the transform {per_picture.name} failed in epoch {request.epoch} ({reason})", path=path
            ) from error


def _compare(filling: _Filling, pictures: Mapping[int, Pixels]) -> None:
    """Compare pictures, by their slots, and add the errors of those that are not as they were written."""
    if (compare := filling.pictures.compare) is not None:
        for slot, picture in pictures.items():
            if (wrong := compare(slot, picture)) is not None:
                filling.errors[slot] = wrong


def _fill_view(view: _View, part: range, pictures: dict[int, Pixels]) -> None:
    """Put the crops of these slots into a view, and apply their operations.

    Args:
        pictures: stored pictures by slot; those that could not be decoded are not there.
    """
    if len(pictures) == len(part):
        slots = slice(part.start, part.stop)
        crop_all_into([*pictures.values()], view.boxes[slots], view.mirrored[slots], view.images[slots])
    else:
        for slot, picture in pictures.items():
            crop_into(picture, view.boxes[slot], view.mirrored[slot], view.images[slot])
    if view.steps:
        for slot in pictures:
            apply_to_picture(view.images[slot], view.steps[slot], view.fill)


def _stop_filling(filling: _Filling) -> None:
    """Skip the slots that have not been begun, and wait until no thread reads or writes for the batch."""
    for _ in filling.parts:
        pass
    wait(filling.threads)
