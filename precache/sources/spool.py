"""A compressed tar is read once, from its start, into a file without a name, which ends with its last reader.

Pictures are converted in shuffled order, and what is compressed as a whole can be read in its own order
alone. The file lies in the folder for temporary files (TMPDIR), as large as the tar is without compression.
"""

import bz2
import errno
import gzip
import io
import lzma
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from precache.errors import SourceError
from precache.pictures.reading import read_part

_READ_BYTES = 1 << 20
_MOST_RATIO, _ANY_BYTES = 100, 1 << 30  # what is beyond both is a bomb


class Spool:
    """The file.

    Attributes:
        path: under which this process, and others while it lives, may open it.
    """

    def __init__(self, path: str, descriptor: int | None = None) -> None:
        self.path = path
        if descriptor is not None:
            weakref.finalize(self, os.close, descriptor)

    def __reduce__(self) -> tuple[type["Spool"], tuple[str]]:
        return Spool, (self.path,)  # elsewhere it is read, and held here


def compression(path: str, as_scanned: tuple[int, int]) -> str | None:
    """How the file is compressed, as its first bytes say; None if it is not."""
    start = read_part(path, as_scanned, 0, 6)
    return next((name for mark, name in _MARKS.items() if start.startswith(mark)), None)


def unpack(path: Path, as_scanned: tuple[int, int], how: str) -> Spool:
    """The content of the compressed file at `path`.

    Raises:
        SourceError: it is damaged, cannot be read, or there is no room for what it holds.
    """
    if not os.path.isdir("/proc/self/fd"):
        raise SourceError(f"{path}: compressed tars are read on Linux alone; unpack it with {COMMANDS[how]}")
    with tempfile.TemporaryFile() as file:
        try:
            for part in _unpacked(path, as_scanned, how):
                file.write(part)
            file.flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise SourceError(_no_room(path, how)) from error
        descriptor = os.dup(file.fileno())
    return Spool(f"/proc/{os.getpid()}/fd/{descriptor}", descriptor)


def folder() -> str:
    """Where it lies."""
    return tempfile.gettempdir()


def _no_room(path: Path, how: str) -> str:
    free = shutil.disk_usage(folder()).free
    return (
        f"{path}: does not fit into {folder()} when it is unpacked ({free:,} bytes are "
        f"free); set TMPDIR to a folder on a larger disk, or unpack it with {COMMANDS[how]}"
    )


def _unpacked(path: Path, as_scanned: tuple[int, int], how: str) -> Iterator[bytes]:
    """Its content, part by part."""
    packed = _Packed(str(path), as_scanned)
    given = 0
    with io.BufferedReader(packed, _READ_BYTES) as file, _OPENERS[how](file) as unpacked:
        while True:
            try:
                part = unpacked.read(_READ_BYTES)
            except EOFError as error:
                raise _damaged(path, "it breaks off") from error
            except (zlib.error, lzma.LZMAError, OSError, MemoryError, ValueError) as error:
                raise _damaged(path, str(error) or "out of memory") from error
            given += len(part)
            if given > _ANY_BYTES and given > _MOST_RATIO * packed.position:
                raise _damaged(path, f"it is over {_MOST_RATIO} times as large then, as no pictures are")
            if not part:
                return
            yield part


class _Packed(io.RawIOBase):
    """The compressed file; up to `position` it has been read."""

    def __init__(self, path: str, as_scanned: tuple[int, int]) -> None:
        self.path, self.as_scanned, self.position = path, as_scanned, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = read_part(self.path, self.as_scanned, self.position, len(buffer))
        buffer[: len(part)] = part
        self.position += len(part)
        return len(part)


def _damaged(path: Path, why: str) -> SourceError:
    return SourceError(f"{path}: cannot be unpacked ({why}); download or copy it again")


_MARKS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_OPENERS: dict[str, Callable[[Any], Any]] = {
    "gzip": lambda file: gzip.GzipFile(fileobj=file, mode="rb"),
    "bzip2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
}
COMMANDS = {"gzip": "gunzip -k", "bzip2": "bunzip2 -k", "xz": "unxz -k"}
