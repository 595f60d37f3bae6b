"""Pictures as they are stored, in a raw tree or as JPEGs in shards: read, compared, decoded."""

import math
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import simplejpeg

from loaders.augment import Crops
from loaders.batch import DecodedBatch, Request
from loaders.dataset import RAW, SplitData
from loaders.read.filler import BatchFiller, Pictures
from loaders.read.integrity import SampleCheck, check_index
from loaders.read.sequential import look_ahead
from loaders.settings import LoaderSpec
from loaders.threads import Pool
from precache.errors import DatasetError, ImageError
from precache.formats import FORMATS, StoredSample
from precache.formats.base import Places
from precache.pictures import images, jpeg
from precache.pictures.jpeg import Pixels
from precache.pictures.reading import MAX_PIXELS
from precache.storage import open_regular, read_descriptor_at

_KEPT_PLACES = 1024  # shards: 16 bytes a sample


@dataclass(frozen=True, slots=True)
class Encoded:
    """A picture that was read.

    Attributes:
        path: of its file, or its name, for messages.
        shape: height and width of the upright picture, as its header, or the index, says.
        error: why it cannot be decoded, where that is known already.
        channels: of a sample of a shard; None: of a file, which becomes RGB.
    """

    path: str
    data: bytes
    shape: tuple[int, int]
    error: ImageError | None = None
    channels: int | None = None

    def decode(self) -> Pixels:
        """uint8 [height, width, channels].

        Raises:
            ImageError: it cannot be decoded; names `path` and the reason.
        """
        if self.error is not None:
            raise self.error
        if self.channels is None:
            pixels = images.decode_pixels(self.data, self.path)
        else:
            pixels = jpeg.decode_jpeg(self.data, self.path, self.channels)
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
            return type(error)(error.path, error.reason, remedy=error.remedy)

    def is_plain(self) -> bool:
        """Whether other decoders make the reference's RGB of this: a whole JPEG in grey or YCbCr.

        It is upright, or turned by EXIF alone.
        """
        if self.error is not None or not self.data.startswith(jpeg.START) or jpeg.is_truncated(self.data):
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
        return orientation == 1 or (orientation > 0 and jpeg.XMP not in self.data)


def read(path: str) -> Encoded:
    """The picture at `path`; one that cannot be decoded says so when it is.

    Raises:
        SourceError: it cannot be read, which says nothing about the picture.
    """
    try:
        data = images.read_bytes(path)
        return Encoded(path, data, images.upright_shape(data, path))
    except ImageError as error:
        copy = type(error)(error.path, error.reason, remedy=error.remedy)  # without its traceback
        return Encoded(path, b"", (1, 1), copy)


Asked: TypeAlias = tuple[Request, list[Encoded]]
"""A request with its pictures."""


def to_fill(request: Request, pictures: list[Encoded]) -> Pictures:
    """What fills the batch of a request."""
    shapes = np.array([picture.shape for picture in pictures], np.int64).reshape(-1, 2)
    return Pictures(request, lambda slot: pictures[slot].decode(), shapes)


