"""Format `shards`: decoded pixels in safetensors files.

    byte 0      uint64 little-endian: length of the header, always 4,088
    byte 8      the header: JSON, padded with spaces
    byte 4096   images  uint8 [n, size, size, 3], RGB (NHWC: permuted, it is channels-last)
    then        labels  int64 [n], little-endian
    then        ids     int64 [n], little-endian

Pixels start on a page boundary, so that a row can be mapped and read without touching the header.
Any safetensors reader opens these files: https://github.com/huggingface/safetensors#format
"""

import errno
import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from precache.errors import DatasetError
from precache.formats.sample import Format, Sample, StoredSample
from precache.jpeg import Pixels
from precache.output import OutputFile, write_beside
from precache.recipe import Recipe

SUFFIX = ".safetensors"
DATA_START = 4096
_CHUNK_BYTES = 128 * 1024
_POPULATE_READ = 22  # MADV_POPULATE_READ of <asm-generic/mman-common.h>, Linux 5.14
_TENSORS = (("images", "U8", 1), ("labels", "I64", 8), ("ids", "I64", 8))
_REMEDY = "run 'precache verify' on its folder, then 'precache convert --overwrite' to rewrite it"


def write_shard(base: Path, samples: Iterable[Sample], count: int, recipe: Recipe) -> list[OutputFile]:
    """Write `base` + '.safetensors' beside; pixels stream through, only labels and ids are held."""
    path = base.with_name(base.name + SUFFIX)
    labels: list[int] = []
    ids: list[int] = []
    with write_beside(path) as file:
        file.write(_header(count, recipe.size))
        for sample in samples:
            file.write(np.ascontiguousarray(sample.data).data)
            labels.append(sample.label)
            ids.append(sample.id)
        file.write(np.array(labels, "<i8").tobytes())
        file.write(np.array(ids, "<i8").tobytes())
        if len(ids) < count:
            file.replace_start(_header(len(ids), recipe.size))
    return [file]


def read_shard(path: Path) -> Iterator[StoredSample]:
    """The samples of a shard in stored order; pixels are copies."""
    with ShardFile(path) as shard:
        for row in range(len(shard.ids)):
            pixels = shard.rows(row, 0, shard.size).copy()
            yield StoredSample(int(shard.ids[row]), int(shard.labels[row]), pixels)


class ShardFile:
    """An open shard; several threads may read it at a time.

    It is mapped, and rows are looked at where they lie. Where a file shrinks or its disk fails, touching
    a mapping would end the process (SIGBUS): `rows` has the system bring in the pages first, which fails
    as an exception.

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
            with open(path, "rb", buffering=0) as file:
                file_bytes = os.fstat(file.fileno()).st_size
                shapes = _read_shapes(path, file.read(DATA_START), file_bytes)
                count, self.size = shapes["images"][:2]
                pixel_bytes = math.prod(shapes["images"])
                file.seek(DATA_START + pixel_bytes)
                tail = np.frombuffer(file.read(16 * count), "<i8").reshape(2, count)
                self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except OSError as error:
            raise DatasetError(f"{path}: cannot be opened ({error.strerror}); {_REMEDY}") from error
        self.labels: npt.NDArray[np.int64] = tail[0].astype(np.int64)
        self.ids: npt.NDArray[np.int64] = tail[1].astype(np.int64)
        self._images = np.frombuffer(self._map, np.uint8, pixel_bytes, DATA_START).reshape(shapes["images"])

    def rows(self, sample: int, first: int, count: int) -> Pixels:
        """Rows `first` to `first + count` of picture `sample`: uint8 [count, size, 3], read-only, mapped.

        Raises:
            DatasetError: the file became shorter, or cannot be read.
        """
        row_bytes = self.size * 3
        start = DATA_START + (sample * self.size + first) * row_bytes
        page = start & -mmap.PAGESIZE
        try:
            self._map.madvise(_POPULATE_READ, page, start + count * row_bytes - page)
        except OSError as error:
            if error.errno != errno.EINVAL:  # that is Linux before 5.14, which does not know it
                raise DatasetError(
                    f"{self.path}: byte {start:,} and what follows cannot be read (truncated since it was "
                    f"opened, or a failing disk); {_REMEDY}"
                ) from error
        rows: Pixels = self._images[sample, first : first + count]
        return rows

    def read_ahead(self) -> None:
        """Read what of the file is not in the system's cache, sequentially.

        Not by `posix_fadvise`: read like this, Linux caches the file in large folios, out of which rows
        are copied in half the time.
        """
        with open(self.path, "rb", buffering=0) as file:
            chunk = memoryview(bytearray(_CHUNK_BYTES))
            for start in range(0, len(self._map), _CHUNK_BYTES):
                # not its ends: opening the file brought in those of the file
                if not _is_cached(file.fileno(), start + _CHUNK_BYTES // 2):
                    file.seek(start)
                    file.readinto(chunk)

    def drop_cached(self) -> None:
        """Ask the system to forget what it has cached of the file."""
        self._map.madvise(mmap.MADV_DONTNEED)  # mapped pages would stay
        if hasattr(os, "posix_fadvise"):
            with open(self.path, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Let the file go; it is unmapped with the last array that shows a part of it."""
        self._images = self._images[:0]

    def __enter__(self) -> "ShardFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _is_cached(descriptor: int, start: int) -> bool:
    """Whether the byte at `start` can be read without waiting for the disk; False behind the end."""
    try:
        return os.preadv(descriptor, [bytearray(1)], start, os.RWF_NOWAIT) > 0
    except (AttributeError, OSError):  # no such call, or it would wait
        return False


def _read_shapes(path: Path, start: bytes, file_bytes: int) -> dict[str, list[int]]:
    """Shapes of the tensors, from the first bytes of a file of `file_bytes`."""
    header = _read_header(path, start)
    shapes: dict[str, list[int]] = {name: header[name]["shape"] for name, _, _ in _TENSORS}
    expected_bytes = DATA_START + sum(math.prod(shapes[name]) * width for name, _, width in _TENSORS)
    if file_bytes != expected_bytes:
        raise DatasetError(
            f"{path}: expected {expected_bytes:,} bytes, got {file_bytes:,} (truncated?); {_REMEDY}"
        )
    return shapes


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


def _read_header(path: Path, start: bytes) -> dict[str, Any]:
    """Parse and check the first DATA_START bytes of a shard."""
    try:
        (length,) = struct.unpack_from("<Q", start)
        header: dict[str, Any] = json.loads(start[8 : 8 + length])
        layout_ok = length == DATA_START - 8 and all(
            header[name]["dtype"] == dtype for name, dtype, _ in _TENSORS
        )
        count, _, _, channels = header["images"]["shape"]
        layout_ok = layout_ok and channels == 3 and header["labels"]["shape"] == [count]
    except (struct.error, ValueError, KeyError, TypeError):
        layout_ok = False
    if not layout_ok:
        raise DatasetError(f"{path}: not a shard of this format (its header is damaged); {_REMEDY}")
    return header


FORMAT = Format(SUFFIX, None, write_shard, read_shard)
