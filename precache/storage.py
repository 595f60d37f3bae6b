"""Files that are either whole or not there: write beside, fsync, rename."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMPORARY_SUFFIX = ".partial"


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that appears at `path` only if the block ends without exception.

    Readers see the old file or the new one, never a part; a file that somebody has mapped is
    replaced, not truncated. After a crash a `*.partial` file may be left beside it.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
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


def sha256_file(path: Path) -> str:
    """SHA-256 of the file's bytes, in hex."""
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            hasher.update(part)
    return hasher.hexdigest()
