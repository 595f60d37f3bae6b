"""Filling batches on the CPU, by threads, out of whatever a backend's pictures lie in."""

import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from operator import le

import numpy as np
import numpy.typing as npt
import torch

from loaders.augment.cpu import Boxes, Crops, mirror, place
from loaders.backends.buffers import BufferPool
from loaders.batch import DecodedBatch, Request
from loaders.dataset import SplitData
from loaders.deliver.threads import Pool, check_exit
from precache.errors import ImageError
from precache.pictures.jpeg import Pixels
from precache.pictures.sizes import sides

Rows = Callable[[int, int, Pixels], Pixels]
"""(number in the batch, first row, space uint8 [count, width, bytes]) -> so many rows of the stored
picture, from one edge to the other, in `space` or elsewhere."""

Gather = Callable[[slice, npt.NDArray[np.int64], Pixels], bool]
"""(which of the batch, left and top of their crops int64 [n, 2], space uint8 [n, height, width, bytes]) ->
whether all of them are in `space` now."""

_AT_A_TIME = 4  # pictures that a thread takes: few, so that none waits long for the others


@dataclass(frozen=True, slots=True)
class Pictures:
    """The pictures of a batch, and where they come from.

    Attributes:
        request: at most as many samples as a batch has.
        rows_of: called by several threads at a time; a picture for which it raises ImageError is left out,
            and named in `refused`.
        gather: called by several threads at a time, for crops that are not resized, of pictures of one size;
            `rows_of` is asked for what is not all there.
        shapes: int64 [n, 2], height and width of each, where the data does not know them.
    """

    request: Request
    rows_of: Rows
    gather: Gather | None = None
    shapes: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class _Filling:
    """A batch that is being filled.

    Attributes:
        shapes: height and width of each picture.
        boxes: what is served of each; of several views, one behind the other: [views * n, 4].
        gathers: whether none is resized.
        mirrored: which of them are.
        images: as of `DecodedBatch`.
        places: of each picture in `images`, uint8 [height, width, bytes], in the order of `boxes`.
        parts: what is left to do; shared, each thread takes what is next.
        helpers: threads at work on it.
        errors: why pictures are left out, by their number in the batch.
    """

    pictures: Pictures
    ids: npt.NDArray[np.int64]
    shapes: list[tuple[int, int]]
    boxes: Boxes
    gathers: bool
    mirrored: list[bool]
    images: torch.Tensor
    places: Pixels | list[Pixels]
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
        request, stored, size = pictures.request, self._crops.stored, self._crops.size
        ids = self._data.ids[request.positions]
        if stored is None:
            varying = pictures.shapes
            if varying is None:
                varying = self._data.shapes_at(request.positions)
            shapes = [(height, width) for height, width in varying.tolist()]
        else:
            varying, shapes = None, [sides(stored)] * len(ids)
        boxes, mirrored = self._crops.of(request.epoch, ids, varying, request.occurrences)
        images, places = self._space(shapes * self._crops.views)
        gathers = False
        # of several views each picture would be read as many times
        if pictures.gather is not None and size is not None and self._crops.views == 1:
            window = sides(size)
            inside = len(ids) == 0 or all(map(le, window, shapes[0]))  # else there is black around
            gathers = bool(inside and boxes.dtype == np.int64 and (boxes[:, :1:-1] == window).all())
        at_a_time = max(1, -(-len(ids) // self._threads)) if gathers else _AT_A_TIME
        parts = [slice(start, start + at_a_time) for start in range(0, len(ids), at_a_time)]
        filling = _Filling(
            pictures, ids, shapes, boxes, gathers, mirrored.tolist(), images, places, iter(parts)
        )
        for _ in range(min(self._threads, len(parts)) - 1):
            filling.helpers.append(self._pool.submit(self._fill_some, filling))
        return filling

    def _space(self, shapes: list[tuple[int, int]]) -> tuple[torch.Tensor, Pixels | list[Pixels]]:
        """Memory for a batch of pictures of these `shapes`: `images` and `places` of `_Filling`."""
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
            labels, ids = labels[kept], ids[kept]
            if isinstance(filling.places, np.ndarray):
                images = images[torch.from_numpy(np.tile(kept, self._crops.views))]
            else:
                left = [place.ravel() for place, whole in zip(filling.places, kept, strict=True) if whole]
                images = torch.from_numpy(np.concatenate([images.numpy()[:0], *left]))
        return DecodedBatch(images, torch.from_numpy(labels), torch.from_numpy(ids), refused)

    def _fill_some(self, filling: _Filling) -> None:
        out = filling.places
        gather = filling.pictures.gather if filling.gathers else None
        for part in filling.parts:
            slots = range(*part.indices(len(filling.ids)))
            if gather is not None and gather(part, filling.boxes[part, :2], np.asarray(out[part])):
                for slot in slots:
                    if filling.mirrored[slot]:
                        mirror(out[slot])
                continue
            for slot in slots:
                check_exit()
                self._fill_one(filling, slot)

    def _fill_one(self, filling: _Filling, slot: int) -> None:
        """All views of a picture, which is decoded once."""
        views = range(slot, len(filling.boxes), len(filling.ids))
        boxes = filling.boxes[slot :: len(filling.ids)].tolist()
        rows, columns = filling.shapes[slot]
        out, rows_of = filling.places[slot], filling.pictures.rows_of
        try:
            if (
                boxes == [[0, 0, columns, rows]]
                and not filling.mirrored[slot]
                and out.shape[:2] == (rows, columns)
            ):
                if (whole := rows_of(slot, 0, out)) is not out:
                    np.copyto(out, whole)
                return
            first, last = 0, rows
            if filling.boxes.dtype == np.int64:  # else a part is resized with what lies around it
                first = max(min(top for _, top, _, _ in boxes), 0)
                last = min(max(top + height for _, top, _, height in boxes), rows)
            band = rows_of(slot, first, self._space_for((last - first, columns, out.shape[2])))
            for view, box in zip(views, boxes, strict=True):
                mirrored, place_of = filling.mirrored[view], filling.places[view]
                place(band, first, rows, box, mirrored, place_of, self._data.dtype)
        except ImageError as error:
            # without what its traceback holds
            filling.errors[slot] = type(error)(error.path, error.reason)

    def _space_for(self, shape: tuple[int, int, int]) -> Pixels:
        """uint8 of this shape, of this thread: it stays in the CPU's cache."""
        count = math.prod(shape)
        space: Pixels | None = getattr(self._local, "space", None)
        if space is None or len(space) < count:
            space = self._local.space = np.empty(count, np.uint8)
        return space[:count].reshape(shape)


def _stop_filling(filling: _Filling) -> None:
    """Wait until no thread reads or writes for the batch; what is not begun is not done."""
    for _ in filling.parts:
        pass
    wait(filling.helpers)
