"""Lock that makes the workers of a run decode large pictures one at a time.

A picture of 100 million pixels takes up to a gigabyte while it is decoded, and one in each worker at once
could exceed the machine's memory. The lock is on a byte of a file, so the system releases it when its holder
dies. Each run has a byte of its own, so that a suspended run does not block others.
"""

import errno
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from io import FileIO

from precache.errors import OpenFilesError
from precache.storage import open_single

LARGE_PIXELS = 25_000_000
"""Pictures of more pixels than this are decoded one at a time."""
_DECODING_BYTES = 12  # per pixel: Pillow's four, four of the upright picture, and the decoder's own
_MAX_PID = 1 << 32
_run: int | None = None


def join_run(run: int) -> None:
    """Make this process a worker of the run with this number, rather than of its parent process."""
    global _run
    _run = run


@contextmanager
def large_picture_lock() -> Iterator[None]:
    """Hold the lock while a picture of more than LARGE_PIXELS is decoded; wait while another worker has it.

    Without access to the lock's file, go on without the lock: it only saves memory.
    """
    file: FileIO | None = None
    with suppress(ImportError, OSError, OpenFilesError):
        file = _open_locked_file()
    with file or nullcontext():
        yield


def _open_locked_file() -> FileIO:
    """Open the user's lock file, and lock this run's byte of it."""
    import fcntl

    path = os.path.join(tempfile.gettempdir(), f"precache-large-pictures-{os.getuid()}.lock")
    file = FileIO(open_single(path, os.O_CREAT), "r+")
    if os.fstat(file.fileno()).st_uid != os.getuid():
        file.close()
        raise PermissionError(errno.EACCES, "another user has made this file", path)
    # a byte per run, not flock, which would need a file per run that nobody removes
    fcntl.lockf(file, fcntl.LOCK_EX, 1, _byte_of_run())
    return file


def _byte_of_run() -> int:
    if _run is not None:
        return _MAX_PID + _run
    parent = multiprocessing.parent_process()
    return os.getpid() if parent is None else parent.pid or 0


def lacks_memory(error: Exception, max_pixels: int) -> bool:
    """Whether a decoder failed because memory is short, not because a header claims too large a size."""
    message = str(error).lower()
    is_of_memory = isinstance(error, MemoryError)
    if not (is_of_memory or "out of memory" in message or "insufficient memory" in message):
        return False
    try:
        bytearray(max_pixels * _DECODING_BYTES)  # memory for the largest picture; the pages are not touched
    except MemoryError:
        return True
    return False
