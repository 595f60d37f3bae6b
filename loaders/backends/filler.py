"""Filling batches on the CPU, by threads, out of whatever a backend's pictures lie in."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from loaders.augment.cpu import Crops, mirror, place
from loaders.backends.buffers import BufferPool
from loaders.batch import DecodedBatch, Request
from loaders.dataset import SplitData
from loaders.threads import Pool, check_exit
from precache.errors import ImageError
from precache.jpeg import Pixels

Rows = Callable[[int, int, Pixels], Pixels]
"""(number in the batch, first row, space uint8 [count, stored, 3]) -> so many rows of the stored square, in
`space` or elsewhere."""

Gather = Callable[[slice, npt.NDArray[np.int64], Pixels], bool]
"""(which of the batch, left and top of their crops int64 [n, 2], space uint8 [n, size, size, 3]) -> whether
all of them are in `space` now."""

_AT_A_TIME = 4  # pictures that a thread takes: few, so that none waits long for the others


@dataclass(frozen=True, slots=True)
class Pictures:
    """The pictures of a batch, and where they come from.

    Attributes:
        request: at most as many samples as a batch has.
        rows_of: called by several threads at a time; a picture for which it raises ImageError is left out,
            and named in `refused`.
        gather: called by several threads at a time, for crops that are not resized; `rows_of` is asked for
            what is not all there.
    """

    request: Request
    rows_of: Rows
    gather: Gather | None = None


@dataclass(frozen=True, slots=True)
class _Filling:
    """A batch that is being filled.

    Attributes:
        boxes: left, top, width, height of what is served of each picture; of several views, one behind the
            other: [views * n, 4].
        gathers: whether none is resized.
        mirrored: which of them are.
        images: uint8 [views * n, size, size, 3].
        parts: what is left to do; shared, each thread takes what is next.
        helpers: threads at work on it.
        errors: why pictures are left out, by their number in the batch.
    """

    pictures: Pictures
    ids: npt.NDArray[np.int64]
    boxes: npt.NDArray[np.int64]
    gathers: bool
    mirrored: list[bool]
    images: torch.Tensor
    parts: Iterator[slice]
    helpers: list[Future[None]] = field(default_factory=list)
    errors: dict[int, ImageError] = field(default_factory=dict)


class BatchFiller:
    """Fills batches with the served parts of pictures, by threads."""

    def __init__(
        self, data: SplitData, crops: Crops, batch_size: int, threads: int, device: torch.device
    ) -> None:
        self._data = data
        self._crops = crops
        self._threads = max(1, threads)
        self._local = threading.local()
        self._buffers = BufferPool(batch_size * crops.views, crops.size, device)
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
                    yield self._finish(running.popleft())
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
        request = pictures.request
        ids = self._data.ids[request.positions]
        boxes, mirrored = self._crops.of(request.epoch, ids, request.occurrences)
        gathers = pictures.gather is not None and bool((boxes[:, 2:] == self._crops.size).all())
        gathers = gathers and self._crops.views == 1  # or each picture would be read once a view
        at_a_time = max(1, -(-len(ids) // self._threads)) if gathers else _AT_A_TIME
        parts = [slice(start, start + at_a_time) for start in range(0, len(ids), at_a_time)]
        images = self._buffers.take(len(boxes))
        filling = _Filling(pictures, ids, boxes, gathers, mirrored.tolist(), images, iter(parts))
        for _ in range(min(self._threads, len(parts)) - 1):
            filling.helpers.append(self._pool.submit(self._fill_some, filling))
        return filling

    def _finish(self, filling: _Filling) -> DecodedBatch:
        """Help with a batch until it is filled."""
        try:
            self._fill_some(filling)
        finally:
            _stop_filling(filling)
        for helper in filling.helpers:
            helper.result()
        images, ids = filling.images, filling.ids
        labels = self._data.labels[filling.pictures.request.positions]
        refused = {}
        if errors := filling.errors:
            kept = np.array([slot not in errors for slot in range(len(ids))])
            refused = {int(ids[slot]): errors[slot] for slot in sorted(errors)}
            images = images[torch.from_numpy(np.tile(kept, self._crops.views))]
            labels, ids = labels[kept], ids[kept]
        return DecodedBatch(images, torch.from_numpy(labels), torch.from_numpy(ids), refused)

    def _fill_some(self, filling: _Filling) -> None:
        space = getattr(self._local, "space", None)  # of this thread; it stays in the CPU's cache
        if space is None:
            space = self._local.space = np.empty((self._crops.stored, self._crops.stored, 3), np.uint8)
        out = filling.images.numpy()
        gather = filling.pictures.gather if filling.gathers else None
        for part in filling.parts:
            slots = range(*part.indices(len(filling.ids)))
            if gather is not None and gather(part, filling.boxes[part, :2], out[part]):
                for slot in slots:
                    if filling.mirrored[slot]:
                        mirror(out[slot])
                continue
            for slot in slots:
                check_exit()
                self._fill_one(filling, slot, out, space)

    def _fill_one(self, filling: _Filling, slot: int, images: Pixels, space: Pixels) -> None:
        views = range(slot, len(images), len(filling.ids))
        boxes = filling.boxes[slot :: len(filling.ids)].tolist()
        left, top, width, height = boxes[0]
        try:
            if len(boxes) > 1:  # decoded once
                top = min(box[1] for box in boxes)
                height = max(box[1] + box[3] for box in boxes) - top
            elif width == height == self._crops.stored == images.shape[1] and not filling.mirrored[slot]:
                if (rows := filling.pictures.rows_of(slot, 0, images[slot])) is not images[slot]:
                    np.copyto(images[slot], rows)
                return
            rows = filling.pictures.rows_of(slot, top, space[:height])
            for view, (left, first, width, height) in zip(views, boxes, strict=True):
                part = rows[first - top : first - top + height, left : left + width]
                place(part, filling.mirrored[view], images[view])
        except ImageError as error:
            # without what its traceback holds
            filling.errors[slot] = type(error)(error.path, error.reason)


def _stop_filling(filling: _Filling) -> None:
    """Wait until no thread reads or writes for the batch; what is not begun is not done."""
    for _ in filling.parts:
        pass
    wait(filling.helpers)
