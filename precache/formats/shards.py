"""Format `shards`: decoded pixels in safetensors files.

    byte 0      uint64 little-endian: length of the header, always 4,088
    byte 8      the header: JSON, padded with spaces
    byte 4096   images  uint8 [n, height, width, channels] with 1 channel (grey) or 3 (RGB). NHWC, so that a
                        permuted view is channels-last
    then        labels  int64 [n], little-endian
    then        ids     int64 [n], little-endian

If the pictures have sizes of their own:

    byte 4096   images  uint8 [bytes], one picture behind the other, then zeros up to a multiple of 8 bytes
    then        labels  int64 [n]
    then        ids     int64 [n]
    then        offsets int64 [n], index in `images` of each picture's first byte
    then        shapes  int32 [n, 2], height and width of each: images[offset:][: height * width * 3];
                        or int32 [n, 3], whose third column is the number of channels, in grey

A label is -1 where a sample has no class, or several; targets and fields are in the dataset's index alone.
Pixels start on a page boundary, which direct reads and mappings need.
Any safetensors reader opens these files: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from precache.errors import DatasetError, os_reason
from precache.formats.base import ByteRange, Format, Sample, StoredSample, shard_remedy
from precache.pictures.images import MAX_KEPT_SIDE, Size, sides
from precache.pictures.jpeg import Pixels
from precache.storage import open_regular
from precache.storage.output import OutputFile

Shapes: TypeAlias = npt.NDArray[np.int64]
SUFFIX = ".safetensors"
DATA_START = 4096
_TENSORS = (("images", "U8", 1), ("labels", "I64", 8), ("ids", "I64", 8))
_TENSORS_OF_VARYING = (*_TENSORS, ("offsets", "I64", 8), ("shapes", "I32", 4))


class ShardsWriter:
    """Writer of a shard: streams pixels, and keeps the arrays behind them in memory until `finish`."""

    def __init__(self, base: Path, count: int, size: Size | None) -> None:
        """Create the file that becomes `base` + '.safetensors'; arguments as of `ShardWriter`."""
        self._size, self._channels = size, 3
        self._labels: list[int] = []
        self._ids: list[int] = []
        self._shapes: list[tuple[int, ...]] = []
        self._file = OutputFile(base.with_name(base.name + SUFFIX))
        # replaced by `finish` if pictures are rejected, are grey, or vary in size
        self._first_header = _header(_images_shape(count, size, 3), count, 3)
        self._file.write(self._first_header)

    def add(self, sample: Sample) -> ByteRange:
        """Write one more sample, and return the bytes of its pixels."""
        pixels = np.ascontiguousarray(sample.data)
        start = self._file.bytes
        self._file.write(pixels.data)
        self._labels.append(sample.label)
        self._ids.append(sample.id)
        self._shapes.append(pixels.shape)
        self._channels = pixels.shape[2]
        return start, pixels.nbytes

    def finish(self) -> list[OutputFile]:
        """Write the arrays behind the pixels, and close the file, which is not durable yet."""
        count, channels = len(self._ids), self._channels
        images_shape = _images_shape(count, self._size, channels)
        with self._file as file:
            if self._size is None:
                shapes = np.array(self._shapes, np.int64).reshape(-1, 3)
                offsets, end = _offsets(shapes, channels)
                images_shape = [-(-end // 8) * 8]
                file.write(bytes(images_shape[0] - end))
            file.write(np.array(self._labels, "<i8").tobytes())
            file.write(np.array(self._ids, "<i8").tobytes())
            if self._size is None:
                file.write(offsets.astype("<i8").tobytes())
                file.write(shapes[:, : _shapes_columns(channels)].astype("<i4").tobytes())
            header = _header(images_shape, count, channels)
            if header != self._first_header:
                file.replace_start(self._first_header, header)
        return [self._file]

    def abandon(self) -> None:
        """Remove what was written; also after `finish` has raised."""
        self._file.abandon()


def read_shard(path: Path) -> Iterator[StoredSample]:
    """Yield the samples of the shard at `path`, in stored order."""
    with ShardFile(path) as shard:
        for row in range(len(shard.ids)):
            yield StoredSample(int(shard.ids[row]), int(shard.labels[row]), shard.read_picture(row))


class ShardFile:
    """Open shard; several threads may read it at a time.

    Attributes:
        bytes: size of the file.
        channels: number of channels of all pictures.
        shapes: int64 [n, 2], height and width of each picture in pixels.
        starts: int64 [n], first byte of each picture in the file.
        labels: int64 [n], class of each sample, or -1.
        ids: int64 [n], id of each sample.
    """

    def __init__(self, path: Path) -> None:
        """Open the shard at `path`.

        Raises:
            DatasetError: the file is missing, truncated, or of another form.
        """
        self.path = path
        try:
            self._file = open_regular(path)
        except OSError as error:
            raise DatasetError(
                f"cannot be opened ({os_reason(error)})", path=path, remedy=shard_remedy(path)
            ) from error
        try:
            self.bytes = file_bytes = os.fstat(self._file.fileno()).st_size
            start = bytearray(min(DATA_START, file_bytes))
            self._read(memoryview(start), 0)
            header = _read_header(path, bytes(start), file_bytes)
            count, images_shape = header.samples, header.images_shape
            images_end = DATA_START + math.prod(images_shape)
            tail = memoryview(bytearray(file_bytes - images_end))
            self._read(tail, images_end)
            self.labels, self.ids = (
                np.frombuffer(tail[: 16 * count], "<i8").reshape(2, count).astype(np.int64)
            )
            if len(images_shape) == 1:
                self.shapes, self.channels = _read_shapes(path, tail[16 * count :], count, images_shape[0])
            else:
                self.shapes = np.tile(np.array(images_shape[1:3], np.int64), (count, 1))
                self.channels = header.channels
            self.starts = picture_starts(self.shapes, self.channels)
        except BaseException:
            self._file.close()
            raise

    def read_picture(self, sample: int) -> Pixels:
        """Read picture `sample`, uint8 [height, width, channels].

        Raises:
            DatasetError: the file has become shorter, or cannot be read.
        """
        pixels = np.empty((*self.shapes[sample], self.channels), np.uint8)
        self._read(pixels.data.cast("B"), int(self.starts[sample]))
        return pixels

    @property
    def descriptor(self) -> int:
        """Descriptor of the open file."""
        return self._file.fileno()

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def __enter__(self) -> "ShardFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self, out: memoryview, start: int) -> None:
        """Fill `out` with the bytes from `start` on."""
        done = self.read_some(out, start)
        while done < len(out):  # a signal or the end of the file cut the read short
            more = self.read_some(out[done:], start + done)
            if more == 0:
                raise DatasetError(
                    f"breaks off at byte {start + done:,} (truncated since it was opened?)",
                    path=self.path,
                    remedy=shard_remedy(self.path),
                )
            done += more

    def read_some(self, out: memoryview, start: int) -> int:
        """Read bytes from `start` on into `out`, and return their number; 0 at the end of the file.

        Raises:
            DatasetError: the file cannot be read.
        """
        try:
            return os.preadv(self._file.fileno(), (out,), start)
        except OSError as error:
            raise DatasetError(
                f"cannot be read ({os_reason(error)})", path=self.path, remedy=shard_remedy(self.path)
            ) from error


def picture_starts(shapes: Shapes, channels: int) -> Shapes:
    """Compute the first byte in a shard of each picture, int64 [n], of these `shapes`, int64 [n, 2]."""
    return DATA_START + _offsets(shapes, channels)[0]


def _offsets(shapes: Shapes, channels: int) -> tuple[Shapes, int]:
    """Compute the first byte of each picture in `images`, int64 [n], and the end of the last picture."""
    ends = np.cumsum(shapes[:, 0] * shapes[:, 1] * channels)
    return np.concatenate(([0], ends[:-1]))[: len(ends)], int(ends[-1]) if len(ends) else 0


def _images_shape(count: int, size: Size | None, channels: int) -> list[int]:
    """Shape of the tensor `images`; [0] if `size` is None, since the pictures' sizes are not known yet."""
    return [0] if size is None else [count, *sides(size), channels]


