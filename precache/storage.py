"""Files that are either whole or not there: write beside, fsync, rename."""

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import google_crc32c
import numpy as np

TEMPORARY_SUFFIX = ".partial"
_READ_BYTES = 1 << 20  # stays in the CPU's cache


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor of the file at `path`, for reading; of a file alone, never of a pipe or a device.

    Opening a FIFO that nobody writes to would wait for ever.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
    return descriptor


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The content of the file at `path`.

    Raises:
        OSError: as `open_regular`, or it cannot be read.
    """
    with open(open_regular(path), "rb", buffering=0) as file:
        return file.read()


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that appears at `path`, durable, only if the block ends well.

    Readers see the old file or the new one, never a part; a file that somebody has mapped is
    replaced, not truncated. After a crash a `*.partial` file may be left beside it.
    """
    temporary = temporary_path(path)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def temporary_path(path: Path) -> Path:
    """The name under which a file is written before it becomes `path`."""
    return path.with_name(path.name + TEMPORARY_SUFFIX)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes `path`, missing or empty before, if the block succeeds."""
    path = path.resolve()
    temporary = path.with_name(f".{path.name}-{os.getpid()}{TEMPORARY_SUFFIX}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if path.exists():  # empty; it may be the working folder, or a mount point: keep it itself
            for child in temporary.iterdir():
                os.replace(child, path / child.name)
        else:
            os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable; a no-op where folders cannot be opened (Windows)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def crc32c(content: bytes) -> str:
    """As `crc32c_file`, of what is in memory."""
    return f"{google_crc32c.value(content):08x}"


def crc32c_file(path: Path) -> str:
    """CRC-32C (Castagnoli) of the file's bytes, 8 hex digits.

    It finds what disks and networks do to files, and it is some five times as fast as SHA-256, so that
    it can be computed while shards are written and read. It does not find what a forger does.
    """
    buffer = np.empty(_READ_BYTES, np.uint8)
    crc = 0
    with open(open_regular(path), "rb", buffering=0) as file:
        # not mapped: a failing disk is an error here, not a signal
        while count := file.readinto(buffer.data):
            crc = google_crc32c.extend(crc, buffer[:count])
    return f"{crc:08x}"
