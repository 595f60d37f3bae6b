"""Pictures as they are stored, in a raw tree or as JPEGs in shards: read, compared, decoded."""

import math
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import simplejpeg

from loaders.batch import Positions, Request
from loaders.dataset import RAW, SplitData
from loaders.deliver import Pool
from loaders.read.integrity import SampleCheck, check_index
from loaders.read.sequential import look_ahead
from loaders.settings import LoaderSpec
from precache.errors import DatasetError, ImageError
from precache.formats import FORMATS, StoredSample
from precache.formats.base import Places
from precache.pictures import images, jpeg
from precache.pictures.jpeg import Pixels
from precache.pictures.reading import MAX_PIXELS
from precache.storage import open_regular, read_descriptor_at

Samples: TypeAlias = list[tuple[StoredSample, str]]
"""Of a request, in order, each with its shard's path."""
_KEPT_PLACES = 1024  # shards: 16 bytes a sample


@dataclass(frozen=True, slots=True)
class Encoded:
    """A picture that was read.

    Attributes:
        path: of its file, or its name, for messages.
        shape: height and width of the upright picture, as its header, or the index, says.
        error: why it cannot be decoded, where that is known already.
    """

    path: str
    data: bytes
    shape: tuple[int, int]
    error: ImageError | None = None

    def decode(self) -> Pixels:
        """uint8 [height, width, 3], RGB.

        Raises:
            ImageError: it cannot be decoded; names `path` and the reason.
        """
        if self.error is not None:
            raise self.error
        pixels = images.decode_pixels(self.data, self.path)
        if pixels.shape[:2] != self.shape:
            (height, width), (rows, columns) = self.shape, pixels.shape[:2]
            raise ImageError(
                self.path,
                f"is {columns}x{rows}, expected {width}x{height}; run 'precache verify' on its dataset, or "
                f"store it anew",
            )
        return pixels

    def try_decode(self) -> Pixels | ImageError:
        """As `decode`, or its error, without what the traceback holds."""
        try:
            return self.decode()
        except ImageError as error:
            return type(error)(error.path, error.reason)

    def is_plain(self, *, turned: bool) -> bool:
        """Whether other decoders make the reference's RGB of this: a whole JPEG in grey or YCbCr.

        Args:
            turned: whether what EXIF, and EXIF alone, turns is plain as well.
        """
        if self.error is not None or not self.data.startswith(jpeg.START) or jpeg.breaks_off(self.data):
            return False
        try:
            *sides, colorspace, _ = simplejpeg.decode_jpeg_header(self.data)
            if math.prod(sides) > MAX_PIXELS or colorspace not in ("Gray", "YCbCr"):
                return False
            orientation = jpeg.orientation(self.data)
        except Exception:  # `images.decode` says what is wrong with it
            return False
        upright = sides if orientation < 5 else sides[::-1]  # from there on EXIF turns it on its side
        if tuple(upright) != self.shape:  # then `decode` says so
            return False
        return orientation == 1 or (turned and orientation > 0 and jpeg.XMP not in self.data)


def read(path: str) -> Encoded:
    """The picture at `path`; one that cannot be decoded says so when it is.

    Raises:
        SourceError: it cannot be read, which says nothing about the picture.
    """
    try:
        data = images.read_bytes(path)
        return Encoded(path, data, images.upright_shape(data, path))
    except ImageError as error:
        return Encoded(path, b"", (1, 1), type(error)(error.path, error.reason))  # without its traceback


def shapes_of(pictures: list[Encoded]) -> npt.NDArray[np.int64]:
    """int64 [n, 2], height and width of each."""
    return np.array([picture.shape for picture in pictures], np.int64).reshape(-1, 2)


class EncodedPictures:
    """The pictures of a split as they are stored, compared, for who decodes whole batches.

    Attributes:
        random_access: as of a `Reader`.
        pool: threads that read; for other work on pictures, too.
    """

    def __init__(self, spec: LoaderSpec, data: SplitData) -> None:
        self._data = data
        self.pool = Pool(max(1, spec.workers), "read")
        self.random_access = data.kind == RAW
        self._shards = None if self.random_access else EncodedShards(spec, data)

    def read(self, requests: Iterator[Request]) -> Generator[tuple[Request, list[Encoded]], None, None]:
        """Yield each request with its pictures, in order.

        Raises:
            SourceError, DatasetError: a file of the tree, or a shard, cannot be read.
        """
        if self._shards is None:
            for request in requests:
                files = [self._data.files[position] for position in request.positions.tolist()]
                yield request, self.pool.map(read, files)
            return
        for request, samples in self._shards.read(requests):
            shapes = self._data.shapes_at(request.positions).tolist()
            asked = zip(request.positions.tolist(), samples, shapes, strict=True)
            yield request, [self._compared(position, *sample, shape) for position, sample, shape in asked]

    def _compared(self, position: int, sample: StoredSample, shard: str, shape: list[int]) -> Encoded:
        assert self._shards is not None
        assert isinstance(sample.data, bytes)
        error = None
        try:
            self._shards.check.compare(position, sample.data, sample.damage)
        except ImageError as wrong:
            error = type(wrong)(wrong.path, wrong.reason)  # without what its traceback holds
        return Encoded(f"{shard}: sample {sample.id}", sample.data, (shape[0], shape[1]), error)


