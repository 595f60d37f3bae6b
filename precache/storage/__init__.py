"""Storage of bytes: files of this machine that are complete or absent, and objects of an object storage.

A file is written under a temporary name beside its final one, synced, and renamed. The temporary name is
hidden and cannot be guessed, `.NAME.0123456789abcdef.partial`: no file of the user has it, and nobody can
place a link there to lead the bytes to another file.

output       large files, written once, past the page cache
locks        locks of files, and the lock that lets one process at a time write to a destination
urls         parsing of paths and URLs
objects      objects of S3, Google Cloud Storage, Azure and web servers, by obstore
retries      retries of requests, and messages of their errors
shard_cache  cache of files of datasets at URLs
staging      temporary folders, which are removed after a kill, too
"""

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Container, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import google_crc32c
import numpy as np
import numpy.typing as npt
import xxhash

from precache.errors import SettingError, check_open_files

_TEMPORARY_SUFFIX = ".partial"
_TEMPORARY_NAME = re.compile(rf"\.(.+)\.[0-9a-f]{{16}}{re.escape(_TEMPORARY_SUFFIX)}", re.DOTALL)
_NO_FOLDER_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)
_READ_BYTES = 1 << 20  # stays in the CPU's cache
_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_READING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _BINARY
_SAFE = getattr(os, "O_NOFOLLOW", 0) | _BINARY


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> FileIO:
    """Open a file for reading, unbuffered; refuse a folder, a pipe or a device.

    The file is opened without blocking, because opening a FIFO that nobody writes to would wait forever.

    Raises:
        OSError: it cannot be opened, or is no file.
        OpenFilesError: too many files are open; all functions here that open files raise it.
    """
    file = FileIO(path, opener=lambda path, _: _open(path, flags | _READING))
    try:
        regular_status(file.fileno(), path)
    except OSError:
        file.close()
        raise
    return file


@contextmanager
def open_descriptor(path: str | os.PathLike[str]) -> Iterator[int]:
    """Open a path for reading, and yield the descriptor, which may be of a pipe: see `regular_status`.

    Raises:
        OSError: the path cannot be opened.
    """
    descriptor = _open(path, _READING)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def regular_status(descriptor: int, path: str | os.PathLike[str]) -> os.stat_result:
    """Status of an open file; OSError, which names `path`, if it is a folder, a pipe or a device."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
    return status


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Read the file at `path`.

    Raises:
        OSError: as `open_regular`, or the file cannot be read.
    """
    with open_descriptor(path) as descriptor:
        return read_descriptor(descriptor, regular_status(descriptor, path).st_size)


def read_descriptor(descriptor: int, file_bytes: int) -> bytes:
    """Read the rest of an open file of about `file_bytes`.

    The `read` of a file object is not used, because it takes EAGAIN for the end of the file.

    Raises:
        OSError: the file cannot be read.
    """
    parts = []
    while part := os.read(descriptor, max(_READ_BYTES, file_bytes)):
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_at_most(descriptor: int, count: int) -> bytes:
    """Read the next `count` bytes of an open file; fewer where it ends before.

    Raises:
        OSError: the file cannot be read.
    """
    parts = []
    while count > 0 and (part := os.read(descriptor, count)):
        parts.append(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_regular_part(path: str | os.PathLike[str], start: int, count: int) -> bytes:
    """Read `count` bytes of the file at `path` from `start` on; fewer where it ends before.

    Raises:
        OSError: as `read_regular`.
    """
    with open_regular(path) as file:
        return read_descriptor_at(file.fileno(), start, count)


def read_descriptor_at(descriptor: int, start: int, count: int) -> bytes:
    """Read `count` bytes of an open file from `start` on; fewer where it ends before.

    A single read of the system may return fewer bytes than there are.

    Raises:
        OSError: the file cannot be read.
    """
    parts = []
    count = min(count, os.fstat(descriptor).st_size - start)  # `pread` allocates memory for all of `count`
    while count > 0 and (part := os.pread(descriptor, count, start)):
        parts.append(part)
        start, count = start + len(part), count - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def open_new(path: str | os.PathLike[str], flags: int = 0) -> int:
    """Create a file and return a descriptor for writing; links are not followed.

    Raises:
        FileExistsError: the name is taken, be it by a broken link.
    """
    return _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE | flags)


