"""Reading the files of a source, with retries.

A disk or a network that fails for a moment is no fault of a picture. So a failed read is tried again, and if
it fails still, the run ends with a SourceError: finished shards are kept, and the same command continues. A
picture is rejected only if its bytes were read and cannot be decoded.
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

from precache.errors import (
    ImageError,
    OpenFilesError,
    SourceError,
    check_open_files,
    os_reason,
    thread_errors,
)
from precache.storage import (
    open_descriptor,
    read_at_most,
    read_descriptor,
    read_descriptor_at,
    regular_status,
)
from precache.storage.retries import with_retries

MAX_PIXELS = 100_000_000
"""Default of the maximal number of pixels of a picture."""

T = TypeVar("T")
Ints: TypeAlias = npt.NDArray[np.int64]

_STATS_PER_TASK = 256
_STAT_THREADS = 64
_SLOW_STAT_S = 20e-6  # mean time of a stat above which threads pay; on a local disk it is 3e-6
_OUTLIERS = 4  # slowest stats of a task, which are ignored: they waited for the CPU, not for the disk
_PAUSES_S = (0.15, 0.5)  # between the tries that follow a failed one
# Errors that another try would not change.
_FINAL = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.ENXIO)
)
_REMEDIES = {
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.EBADF: "open the dataset's files anew in each worker process, or use workers=0",
    errno.ENOMEM: "use fewer --workers, or free some memory",
}
_MAX_BYTES_PER_PIXEL = 8  # four channels of 16 bits
_MAX_METADATA_BYTES = 64 << 20


def read_picture(
    path: str, max_pixels: int = MAX_PIXELS, scanned_status: tuple[int, int] | None = None
) -> bytes:
    """Read the file of the picture at `path`.

    Args:
        path: path of the file.
        max_pixels: maximal number of pixels; a file that is too large for so many pixels is not read.
        scanned_status: size in bytes and time of the last write in ns that the file had when the tree was
            scanned, and still must have, so that the result does not depend on when the file is read.

    Raises:
        ImageError: the file is larger than a picture can be.
        SourceError: the file cannot be read, or has changed since it was scanned.
    """
    return read_with_retries(lambda: _read(path, max_pixels, scanned_status), path)


def read_part(path: str, shown: str, scanned_status: tuple[int, int], start: int, count: int) -> bytes:
    """Read `count` bytes of a file from `start` on; fewer where the file ends before.

    Args:
        path: path of the file.
        shown: name of the file in messages.
        scanned_status: as of `read_picture`.
        start, count: part of the file, in bytes.

    Raises:
        SourceError: the file cannot be read, or has changed since it was scanned.
    """

    def read() -> bytes:
        with open_descriptor(path) as descriptor:
            _check_unchanged(shown, regular_status(descriptor, path), scanned_status)
            return read_descriptor_at(descriptor, start, count)

    return read_with_retries(read, shown)


def status_of(path: str) -> tuple[int, int] | None:
    """Size in bytes, and time of the last write in ns, of the file at `path`; None if there is none.

    Raises:
        SourceError: the status cannot be read.
    """
    try:
        status = read_with_retries(lambda: os.stat(path), path)
    except ValueError:  # the path holds a NUL
        return None
    except SourceError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _FINAL:
            return None
        raise
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


@thread_errors()
def sizes_and_times(paths: Sequence[str]) -> tuple[Ints, Ints]:
    """Sizes in bytes, and times of the last write in ns, of the files at `paths`: int64 [n] each.

    The files are looked up by many threads as soon as that is slow: a network drive that takes a millisecond
    for one file takes no longer for 64. If it is quick, threads would only contend for Python's own lock.

    Raises:
        SourceError: a file is gone, or its status cannot be read.
    """
    sizes, times = np.empty(len(paths), np.int64), np.empty(len(paths), np.int64)

    def fill(start: int) -> list[float]:
        """Fill in some rows, and return the seconds that each took."""
        ends_s = [time.perf_counter()]
        for row, path in enumerate(paths[start : start + _STATS_PER_TASK], start):
            sizes[row], times[row] = _size_and_time(path)
            ends_s.append(time.perf_counter())
        return [end_s - start_s for start_s, end_s in pairwise(ends_s)]

    starts = iter(range(0, len(paths), _STATS_PER_TASK))
    for start in starts:
        usual_s = sorted(fill(start))[:-_OUTLIERS]
        if sum(usual_s) > len(usual_s) * _SLOW_STAT_S:
            break
    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        try:
            for task in [pool.submit(fill, start) for start in starts]:
                task.result()
        finally:
            pool.shutdown(cancel_futures=True)
    return sizes, times


def _size_and_time(path: str) -> tuple[int, int]:
    try:  # without the overhead of retries, since a tree may hold 10,000,000 files
        status = os.stat(path)
    except OSError:
        status = read_with_retries(lambda: os.stat(path), path)
    return status.st_size, status.st_mtime_ns


def read_with_retries(read: Callable[[], T], path: str | os.PathLike[str]) -> T:
    """Return what `read` returns; an OSError is tried again within a second.

    Raises:
        SourceError: `read` still fails with an OSError; names `path`.
        OpenFilesError: too many files are open, still after a second.
    """
    try:
        try:
            return read()
        except (OSError, OpenFilesError) as error:
            if not _is_temporary(error):
                raise
            return with_retries(read, _PAUSES_S, _is_temporary)
    except OSError as error:
        check_open_files(error, path)
        raise _source_error(path, error) from error


def _is_temporary(error: Exception) -> bool:
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
        # checked once, after reading: a file that is unchanged now was unchanged while it was read
        status = regular_status(descriptor, path)
    _check_unchanged(path, status, scanned_status)
    if len(data) != status.st_size:
        raise SourceError(
            f"{len(data):,} of its {status.st_size:,} bytes could be read",
            path=path,
            remedy="check the disk or the network, then run the same command again",
        )
    return data


def check_bytes(path: str, size: int, max_pixels: int) -> None:
    """Raise ImageError if a file of `size` bytes is too large for a picture of `max_pixels`."""
    max_bytes = max_pixels * _MAX_BYTES_PER_PIXEL + _MAX_METADATA_BYTES
    if size > max_bytes:
        raise ImageError(
            path,
            f"is too large ({size:,} bytes; a picture of the {max_pixels:,} pixels that --max-pixels "
            f"allows has at most {max_bytes:,})",
        )


def _check_unchanged(path: str, status: os.stat_result, scanned_status: tuple[int, int] | None) -> None:
    if scanned_status is not None and scanned_status != (status.st_size, status.st_mtime_ns):
        raise SourceError(
            f"changed while it was converted (expected {scanned_status[0]:,} bytes, got {status.st_size:,}, "
            f"or written since)",
            path=path,
            remedy="do not change it meanwhile, and convert with --overwrite",
        )


def _source_error(path: str | os.PathLike[str], error: OSError) -> SourceError:
    """Make the error to raise instead of an OSError of reading the file at `path`."""
    if error.errno == errno.ENOENT:
        return SourceError(
            "disappeared after the tree was scanned", path=path, remedy="run the same command again"
        )
    if error.errno in (errno.EAGAIN, errno.EINVAL, errno.EISDIR, errno.ENXIO) and not _is_file(path):
        return SourceError(
            "is not a regular file any more (a pipe, a socket or a device?)",
            path=path,
            remedy="remove it and run the same command again",
        )
    remedy = _REMEDIES.get(error.errno or 0, "check the disk or the network")
    return SourceError(
        f"cannot be read ({os_reason(error)})", path=path, remedy=f"{remedy}, then run the same command again"
    )


def _is_file(path: str | os.PathLike[str]) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False
