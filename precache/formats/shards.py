"""Format `shards`: decoded pixels in safetensors files.

    byte 0      uint64 little-endian: length of the header, always 4,088
    byte 8      the header: JSON, padded with spaces
    byte 4096   images  uint8 [n, size, size, 3], RGB (NHWC: permuted, it is channels-last)
    then        labels  int64 [n], little-endian
    then        ids     int64 [n], little-endian

Pixels start on a page boundary, as direct reads and mappings want it.
Any safetensors reader opens these files: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from precache.errors import DatasetError
from precache.formats.base import Format, Places, Sample, StoredSample, remedy
from precache.jpeg import Pixels
from precache.output import OutputFile, write_beside
from precache.storage import open_regular

SUFFIX = ".safetensors"
DATA_START = 4096
_CHUNK_BYTES = 128 * 1024
_PROBED_BYTES = 1024 * 1024  # in the cache or not as one: asking takes time, too
_Integer = TypeVar("_Integer", int, npt.NDArray[np.int64])
_TENSORS = (("images", "U8", 1), ("labels", "I64", 8), ("ids", "I64", 8))


def write_shard(base: Path, samples: Iterable[Sample], count: int, size: int) -> list[OutputFile]:
    """Write `base` + '.safetensors' beside; pixels stream through, only labels and ids are held."""
    path = base.with_name(base.name + SUFFIX)
    labels: list[int] = []
    ids: list[int] = []
    with write_beside(path) as file:
        file.write(_header(count, size))
        for sample in samples:
            file.write(np.ascontiguousarray(sample.data).data)
            labels.append(sample.label)
            ids.append(sample.id)
        file.write(np.array(labels, "<i8").tobytes())
        file.write(np.array(ids, "<i8").tobytes())
        if len(ids) < count:
            file.replace_start(_header(len(ids), size))
    return [file]


def read_shard(path: Path) -> Iterator[StoredSample]:
    """The samples of a shard in stored order."""
    with ShardFile(path) as shard:
        for row in range(len(shard.ids)):
            pixels = np.empty((shard.size, shard.size, 3), np.uint8)
            shard.read_rows(row, 0, pixels)
            yield StoredSample(int(shard.ids[row]), int(shard.labels[row]), pixels)


def find_samples(path: Path) -> Places:
    """Where in the shard at `path` its pictures lie."""
    with ShardFile(path) as shard:
        starts = shard.start_of(np.arange(len(shard.ids)))
        return np.stack((starts, np.full(len(starts), shard.size**2 * 3)), axis=1)


def read_sample(stored: bytes) -> StoredSample:
    """The pixels of one picture, uint8 [bytes]; the bytes do not say whose they are."""
    return StoredSample(-1, -1, np.frombuffer(stored, np.uint8).copy())  # or nobody may write to it


class ShardFile:
    """An open shard, read by position; several threads may do so at a time.

    Read, not mapped: where a file shrinks or its disk fails, touching a mapping ends the process (SIGBUS),
    a read raises.

    Attributes:
        size: side of the stored squares in pixels.
        labels: int64 [n].
        ids: int64 [n].
    """

    def __init__(self, path: Path) -> None:
        """Open the shard at `path`.

        Raises:
            DatasetError: missing, truncated or not such a file; names the path and the bytes.
        """
        self.path = path
        try:
            self._file = open(open_regular(path), "rb", buffering=0)  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise DatasetError(f"{path}: cannot be opened ({error.strerror}); {remedy(path)}") from error
        try:
            file_bytes = os.fstat(self._file.fileno()).st_size
            start = bytearray(min(DATA_START, file_bytes))
            self._read(memoryview(start), 0)
            count, self.size = _read_header(path, bytes(start), file_bytes)
            tail = bytearray(16 * count)
            self._read(memoryview(tail), file_bytes - len(tail))
        except DatasetError:
            self._file.close()
            raise
        self.labels, self.ids = np.frombuffer(tail, "<i8").reshape(2, count).astype(np.int64)

    def read_rows(self, sample: int, first: int, out: Pixels) -> None:
        """Read rows `first`, ... of picture `sample` into `out`: uint8 [rows, size, 3], contiguous.

        Raises:
            DatasetError: the file became shorter, or cannot be read.
        """
        self._read(out.data.cast("B"), self.start_of(sample) + first * self.size * 3)

    @property
    def descriptor(self) -> int:
        """Of the open file."""
        return self._file.fileno()

    def start_of(self, sample: _Integer) -> _Integer:
        """The byte of the file where picture `sample`, or each of an array of them, begins."""
        return sample * (self.size**2 * 3) + DATA_START

    def read_ahead(self) -> None:
        """Read what of the file is not in the system's cache, sequentially.

        Not by `posix_fadvise`: read like this, Linux caches the file in large folios, out of which rows
        are copied in half the time.
        """
        chunk = memoryview(bytearray(_CHUNK_BYTES))
        file_bytes = os.fstat(self.descriptor).st_size
        for start in range(0, file_bytes, _PROBED_BYTES):
            stop = min(start + _PROBED_BYTES, file_bytes)
            # not its ends: opening the file brought in those of the file
            if not _is_cached(self.descriptor, (start + stop) // 2):
                for place in range(start, stop, _CHUNK_BYTES):
                    self._read_some(chunk, place)

    def is_cached(self, sample: int) -> bool:
        """Whether the midst of picture `sample` is in the system's cache."""
        return _is_cached(self.descriptor, self.start_of(sample) + self.size**2 * 3 // 2)

    def will_need(self, sample: int) -> None:
        """Ask the system to fetch picture `sample` from the disk, without waiting for it."""
        if hasattr(os, "posix_fadvise"):
            square_bytes = self.size**2 * 3
            with suppress(OSError):  # whoever reads it says what is wrong
                os.posix_fadvise(self.descriptor, self.start_of(sample), square_bytes, os.POSIX_FADV_WILLNEED)

    def drop_cached(self) -> None:
        """Ask the system to forget what it has cached of the file."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def __enter__(self) -> "ShardFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self, out: memoryview, start: int) -> None:
        """Fill `out` with the bytes from `start` on."""
        done = self._read_some(out, start)
        while done < len(out):  # a signal or the end of the file cut the read short
            more = self._read_some(out[done:], start + done)
            if more == 0:
                raise DatasetError(
                    f"{self.path}: breaks off at byte {start + done:,} (truncated since it was opened?); "
                    f"{remedy(self.path)}"
                )
            done += more

    def _read_some(self, out: memoryview, start: int) -> int:
        """How many bytes from `start` on were read into `out`; 0 at the end of the file."""
        try:
            return os.preadv(self._file.fileno(), (out,), start)
        except OSError as error:
            raise DatasetError(
                f"{self.path}: cannot be read ({error.strerror}); {remedy(self.path)}"
            ) from error


def _is_cached(descriptor: int, start: int) -> bool:
    """Whether the byte at `start` can be read without waiting for the disk; False behind the end."""
    try:
        return os.preadv(descriptor, [bytearray(1)], start, os.RWF_NOWAIT) > 0
    except (AttributeError, OSError):  # no such call, or it would wait
        return False


def _header(count: int, size: int) -> bytes:
    shapes = {"images": [count, size, size, 3], "labels": [count], "ids": [count]}
    header: dict[str, Any] = {}
    start = 0
    for name, dtype, width in _TENSORS:
        stop = start + math.prod(shapes[name]) * width
        header[name] = {"dtype": dtype, "shape": shapes[name], "data_offsets": [start, stop]}
        start = stop
    body = json.dumps(header, separators=(",", ":")).encode().ljust(DATA_START - 8)
    return struct.pack("<Q", len(body)) + body


def _read_header(path: Path, start: bytes, file_bytes: int) -> tuple[int, int]:
    """Number and size of the pictures, from the first bytes of a file of `file_bytes`."""
    try:
        count, size = json.loads(start[8:])["images"]["shape"][:2]
        as_written = isinstance(count, int) and isinstance(size, int) and start == _header(count, size)
    except (ValueError, KeyError, TypeError, RecursionError, struct.error):
        as_written = False
    if not as_written or count < 0 or size < 1:
        raise DatasetError(f"{path}: not a shard of this format (its header is damaged); {remedy(path)}")
    expected_bytes: int = DATA_START + count * (size * size * 3 + 16)
    if file_bytes != expected_bytes:
        raise DatasetError(
            f"{path}: expected {expected_bytes:,} bytes, got {file_bytes:,} (truncated?); {remedy(path)}"
        )
    return count, size


FORMAT = Format(
    suffix=SUFFIX,
    index_suffix=None,
    write_shard=write_shard,
    read_shard=read_shard,
    find_samples=find_samples,
    read_sample=read_sample,
    holds_pixels=True,
    bytes_per_sample=16,  # label and id
    bytes_per_shard=DATA_START,
)
