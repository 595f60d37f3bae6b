"""Read, compare and decode pictures of a raw tree, and JPEGs in shards."""

import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import simplejpeg

from loaders.augment.crops import Crops
from loaders.batch import DecodedBatch, Request
from loaders.dataset import RAW, SplitData
from loaders.read.filler import BatchFiller, Pictures
from loaders.read.integrity import SampleCheck, check_index
from loaders.read.opening import OpenShards
from loaders.settings import LoaderSpec
from loaders.threads import Pool
from precache.errors import DatasetError, ImageError
from precache.formats import FORMATS, StoredSample
from precache.pictures import images, jpeg
from precache.pictures.jpeg import Pixels
from precache.pictures.reading import MAX_PIXELS
from precache.storage import open_regular, read_descriptor_at


@dataclass(frozen=True, slots=True)
class Encoded:
    """A picture that was read and not decoded yet.

    Attributes:
        path: path of its file, or the shard's path and the sample's id; for messages.
        data: its encoded bytes.
        shape: height and width of the upright picture, according to its header or the index.
        error: the reason why it cannot be decoded, where that is known already.
        channels: channels of a shard's sample; None: a file of a raw tree, which becomes RGB.
    """

    path: str
    data: bytes
    shape: tuple[int, int]
    error: ImageError | None = None
    channels: int | None = None

    def decode(self) -> Pixels:
        """Decode it to uint8 [height, width, channels].

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
                f"is {columns}x{rows}, expected {width}x{height}",
                remedy="run 'precache verify' on its dataset, or store it anew",
            )
        return pixels

    def try_decode(self) -> Pixels | ImageError:
        """Decode it, or return the error that `decode` raises."""
        try:
            return self.decode()
        except ImageError as error:
            return copy(error)  # without its traceback, which would keep alive what its frames hold

    def is_plain(self) -> bool:
        """Whether other decoders agree with `pictures.images` on it: a complete JPEG in grey or YCbCr.

        Such a JPEG is upright, or turned by its EXIF orientation alone.
        """
        if self.error is not None or not self.data.startswith(jpeg.START) or jpeg.is_truncated(self.data):
            return False
        try:
            height, width, colorspace, _ = simplejpeg.decode_jpeg_header(self.data)
            if height * width > MAX_PIXELS or colorspace not in ("Gray", "YCbCr"):
                return False
            orientation = jpeg.orientation(self.data)
        except Exception:  # `decode` says what is wrong with it
            return False
        # EXIF orientations 5 to 8 swap height and width.
        upright_shape = (height, width) if orientation < 5 else (width, height)
        if upright_shape != self.shape:  # `decode` says so
            return False
        return orientation == 1 or (orientation > 0 and jpeg.XMP not in self.data)


def read(path: str) -> Encoded:
    """Read the picture at `path`; one that cannot be decoded has its error, which `decode` raises.

    Raises:
        SourceError: the file cannot be read, which says nothing about the picture.
    """
    try:
        data = images.read_bytes(path)
        return Encoded(path, data, images.upright_shape(data, path))
    except ImageError as error:
        return Encoded(path, b"", (1, 1), copy(error))  # without its traceback


EncodedBatch: TypeAlias = tuple[Request, list[Encoded]]
"""A request with its pictures."""


def make_pictures(request: Request, pictures: list[Encoded]) -> Pictures:
    """Describe to a `BatchFiller` how to decode the pictures of a request."""
    shapes = np.array([picture.shape for picture in pictures], np.int64).reshape(-1, 2)
    return Pictures(request, lambda slot: pictures[slot].decode(), shapes)


class EncodedPictures:
    """Reads the encoded pictures of a split, and compares them: files, or JPEGs in shards.

    Shards are read whole; in a full shuffle, sample by sample.

    Attributes:
        random_access: whether any order is as good as the stored one.
        pool: threads that read, and that may be used for other work on pictures.
    """

    def __init__(self, spec: LoaderSpec, data: SplitData, threads: int) -> None:
        self.pool = Pool(max(1, threads), "read")
        self._reads_here = threads == 1  # to hand a file over to the only thread would cost, and gain nothing
        self.random_access = data.kind == RAW
        self._data = data
        self._check = SampleCheck(data, spec.reading.check)
        self._window_shards = data.window_shards(spec.reading.memory_bytes)
        self._at_random = spec.shuffle == "full" and (data.kind == RAW or FORMATS[data.kind].has_byte_ranges)
        self._measured: set[int] = set()  # shards whose size was compared with the manifest

    def read(self, requests: Iterator[Request]) -> Generator[EncodedBatch, None, None]:
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
                yield request, [*map(read, files)] if self._reads_here else self.pool.map(read, files)
                continue
            try:
                pictures = self._read_samples(request)
            except (ValueError, OSError, DatasetError):
                # Read the whole shards instead: that serves the samples, or finds out what is wrong.
                yield from self._read_whole(iter([request]))
            else:
                yield request, pictures

    def _read_whole(self, requests: Iterator[Request]) -> Iterator[EncodedBatch]:
        shards = OpenShards.in_windows(self._data, self._window_shards, self._open, lambda samples: None)
        with closing(shards):
            for request, rows in shards.read(requests):
                yield request, self._compare(request, [samples[row] for samples, row in rows])

    def _compare(self, request: Request, samples: list[StoredSample]) -> list[Encoded]:
        """Compare the samples of a request with their checksums."""
        shard_numbers = self._data.locate(request.positions)[0].tolist()
        shapes = self._data.shapes_at(request.positions).tolist()
        ids = self._data.ids[request.positions].tolist()
        positions, pictures = request.positions.tolist(), []
        for position, sample_id, number, sample, (height, width) in zip(
            positions, ids, shard_numbers, samples, shapes, strict=True
        ):
            error = None
            try:
                self._check.compare(position, sample.data, sample.damage)
            except ImageError as wrong:
                error = copy(wrong)  # without its traceback
            assert isinstance(sample.data, bytes)
            path = f"{self._data.files[number]}: sample {sample_id}"
            pictures.append(Encoded(path, sample.data, (height, width), error, self._data.channels))
        return pictures

    def _open(self, number: int) -> Mapping[int, StoredSample]:
        """Read shard `number`: its samples by their rows."""
        return self._data.read(number, partial(self._read_shard, number))

    def _read_shard(self, number: int, path: Path) -> Mapping[int, StoredSample]:
        self._check.compare_size(number)
        if number in self._data.shard_parts:
            return self._data.shard_parts[number].read(path)
        samples = list(FORMATS[self._data.kind].read_shard(path))
        whole = self._data.whole
        stored = whole.shard_positions(number)
        ids, labels = whole.ids[stored], whole.labels[stored]
        for row, sample in enumerate(samples[: len(ids)]):
            if sample.damage:  # its own id and label may be damaged, too: those of the index are right
                samples[row] = replace(sample, id=int(ids[row]), label=int(labels[row]))
        check_index(self._data, number, [s.id for s in samples], [s.label for s in samples])
        return dict(enumerate(samples))

    def _read_samples(self, request: Request) -> list[Encoded]:
        """Read single samples, each by its byte range in its shard.

        Raises:
            ValueError: another sample lies there.
        """
        shards = self._data.locate(request.positions)[0]
        byte_ranges = self._data.index.byte_ranges[request.positions].tolist()
        samples_by_slot: dict[int, StoredSample] = {}
        for number in np.unique(shards).tolist():
            slots = np.flatnonzero(shards == number).tolist()
            with self._data.local_shard(number) as path, open_regular(path) as file:
                if number not in self._measured:
                    self._check.compare_size(number)
                    self._measured.add(number)
                if hasattr(os, "posix_fadvise"):
                    # Announced together: otherwise each read waits for the disk in its turn.
                    for start, size in (byte_ranges[slot] for slot in slots):
                        os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_WILLNEED)
                for slot in slots:
                    start, size = byte_ranges[slot]
                    content = read_descriptor_at(file.fileno(), start, size)
                    samples_by_slot[slot] = FORMATS[self._data.kind].read_sample(content)
        samples = [samples_by_slot[slot] for slot in range(len(shards))]
        if [sample.id for sample in samples] != self._data.stored_ids(request.positions).tolist():
            raise ValueError("other samples")
        return self._compare(request, samples)


class ThreadsReader:
    """Backend `webdataset`, and `pytorch` without worker processes: threads read, decode and resize.

    They run in parallel, because reading, decoding and resizing release the interpreter's lock.
    """

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        threads = spec.threads if data.kind == RAW else spec.workers
        self._encoded = EncodedPictures(spec, data, threads)
        self.random_access = self._encoded.random_access
        self._filler = BatchFiller(data, crops, spec.batch_size, threads, spec.device)

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        with closing(self._encoded.read(requests)) as batches:
            yield from self._filler.fill_each(
                make_pictures(request, pictures) for request, pictures in batches
            )

    def close(self) -> None:
        """End the threads."""
        self._filler.close()
        self._encoded.pool.close()
