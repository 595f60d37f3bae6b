"""Backend `shards`: rows of decoded pixels, copied by threads straight into each batch.

Crops that are not resized go there at once, many pictures in one call, see `loaders.backends.gather`. A
picture that is to be compared with its checksum is read whole, whatever is served of it.
"""

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

import numpy as np

from loaders.augment.cpu import Crops
from loaders.backends.filler import BatchFiller, Pictures
from loaders.backends.gather import can_gather, gather
from loaders.backends.integrity import SampleCheck, check_index
from loaders.backends.sequential import look_ahead
from loaders.batch import DecodedBatch, Positions, Request
from loaders.dataset import SplitData
from loaders.remote import FetchAhead
from loaders.settings import LoaderSpec
from precache.dataset.index import checksum_of
from precache.errors import DatasetError, shell_command
from precache.formats.shards import ShardFile
from precache.pictures.jpeg import Pixels
from precache.pictures.sizes import sides

_PROBES = 4  # pictures of a batch that tell whether the disk is to be asked for any: a call each
_BATCHES_AHEAD = 2  # whose shards at a URL are fetched
_OPEN_FILES = 256  # a process may have 1,024 by default, and others want some


def open_reader(spec: LoaderSpec, data: SplitData, crops: Crops) -> "ShardsReader":
    """A reader over `data`, a folder of format `shards`."""
    return ShardsReader(spec, data, crops)


class ShardsReader:
    """Reads single samples at random, or shard after shard for `shuffle="window"` and False."""

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        self.random_access = data.remote is None or spec.shuffle == "full"
        self._data = data
        self._batch_size = spec.batch_size
        self._gathers = _can_gather(crops)
        self._filler = BatchFiller(data, crops, spec.batch_size, spec.workers, spec.device)
        self._sequential = spec.shuffle in (False, "window") or not self.random_access
        self._window_shards = data.window_shards(spec.reading.memory_bytes)
        most_bytes = spec.reading.memory_bytes
        self._bounded = most_bytes is not None and int(data.shard_bytes.sum()) > most_bytes
        self._check = SampleCheck(data, spec.reading.check)
        self._scratch = _Scratch(math.prod(data.most_sides), data.pixel_bytes)
        self._unasked = 0 if self._sequential else len(data)

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
        self._ask_for(files, samples)
        shapes, starts = self._data.shapes_at(request.positions), _starts(files, samples)
        lying = _Lying(files, samples, request.positions, shapes, starts, self._check, self._scratch)
        return Pictures(request, lying.rows, lying.gather if self._gathers() else None)

    def close(self) -> None:
        """End the threads."""
        self._filler.close()

    def _ask_for(self, files: list[ShardFile], samples: Positions) -> None:
        """Have the disk fetch all pictures of a batch at a time; each thread alone would wait for one.

        Until as many were read as there are: then they are in the system's cache, where it is large enough.
        """
        if self._unasked <= 0:
            return
        self._unasked -= len(files)
        asked = list(zip(files, samples.tolist(), strict=True))
        if not all(file.is_cached(sample) for file, sample in asked[:_PROBES]):
            for file, sample in asked:
                file.will_need(sample)

    def _open_at_random(
        self, requests: Iterator[Request], at_end: ExitStack
    ) -> Iterator[tuple[Request, dict[int, ShardFile]]]:
        """The files of each request; those used last stay open, of this request and the one before all."""
        opened: OrderedDict[int, ShardFile] = OrderedDict()
        fetching: FetchAhead | None = None
        if self._data.remote is not None:
            fetching = FetchAhead(self._data.remote, _OPEN_FILES, _BATCHES_AHEAD * self._batch_size)
            requests = fetching.requests(requests, lambda positions: self._data.locate(positions)[0])

        def close() -> None:
            if fetching is not None:
                fetching.close()
            for file in opened.values():
                file.close()

        at_end.callback(close)
        before = 0
        for request in requests:
            indexes = np.unique(self._data.locate(request.positions)[0])
            for index in indexes.tolist():
                if index not in opened:
                    with nullcontext() if fetching is None else fetching.fetched(index):
                        opened[index] = self._open(index)
                opened.move_to_end(index)
            while len(opened) > max(_OPEN_FILES, before + len(indexes)):
                index, file = opened.popitem(last=False)
                file.close()
                if fetching is not None:
                    fetching.closed(index)
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
        return self._data.read(index, partial(self._open_file, index))

    def _open_file(self, index: int, path: Path) -> ShardFile:
        self._check.open_file(index)
        file = ShardFile(path)
        if self._data.remote is not None:
            self._data.remote.keep(file.descriptor)
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