class EncodedPictures:
    """The pictures of a split as they are stored, compared: files, or samples of shards that hold JPEGs.

    Each shard is read whole; or, shuffled `full`, samples.

    Attributes:
        random_access: as of a `Reader`.
        pool: threads that read; for other work on pictures, too.
    """

    def __init__(self, spec: LoaderSpec, data: SplitData, threads: int) -> None:
        self.pool = Pool(max(1, threads), "read")
        self.random_access = data.kind == RAW
        self._data = data
        self._check = SampleCheck(data, spec.reading.check)
        self._window_shards = data.window_shards(spec.reading.memory_bytes)
        self._at_random = spec.shuffle == "full"
        self._places: dict[int, Places] = {}

    def read(self, requests: Iterator[Request]) -> Generator[Asked, None, None]:
        """Yield each request with its pictures, in order.

        Raises:
            SourceError: a file of the tree cannot be read.
            DatasetError: a shard is missing, damaged, or holds other samples than the index says.
        """
        if not (self.random_access or self._at_random):
            yield from self._read_whole(requests)
            return
        for request in requests:
            if self.random_access:
                files = [self._data.files[position] for position in request.positions.tolist()]
                yield request, self.pool.map(read, files)
                continue
            try:
                pictures = self._read_alone(request)
            except (ValueError, OSError, DatasetError):  # who reads the whole shard says what is wrong
                yield from self._read_whole(iter([request]))
            else:
                yield request, pictures

    def _read_whole(self, requests: Iterator[Request]) -> Iterator[Asked]:
        with ExitStack() as at_end:
            for request, shards in look_ahead(
                self._data, requests, self._window_shards, self._open, lambda samples: None, at_end
            ):
                indexes, rows = (found.tolist() for found in self._data.locate(request.positions))
                samples = [shards[index][row] for index, row in zip(indexes, rows, strict=True)]
                yield request, self._compared(request, indexes, samples)

    def _compared(self, request: Request, indexes: list[int], samples: list[StoredSample]) -> list[Encoded]:
        """Samples of the shards of these `indexes`."""
        shapes, compared = self._data.shapes_at(request.positions).tolist(), []
        asked = zip(request.positions.tolist(), indexes, samples, shapes, strict=True)
        for position, index, sample, (height, width) in asked:
            error = None
            try:
                self._check.compare(position, sample.data, sample.damage)
            except ImageError as wrong:
                error = type(wrong)(
                    wrong.path, wrong.reason, remedy=wrong.remedy
                )  # without what its traceback holds
            assert isinstance(sample.data, bytes)
            path = f"{self._data.files[index]}: sample {sample.id}"
            compared.append(Encoded(path, sample.data, (height, width), error, self._data.channels))
        return compared

    def _open(self, index: int) -> Mapping[int, StoredSample]:
        """The samples of shard `index` by their rows."""
        return self._data.read(index, partial(self._read_shard, index))

    def _read_shard(self, index: int, path: Path) -> Mapping[int, StoredSample]:
        self._check.open_file(index)
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

    def _read_alone(self, request: Request) -> list[Encoded]:
        """Each sample by its place in its shard; ValueError where another one lies there."""
        indexes, rows = self._data.locate(request.positions)
        found: dict[int, StoredSample] = {}
        for index in np.unique(indexes).tolist():
            slots = np.flatnonzero(indexes == index).tolist()
            with self._data.local_shard(index) as path, open_regular(path) as file:
                if index not in self._places:
                    self._places[index] = self._find(index)
                wanted = self._places[index][rows[slots]].tolist()
                for start, size in wanted if hasattr(os, "posix_fadvise") else ():
                    # of all at a time: each read alone would wait for the disk
                    os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_WILLNEED)
                for slot, (start, size) in zip(slots, wanted, strict=True):
                    content = read_descriptor_at(file.fileno(), start, size)
                    found[slot] = FORMATS[self._data.kind].read_sample(content)
        samples = [found[slot] for slot in range(len(indexes))]
        if [sample.id for sample in samples] != self._data.ids[request.positions].tolist():
            raise ValueError("other samples")
        return self._compared(request, indexes.tolist(), samples)

    def _find(self, index: int) -> Places:
        """Where the samples of shard `index` lie."""
        while len(self._places) >= _KEPT_PLACES:
            del self._places[next(iter(self._places))]
        with self._data.local_shard(index, with_index=True) as path:
            self._check.open_file(index)
            # of a part of a shard, too: its index is that of the shard
            whole = path.with_name(Path(self._data.whole.files[index]).name)
            places = FORMATS[self._data.kind].find_samples(whole)
        if len(places) != self._data.whole.shard_samples[index]:
            raise ValueError("an index of other samples")
        return places


class ThreadsReader:
    """Backend `webdataset`, and `pytorch` without worker processes: threads read, decode and resize.

    What they call for that releases the interpreter's lock.
    """

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        threads = spec.threads if data.kind == RAW else spec.workers
        self._encoded = EncodedPictures(spec, data, threads)
        self.random_access = self._encoded.random_access
        self._filler = BatchFiller(data, crops, spec.batch_size, threads, spec.device)

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        with closing(self._encoded.read(requests)) as asked:
            yield from self._filler.fill_each(to_fill(*each) for each in asked)

    def close(self) -> None:
        """End the threads."""
        self._filler.close()
        self._encoded.pool.close()
