"""Backend `shards`: decoded pixels, copied by threads out of mapped files straight into each batch."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from loaders.augment import Crops
from loaders.batch import DecodedBatch, Request
from loaders.dataset import SplitData
from loaders.read.filler import BatchFiller, Pictures
from loaders.read.integrity import SampleCheck, check_index
from loaders.read.sequential import look_ahead
from loaders.settings import LoaderSpec
from precache.errors import DatasetError, shell_command
from precache.formats.shards import ShardFile
from precache.pictures.jpeg import Pixels
from precache.storage.locks import lock

_PROBES = 4  # pictures of a batch that tell whether the disk is to be asked for any: a call each
_BATCHES_AHEAD = 2  # whose shards at a URL are fetched
_OPEN_FILES = 256  # of two descriptors each: a process may have 1,024 by default, and others want some


class ShardsReader:
    """Reads single samples at random, or shard after shard for `shuffle="window"` and False."""

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        self.random_access = data.remote is None or spec.shuffle == "full"
        self._data = data
        self._batch_size = spec.batch_size
        self._filler = BatchFiller(data, crops, spec.batch_size, spec.workers, spec.device)
        self._sequential = spec.shuffle in (False, "window") or not self.random_access
        self._window_shards = data.window_shards(spec.reading.memory_bytes)
        most_bytes = spec.reading.memory_bytes
        exceeds = most_bytes is not None and int(data.shard_bytes.sum()) > most_bytes
        self._bounded = self._sequential and exceeds
        self._check = SampleCheck(data, spec.reading.check)
        self._unasked = 0 if self._sequential else len(data)

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one batch per request."""
        with ExitStack() as at_end:  # of the filling, too: until then it reads from the files
            shards = look_ahead(
                *(self._data, requests, self._window_shards, self._open, self._close, at_end),
                kept=0 if self._sequential else _OPEN_FILES,
                most_samples=_BATCHES_AHEAD * self._batch_size,
            )
            yield from self._filler.fill_each(self._pictures(*asked) for asked in shards)

    def _pictures(self, request: Request, opened: Mapping[int, ShardFile]) -> Pictures:
        indexes, samples = self._data.locate(request.positions)
        files = [opened[index] for index in indexes.tolist()]
        rows = samples.tolist()
        self._ask_for(files, rows)

        def picture_of(slot: int) -> Pixels:
            return files[slot].picture(rows[slot])

        compare = self._check.of_batch(request.positions)
        return Pictures(request, picture_of, in_memory=True, compare=compare)

    def close(self) -> None:
        """End the threads."""
        self._filler.close()

    def _ask_for(self, files: list[ShardFile], samples: list[int]) -> None:
        """Have the disk fetch all pictures of a batch at a time; each thread alone would wait for one.

        Until as many were read as there are: then they are in the system's cache, where it is large enough.
        """
        if self._unasked <= 0:
            return
        self._unasked -= len(files)
        asked = list(zip(files, samples, strict=True))
        if not all(file.is_cached(sample) for file, sample in asked[:_PROBES]):
            for file, sample in asked:
                file.will_need(sample)

    def _open(self, index: int) -> ShardFile:
        file = self._data.read(index, partial(self._open_file, index))
        if self._sequential:
            file.read_ahead()
            file.map_cached()
        return file

    def _close(self, file: ShardFile) -> None:
        file.close(drop_cached=self._bounded)

    def _open_file(self, index: int, path: Path) -> ShardFile:
        self._check.open_file(index)
        file = ShardFile(path)
        if self._data.remote is not None:
            lock(file.descriptor, alone=False, waiting=True)  # it stays in the cache until it is closed
        try:
            check_index(self._data, index, file.ids, file.labels)
            whole = self._data.whole
            shapes = whole.shapes_at(whole.shard_positions(index))
            if (file.channels, file.dtype) != (whole.channels, whole.dtype) or not np.array_equal(
                file.shapes, shapes
            ):
                raise DatasetError(
                    f"{path}: holds pictures of other sizes or channels than manifest and index say; "
                    f"run: {shell_command('precache verify', self._data.path)}"
                )
        except DatasetError:
            file.close()
            raise
        return file
