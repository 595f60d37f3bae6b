"""Format `shards`: decoded pixels in safetensors files.

    byte 0      uint64 little-endian: length of the header, always 4,088
    byte 8      the header: JSON, padded with spaces
    byte 4096   images  uint8 [n, height, width, channels] (NHWC: permuted, it is channels-last), where
                        channels are 1, grey, 3, RGB, or 4, RGBA; or uint16, little-endian, in grey
    then        labels  int64 [n], little-endian
    then        ids     int64 [n], little-endian

Where each picture has a size of its own:

    byte 4096   images  uint8 or uint16 [values], one picture behind the other, then zeros up to a multiple of
                        8 values
    then        labels  int64 [n]
    then        ids     int64 [n]
    then        offsets int64 [n], where in `images` each picture begins
    then        shapes  int32 [n, 2], height and width of each: images[offset:][: height * width * 3];
                        or int32 [n, 3] with the channels of each, where there are not three

Where there are masks (see `precache.pictures.masks`), then, behind all these:

    then        masks   uint8 [n, height, width], or [bytes] where each has a size of its own

A label is -1 where a sample has not just one class; targets and fields are in the dataset's index alone.
Pixels start on a page boundary, as direct reads and mappings want it.
Any safetensors reader opens these files: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from precache.errors import DatasetError, os_reason
from precache.formats.base import Format, Places, Sample, StoredSample, open_shard, shard_remedy
from precache.pictures.images import MAX_KEPT_SIDE
from precache.pictures.jpeg import Pixels
from precache.pictures.sizes import Size, sides
from precache.storage.output import OutputFile

Shapes: TypeAlias = npt.NDArray[np.int64]
SUFFIX = ".safetensors"
DATA_START = 4096
_DTYPES = {1: "U8", 2: "U16"}
_TENSORS = (("labels", "I64", 8), ("ids", "I64", 8))
_MASKS = ("masks", "U8", 1)
_TENSORS_OF_VARYING = (*_TENSORS, ("offsets", "I64", 8), ("shapes", "I32", 4))


class ShardsWriter:
    """Writes a shard: pixels are streamed, and what follows them is kept in memory until `finish`."""

    def __init__(self, base: Path, count: int, size: Size | None) -> None:
        """Begin `base` + '.safetensors' beside; see `ShardWriter`."""
        self._size, self._channels, self._dtype = size, 3, np.dtype(np.uint8)
        self._labels: list[int] = []
        self._ids: list[int] = []
        self._shapes: list[tuple[int, ...]] = []
        self._masks: list[Pixels] = []
        self._file = OutputFile(base.with_name(base.name + SUFFIX))
        # right unless pictures are rejected, or vary in size; else it is replaced at the end
        self._first_header = _header(_images_shape(count, size, 3), count, 3, self._dtype)
        self._file.write(self._first_header)

    def add(self, sample: Sample) -> None:
        """See `ShardWriter`."""
        pixels = np.ascontiguousarray(sample.data)
        self._file.write(pixels.data)
        self._labels.append(sample.label)
        self._ids.append(sample.id)
        self._shapes.append(pixels.shape)
        self._channels, self._dtype = pixels.shape[2], pixels.dtype
        if sample.mask is not None:
            self._masks.append(sample.mask)

    def finish(self) -> list[OutputFile]:
        """See `ShardWriter`."""
        count, channels = len(self._ids), self._channels
        images_shape = _images_shape(count, self._size, channels)
        with self._file as file:
            if self._size is None:
                shapes = np.array(self._shapes, np.int64).reshape(-1, 3)
                offsets, values = _offsets(shapes, channels)
                images_shape = [-(-values // 8) * 8]
                file.write(bytes((images_shape[0] - values) * self._dtype.itemsize))
            file.write(np.array(self._labels, "<i8").tobytes())
            file.write(np.array(self._ids, "<i8").tobytes())
            if self._size is None:
                file.write(offsets.astype("<i8").tobytes())
                file.write(shapes[:, : _columns(channels)].astype("<i4").tobytes())
            for mask in self._masks:
                file.write(mask.data)
            masks_bytes = sum(mask.nbytes for mask in self._masks)
            header = _header(images_shape, count, channels, self._dtype, masks_bytes)
            if header != self._first_header:
                file.replace_start(self._first_header, header)
        return [self._file]

    def abandon(self) -> None:
        """See `ShardWriter`."""
        self._file.abandon()


def read_shard(path: Path) -> Iterator[StoredSample]:
    """The samples of a shard in stored order."""
    with ShardFile(path) as shard:
        for row in range(len(shard.ids)):
            pixels = shard.read_picture(row)
            mask = shard.read_mask(row) if shard.has_masks else None
            yield StoredSample(int(shard.ids[row]), int(shard.labels[row]), pixels, mask=mask)


def find_samples(path: Path) -> Places:
    """Where in the shard at `path` its pictures lie."""
    with ShardFile(path) as shard:
        return np.array([shard._place(row) for row in range(len(shard.ids))], np.int64).reshape(-1, 2)


class ShardFile:
    """An open shard; several threads may read it at a time.

    Attributes:
        bytes: size of the file.
        channels: of all pictures.
        dtype: of their values.
        shapes: int64 [n, 2], height and width of each picture in pixels.
        starts: int64 [n], the byte of the file where each picture begins.
        labels: int64 [n].
        ids: int64 [n].
        has_masks: whether it holds some.
    """

    def __init__(self, path: Path) -> None:
        """Open the shard at `path`.

        Raises:
            DatasetError: missing, truncated or not such a file; names the path and the bytes.
        """
        self.path = path
        self._file = open_shard(path)
        try:
            self.bytes = file_bytes = os.fstat(self._file.fileno()).st_size
            start = bytearray(min(DATA_START, file_bytes))
            self._read(memoryview(start), 0)
            images_shape, count, self.channels, self.dtype, masks_bytes = _read_header(
                path, bytes(start), file_bytes
            )
            self.has_masks = masks_bytes > 0
            images_end = DATA_START + math.prod(images_shape) * self.dtype.itemsize
            tail = memoryview(bytearray(file_bytes - masks_bytes - images_end))
            self._read(tail, images_end)
            self.labels, self.ids = (
                np.frombuffer(tail[: 16 * count], "<i8").reshape(2, count).astype(np.int64)
            )
            if len(images_shape) == 1:
                self.shapes, self.channels = _read_shapes(path, tail[16 * count :], count, images_shape[0])
            else:
                self.shapes = np.tile(np.array(images_shape[1:3], np.int64), (count, 1))
            self._pixel_bytes = self.channels * self.dtype.itemsize
            self.starts = picture_starts(self.shapes, self._pixel_bytes)
            self._mask_ends = file_bytes - masks_bytes + np.cumsum(self.shapes.prod(axis=1))
            if self.has_masks and self._mask_ends[-1:].sum() != file_bytes:
                raise DatasetError(
                    f"{path}: its masks do not fit its pictures (damaged?); {shard_remedy(path)}"
                )
        except BaseException:
            self._file.close()
            raise

    def read_picture(self, sample: int) -> npt.NDArray[Any]:
        """A copy of picture `sample`, [height, width, channels] of `dtype`.

        Raises:
            DatasetError: the file became shorter, or cannot be read.
        """
        pixels = np.empty((*self.shapes[sample], self.channels), self.dtype)
        self._read(pixels.data.cast("B"), int(self.starts[sample]))
        return pixels

    def read_mask(self, row: int) -> Pixels:
        """The mask of picture `row`, where there are masks; DatasetError as of `read_picture`."""
        mask = np.empty(self.shapes[row], np.uint8)
        self._read(mask.data.cast("B"), int(self._mask_ends[row]) - mask.nbytes)
        return mask

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

    def _place(self, sample: int) -> tuple[int, int]:
        """Where picture `sample` begins, and how many bytes it has."""
        height, width = self.shapes[sample].tolist()
        return int(self.starts[sample]), height * width * self._pixel_bytes

    def _read(self, out: memoryview, start: int) -> None:
        """Fill `out` with the bytes from `start` on."""
        done = self.read_some(out, start)
        while done < len(out):  # a signal or the end of the file cut the read short
            more = self.read_some(out[done:], start + done)
            if more == 0:
                raise DatasetError(
                    f"{self.path}: breaks off at byte {start + done:,} (truncated since it was opened?); "
                    f"{shard_remedy(self.path)}"
                )
            done += more

    def read_some(self, out: memoryview, start: int) -> int:
        """How many bytes from `start` on were read into `out`; 0 at the end of the file.

        Raises:
            DatasetError: the file cannot be read.
        """
        try:
            return os.preadv(self._file.fileno(), (out,), start)
        except OSError as error:
            raise DatasetError(
                f"{self.path}: cannot be read ({os_reason(error)}); {shard_remedy(self.path)}"
            ) from error


def picture_starts(shapes: Shapes, pixel_bytes: int) -> Shapes:
    """int64 [n], the byte of a shard where each of its pictures of these `shapes`, int64 [n, 2], begins."""
    return DATA_START + _offsets(shapes, pixel_bytes)[0]


def _offsets(shapes: Shapes, channels: int) -> tuple[Shapes, int]:
    """int64 [n], where in `images` each picture begins, and where the last one ends."""
    ends = np.cumsum(shapes[:, 0] * shapes[:, 1] * channels)
    return np.concatenate(([0], ends[:-1]))[: len(ends)], int(ends[-1]) if len(ends) else 0


def _images_shape(count: int, size: Size | None, channels: int) -> list[int]:
    """Of the tensor `images`; of one whose bytes are not known yet if `size` is None."""
    return [0] if size is None else [count, *sides(size), channels]


def _columns(channels: int) -> int:
    """Of the tensor `shapes`."""
    return 2 if channels == 3 else 3


def _header(
    images_shape: list[int], count: int, channels: int, dtype: np.dtype[Any], masks_bytes: int = 0
) -> bytes:
    masks_shape = [masks_bytes] if len(images_shape) == 1 else images_shape[:3]
    shapes = {"images": images_shape, "shapes": [count, _columns(channels)], "masks": masks_shape}
    header: dict[str, Any] = {}
    start = 0
    others = _TENSORS_OF_VARYING if len(images_shape) == 1 else _TENSORS
    images = ("images", _DTYPES[dtype.itemsize], dtype.itemsize)
    for name, kind, width in (images, *others, *([_MASKS] if masks_bytes else [])):
        shape = shapes.get(name, [count])
        stop = start + math.prod(shape) * width
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    body = json.dumps(header, separators=(",", ":")).encode().ljust(DATA_START - 8)
    return struct.pack("<Q", len(body)) + body


def _read_header(path: Path, start: bytes, file_bytes: int) -> tuple[list[int], int, int, np.dtype[Any], int]:
    """Shape of `images`, number, channels and dtype of pictures, bytes of masks; from a file's start."""
    try:
        header = json.loads(start[8:])
        shape, count = header["images"]["shape"], header["ids"]["shape"][0]
        dtype = np.dtype({"U8": "u1", "U16": "<u2"}[header["images"]["dtype"]])
        whole = all(type(side) is int and side >= 0 for side in (*shape, count))
        if len(shape) == 1:  # then the first picture says how many channels, if there are not three
            channels, right = (3 if header["shapes"]["shape"][1] == 2 else 0), whole
        else:
            channels = shape[3]
            right = whole and shape[0] == count and min(shape[1:]) > 0 and len(shape) == 4
        masks_shape = header.get("masks", {"shape": [0]})["shape"]
        right = right and all(type(side) is int and side >= 0 for side in masks_shape)
        masks_bytes = math.prod(masks_shape)
        as_written = right and start == _header(shape, count, channels, dtype, masks_bytes)
    except (ValueError, LookupError, TypeError, RecursionError, struct.error):
        as_written = False
    if not as_written:
        raise DatasetError(
            f"{path}: not a shard of this format (its header is damaged); {shard_remedy(path)}"
        )
    behind = 24 + 4 * _columns(channels) if len(shape) == 1 else 16  # bytes of a picture besides its pixels
    expected_bytes: int = DATA_START + math.prod(shape) * dtype.itemsize + count * behind + masks_bytes
    if file_bytes != expected_bytes:
        raise DatasetError(
            f"{path}: expected {expected_bytes:,} bytes, got {file_bytes:,} (truncated?); "
            f"{shard_remedy(path)}"
        )
    return shape, count, channels, dtype, masks_bytes


