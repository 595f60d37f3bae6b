"""Files that are either whole or not there: write beside, fsync, rename."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import google_crc32c
import numpy as np

TEMPORARY_SUFFIX = ".partial"
_READ_BYTES = 1 << 20  # stays in the CPU's cache


@contextmanager
def write_beside(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing beside `path`; `publish([path])` gives it its name.

    If the block raises, nothing is left of it.
    """
    temporary = _temporary(path)
    try:
        with open(temporary, "wb") as file:
            yield file
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def publish(paths: Sequence[Path]) -> None:
    """Make files that `write_beside` wrote, all of one folder, durable, and give them their names.

    Readers see the old file or the new one, never a part; a file that somebody has mapped is
    replaced, not truncated. After a crash a `*.partial` file may be left beside it.
    """
    try:
        for path in paths:
            with open(_temporary(path), "rb+") as file:
                os.fsync(file.fileno())
            os.replace(_temporary(path), path)
    except BaseException:
        for path in paths:
            _temporary(path).unlink(missing_ok=True)
        raise
    for folder in {path.parent for path in paths}:
        fsync_folder(folder)


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that appears at `path`, durable, only if the block ends well."""
    with write_beside(path) as file:
        yield file
    publish([path])


def _temporary(path: Path) -> Path:
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


def crc32c_file(path: Path) -> str:
    """CRC-32C (Castagnoli) of the file's bytes, 8 hex digits.

    It finds what disks and networks do to files, and it is some five times as fast as SHA-256, so that
    it can be computed while shards are written and read. It does not find what a forger does.
    """
    buffer = np.empty(_READ_BYTES, np.uint8)
    crc = 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(
            buffer.data
        ):  # not mapped: a failing disk is an error here, not a signal
            crc = google_crc32c.extend(crc, buffer[:count])
    return f"{crc:08x}"