class EncodedShards:
    """The stored samples of shards that hold JPEGs: each shard is read whole; or, shuffled `full`, samples.

    Attributes:
        check: its `compare` is to be called by who decodes a sample, before.
    """

    def __init__(self, spec: LoaderSpec, data: SplitData) -> None:
        self.check = SampleCheck(data, spec.reading.check)
        self._data = data
        self._window_shards = data.window_shards(spec.reading.memory_bytes)
        self._at_random = spec.shuffle == "full"
        self._places: dict[int, Places] = {}

    def read(self, requests: Iterator[Request]) -> Generator[tuple[Request, Samples], None, None]:
        """Yield each request with its samples.

        Raises:
            DatasetError: a shard is missing, damaged, or holds other samples than the index says.
        """
        if not self._at_random:
            yield from self._read_whole(requests)
            return
        for request in requests:
            try:
                samples = self._read_alone(request)
            except (ValueError, OSError, DatasetError):  # who reads the whole shard says what is wrong
                yield from self._read_whole(iter([request]))
            else:
                yield request, samples

    def _read_whole(self, requests: Iterator[Request]) -> Iterator[tuple[Request, Samples]]:
        with ExitStack() as at_end:
            for request, shards in look_ahead(
                self._data, requests, self._window_shards, self._open, lambda samples: None, at_end
            ):
                indexes, rows = (found.tolist() for found in self._data.locate(request.positions))
                found = [(shards[n][row], self._data.files[n]) for n, row in zip(indexes, rows, strict=True)]
                yield request, found

    def _open(self, index: int) -> Mapping[int, StoredSample]:
        """The samples of shard `index` by their rows."""
        return self._data.read(index, partial(self._read_shard, index))

    def _read_shard(self, index: int, path: Path) -> Mapping[int, StoredSample]:
        self.check.open_file(index)
        if self._data.remote is not None and index in self._data.remote.parts:
            return self._data.remote.parts[index].read(path)
        samples = list(FORMATS[self._data.kind].read_shard(path))
        whole = self._data.whole
        stored = whole.shard_positions(index)
        ids, labels = whole.ids[stored], whole.labels[stored]
        for row, sample in enumerate(samples[: len(ids)]):
            if sample.damage:  # then the index alone knows which one it is
                samples[row] = replace(sample, id=int(ids[row]), label=int(labels[row]))
        check_index(self._data, index, [s.id for s in samples], [s.label for s in samples])
        return dict(enumerate(samples))

    def _read_alone(self, request: Request) -> Samples:
        """Each sample by its place in its shard; ValueError where another one lies there."""
        indexes, rows = self._data.locate(request.positions)
        found: dict[int, StoredSample] = {}
        for index in np.unique(indexes).tolist():
            self._read_from(index, np.flatnonzero(indexes == index), rows, found)
        samples = [(found[slot], self._data.files[index]) for slot, index in enumerate(indexes.tolist())]
        if [sample.id for sample, _ in samples] != self._data.ids[request.positions].tolist():
            raise ValueError("other samples")
        return samples

    def _read_from(
        self, index: int, slots: Positions, rows: Positions, found: dict[int, StoredSample]
    ) -> None:
        """Put the samples of shard `index`, wanted at `slots`, into `found`."""
        with self._data.held(index) as path:
            file = open_regular(path)
        with file:
            descriptor = file.fileno()
            if index not in self._places:
                self._places[index] = self._find(index)
            places = self._places[index]
            wanted = [(slot, *places[rows[slot]].tolist()) for slot in slots.tolist()]
            for _, start, size in wanted if hasattr(os, "posix_fadvise") else ():
                # of all at a time: each read alone would wait for the disk
                os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_WILLNEED)
            for slot, start, size in wanted:
                content = read_descriptor_at(descriptor, start, size)
                found[slot] = FORMATS[self._data.kind].read_sample(content)

    def _find(self, index: int) -> Places:
        """Where the samples of shard `index` lie."""
        while len(self._places) >= _KEPT_PLACES:
            del self._places[next(iter(self._places))]
        with self._data.held(index, with_index=True) as path:
            self.check.open_file(index)
            # of a part of a shard, too: its index is that of the shard
            whole = path.with_name(Path(self._data.whole.files[index]).name)
            places = FORMATS[self._data.kind].find_samples(whole)
        if len(places) != self._data.whole.shard_samples[index]:
            raise ValueError("an index of other samples")
        return places