def _read_shapes(path: Path, tail: memoryview, count: int, values: int) -> tuple[Shapes, int]:
    """int64 [n, 2], and the channels, from `offsets` and `shapes`; DatasetError unless both say the same."""
    offsets = np.frombuffer(tail[: 8 * count], "<i8")
    columns = len(tail[8 * count :]) // (4 * count) if count else 2
    shapes = np.frombuffer(tail[8 * count :], "<i4").reshape(count, columns).astype(np.int64)
    channels = 3 if shapes.shape[1] == 2 else int(shapes[:1, 2].sum())
    expected, end = _offsets(shapes, channels)
    fits = 0 <= values - end < 8 and np.array_equal(offsets, expected)
    if not fits or (shapes < 1).any() or (shapes > MAX_KEPT_SIDE).any() or (shapes[:, 2:] != channels).any():
        raise DatasetError(f"{path}: its offsets do not fit its pictures (damaged?); {shard_remedy(path)}")
    return shapes[:, :2], channels


FORMAT = Format(
    suffix=SUFFIX,
    index_suffix=None,
    writer=ShardsWriter,
    read_shard=read_shard,
    find_samples=find_samples,
    # a copy, since the original cannot be written to
    read_sample=lambda stored: StoredSample(-1, -1, np.frombuffer(stored, np.uint8).copy()),
    open_masks=ShardFile,
    annotations=lambda sample: b"",
    holds_pixels=True,
    bytes_per_sample=16,  # label and id
    bytes_per_shard=DATA_START,
)
