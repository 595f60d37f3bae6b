"""Keep what was decoded, in main memory or on the device: from the second epoch on a batch is a gather.

The cache sits between a backend's reader and the loader and changes neither order nor pixels. The
first epoch goes at the reader's pace and fills it; once every sample has passed, the reader rests.
"""

from collections import deque
from collections.abc import Iterator
from itertools import chain

import numpy as np
import psutil
import torch

from loaders.batch import DecodedBatch, Positions, Reader
from loaders.dataset import SplitData
from precache.errors import ImageError, SettingError

_RESERVED_SHARE = 0.1  # of the free memory is left to others


class CachedReader:
    """What `reader` decodes, kept on `device`."""

    def __init__(self, reader: Reader, data: SplitData, size: int, device: torch.device) -> None:
        self.random_access = reader.random_access
        self._reader = reader
        self._data = data
        self._device = device
        shape = (len(data.ids), size, size, 3)
        needed, free = int(np.prod(shape)), _free_bytes(device)
        if needed > free * (1 - _RESERVED_SHARE):
            reader.close()
            raise SettingError(
                f"the cache of {data.path} needs {needed:,} bytes, {free:,} are free on {device}; "
                f"use cache 'none', or a smaller size"
            )
        self._images = torch.empty(shape, dtype=torch.uint8, device=device)
        self._passed = np.zeros(len(data.ids), bool)
        self._refused: dict[int, ImageError] = {}  # what passed, but could not be decoded: id -> why

    def read(self, batches: Iterator[Positions]) -> Iterator[DecodedBatch]:
        """Yield one batch per array of positions, from the reader while it has something new."""
        asked: deque[Positions] = deque()  # of the reader, which looks ahead

        def ask() -> Iterator[Positions]:
            for positions in batches:
                asked.append(positions)
                yield positions

        if not self._passed.all():
            decoded = self._reader.read(ask())
            for batch in decoded:
                positions = asked.popleft()
                self._passed[positions] = True
                for sample_id, error in batch.refused.items():  # without what the error's traceback holds
                    self._refused[sample_id] = ImageError(error.path, error.reason)
                kept = positions[~np.isin(self._data.ids[positions], list(batch.refused))]
                self._images[torch.from_numpy(kept).to(self._device)] = batch.images.to(self._device)
                yield batch
                if self._passed.all():
                    break
            close = getattr(decoded, "close", None)
            if close is not None:
                close()
        for positions in chain(asked, batches):
            ids = self._data.ids[positions]
            refused = {i: self._refused[i] for i in ids.tolist() if i in self._refused}
            kept = positions[~np.isin(ids, list(refused))]
            yield DecodedBatch(
                self._images[torch.from_numpy(kept).to(self._device)],
                torch.from_numpy(self._data.labels[kept]),
                torch.from_numpy(self._data.ids[kept]),
                refused,
            )

    def close(self) -> None:
        """Free the cache."""
        self._images = torch.empty(0, dtype=torch.uint8)
        self._reader.close()


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
