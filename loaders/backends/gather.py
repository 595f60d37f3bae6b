"""Reading many pieces of files in one system call.

A read per picture hands the interpreter's lock over and back each time, which keeps several threads from
being faster than one. Linux's native AIO takes a list of reads, and what the system has cached of a file that
is not opened with O_DIRECT it copies at once, in the calling thread; some network file systems later, so the
end of each read is waited for: https://man7.org/linux/man-pages/man2/io_submit.2.html

Nothing is mapped: where a file shrinks or its disk fails, touching a mapping ends the process (SIGBUS), and
each of its pages must be mapped first, which takes as long as copying it.
"""

import ctypes
import errno
import logging
import os
import platform
import sys
import threading
import weakref
from collections import deque
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from precache.pictures.jpeg import Pixels

Integers = npt.NDArray[np.integer[Any]]

_MAX_READS = 64  # in one call
_MAX_ROWS = 512  # of a piece with gaps: IOV_MAX is 1,024, for them and the gaps
_PREAD, _PREADV = 0, 7
_IOCB = np.dtype(  # struct iocb of linux/aio_abi.h, little-endian
    [
        ("data", "<u8"), ("key", "<u4"), ("rw_flags", "<u4"), ("opcode", "<u2"), ("priority", "<i2"),
        ("descriptor", "<u4"), ("buffer", "<u8"), ("bytes", "<u8"), ("offset", "<i8"), ("reserved", "<u8"),
        ("flags", "<u4"), ("event_descriptor", "<u4"),
    ]
)  # fmt: skip
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])
_LOGGER = logging.getLogger(__name__)
_local = threading.local()
# Contexts of threads that have ended: to destroy one takes the system 50 ms.
_free: "deque[_Context]" = deque(maxlen=16)


class _Calls(NamedTuple):
    """Numbers of the system calls."""

    setup: int
    destroy: int
    getevents: int
    submit: int


_CALLS = {"x86_64": _Calls(206, 207, 208, 209), "aarch64": _Calls(0, 1, 4, 2)}


def gather(descriptors: Integers, starts: Integers, stride: int, out: Pixels) -> bool:
    """Read pieces of files into `out`, uint8 [n, rows, row], contiguous.

    Row r of piece k is what stands at `starts[k]` + r * `stride` in the file open as `descriptors[k]`.

    Returns:
        Whether all of them were read whole. If not, some cannot be, or this system does not do it.
    """
    if not (out.flags.c_contiguous and out.flags.writeable and out.dtype == np.uint8):
        raise ValueError("out must be contiguous uint8 that can be written to")
    if not len(out):
        return True
    context = _context()
    if context is None or (out.nbytes != len(out) * out.shape[1] * stride and out.shape[1] > _MAX_ROWS):
        return False
    parts = (slice(start, start + _MAX_READS) for start in range(0, len(out), _MAX_READS))
    return all(_read(context, descriptors[part], starts[part], stride, out[part]) for part in parts)


def can_gather(rows: int, *, gaps: bool) -> bool:
    """Whether this system lets this thread read pieces of so many rows; some sandboxes forbid the calls."""
    return (rows <= _MAX_ROWS or not gaps) and _context() is not None


class _Context:
    """What the system keeps for the reads of one thread.

    Raises:
        OSError: it keeps nothing.
    """

    def __init__(self) -> None:
        calls = _calls()
        handle = ctypes.c_ulong(0)
        if calls is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        _call(calls.setup, _MAX_READS, ctypes.addressof(handle))
        self._calls = calls
        self._handle = handle.value
        self._events = np.empty(_MAX_READS, _EVENT)
        self.process = os.getpid()
        self.close = weakref.finalize(self, _destroy, calls.destroy, self._handle, self.process)
        self.close.atexit = False

    def run(self, requests: npt.NDArray[Any], expected_bytes: int) -> bool:
        """Do `requests`, _IOCB [n]; whether each read so many bytes.

        Raises:
            OSError: it is of no use any more.
        """
        pointers = _addresses(requests)
        try:
            running = _call(self._calls.submit, self._handle, len(requests), pointers.ctypes.data)
        except OSError:  # of the very first: nothing runs
            return False
        complete = running == len(requests)
        try:
            while running > 0:  # even if not all were submitted: those that were write into memory
                done = self._wait(running)
                complete = complete and bool((self._events["result"][:done] == expected_bytes).all())
                running -= done
        except BaseException:
            self.close()  # waits for those that run
            raise
        return complete

    def _wait(self, running: int) -> int:
        try:
            return _call(self._calls.getevents, self._handle, running, running, self._events.ctypes.data, 0)
        except InterruptedError:
            return 0


