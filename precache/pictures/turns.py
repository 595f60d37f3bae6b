"""Large pictures are decoded one at a time by the workers of a run.

A picture of 100 million pixels takes up to a gigabyte while it is decoded: one in each worker at once could
be more than the machine has. The turn is a lock on a byte of a file, which the system releases when its
holder dies. Each run has a byte of its own, so that a suspended run holds up no other.
"""

import errno
import multiprocessing
import os
import tempfile
from contextlib import suppress
from io import FileIO

from precache.errors import OpenFilesError
from precache.storage import open_single

LARGE_PIXELS = 25_000_000
"""A picture of more pixels than this waits for its turn."""
_DECODING_BYTES = 12  # per pixel: Pillow's own four, turned upright, and what the decoder keeps
_PIDS = 1 << 32  # more than any system has
_run: int | None = None


def join_run(run: int) -> None:
    """Make this process a worker of the run with this number, rather than of its parent process."""
    global _run
    _run = run


class LargePictureLock:
    """One picture's place in the queue: `wait` takes the turn, the end of the block gives it back."""

    def __init__(self) -> None:
        self._lock: FileIO | None = None

    def wait(self, pixels: int) -> None:
        """Wait for the turn if so many `pixels` are to be decoded."""
        if pixels > LARGE_PIXELS and self._lock is None:
            with suppress(ImportError, OSError, OpenFilesError):  # turns save memory, no more
                self._lock = _lock_file()

    def __enter__(self) -> "LargePictureLock":
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()  # with it goes the lock
            self._lock = None


def _lock_file() -> FileIO:
    """The file whose byte of this run this process has locked."""
    import fcntl

    path = os.path.join(tempfile.gettempdir(), f"precache-large-pictures-{os.getuid()}.lock")
    file = FileIO(open_single(path, os.O_CREAT), "r+")
    if os.fstat(file.fileno()).st_uid != os.getuid():
        file.close()
        raise PermissionError(errno.EACCES, "another user has made this file", path)
    # not flock: a byte per run needs no file per run, which would be left behind
    fcntl.lockf(file, fcntl.LOCK_EX, 1, _byte_of_run())
    return file


def _byte_of_run() -> int:
    if _run is not None:
        return _PIDS + _run
    parent = multiprocessing.parent_process()
    return os.getpid() if parent is None else parent.pid or 0


def lacks_memory(error: Exception, max_pixels: int) -> bool:
    """Whether a decoder failed because memory is short, rather than over a header that asks for too much."""
    words = str(error).lower()
    if not (isinstance(error, MemoryError) or "out of memory" in words or "insufficient memory" in words):
        return False
    try:
        bytearray(max_pixels * _DECODING_BYTES)  # as much as the largest picture takes; it is not touched
    except MemoryError:
        return True
    return False
