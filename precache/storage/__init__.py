"""Where bytes lie: files of this machine, either complete or absent, and objects of a storage.

A file is written beside, synced, and renamed. What is written beside has a hidden name that nobody can guess,
`.NAME.0123456789abcdef.partial`: no file of anybody else has it, and no link waits there to lead the bytes
elsewhere.

output       large files, written once, past the page cache
records      files of JSON lines that show what became of them
locks        one process at a time writes to a destination
urls         which text names a path, and which a URL
objects      S3, Google Cloud Storage, Azure, web servers: by obstore
retries      what of a request is asked again, and how it fails
shard_cache  files of datasets at URLs that are kept on this machine
staging      a folder of this process for what comes from a storage, or is unpacked
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

from precache.errors import SettingError, check_open_files

TEMPORARY_SUFFIX = ".partial"
_TEMPORARY_NAME = re.compile(rf"\.(.+)\.[0-9a-f]{{16}}{re.escape(TEMPORARY_SUFFIX)}", re.DOTALL)
_NO_FOLDER_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)
_READ_BYTES = 1 << 20  # stays in the CPU's cache
_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_READING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _BINARY
_SAFE = getattr(os, "O_NOFOLLOW", 0) | _BINARY


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> FileIO:
    """The file at `path`, unbuffered, for reading; a file alone, never a folder, a pipe or a device.

    Opening a FIFO that nobody writes to would wait forever.

    Raises:
        OSError: it cannot be opened, or is something else.
        OpenFilesError: too many files are open; so does all that opens files here.
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
    """Open what lies at `path` for reading; `regular_status` says whether that is a file.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = _open(path, _READING)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def regular_status(descriptor: int, path: str | os.PathLike[str]) -> os.stat_result:
    """The status of an open file; OSError, which names `path`, where it is a folder, a pipe or a device."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
    return status


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The content of the file at `path`.

    Raises:
        OSError: as `open_regular`, or it cannot be read.
    """
    with open_descriptor(path) as descriptor:
        return read_descriptor(descriptor, regular_status(descriptor, path).st_size)


def read_descriptor(descriptor: int, file_bytes: int) -> bytes:
    """The rest of an open file of some `file_bytes`.

    Not by a file object's `read`: what of a file cannot be read at once, EAGAIN, it takes for the end.

    Raises:
        OSError: it cannot be read.
    """
    parts = []
    while part := os.read(descriptor, max(_READ_BYTES, file_bytes)):
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_at_most(descriptor: int, count: int) -> bytes:
    """The next `count` bytes of an open file; fewer where it ends before.

    Raises:
        OSError: it cannot be read.
    """
    parts = []
    while count > 0 and (part := os.read(descriptor, count)):
        parts.append(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_regular_part(path: str | os.PathLike[str], start: int, count: int) -> bytes:
    """`count` bytes of the file at `path` from `start` on; fewer where it ends before.

    Raises:
        OSError: as `read_regular`.
    """
    with open_regular(path) as file:
        return read_descriptor_at(file.fileno(), start, count)


def read_descriptor_at(descriptor: int, start: int, count: int) -> bytes:
    """`count` bytes of an open file from `start` on; fewer where it ends before.

    One read of the system may give fewer than there are.

    Raises:
        OSError: it cannot be read.
    """
    parts = []
    count = min(count, os.fstat(descriptor).st_size - start)  # memory is asked for as much as is to be read
    while count > 0 and (part := os.pread(descriptor, count, start)):
        parts.append(part)
        start, count = start + len(part), count - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def open_new(path: str | os.PathLike[str], flags: int = 0) -> int:
    """A descriptor, for writing, of a file that this call makes; links are not followed.

    Raises:
        FileExistsError: something has the name; be it a link to nowhere.
    """
    return _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE | flags)


def open_append(path: str | os.PathLike[str], flags: int = 0) -> int:
    """As `open_single`, for reading and appending."""
    return open_single(path, flags | os.O_APPEND)


def open_single(path: str | os.PathLike[str], flags: int = 0) -> int:
    """A descriptor, for reading and writing, of the file at `path`, which no other name stands for.

    Raises:
        OSError: there is none, or a link, or a file with several names, or something else.
    """
    flags |= os.O_RDWR | getattr(os, "O_NONBLOCK", 0) | _SAFE
    descriptor = _open(path, flags)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink < 2:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is not a regular file with one name", os.fspath(path))


def check_can_open(path: str | os.PathLike[str]) -> None:
    """Raise OpenFilesError, about `path`, if no file can be opened now; for libraries that do not say so."""
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
    """Open a file for writing that appears at `path`, durable, only if the block ends well.

    Readers see the old file or the new one, never a part; a file that is mapped elsewhere is
    replaced, not truncated, and so is a link, not what it leads to. After a crash the file that was
    written may be left beside it: `is_leftover` knows it.
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
    """A new name under which a file is written before it becomes `path`; another one at each call."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")


def partial_of(name: str) -> str | None:
    """The final name of a temporary file with this name; None if it is not a temporary file."""
    match = _TEMPORARY_NAME.fullmatch(name)
    return match[1] if match else None


def is_leftover(path: Path, names: Container[str]) -> bool:
    """Whether `path` is what a killed process left of writing a file of one of `names`."""
    name = partial_of(path.name)
    return name is not None and name in names and not path.is_symlink() and path.is_file()


def remove_leftovers(folder: Path, names: Container[str]) -> None:
    """Remove from `folder` what killed processes left of writing files of `names`."""
    for path in folder.iterdir():
        if is_leftover(path, names):
            path.unlink(missing_ok=True)


def check_new_folder(path: Path) -> None:
    """Raise SettingError unless `path` can become a new folder: it is missing, or an empty folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise SettingError(f"{path}: exists and is not empty; choose another DST or remove it")


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes `path`, missing or empty before, if the block succeeds."""
    path = Path(os.path.realpath(path))  # resolve() makes a RuntimeError of a loop of links
    temporary = temporary_path(path)
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
    """Make the names in `folder` durable; a no-op where folders cannot be opened or synced.

    Windows opens none; some network and FUSE file systems sync none.
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
    with open_regular(path) as file:
        # not mapped: a failing disk is an error here, not a signal
        while count := os.readv(file.fileno(), (buffer.data,)):
            crc = google_crc32c.extend(crc, buffer[:count])
    return f"{crc:08x}"
