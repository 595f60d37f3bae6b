"""Backend `shards`: rows of mapped safetensors files, gathered by threads into each batch."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch

from loaders.batch import DecodedBatch, LoaderSpec, Positions
from loaders.dataset import SplitData
from loaders.integrity import BackgroundCheck
from precache.errors import DatasetError
from precache.formats.shards import ShardArrays, open_shard
from precache.jpeg import Pixels


def open_reader(spec: LoaderSpec, data: SplitData, size: int) -> "ShardsReader":
    """A reader over `data`, a folder of format `shards`."""
    check = BackgroundCheck(data) if spec.check == "first-read" else None
    return ShardsReader(data, size, max(1, spec.workers), check)


class ShardsReader:
    """Maps each shard when it is first touched, and keeps it mapped until `close`."""

    random_access = True

    def __init__(self, data: SplitData, size: int, threads: int, check: BackgroundCheck | None) -> None:
        self._data = data
        self._size = size
        self._threads = threads
        self._check = check
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="gather")
        self._starts = np.concatenate(([0], np.cumsum(data.shard_samples)))
        self._shards: list[ShardArrays | None] = [None] * len(data.files)

    def read(self, batches: Iterator[Positions]) -> Iterator[DecodedBatch]:
        """Yield one gathered batch per array of positions."""
        for positions in batches:
            shards = np.searchsorted(self._starts, positions, side="right") - 1
            for shard in np.unique(shards):
                self._open(int(shard))
            if self._check is not None:
                self._check.raise_failure()
            rows = positions - self._starts[shards]
            out = torch.empty((len(positions), self._size, self._size, 3), dtype=torch.uint8)
            gather = partial(self._gather, shards, rows, out.numpy())
            # copying rows releases the interpreter lock, so threads share the memory's bandwidth
            list(self._pool.map(gather, np.array_split(np.arange(len(positions)), self._threads)))
            yield DecodedBatch(
                out,
                torch.from_numpy(self._data.labels[positions]),
                torch.from_numpy(self._data.ids[positions]),
            )

    def close(self) -> None:
        """End the threads and unmap the shards."""
        self._pool.shutdown()
        if self._check is not None:
            self._check.close()
        self._shards = [None] * len(self._shards)

    def _open(self, index: int) -> None:
        if self._shards[index] is not None:
            return
        path = self._data.files[index]
        shard = open_shard(Path(path))
        start = self._starts[index]
        rows = slice(start, self._starts[index + 1])
        same_ids = np.array_equal(shard.ids, self._data.ids[rows])
        if shard.images.shape[1:3] != (self._data.size, self._data.size):
            raise DatasetError(
                f"{path}: holds pictures of {shard.images.shape[2]} px, the manifest says {self._data.size}; "
                f"run 'precache verify {self._data.path}'"
            )
        if not same_ids or not np.array_equal(shard.labels, self._data.labels[rows]):
            raise DatasetError(
                f"{path}: holds other samples than the dataset's index says; "
                f"run 'precache verify {self._data.path}'"
            )
        self._shards[index] = shard
        if self._check is not None:
            self._check.start(index)

    def _gather(self, shards: Positions, rows: Positions, out: Pixels, slots: Positions) -> None:
        crop = self._data.centre_crop(self._size)
        for slot in slots.tolist():
            shard = self._shards[shards[slot]]
            assert shard is not None
            out[slot] = shard.images[rows[slot], crop, crop]