def _starts(files: list[ShardFile], samples: Positions) -> Positions:
    """int64 [n], the byte of its file where each of the samples begins."""
    return np.array([file.starts[sample] for file, sample in zip(files, samples.tolist(), strict=True)])


def _can_gather(crops: Crops) -> Callable[[], bool]:
    """To be asked in the thread that gathers; pictures of varying size are read one after the other."""
    if crops.stored is None or crops.size is None:
        return lambda: False
    (_, stored_width), (height, width) = sides(crops.stored), sides(crops.size)
    return lambda: can_gather(height, gaps=width != stored_width)


class _Scratch(threading.local):
    """Room for any whole picture, of each thread its own: it stays in the CPU's cache."""

    def __init__(self, most_pixels: int, pixel_bytes: int) -> None:
        self._memory = np.empty(most_pixels * pixel_bytes, np.uint8)
        self.pixel_bytes = pixel_bytes

    def picture(self, height: int, width: int) -> Pixels:
        """uint8 [height, width, pixel_bytes]."""
        return self._memory[: height * width * self.pixel_bytes].reshape(height, width, self.pixel_bytes)


class _Lying:
    """The pictures of one batch: where they lie, and what is to be compared of them.

    Args:
        samples: int64 [n], their numbers in `files`.
        positions: int64 [n], in the split.
        shapes: int64 [n, 2], height and width of each.
        starts: int64 [n], the byte of its file where each begins.
    """

    def __init__(
        self,
        files: list[ShardFile],
        samples: Positions,
        positions: Positions,
        shapes: Positions,
        starts: Positions,
        check: SampleCheck,
        scratch: _Scratch,
    ) -> None:
        self._files, self._samples, self._positions = files, samples, positions
        self._shapes, self._starts, self._check, self._scratch = shapes, starts, check, scratch
        self._descriptors = np.array([file.descriptor for file in files])

    def rows(self, slot: int, first: int, space: Pixels) -> Pixels:
        """As `loaders.backends.filler.Rows`."""
        position = int(self._positions[slot])
        file, sample = self._files[slot], int(self._samples[slot])
        if not self._check.wants(position):
            file.read_rows(sample, first, space)
            return space
        height, width = self._shapes[slot].tolist()
        picture = space if len(space) == height else self._scratch.picture(height, width)
        file.read_rows(sample, 0, picture)
        self._check.compare(position, picture)
        return picture[first : first + len(space)]

    def gather(self, part: slice, corners: Positions, space: Pixels) -> bool:
        """As `loaders.backends.filler.Gather`."""
        stored_height, stored_width = self._shapes[0].tolist()  # as those of all
        pixel_bytes = self._scratch.pixel_bytes
        row_bytes = stored_width * pixel_bytes
        positions = self._positions[part]
        if not self._check.wants_any(positions):
            first = self._starts[part] + corners[:, 1] * row_bytes + corners[:, 0] * pixel_bytes
            return gather(self._descriptors[part], first, row_bytes, space)
        height, width = space.shape[1:3]
        whole = (height, width) == (stored_height, stored_width)
        picture_bytes = stored_height * row_bytes
        out = space.data.cast("B")
        picture = self._scratch.picture(stored_height, stored_width)
        columns = (self._descriptors[part].tolist(), self._starts[part].tolist())
        parts = zip(*columns, self._check.written(positions), strict=True)
        # one after the other, or what was read would have left the CPU's cache before it is compared
        for number, (descriptor, start, checksum) in enumerate(parts):
            target = out[number * picture_bytes :][:picture_bytes] if whole else picture.data
            try:
                read_bytes = os.preadv(descriptor, (target,), start)
            except OSError:
                return False  # `rows` reads it again, and says what is wrong
            if read_bytes != picture_bytes or checksum_of(target) != checksum:
                return False
            if not whole:
                left, top = corners[number].tolist()
                np.copyto(space[number], picture[top : top + height, left : left + width])
        self._check.passed(positions)
        return True