def _shapes_columns(channels: int) -> int:
    """Number of columns of the tensor `shapes`."""
    return 2 if channels == 3 else 3


def _header(images_shape: list[int], count: int, channels: int) -> bytes:
    """Make the first 4,096 bytes of a shard: the length of the header, and the header."""
    tensors = _TENSORS_OF_VARYING if len(images_shape) == 1 else _TENSORS
    shapes = {"images": images_shape, "shapes": [count, _shapes_columns(channels)]}
    header: dict[str, Any] = {}
    start = 0
    for name, kind, width in tensors:
        shape = shapes.get(name, [count])
        stop = start + math.prod(shape) * width
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    body = json.dumps(header, separators=(",", ":")).encode().ljust(DATA_START - 8)
    return struct.pack("<Q", len(body)) + body


class _ShardHeader(NamedTuple):
    """Values of a shard's header; `channels` is 0 where the tensor `shapes` has the number of channels."""

    images_shape: list[int]
    samples: int
    channels: int


def _parse_header(start: bytes) -> _ShardHeader | None:
    """Parse the first 4,096 bytes of a shard; None unless they are as `_header` makes them."""
    try:
        header = json.loads(start[8:])
        shape, count = header["images"]["shape"], header["ids"]["shape"][0]
        if not all(type(side) is int and side >= 0 for side in (*shape, count)):
            return None
        if len(shape) == 1:
            channels = 3 if header["shapes"]["shape"][1] == 2 else 0
        else:
            channels = shape[3]
            if len(shape) != 4 or shape[0] != count or min(shape[1:]) == 0:
                return None
        if start != _header(shape, count, channels):
            return None
    except (ValueError, LookupError, TypeError, RecursionError, struct.error):
        return None
    return _ShardHeader(shape, count, channels)


