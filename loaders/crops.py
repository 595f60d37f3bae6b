"""Which part of each stored square is served, and how it gets into the batch on the CPU."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt
import torch

from loaders.augment import RandomAugmentation, draw
from loaders.batch import DecodedBatch, Request
from loaders.buffers import BufferPool
from loaders.dataset import SplitData
from precache.errors import ImageError
from precache.images import centre_offset
from precache.jpeg import Pixels

Rows = Callable[[int, int, Pixels], Pixels]
"""(number in the batch, first row, space uint8 [count, stored, 3]) -> so many rows of the stored square, in
`space` or elsewhere."""

_AT_A_TIME = 4  # pictures that a thread takes: few, so that none waits long for the others


@dataclass(frozen=True, slots=True)
class Crops:
    """What is served of stored squares.

    Attributes:
        stored: side of the stored squares in pixels.
        size: side of the served ones.
        random: draws crops and flips; None: the centre.
        seed: of the draws.
    """

    stored: int
    size: int
    random: RandomAugmentation | None = None
    seed: int = 0

    def of(
        self, epoch: int, ids: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Boxes int64 [n, 4] (left, top, width, height) and whether mirrored, bool [n]."""
        if self.random is not None:
            draws = draw(self.random, self.stored, self.seed, epoch, ids)
            return draws.boxes, draws.mirrored
        offset = centre_offset(self.stored, self.size)
        return np.tile([offset, offset, self.size, self.size], (len(ids), 1)), np.zeros(len(ids), bool)


def place(rows: Pixels, left: int, width: int, mirrored: bool, out: Pixels) -> None:
    """Put columns `left` to `left + width` of `rows` into the square `out`, resized if need be.

    Resized bilinearly without antialiasing: crops are mostly enlarged, and 256 px shrink to 224 px by
    1.14 at most. OpenCV does it in a third of the time of torch's or Pillow's antialiased kernels.
    """
    part = rows[:, left : left + width]
    if part.shape == out.shape and not mirrored:
        np.copyto(out, part)
        return
    if part.shape == out.shape:
        cv2.flip(part, 1, dst=out)
        return
    cv2.resize(part, out.shape[1::-1], dst=out, interpolation=cv2.INTER_LINEAR)
    if mirrored:
        cv2.flip(out, 1, dst=out)


class BatchFiller:
    """Fills batches with the served parts of pictures, by threads."""

    def __init__(
        self, data: SplitData, crops: Crops, batch_size: int, threads: int, device: torch.device
    ) -> None:
        self._data = data
        self._crops = crops
        self._threads = max(1, threads)
        self._local = threading.local()
        self._buffers = BufferPool(batch_size, crops.size, device)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="fill")

    def fill(self, request: Request, rows_of: Rows) -> DecodedBatch:
        """The batch of the samples asked for; `rows_of` is called by several threads at a time.

        A picture for which it raises ImageError is left out, and named in `refused`.
        """
        ids = self._data.ids[request.positions]
        boxes, mirrored = self._crops.of(request.epoch, ids)
        out = self._buffers.take(len(ids))
        starts = iter(range(0, len(ids), _AT_A_TIME))  # shared: each thread takes what is next
        errors: dict[int, ImageError] = {}  # number in the batch -> why
        task = (starts, boxes.tolist(), mirrored.tolist(), rows_of, out.numpy(), errors)
        others = min(self._threads, -(-len(ids) // _AT_A_TIME)) - 1
        helpers = [self._pool.submit(self._fill_some, *task) for _ in range(others)]
        try:
            self._fill_some(*task)
        finally:
            wait(helpers)  # none may still read or write when the caller goes on, not after an error either
        for helper in helpers:
            helper.result()
        labels = self._data.labels[request.positions]
        if errors:
            kept = np.array([slot not in errors for slot in range(len(ids))])
            refused = {int(ids[slot]): errors[slot] for slot in sorted(errors)}
            out, labels, ids = out[torch.from_numpy(kept)], labels[kept], ids[kept]
            return DecodedBatch(out, torch.from_numpy(labels), torch.from_numpy(ids), refused)
        return DecodedBatch(out, torch.from_numpy(labels), torch.from_numpy(ids))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _fill_some(
        self,
        starts: Iterator[int],
        boxes: list[list[int]],
        mirrored: list[bool],
        rows_of: Rows,
        out: Pixels,
        errors: dict[int, ImageError],
    ) -> None:
        stored, size = self._crops.stored, self._crops.size
        space = getattr(self._local, "space", None)  # of this thread; it stays in the CPU's cache
        if space is None:
            space = self._local.space = np.empty((stored, stored, 3), np.uint8)
        for start in starts:
            for slot in range(start, min(start + _AT_A_TIME, len(out))):
                left, top, width, height = boxes[slot]
                try:
                    if width == height == stored == size and not mirrored[slot]:
                        target = out[slot]
                        if (rows := rows_of(slot, 0, target)) is not target:
                            np.copyto(target, rows)
                        continue
                    rows = rows_of(slot, top, space[:height])
                    place(rows, left, width, mirrored[slot], out[slot])
                except ImageError as error:
                    errors[slot] = ImageError(error.path, error.reason)  # without what its traceback holds