def _context() -> _Context | None:
    """One that no other thread uses as long as this one runs; None if there can be none."""
    process = os.getpid()
    context: _Context | None = getattr(_local, "context", None)
    if context is not None and context.process == process and context.close.alive:
        return context
    if getattr(_local, "refused", None) == process:
        return None
    try:
        context = _local.context = _free_context(process) or _Context()
    except OSError as error:
        _refuse(error)
        return None
    _local.loan = loan = _Loan()  # goes with the thread
    weakref.finalize(loan, _give_back, context).atexit = False
    return context


class _Loan:
    """Of a context to a thread."""


def _free_context(process: int) -> _Context | None:
    with suppress(IndexError):
        while True:
            context = _free.pop()
            if context.process == process and context.close.alive:
                return context
    return None


def _give_back(context: _Context) -> None:
    _free.append(context)


def _refuse(error: OSError) -> None:
    """Do without in this thread; EAGAIN alone, other processes have taken all there is, may pass."""
    _LOGGER.debug("reading piece by piece: %s", error)
    if error.errno != errno.EAGAIN:
        _local.refused = os.getpid()


def _destroy(number: int, handle: int, process: int) -> None:
    if process == os.getpid():  # a forked one inherits none: this number may be that of another
        _libc().syscall(ctypes.c_long(number), ctypes.c_long(handle))


def _read(context: _Context, descriptors: Integers, starts: Integers, stride: int, out: Pixels) -> bool:
    """At most _MAX_READS pieces."""
    count, rows = out.shape[:2]
    piece_bytes = out.nbytes // count
    row_bytes, gap_bytes = piece_bytes // rows, stride - piece_bytes // rows
    requests = np.zeros(count, _IOCB)
    requests["descriptor"], requests["offset"] = descriptors, starts
    expected_bytes = piece_bytes + (rows - 1) * gap_bytes
    if gap_bytes == 0:
        requests["opcode"], requests["buffer"], requests["bytes"] = _PREAD, _addresses(out), piece_bytes
    else:
        gap = np.empty(gap_bytes, np.uint8)  # where goes what lies between the rows
        vectors = np.empty((count, rows, 2, 2), np.uint64)  # struct iovec: of each row and of the gap behind
        vectors[:, :, 0, 0] = _addresses(out)[:, None] + np.arange(rows, dtype=np.uint64) * row_bytes
        vectors[:, :, 0, 1] = row_bytes
        vectors[:, :, 1] = gap.ctypes.data, gap_bytes
        requests["opcode"], requests["bytes"] = _PREADV, 2 * rows - 1  # none behind the last row
        requests["buffer"] = _addresses(vectors)
    try:
        return context.run(requests, expected_bytes)
    except OSError as error:
        _refuse(error)
        return False


def _addresses(array: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Of the elements of its first axis."""
    return array.ctypes.data + np.arange(len(array), dtype=np.uint64) * array.strides[0]


def _calls() -> _Calls | None:
    if sys.platform != "linux" or sys.maxsize < 2**32:  # a 32-bit process has other numbers
        return None
    return _CALLS.get(platform.machine())


def _call(number: int, *arguments: int) -> int:
    """What a system call returns; OSError if it fails."""
    result: int = _libc().syscall(*map(ctypes.c_long, (number, *arguments)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)  # the interpreter's lock is released while it runs
    libc.syscall.restype = ctypes.c_long
    return libc
