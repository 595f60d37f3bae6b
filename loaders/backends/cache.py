"""Keep what was decoded, in main memory or on the device: from the second epoch on a batch is a gather.

The cache sits between a backend's reader and the loader and changes neither order nor pixels. The
first epoch goes at the reader's pace and fills it; once every sample has passed, the reader rests.
Random crops are taken of what is kept, so that they differ from epoch to epoch.
"""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import chain

import numpy as np
import psutil
import torch

from loaders.augment.cpu import Crops
from loaders.backends.filler import BatchFiller, Pictures
from loaders.batch import DecodedBatch, Positions, Reader, Request
from loaders.dataset import SplitData
from loaders.devices import Lane, upload
from loaders.settings import LoaderSpec
from precache.errors import ImageError, SettingError
from precache.jpeg import Pixels
from precache.sizes import sides

_MOST_CACHED = 8  # batches in a row that a reader which has something left to read is not asked for
_RESERVED_SHARE = 0.1  # of the free memory is left to others


class CachedReader:
    """What `reader` decodes, pictures of `crops.stored`, kept on `device` and served as `crops` say.

    To be made where `lane`, that of the loader, is active.
    """

    def __init__(
        self,
        reader: Reader,
        spec: LoaderSpec,
        data: SplitData,
        crops: Crops,
        device: torch.device,
        lane: Lane,
    ) -> None:
        self.random_access = reader.random_access
        self._reader = reader
        self._data = data
        self._device = device
        self._lane = lane
        if crops.stored is None and device.type == "cuda":
            reader.close()
            raise SettingError(
                f"cache 'device' keeps pictures of one size, and those of {data.path} vary; use cache 'ram'"
            )
        shape: tuple[int, ...]
        if crops.stored is None:
            self._ends = np.cumsum(data.shapes_at(slice(None)).prod(axis=1) * data.pixel_bytes)
            shape = (int(self._ends[-1]),)
        else:
            shape = (len(data.ids), *sides(crops.stored), data.pixel_bytes)
        needed, free = math.prod(shape), _free_bytes(device)
        if needed > free * (1 - _RESERVED_SHARE):
            reader.close()
            raise SettingError(
                f"the cache of {data.path} needs {needed:,} bytes, {free:,} are free on {device}; "
                f"use cache 'none', or a smaller size"
            )
        self._images = torch.empty(shape, dtype=torch.uint8, device=device)
        self._passed = np.zeros(len(data.ids), bool)
        self._missing = np.zeros(len(data.ids), bool)
        self._takes = crops.size == crops.stored
        self._refused: dict[int, ImageError] = {}  # what passed, but could not be decoded: id -> why
        self._filler = BatchFiller(data, crops, spec.batch_size, spec.workers, spec.device)

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one batch per request, from the reader while it has something new."""
        waiting: deque[tuple[Request, bool]] = deque()  # with whether the reader was asked, which looks ahead
        asked = self._passed.copy()

        def ask() -> Iterator[Request]:
            cached = 0  # since the reader was asked last
            for request in requests:
                # of samples that may come again some never come, and the reader would be asked no more
                new = not asked[request.positions].all() or cached == _MOST_CACHED
                cached = 0 if new else cached + 1
                asked[request.positions] = True
                waiting.append((request, new))
                if new:
                    yield request

        if not self._passed.all():
            with closing(self._reader.read(ask())) as decoded:  # type: ignore[type-var]
                for batch in decoded:
                    while not waiting[0][1]:
                        yield self._gather(waiting.popleft()[0])
                    request, _ = waiting.popleft()
                    self._keep(request, batch)
                    yield self._gather(request)
                    if self._passed.all():
                        break
        for request in chain((request for request, _ in waiting), requests):
            yield self._gather(request)

    def close(self) -> None:
        """Free the cache."""
        self._images = torch.empty(0, dtype=torch.uint8)
        self._filler.close()
        self._reader.close()

    def _keep(self, request: Request, batch: DecodedBatch) -> None:
        self._passed[request.positions] = True
        for sample_id, error in batch.refused.items():  # without what the error's traceback holds
            self._refused[sample_id] = type(error)(error.path, error.reason)
        refused = np.isin(self._data.ids[request.positions], list(batch.refused))
        self._missing[request.positions] = refused
        kept = request.positions[~refused]
        images = self._lane.take(batch.images, batch.ready)
        if images.ndim == 1:  # one picture behind the other, as they are kept
            lengths = self._data.shapes_at(kept).prod(axis=1) * self._data.pixel_bytes
            parts = torch.split(images.to(self._device), lengths.tolist())
            for end, part in zip(self._ends[kept].tolist(), parts, strict=True):
                self._images[end - len(part) : end] = part
        elif self._device.type == "cuda":
            self._images[upload(torch.from_numpy(kept), self._device)] = upload(images, self._device)
        else:  # of a backend that decodes on a GPU: waited for
            self._images[torch.from_numpy(kept)] = images.to(self._device)

    def _gather(self, request: Request) -> DecodedBatch:
        if self._device.type == "cpu":
            rows_of = partial(self._rows, request.positions.tolist())
            take = partial(self._take, request.positions) if self._takes else None
            return self._filler.fill(Pictures(request, rows_of, take))
        ids = self._data.ids[request.positions]
        refused = {i: self._refused[i] for i in ids.tolist() if i in self._refused}
        kept = request.positions[~self._missing[request.positions]]
        return DecodedBatch(
            self._images[upload(torch.from_numpy(kept), self._device)],
            torch.from_numpy(self._data.labels[kept]),
            torch.from_numpy(self._data.ids[kept]),
            refused,
        )

    def _take(self, positions: Positions, part: slice, corners: Positions, space: Pixels) -> bool:
        """As `loaders.backends.filler.Gather`, of whole squares."""
        if self._missing[positions[part]].any():
            return False
        squares = self._images.numpy()
        np.take(squares, positions[part], axis=0, out=space, mode="clip")  # the lock is released
        return True

    def _rows(self, positions: list[int], slot: int, first: int, space: Pixels) -> Pixels:
        position = positions[slot]
        if self._refused and (sample_id := int(self._data.ids[position])) in self._refused:
            raise self._refused[sample_id]
        images: Pixels = self._images.numpy()
        if images.ndim == 1:
            height, width = self._data.shapes_at(slice(position, position + 1))[0].tolist()
            stop, channels = int(self._ends[position]), self._data.pixel_bytes
            images = images[stop - height * width * channels : stop].reshape(1, height, width, channels)
            position = 0
        return images[position, first : first + len(space)]


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
