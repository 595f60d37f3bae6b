"""Files of named arrays, safetensors: written whole, read whole, or a range of rows at a time.

Nothing is mapped: a file that somebody cuts off is an error here, not a signal that ends the process. See
https://huggingface.co/docs/safetensors: 8 bytes, the length of the header; the header, JSON, which says of
each array its dtype, its shape and where it lies; the arrays, one behind the other.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash
from safetensors.numpy import save

from precache.dataset.files import FileEntry
from precache.errors import DatasetError
from precache.storage import atomic_write, crc32c, read_regular

REMEDY = "run 'precache verify' on its folder, then convert it again with --overwrite"
Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
MOST_HEADER_BYTES = 100_000_000  # what the stock reader takes
_LENGTH_BYTES = 8
_DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "F64": np.dtype(np.float64),
}


def checksum_of(stored: bytes | memoryview | npt.NDArray[np.uint8]) -> int:
    """XXH3-64 of something contiguous: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md

    It finds what disks, memory and networks do to bytes, nearly as fast as the CPU's cache is read; it does
    not find what a forger does.
    """
    return xxhash.xxh3_64_intdigest(stored)  # type: ignore[arg-type]  # NumPy 1's arrays do not say Buffer


class Place(NamedTuple):
    """Where an array lies.

    Attributes:
        start: its first byte in the file.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        """Of one row, what the first dimension counts."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class Header(NamedTuple):
    """The beginning of a file.

    Attributes:
        places: of the arrays, by name.
        checksum: XXH3-64 of its bytes.
    """

    places: dict[str, Place]
    checksum: int


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[FileEntry, Header]:
    """Write the file: how manifests name it, and its header."""
    content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    with atomic_write(path) as file:
        file.write(content)
    header = parse_header(content[: header_bytes(content)], len(content))
    return FileEntry(path.name, len(content), crc32c(content)), header


def read_arrays(path: Path, entry: FileEntry) -> Arrays:
    """All arrays of the file at `path`, whose bytes are those that `entry` describes; to be read alone.

    Raises:
        DatasetError: it cannot be read, or is another.
    """
    try:
        content = read_regular(path)
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from error
    if len(content) != entry.bytes:
        raise damaged(path, f"expected {entry.bytes:,} bytes, got {len(content):,}")
    if crc32c(content) != entry.crc32c:
        raise damaged(path, "its checksum is not the manifest's")
    try:
        places = parse_header(content[: header_bytes(content)], len(content)).places
    except ValueError as error:
        raise damaged(path, str(error)) from error
    return {
        name: np.frombuffer(content, place.dtype, math.prod(place.shape), place.start).reshape(place.shape)
        for name, place in places.items()
    }


def header_bytes(start: bytes) -> int:
    """How long the header of the file is that begins with `start`, with what says so; ValueError: not one."""
    count = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if len(start) < _LENGTH_BYTES or count > MOST_HEADER_BYTES:
        raise ValueError("it has no header")
    return _LENGTH_BYTES + count


def parse_header(header: bytes, file_bytes: int) -> Header:
    """What the header of a file of so many bytes says; ValueError if it is not as this project writes it."""
    try:
        content = json.loads(header[_LENGTH_BYTES:])
        names = [name for name in content if name != "__metadata__"]
        places = {name: _place(content[name], len(header), file_bytes) for name in names}
    except (LookupError, TypeError, AttributeError, RecursionError, ValueError, OverflowError) as error:
        raise ValueError("its header is not one of arrays") from error
    return Header(places, checksum_of(header))


def _place(entry: Any, header_length: int, file_bytes: int) -> Place:
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    first, last = entry["data_offsets"]
    whole = all(type(number) is int and 0 <= number < 2**63 for number in (*shape, first, last))
    if not whole or last - first != math.prod(shape) * dtype.itemsize or header_length + last > file_bytes:
        raise ValueError(entry)
    return Place(dtype, shape, header_length + first)


def damaged(path: Path, why: str) -> DatasetError:
    """What to raise of a file that is not as it was written."""
    return DatasetError(f"{path}: is damaged ({why}); {REMEDY}")