def _read_header(path: Path, start: bytes, file_bytes: int) -> _ShardHeader:
    """Parse a shard's first 4,096 bytes; DatasetError if they are damaged, or the file has another size."""
    header = _parse_header(start)
    if header is None:
        raise DatasetError(
            "not a shard of this format (its header is damaged)", path=path, remedy=shard_remedy(path)
        )
    sample_bytes = 16  # of label and id
    if len(header.images_shape) == 1:
        sample_bytes += 8 + 4 * _shapes_columns(header.channels)  # of offset and shape
    expected_bytes = DATA_START + math.prod(header.images_shape) + header.samples * sample_bytes
    if file_bytes != expected_bytes:
        raise DatasetError(
            f"expected {expected_bytes:,} bytes, got {file_bytes:,} (truncated?)",
            path=path,
            remedy=shard_remedy(path),
        )
    return header


def _read_shapes(path: Path, tail: memoryview, count: int, images_bytes: int) -> tuple[Shapes, int]:
    """Parse the tensors `offsets` and `shapes`: height and width, int64 [n, 2], and number of channels.

    Raises:
        DatasetError: the tensors contradict each other, or the bytes of all pictures.
    """
    offsets = np.frombuffer(tail[: 8 * count], "<i8")
    columns = len(tail[8 * count :]) // (4 * count) if count else 2
    shapes = np.frombuffer(tail[8 * count :], "<i4").reshape(count, columns).astype(np.int64)
    channels = 3 if shapes.shape[1] == 2 else int(shapes[:1, 2].sum())
    expected, end = _offsets(shapes, channels)
    fits = 0 <= images_bytes - end < 8 and np.array_equal(offsets, expected)
    if not fits or (shapes < 1).any() or (shapes > MAX_KEPT_SIDE).any() or (shapes[:, 2:] != channels).any():
        raise DatasetError(
            "its offsets do not fit its pictures (damaged?)", path=path, remedy=shard_remedy(path)
        )
    return shapes[:, :2], channels


FORMAT = Format(
    suffix=SUFFIX,
    index_suffix=None,
    writer=ShardsWriter,
    read_shard=read_shard,
    holds_pixels=True,
    backend="shards",
    bytes_per_sample=16,  # label and id
    bytes_per_shard=DATA_START,
    # copied, because an array over bytes is read-only
    read_sample=lambda stored: StoredSample(-1, -1, np.frombuffer(stored, np.uint8).copy()),
)
