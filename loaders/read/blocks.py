"""Read files into the system's cache ahead of their use, in blocks that Linux keeps as huge pages.

Linux caches a file that is read picture by picture, or with `read`, in small pages of 4 KiB: reading it,
mapping it and finding its pages then costs the CPU more work. Therefore files that will be read completely,
and that fit into the cache, are read in blocks of the size of a huge page.
"""

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from loaders.batch import Request
from loaders.dataset import SplitData
from loaders.threads import Pool
from precache.errors import DatasetError, OpenFilesError, os_reason
from precache.formats.base import shard_remedy
from precache.formats.shards import ShardFile, picture_starts
from precache.storage import open_regular

BLOCK_BYTES = 2 * 1024 * 1024  # a huge page of x86-64, and of aarch64 with small pages of 4 KiB
_READERS = 4  # threads that wait for the disk
_REQUESTS_AHEAD = 32
# Blocks that are probed to see whether a file is cached. Few, because Linux starts to read a small page for
# each probed block that is not cached.
_PROBES = 4
# `mmap` has no name for it: https://man7.org/linux/man-pages/man2/madvise.2.html
_MADV_POPULATE_READ = 22
_MAP_FAILED = ctypes.c_void_p(-1).value


class BlockReader:
    """Threads that read the shards of a split into the system's cache, each block of 2 MiB once."""

    def __init__(self, data: SplitData) -> None:
        self._data = data
        self._pool = Pool(_READERS, "read-block")
        self._requested: set[tuple[int, int]] = set()  # (shard, block)
        self._blocks: dict[int, npt.NDArray[np.int64]] = {}  # shard -> blocks of its pictures
        # After so many samples, one epoch, every block has been requested.
        self._samples_to_request = len(data)

    def read_shard(self, shard: ShardFile) -> None:
        """Wait until all of an open shard is in the cache.

        Raises:
            DatasetError: the shard cannot be read.
        """
        # By its descriptor, since another file may have taken the shard's name meanwhile.
        descriptor_path = f"/dev/fd/{shard.descriptor}"
        blocks = range(-(-shard.bytes // BLOCK_BYTES))
        probed = blocks[:: 1 + len(blocks) // _PROBES]
        if all(is_block_cached(descriptor_path, number) for number in probed):
            return
        try:
            self._pool.map(partial(read_block, descriptor_path), blocks)
        except OpenFilesError as error:
            error.path = shard.path
            raise
        except OSError as error:
            raise DatasetError(
                f"cannot be read ({os_reason(error)})", path=shard.path, remedy=shard_remedy(shard.path)
            ) from error

    def fetch(self, request: Request) -> None:
        """Queue the blocks of a request, in the first epoch; none if the first ones of all are cached."""
        if self._samples_to_request > 0:
            self._samples_to_request -= len(request.positions)
            self._request_blocks(request)

    def may_fetch_after(self, waiting: Sequence[Request]) -> bool:
        """Whether to fetch for a request after those in `waiting`, too."""
        return len(waiting) < _REQUESTS_AHEAD

    def close(self) -> None:
        """End the threads."""
        self._pool.close()

    def _request_blocks(self, request: Request) -> None:
        needed: dict[tuple[int, int], None] = {}
        shards, rows = self._data.locate(request.positions)
        for shard, row in zip(shards.tolist(), rows.tolist(), strict=True):
            if shard not in self._blocks:
                self._blocks[shard] = self._picture_blocks(shard)
            first, last = self._blocks[shard][row].tolist()
            needed.update(((shard, block), None) for block in range(first, last + 1))
        if not self._requested:
            probed = list(needed)[:_PROBES]
            if all(is_block_cached(self._data.files[shard], block) for shard, block in probed):
                self._samples_to_request = 0
                return
        for shard, block in needed:
            if (shard, block) not in self._requested:
                # The result is not waited for: whoever reads the picture meets an error of the disk again.
                self._pool.submit(read_block, self._data.files[shard], block)
        self._requested.update(needed)

    def _picture_blocks(self, shard: int) -> npt.NDArray[np.int64]:
        """First and last block of the picture in each row of a shard: int64 [samples of the shard, 2]."""
        whole = self._data.whole
        shapes = whole.shapes_at(whole.shard_positions(shard))
        starts = picture_starts(shapes, whole.channels)
        last_bytes = starts + shapes.prod(axis=1) * whole.channels - 1
        return np.stack((starts, last_bytes), axis=1) // BLOCK_BYTES


def read_block(path: str | os.PathLike[str], number: int) -> None:
    """Read a block of the file at `path` into the system's cache, if possible as a huge page.

    Raises:
        OSError: the file cannot be opened or read.
    """
    start = number * BLOCK_BYTES
    with open_regular(path) as file:
        count = min(BLOCK_BYTES, os.fstat(file.fileno()).st_size - start)
        if count > 0 and not _populate(file.fileno(), start, count):
            os.preadv(file.fileno(), [bytearray(count)], start)


def is_block_cached(path: str | os.PathLike[str], number: int) -> bool:
    """Whether the middle of a block is in the system's cache; False where the file cannot be opened."""
    with suppress(OSError, OpenFilesError), open_regular(path) as file:
        start = number * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, os.fstat(file.fileno()).st_size)
        return is_cached(file.fileno(), (start + stop) // 2)
    return False


def is_cached(descriptor: int, start: int) -> bool:
    """Whether the byte at `start` can be read without waiting for the disk; False past the end of the file.

    Where it is not cached, Linux begins to read it, in small pages.
    """
    try:
        return os.preadv(descriptor, [bytearray(1)], start, os.RWF_NOWAIT) > 0
    except (AttributeError, OSError):  # the system has no such call, or the read would wait
        return False


def _populate(descriptor: int, start: int, count: int) -> bool:
    """Map `count` bytes of a file and have Linux read them; False where Linux cannot."""
    if sys.platform != "linux":
        return False
    mapped = map_file(descriptor, count, start)
    prefer_blocks(mapped)
    return advise(mapped, 0, count, _MADV_POPULATE_READ)


def map_pages(mapped: npt.NDArray[np.uint8]) -> None:
    """Put all pages of a mapped file into the page table at once; those not in the cache are read."""
    if sys.platform == "linux":
        advise(mapped, 0, len(mapped), _MADV_POPULATE_READ)


def prefer_blocks(mapped: npt.NDArray[np.uint8]) -> None:
    """Ask Linux to read a whole block, and nothing beyond it, where a page of a mapped file is missing."""
    if sys.platform == "linux":
        advise(mapped, 0, len(mapped), mmap.MADV_HUGEPAGE)
        advise(mapped, 0, len(mapped), mmap.MADV_RANDOM)


def advise(mapped: npt.NDArray[np.uint8], start: int, count: int, advice: int) -> bool:
    """Call madvise for `count` bytes of a mapped file from `start` on; False where the system refuses."""
    begin = start - start % mmap.PAGESIZE
    address = ctypes.c_void_p(mapped.ctypes.data + begin)
    # By ctypes, which lets other threads run during the call; `mmap.madvise` does not.
    return not _libc().madvise(address, ctypes.c_size_t(start + count - begin), advice)


def map_file(descriptor: int, count: int, start: int = 0) -> npt.NDArray[np.uint8]:
    """Map `count` bytes of a file from `start` on, read-only and shared: they take no memory of this process.

    Args:
        start: a multiple of the size of a page.

    Returns:
        uint8 [count]. The map lasts as long as the array or a view of it, and keeps no descriptor
        open, as Python's own maps do (before `trackfd` of Python 3.13).

    Raises:
        OSError: the system refuses.
    """
    address = _libc().mmap(None, count, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, start)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    buffer = (ctypes.c_ubyte * count).from_address(address)
    # Not at the program's end, when threads may still read.
    weakref.finalize(buffer, _libc().munmap, address, count).atexit = False
    mapped: npt.NDArray[np.uint8] = np.frombuffer(memoryview(buffer), np.uint8)
    mapped.flags.writeable = False
    return mapped


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_longlong,
    )
    libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
    return libc
