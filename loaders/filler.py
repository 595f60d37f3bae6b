"""Filling batches on the CPU, by threads, out of whatever a backend's pictures lie in."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import torch

from loaders.batch import DecodedBatch, Request
from loaders.buffers import BufferPool
from loaders.crops import Crops, place
from loaders.dataset import SplitData
from loaders.gather import Addresses, gather
from precache.errors import ImageError
from precache.jpeg import Pixels

Rows = Callable[[int, int, Pixels], Pixels]
"""(number in the batch, first row, space uint8 [count, stored, 3]) -> so many rows of the stored square, in
`space` or elsewhere."""

_AT_A_TIME = 4  # pictures that a thread takes: few, so that none waits long for the others


@dataclass(frozen=True, slots=True)
class _Work:
    """A batch that is being filled.

    Attributes:
        boxes: left, top, width, height of what is served of each picture.
        mirrored: which pictures are.
        rows_of: where pictures come from, one by one.
        addresses: uint64 [n], of the whole pictures in memory; None: take all from `rows_of`.
        out: uint8 [n, size, size, 3].
        errors: why pictures are left out, by their number in the batch.
    """

    boxes: list[list[int]]
    mirrored: list[bool]
    rows_of: Rows
    addresses: Addresses | None
    out: Pixels
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
        self._buffers = BufferPool(batch_size, crops.size, device)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="fill")

    def fill(self, request: Request, rows_of: Rows, addresses: Addresses | None = None) -> DecodedBatch:
        """The batch of the samples asked for.

        A picture for which `rows_of` raises ImageError is left out, and named in `refused`.

        Args:
            request: at most as many samples as a batch has.
            rows_of: called by several threads at a time.
            addresses: uint64 [n], of the stored squares, uint8 [stored, stored, 3], in memory; 0: not
                known. `rows_of` is asked for what does not turn out to be there.
        """
        ids = self._data.ids[request.positions]
        boxes, mirrored = self._crops.of(request.epoch, ids)
        out = self._buffers.take(len(ids))
        if self._crops.stored != self._crops.size or self._crops.random is not None:
            addresses = None  # crops: gathering what lies around them, too, is slower than reading them
        work = _Work(boxes.tolist(), mirrored.tolist(), rows_of, addresses, out.numpy())
        at_a_time = _AT_A_TIME if addresses is None else max(1, -(-len(ids) // self._threads))
        # shared: each thread takes what is next
        parts = iter([slice(start, start + at_a_time) for start in range(0, len(ids), at_a_time)])
        others = min(self._threads, -(-len(ids) // at_a_time)) - 1
        helpers = [self._pool.submit(self._fill_some, work, parts) for _ in range(others)]
        try:
            self._fill_some(work, parts)
        finally:
            wait(helpers)  # none may still read or write when the caller goes on, not after an error either
        for helper in helpers:
            helper.result()
        labels = self._data.labels[request.positions]
        if work.errors:
            kept = np.array([slot not in work.errors for slot in range(len(ids))])
            refused = {int(ids[slot]): work.errors[slot] for slot in sorted(work.errors)}
            out, labels, ids = out[torch.from_numpy(kept)], labels[kept], ids[kept]
            return DecodedBatch(out, torch.from_numpy(labels), torch.from_numpy(ids), refused)
        return DecodedBatch(out, torch.from_numpy(labels), torch.from_numpy(ids))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _fill_some(self, work: _Work, parts: Iterator[slice]) -> None:
        space = getattr(self._local, "space", None)  # of this thread; it stays in the CPU's cache
        if space is None:
            space = self._local.space = np.empty((self._crops.stored, self._crops.stored, 3), np.uint8)
        for part in parts:
            if work.addresses is not None:
                addresses = work.addresses[part]
                if addresses.all() and gather(addresses, work.out[part]):
                    continue
            for slot in range(*part.indices(len(work.out))):
                self._fill_one(work, slot, space)

    def _fill_one(self, work: _Work, slot: int, space: Pixels) -> None:
        left, top, width, height = work.boxes[slot]
        out = work.out[slot]
        try:
            if width == height == self._crops.stored == len(out) and not work.mirrored[slot]:
                if (rows := work.rows_of(slot, 0, out)) is not out:
                    np.copyto(out, rows)
                return
            rows = work.rows_of(slot, top, space[:height])
            place(rows[:, left : left + width], work.mirrored[slot], out)
        except ImageError as error:
            work.errors[slot] = ImageError(error.path, error.reason)  # without what its traceback holds