def open_single(path: str | os.PathLike[str], flags: int = 0) -> int:
    """Open a file that has no other name for reading and writing, and return its descriptor.

    Raises:
        OSError: there is no file at `path`, or it is a link, has several names (hard links), or is no file.
    """
    flags |= os.O_RDWR | getattr(os, "O_NONBLOCK", 0) | _SAFE
    descriptor = _open(path, flags)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink < 2:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is not a regular file with one name", os.fspath(path))


def check_can_open(path: str | os.PathLike[str]) -> None:
    """Raise OpenFilesError, about `path`, if no file can be opened now.

    It is for libraries that open files and do not report this as an error of its own.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        check_open_files(error, os.fspath(path))


def _open(path: str | os.PathLike[str], flags: int) -> int:
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        check_open_files(error, os.fspath(path))
        raise


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that appears at `path`, durable, only if the block does not raise.

    Readers see the old file or the new one, never a part. The old file is replaced, not truncated, because it
    may be mapped by other processes; of a link, the link itself is replaced. After a crash the temporary file
    may be left beside `path`: `is_leftover` recognises it.
    """
    temporary = temporary_path(path)
    try:
        with open(open_new(temporary), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def temporary_path(path: Path) -> Path:
    """New random path beside `path` to write a file to before it is renamed to `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{_TEMPORARY_SUFFIX}")


def final_name(name: str) -> str | None:
    """Final name of the temporary file with this name; None if it is no name of a temporary file."""
    match = _TEMPORARY_NAME.fullmatch(name)
    return match[1] if match else None


def is_leftover(path: Path, names: Container[str]) -> bool:
    """Whether `path` is the temporary file of a killed process that was writing a file of one of `names`."""
    name = final_name(path.name)
    return name is not None and name in names and not path.is_symlink() and path.is_file()


def remove_leftovers(folder: Path, names: Container[str]) -> None:
    """Remove from `folder` the temporary files of killed processes that were writing files of `names`."""
    for path in folder.iterdir():
        if is_leftover(path, names):
            path.unlink(missing_ok=True)


def check_new_folder(path: Path) -> None:
    """Raise SettingError unless `path` is missing, or an empty folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise SettingError("exists and is not empty", path=path, remedy="choose another DST or remove it")


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, which becomes `path`, missing or empty before, if the block succeeds."""
    path = Path(os.path.realpath(path))  # resolve() makes a RuntimeError of a loop of links
    temporary = temporary_path(path)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if path.exists():  # an empty folder, which may be the working folder or a mount point: keep it
            for child in temporary.iterdir():
                os.replace(child, path / child.name)
        else:
            os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable; does nothing where folders cannot be opened or synced.

    Windows cannot open them, and some network and FUSE file systems cannot sync them.
    """
    try:
        descriptor = _open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_FSYNC:
            raise
    finally:
        os.close(descriptor)


def checksum_of(stored: bytes | memoryview | npt.NDArray[np.uint8]) -> int:
    """Compute XXH3-64 of contiguous data: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md

    It detects damage by disks, memory and networks, nearly as fast as the CPU's cache is read; it does not
    detect forgery.
    """
    return xxhash.xxh3_64_intdigest(stored)  # type: ignore[arg-type]  # not declared as a Buffer by NumPy 1


def crc32c(content: bytes) -> str:
    """Compute CRC-32C (Castagnoli) of bytes in memory, 8 hex digits."""
    return f"{google_crc32c.value(content):08x}"


def crc32c_file(path: Path) -> str:
    """Compute CRC-32C (Castagnoli) of a file's bytes, 8 hex digits.

    It detects damage by disks and networks, and is some five times as fast as SHA-256, so that it can be
    computed while shards are written and read. It does not detect forgery.
    """
    buffer = np.empty(_READ_BYTES, np.uint8)
    crc = 0
    with open_regular(path) as file:
        # not mapped: a failing disk is an error here, not a signal
        while count := os.readv(file.fileno(), (buffer.data,)):
            crc = google_crc32c.extend(crc, buffer[:count])
    return f"{crc:08x}"
