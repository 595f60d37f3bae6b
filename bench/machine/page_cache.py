"""Page cache: reads the files of a folder into it, drops them from it, and counts what is in it.

Dropping is a request, which the kernel does not always grant: pages that a process has mapped stay, and
tmpfs has no other place for its pages. So the pages that stay are counted with mincore(2), file by file.
Names and inodes stay cached: a cold tree is cold in its data alone.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from precache.errors import SettingError

_READ_BYTES = 1 << 20


def warm(path: Path) -> bool:
    """Read every file below `path` once; read none and return False above half of the free memory."""
    files = list(_files(path))
    if sum(file.stat().st_size for file in files) > psutil.virtual_memory().available / 2:
        return False
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            while opened.read(_READ_BYTES):
                pass
    return True


def drop(path: Path) -> float:
    """Ask the kernel to drop the pages of every file below `path`, or of the file `path`.

    Returns:
        The share of the bytes, 0 to 1, that stays in memory: 0 where the files are cold.

    Raises:
        SettingError: the system has no such call (macOS, Windows).
    """
    if not hasattr(os, "posix_fadvise"):
        raise SettingError("this system cannot drop pages from its cache", remedy="measure with a warm cache")
    for file in _files(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # a page that has not been written yet would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return resident_share(path)


def resident_share(path: Path) -> float:
    """Return the share of the bytes below `path`, 0 to 1, that is in memory; 0 if there are none.

    Since Linux 5.2 a file that is neither one's own nor writable counts as wholly in memory: the share may be
    too large, never too small.

    Raises:
        SettingError: the system has no such call (Windows).
    """
    pages = resident = 0
    for file in _files(path):
        is_resident = _resident_pages(file)
        pages += len(is_resident)
        resident += int(is_resident.sum())
    return resident / pages if pages else 0.0


def _resident_pages(file: Path) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Return bool [pages]: whether each page of `file` is in memory."""
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
    except (AttributeError, TypeError) as error:  # TypeError: Windows has no library without a name
        raise SettingError("this system cannot tell which pages its cache holds") from error
    size = file.stat().st_size
    if size == 0:  # an empty file cannot be mapped
        return np.zeros(0, np.bool_)
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        states = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)  # for its address; mapping reads no page
        address, out = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(states.ctypes.data)
        code = mincore(address, ctypes.c_size_t(size), out)
        del view  # a mapping with a view cannot be closed
    if code != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))
    return (states & 1).astype(np.bool_)  # the other bits are reserved


def _files(path: Path) -> Iterator[Path]:
    """Yield the regular files below `path`, or `path` itself, without pipes and dangling links."""
    if path.is_file():
        yield path
    for folder, _, names in os.walk(path):
        yield from (file for name in names if (file := Path(folder) / name).is_file())
