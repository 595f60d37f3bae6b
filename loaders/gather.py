"""Reading many pieces of files in one system call.

A read per picture hands the interpreter's lock over and back each time, which keeps several threads from
being faster than one. Linux's native AIO takes a list of reads. Files that are not opened with O_DIRECT it
reads at once, in the calling thread, one piece after the other:
https://man7.org/linux/man-pages/man2/io_submit.2.html

Nothing is mapped: where a file shrinks or its disk fails, touching a mapping ends the process (SIGBUS), and
each of its pages must be mapped first, which takes as long as copying it.
"""

import ctypes
import errno
import os
import platform
import sys
import threading
import weakref
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from precache.jpeg import Pixels

Integers = npt.NDArray[np.integer[Any]]

_MAX_READS = 64  # in one call
_MAX_ROWS = 512  # of a piece: IOV_MAX is 1,024, for them and the gaps
_PREAD, _PREADV = 0, 7
_IOCB = np.dtype(  # struct iocb of linux/aio_abi.h, little-endian
    [
        ("data", "<u8"), ("key", "<u4"), ("rw_flags", "<u4"), ("opcode", "<u2"), ("priority", "<i2"),
        ("descriptor", "<u4"), ("buffer", "<u8"), ("bytes", "<u8"), ("offset", "<i8"), ("reserved", "<u8"),
        ("flags", "<u4"), ("event_descriptor", "<u4"),
    ]
)  # fmt: skip
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])
_SYSTEM_CALLS = {  # io_setup, io_destroy, io_getevents, io_submit
    "x86_64": (206, 207, 208, 209),
    "aarch64": (0, 1, 4, 2),
}
_local = threading.local()


def gather(descriptors: Integers, starts: Integers, stride: int, out: Pixels) -> bool:
    """Read pieces of files into `out`, uint8 [n, rows, row], contiguous.

    Row r of piece k is what stands at `starts[k]` + r * `stride` in the file open as `descriptors[k]`.

    Returns:
        Whether all of them were read whole. If not, some cannot be, or this system does not do it.
    """
    context = _context()
    if context is None or out.shape[1] > _MAX_ROWS:
        return False
    parts = (slice(start, start + _MAX_READS) for start in range(0, len(out), _MAX_READS))
    return all(_read(context, descriptors[part], starts[part], stride, out[part]) for part in parts)


def is_available() -> bool:
    """Whether this system lets this thread do so; some sandboxes forbid the calls."""
    return _context() is not None


class _Context:
    """What the system keeps for the reads of one thread."""

    def __init__(self) -> None:
        handle = ctypes.c_ulong(0)
        if _call(0, _MAX_READS, ctypes.addressof(handle)) != 0:
            raise OSError(ctypes.get_errno(), "io_setup")
        self._handle = handle.value
        self._events = np.empty(_MAX_READS, _EVENT)
        self.process = os.getpid()
        weakref.finalize(self, _destroy, self._handle, self.process).atexit = False

    def run(self, requests: npt.NDArray[Any], expected_bytes: int) -> bool:
        """Do `requests`, _IOCB [n]; whether each read so many bytes."""
        pointers = _addresses(requests)
        running = submitted = _call(3, self._handle, len(requests), pointers.ctypes.data)
        complete = submitted == len(requests)
        while running > 0:  # even if not all were: what was submitted writes into memory
            done = _call(2, self._handle, running, running, self._events.ctypes.data, 0)
            if done < 0:
                if ctypes.get_errno() == errno.EINTR:
                    continue
                raise OSError(ctypes.get_errno(), "io_getevents")
            complete = complete and bool((self._events["result"][:done] == expected_bytes).all())
            running -= done
        return complete


def _context() -> _Context | None:
    """That of this thread, which goes with it; None if there can be none."""
    process = os.getpid()
    context: _Context | None = getattr(_local, "context", None)
    if context is not None and context.process == process:
        return context
    if getattr(_local, "refused", None) == process:
        return None
    try:
        context = _local.context = _Context()
    except OSError:
        _local.refused = process
        return None
    return context


def _read(context: _Context, descriptors: Integers, starts: Integers, stride: int, out: Pixels) -> bool:
    """At most _MAX_READS pieces."""
    count, rows = out.shape[:2]
    piece_bytes = out.nbytes // count
    row_bytes, gap_bytes = piece_bytes // rows, stride - piece_bytes // rows
    requests = np.zeros(count, _IOCB)
    requests["descriptor"], requests["offset"] = descriptors, starts
    if gap_bytes == 0:
        requests["opcode"], requests["buffer"], requests["bytes"] = _PREAD, _addresses(out), piece_bytes
        return context.run(requests, piece_bytes)
    gap = np.empty(gap_bytes, np.uint8)  # where goes what lies between the rows
    vectors = np.empty((count, rows, 2, 2), np.uint64)  # struct iovec: of each row and of the gap behind it
    vectors[:, :, 0, 0] = _addresses(out)[:, None] + np.arange(rows, dtype=np.uint64) * row_bytes
    vectors[:, :, 0, 1] = row_bytes
    vectors[:, :, 1] = gap.ctypes.data, gap_bytes
    requests["opcode"], requests["bytes"] = _PREADV, 2 * rows - 1  # none behind the last row
    requests["buffer"] = _addresses(vectors)
    return context.run(requests, piece_bytes + (rows - 1) * gap_bytes)


def _destroy(handle: int, process: int) -> None:
    if process == os.getpid():  # a forked one has not inherited it
        _call(1, handle)


def _addresses(array: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Of the elements of its first axis."""
    return array.ctypes.data + np.arange(len(array), dtype=np.uint64) * array.strides[0]


def _call(which: int, *arguments: int) -> int:
    """One of _SYSTEM_CALLS; -1 and errno if it fails."""
    numbers = _SYSTEM_CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if numbers is None:
        ctypes.set_errno(errno.ENOSYS)
        return -1
    result: int = _libc().syscall(*map(ctypes.c_long, (numbers[which], *arguments)))
    return result


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)  # the interpreter's lock is released while it runs
    libc.syscall.restype = ctypes.c_long
    return libc
