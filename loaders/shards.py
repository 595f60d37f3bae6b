"""Backend `shards`: rows of decoded pixels, copied by threads straight into each batch.

Crops that are not resized go there at once, many pictures in one call, see `loaders.gather`.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from loaders.batch import DecodedBatch, LoaderSpec, Positions, Request
from loaders.crops import Crops
from loaders.dataset import SplitData
from loaders.filler import BatchFiller, Pictures
from loaders.gather import can_gather, gather
from loaders.integrity import BackgroundCheck, check_index, check_shard
from loaders.sequential import look_ahead
from precache.errors import DatasetError
from precache.formats.shards import ShardFile
from precache.jpeg import Pixels

_OPEN_FILES = 256  # a process may have 1,024 by default, and others want some


def open_reader(spec: LoaderSpec, data: SplitData, crops: Crops) -> "ShardsReader":
    """A reader over `data`, a folder of format `shards`."""
    return ShardsReader(spec, data, crops)


class ShardsReader:
    """Reads single samples at random, or shard after shard for `shuffle="window"` and False."""

    random_access = True

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        self._data = data
        self._size = crops.size
        self._filler = BatchFiller(data, crops, spec.batch_size, spec.workers, spec.device)
        self._starts = np.concatenate(([0], np.cumsum(data.shard_samples)))
        self._sequential = spec.shuffle is False or spec.shuffle == "window"
        self._window_shards = data.window_shards(spec.memory_bytes)
        self._bounded = spec.memory_bytes is not None and sum(data.shard_bytes) > spec.memory_bytes
        self._unchecked = set(range(len(data.files)) if spec.check == "first-read" else ())
        self._background = BackgroundCheck(data)

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one batch per request."""
        with ExitStack() as at_end:  # of the filling, too: until then it reads from the files
            if self._sequential:
                shards = look_ahead(
                    self._data, requests, self._window_shards, self._open_ahead, self._close, at_end
                )
            else:
                shards = self._open_at_random(requests, at_end)
            yield from self._filler.fill_each(self._pictures(*asked) for asked in shards)

    def _pictures(self, request: Request, opened: Mapping[int, ShardFile]) -> Pictures:
        indexes = np.searchsorted(self._starts, request.positions, side="right") - 1
        files = [opened[index] for index in indexes.tolist()]
        samples = request.positions - self._starts[indexes]
        if not can_gather(self._size, gaps=self._size != self._data.size):
            return Pictures(request, partial(_read, files, samples.tolist()))
        descriptors = np.array([file.descriptor for file in files])
        starts = files[0].start_of(samples) if files else samples
        gathered = partial(_gather, descriptors, starts, self._data.size * 3)
        return Pictures(request, partial(_read, files, samples.tolist()), gathered)

    def close(self) -> None:
        """End the threads."""
        self._filler.close()
        self._background.close()

    def _open_at_random(
        self, requests: Iterator[Request], at_end: ExitStack
    ) -> Iterator[tuple[Request, dict[int, ShardFile]]]:
        """The files of each request; those used last stay open, of this request and the one before all."""
        opened: OrderedDict[int, ShardFile] = OrderedDict()

        def close() -> None:
            for file in opened.values():
                file.close()

        at_end.callback(close)
        before = 0
        for request in requests:
            indexes = np.unique(np.searchsorted(self._starts, request.positions, side="right") - 1)
            for index in indexes.tolist():
                if index not in opened:
                    opened[index] = self._open(index)
                    if index in self._unchecked:
                        self._unchecked.discard(index)
                        self._background.start(index)
                opened.move_to_end(index)
            while len(opened) > max(_OPEN_FILES, before + len(indexes)):
                opened.popitem(last=False)[1].close()
            before = len(indexes)
            self._background.raise_failure()
            yield request, opened

    def _open_ahead(self, index: int) -> ShardFile:
        file = self._open(index)
        if index in self._unchecked:
            check_shard(self._data, index)  # reads all of it, too
            self._unchecked.discard(index)
        else:
            file.read_ahead()
        return file

    def _close(self, file: ShardFile) -> None:
        if self._bounded:
            file.drop_cached()
        file.close()

    def _open(self, index: int) -> ShardFile:
        path = self._data.files[index]
        file = ShardFile(Path(path))
        if file.size != self._data.size:
            file.close()
            raise DatasetError(
                f"{path}: holds pictures of {file.size} px, the manifest says {self._data.size}; "
                f"run 'precache verify {self._data.path}'"
            )
        try:
            check_index(self._data, index, file.ids, file.labels)
        except DatasetError:
            file.close()
            raise
        return file


def _gather(
    descriptors: Positions,
    starts: Positions,
    row_bytes: int,
    part: slice,
    corners: Positions,
    space: Pixels,
) -> bool:
    """As `loaders.filler.Gather`, of squares that begin at `starts`, with rows of `row_bytes`."""
    first = starts[part] + corners[:, 1] * row_bytes + corners[:, 0] * 3
    return gather(descriptors[part], first, row_bytes, space)


def _read(files: list[ShardFile], samples: list[int], slot: int, first: int, space: Pixels) -> Pixels:
    files[slot].read_rows(samples[slot], first, space)
    return space
