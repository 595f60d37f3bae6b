"""Copying many pieces of mapped files in one system call.

A read per picture hands the interpreter's lock over and back each time, which keeps several threads from
being faster than one. `process_vm_readv`, here of this very process, takes a list of pieces:
https://man7.org/linux/man-pages/man2/process_vm_readv.2.html
What a file has no longer, or its disk does not give, is an error then; a plain copy out of a mapping would
end the process (SIGBUS).
"""

import ctypes
import os
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from precache.jpeg import Pixels

Addresses: TypeAlias = npt.NDArray[np.uint64]

_MAX_PIECES = 1024  # IOV_MAX of Linux


def gather(addresses: Addresses, out: Pixels) -> bool:
    """Copy what lies at `addresses`, [n], into `out`: uint8 [n, ...], contiguous.

    Returns:
        Whether all was copied. If not, some of it cannot be read.
    """
    pieces = np.empty((len(out), 2), np.uint64)  # struct iovec [n]
    pieces[:, 0], pieces[:, 1] = addresses, out.nbytes // max(1, len(out))
    return all(
        _read(out[start : start + _MAX_PIECES], pieces[start : start + _MAX_PIECES])
        for start in range(0, len(out), _MAX_PIECES)
    )


@cache
def is_available() -> bool:
    """Whether this system lets a process do so; some sandboxes forbid the call."""
    source, target = np.ones(1, np.uint8), np.zeros((1, 1), np.uint8)
    try:
        return gather(np.array([source.ctypes.data], np.uint64), target) and target[0, 0] == 1
    except AttributeError:  # not Linux
        return False


def _read(out: Pixels, pieces: npt.NDArray[np.uint64]) -> bool:
    space = np.array([out.ctypes.data, out.nbytes], np.uint64)  # struct iovec
    copied: int = _function()(os.getpid(), space.ctypes.data, 1, pieces.ctypes.data, len(pieces), 0)
    return copied == out.nbytes


@cache
def _function() -> "ctypes._NamedFuncPointer":
    function = ctypes.CDLL(None).process_vm_readv  # the interpreter's lock is released while it runs
    long, pointer = ctypes.c_ulong, ctypes.c_void_p
    function.argtypes = (ctypes.c_int, pointer, long, pointer, long, long)
    function.restype = ctypes.c_ssize_t
    return function
