"""Backend `shards`: rows of decoded pixels, copied by threads straight into each batch.

Crops that are not resized go there at once, many pictures in one call, see `loaders.backends.gather`. A
picture that is to be compared with its checksum is read whole, whatever is served of it.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from loaders.augment.cpu import Crops
from loaders.backends.filler import BatchFiller, Pictures
from loaders.backends.gather import can_gather, gather
from loaders.backends.integrity import SampleCheck, check_index
from loaders.backends.sequential import look_ahead
from loaders.batch import DecodedBatch, Positions, Request
from loaders.dataset import SplitData
from loaders.settings import LoaderSpec
from precache.errors import DatasetError, shell_command
from precache.formats.shards import ShardFile
from precache.index import checksum_of
from precache.jpeg import Pixels

_PROBES = 4  # pictures of a batch that tell whether the disk is to be asked for any: a call each
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
        self._sequential = spec.shuffle is False or spec.shuffle == "window"
        self._window_shards = data.window_shards(spec.reading.memory_bytes)
        most_bytes = spec.reading.memory_bytes
        self._bounded = most_bytes is not None and sum(data.shard_bytes) > most_bytes
        self._check = SampleCheck(data, spec.reading.check)
        self._scratch = _Scratch(data.size)
        self._unasked = np.full(len(data.ids), not self._sequential)

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
        indexes, samples = self._data.locate(request.positions)
        files = [opened[index] for index in indexes.tolist()]
        self._ask_for(files, samples, request.positions)
        squares = _Squares(files, samples, request.positions, self._data.size, self._check, self._scratch)
        if can_gather(self._size, gaps=self._size != self._data.size):
            return Pictures(request, squares.rows, squares.gather)
        return Pictures(request, squares.rows)

    def close(self) -> None:
        """End the threads."""
        self._filler.close()

    def _ask_for(self, files: list[ShardFile], samples: Positions, positions: Positions) -> None:
        """Have the disk fetch all pictures of a batch at a time; each thread alone would wait for one.

        The first time alone: afterwards they are in the system's cache, where it is large enough.
        """
        new = np.flatnonzero(self._unasked[positions]).tolist()
        self._unasked[positions] = False
        if not all(files[number].is_cached(int(samples[number])) for number in new[:_PROBES]):
            for number in new:
                files[number].will_need(int(samples[number]))

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
            indexes = np.unique(self._data.locate(request.positions)[0])
            for index in indexes.tolist():
                if index not in opened:
                    opened[index] = self._open(index)
                opened.move_to_end(index)
            while len(opened) > max(_OPEN_FILES, before + len(indexes)):
                opened.popitem(last=False)[1].close()
            before = len(indexes)
            yield request, opened

    def _open_ahead(self, index: int) -> ShardFile:
        file = self._open(index)
        file.read_ahead()
        return file

    def _close(self, file: ShardFile) -> None:
        if self._bounded:
            file.drop_cached()
        file.close()

    def _open(self, index: int) -> ShardFile:
        path = self._data.files[index]
        self._check.open_file(index)
        file = ShardFile(Path(path))
        if file.size != self._data.size:
            file.close()
            raise DatasetError(
                f"{path}: holds pictures of {file.size} px, the manifest says {self._data.size}; "
                f"run: {shell_command('precache verify', self._data.path)}"
            )
        try:
            check_index(self._data, index, file.ids, file.labels)
        except DatasetError:
            file.close()
            raise
        return file


class _Scratch(threading.local):
    """A whole square, uint8 [side, side, 3], of each thread its own: it stays in the CPU's cache."""

    def __init__(self, side: int) -> None:
        self.square = np.empty((side, side, 3), np.uint8)


class _Squares:
    """The pictures of one batch: where they lie, and what is to be compared of them.

    Args:
        samples: int64 [n], their numbers in `files`.
        positions: int64 [n], in the split.
        side: of the stored squares.
    """

    def __init__(
        self,
        files: list[ShardFile],
        samples: Positions,
        positions: Positions,
        side: int,
        check: SampleCheck,
        scratch: _Scratch,
    ) -> None:
        self._files, self._samples, self._positions = files, samples, positions
        self._side, self._check, self._scratch = side, check, scratch
        self._descriptors = np.array([file.descriptor for file in files])
        self._starts = files[0].start_of(samples) if files else samples

    def rows(self, slot: int, first: int, space: Pixels) -> Pixels:
        """As `loaders.backends.filler.Rows`."""
        position = int(self._positions[slot])
        file, sample = self._files[slot], int(self._samples[slot])
        if not self._check.wants(position):
            file.read_rows(sample, first, space)
            return space
        square = space if len(space) == self._side else self._scratch.square
        file.read_rows(sample, 0, square)
        self._check.compare(position, square)
        return square[first : first + len(space)]

    def gather(self, part: slice, corners: Positions, space: Pixels) -> bool:
        """As `loaders.backends.filler.Gather`."""
        row_bytes = self._side * 3
        positions = self._positions[part]
        if not self._check.wants_any(positions):
            first = self._starts[part] + corners[:, 1] * row_bytes + corners[:, 0] * 3
            return gather(self._descriptors[part], first, row_bytes, space)
        size = space.shape[1]
        whole = size == self._side
        square_bytes = self._side * self._side * 3
        out = space.data.cast("B")
        square = self._scratch.square
        columns = (self._descriptors[part].tolist(), self._starts[part].tolist())
        parts = zip(*columns, self._check.written(positions), strict=True)
        # one after the other, or what was read would have left the CPU's cache before it is compared
        for number, (descriptor, start, checksum) in enumerate(parts):
            target = out[number * square_bytes :][:square_bytes] if whole else square.data
            try:
                read_bytes = os.preadv(descriptor, (target,), start)
            except OSError:
                return False  # `rows` reads it again, and says what is wrong
            if read_bytes != square_bytes or checksum_of(target) != checksum:
                return False
            if not whole:
                left, top = corners[number].tolist()
                np.copyto(space[number], square[top : top + size, left : left + size])
        self._check.passed(positions)
        return True
