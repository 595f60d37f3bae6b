"""Reading the files of a source, and what happens to an error.

A disk or a network that fails for a moment says nothing about a picture. So reading is tried again, then
the error ends the run with a SourceError: what is finished is kept, and the same command goes on. A picture
is rejected only if its bytes were read and cannot be decoded.
"""

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from precache.errors import ImageError, OpenFilesError, SourceError, check_open_files, os_reason
from precache.storage import (
    open_descriptor,
    read_at_most,
    read_descriptor,
    read_descriptor_at,
    regular_status,
)
from precache.storage.retries import with_retries

MAX_PIXELS = 100_000_000
"""The most pixels of one picture, unless the caller asks for another number."""

Answer = TypeVar("Answer")
Ints: TypeAlias = npt.NDArray[np.int64]

_ASKED = 256  # files that a thread asks about at a time
_ASKING_THREADS = 64
_SLOW_S = 20e-6  # an answer, on average; of a local disk it takes 3
_STALLED = 4  # answers that may take longer because the CPU was busy, and say nothing of the disk
_PAUSES_S = (0.15, 0.5)  # between the tries
# Another try would get the same answer.
_FINAL = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.ENXIO)
)
_REMEDIES = {
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.ENOMEM: "use fewer --workers, or free some memory",
}
# No file needs more than four channels of 16 bits, besides what surrounds the pixels.
_BYTES_PER_PIXEL = 8
_SURROUNDINGS_BYTES = 64 << 20


def read_picture(path: str, max_pixels: int = MAX_PIXELS, scanned_status: tuple[int, int] | None = None) -> bytes:
    """The content of the picture at `path`.

    Args:
        max_pixels: a file of more bytes than so many pixels can take is not read.
        scanned_status: its size in bytes and modified time in ns when the tree was scanned: what is
            rejected, or converted, must not depend on when it is read.

    Raises:
        ImageError: the file is larger than a picture can be.
        SourceError: it cannot be read, or it is not as it was scanned.
    """
    return read_with_retries(lambda: _read(path, max_pixels, scanned_status), path)


def read_part(path: str, shown: str, scanned_status: tuple[int, int], start: int, count: int) -> bytes:
    """`count` bytes of the file at `path`, called `shown`, from `start` on; fewer where it ends before.

    Raises:
        SourceError: as `read_picture`.
    """

    def act() -> bytes:
        with open_descriptor(path) as descriptor:
            _check_unchanged(shown, regular_status(descriptor, path), scanned_status)
            return read_descriptor_at(descriptor, start, count)

    return read_with_retries(act, shown)


def status_of(path: str) -> tuple[int, int] | None:
    """Size in bytes and time of the last write, in ns, of the file at `path`; None where there is none.

    Raises:
        SourceError: it cannot be looked at.
    """
    try:
        status = read_with_retries(lambda: os.stat(path), path)
    except ValueError:  # a NUL in it
        return None
    except SourceError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _FINAL:
            return None
        raise
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def sizes_and_times(paths: Sequence[str]) -> tuple[Ints, Ints]:
    """Size in bytes and time of the last write, in ns, of each of the files at `paths`: int64 [n] each.

    Many threads ask once answers are slow: a network drive that takes a millisecond for one takes no longer
    for 64. Where answers are quick, threads would only take the interpreter from one another.

    Raises:
        SourceError: a file is gone, or cannot be asked.
    """
    sizes, times = np.empty(len(paths), np.int64), np.empty(len(paths), np.int64)

    def ask(start: int) -> list[float]:
        """Fill in some rows; seconds of each answer."""
        ends_s = [time.perf_counter()]
        for row, path in enumerate(paths[start : start + _ASKED], start):
            sizes[row], times[row] = _size_and_time(path)
            ends_s.append(time.perf_counter())
        return [end_s - start_s for start_s, end_s in pairwise(ends_s)]

    starts = iter(range(0, len(paths), _ASKED))
    for start in starts:
        usual_s = sorted(ask(start))[:-_STALLED]
        if sum(usual_s) > len(usual_s) * _SLOW_S:
            break
    with ThreadPoolExecutor(_ASKING_THREADS) as pool:
        try:
            for answer in [pool.submit(ask, start) for start in starts]:
                answer.result()
        finally:
            pool.shutdown(cancel_futures=True)
    return sizes, times


def _size_and_time(path: str) -> tuple[int, int]:
    try:  # first without the overhead of retries: a tree may hold 10,000,000 files
        status = os.stat(path)
    except OSError:
        status = read_with_retries(lambda: os.stat(path), path)
    return status.st_size, status.st_mtime_ns


def read_with_retries(act: Callable[[], Answer], path: str | os.PathLike[str]) -> Answer:
    """`act()`; an OSError is tried again within a second, then it is a SourceError that names `path`.

    Raises:
        OpenFilesError: too many files are open, and stay so for a second.
    """
    try:
        return with_retries(act, _PAUSES_S, _may_pass)
    except OSError as error:
        check_open_files(error, path)
        raise _source_error(path, error) from error


def _may_pass(error: Exception) -> bool:
    """Whether reading again may succeed."""
    return isinstance(error, OpenFilesError) or (isinstance(error, OSError) and error.errno not in _FINAL)


def _read(path: str, max_pixels: int, scanned_status: tuple[int, int] | None) -> bytes:
    with open_descriptor(path) as descriptor:
        if scanned_status is None:
            size = regular_status(descriptor, path).st_size
            check_bytes(path, size, max_pixels)
            return read_descriptor(descriptor, size)
        check_bytes(path, scanned_status[0], max_pixels)
        data = read_at_most(descriptor, scanned_status[0])
        # once, and after reading: a file that is now as it was scanned was so all the while
        status = regular_status(descriptor, path)
    _check_unchanged(path, status, scanned_status)
    if len(data) != status.st_size:
        raise SourceError(
            f"{path}: {len(data):,} of its {status.st_size:,} bytes could be read; "
            f"check the disk or the network, then run the same command again"
        )
    return data


def check_bytes(path: str, size: int, max_pixels: int) -> None:
    """Raise ImageError if no picture of `max_pixels` has a file of `size` bytes."""
    bound = max_pixels * _BYTES_PER_PIXEL + _SURROUNDINGS_BYTES
    if size > bound:
        raise ImageError(
            path,
            f"is too large ({size:,} bytes; a picture of the {max_pixels:,} pixels that --max-pixels "
            f"allows has at most {bound:,})",
        )


def _check_unchanged(path: str, status: os.stat_result, scanned_status: tuple[int, int] | None) -> None:
    if scanned_status is not None and scanned_status != (status.st_size, status.st_mtime_ns):
        raise SourceError(
            f"{path}: changed while it was converted (expected {scanned_status[0]:,} bytes, got "
            f"{status.st_size:,}, or written since); do not change it meanwhile, and convert with --overwrite"
        )


def _source_error(path: str | os.PathLike[str], error: OSError) -> SourceError:
    if error.errno == errno.ENOENT:
        return SourceError(f"{path}: disappeared after the tree was scanned; run the same command again")
    reason = os_reason(error)
    if error.errno in (errno.EAGAIN, errno.EINVAL, errno.EISDIR, errno.ENXIO) and not _is_file(path):
        return SourceError(
            f"{path}: is not a regular file any more (a pipe, a socket or a device?); remove it and run the "
            f"same command again"
        )
    remedy = _REMEDIES.get(error.errno or 0, "check the disk or the network")
    return SourceError(f"{path}: cannot be read ({reason}); {remedy}, then run the same command again")


def _is_file(path: str | os.PathLike[str]) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False
