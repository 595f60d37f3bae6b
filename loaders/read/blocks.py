"""Reading files into the system's cache ahead of their use, in blocks that Linux keeps as huge pages.

A file that is read picture by picture, or by `read`, lies in the cache in small pages: the CPU works longer
to read it, to map it and to find its pages. So where all of a file will be read, and stays in the cache, its
blocks are read like this.
"""

import ctypes
import mmap
import os
import sys
from collections import deque
from collections.abc import Iterator
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

BLOCK_BYTES = 2 * 1024 * 1024  # a huge page of x86, and of ARM with pages of 4 KiB
_READERS = 4  # threads that wait for the disk
_REQUESTS_AHEAD = 32
# blocks that tell whether the disk is to be asked; of those that are not cached Linux then reads a small page
_PROBES = 4
_MADV_POPULATE_READ = 22  # which `mmap` does not name: https://man7.org/linux/man-pages/man2/madvise.2.html


class BlockReader:
    """Threads that read the shards of a split into the system's cache, each block of 2 MiB once."""

    def __init__(self, data: SplitData) -> None:
        self._data = data
        self._pool = Pool(_READERS, "read-block")
        self._asked: set[tuple[int, int]] = set()  # shard and number of each block
        self._blocks: dict[int, npt.NDArray[np.int64]] = {}  # of each shard, see `_blocks_of`
        self._unasked = len(data)  # samples of the first epoch; behind it all blocks have been asked for

    def read_shard(self, shard: ShardFile) -> None:
        """Wait until all of an open shard is in the cache.

        Raises:
            DatasetError: it cannot be read.
        """
        opened = f"/dev/fd/{shard.descriptor}"  # another file may have its name by now
        blocks = range(-(-shard.bytes // BLOCK_BYTES))
        if all(is_block_cached(opened, number) for number in blocks[:: 1 + len(blocks) // _PROBES]):
            return
        try:
            self._pool.map(partial(read_block, opened), blocks)
        except OSError as error:
            raise DatasetError(
                f"{shard.path}: cannot be read ({os_reason(error)}); {shard_remedy(shard.path)}"
            ) from error

    def ahead_of(self, requests: Iterator[Request]) -> Iterator[Request]:
        """Yield the same requests; blocks that later ones need are read meanwhile, in the order of need."""
        waiting: deque[Request] = deque()
        while True:
            # of what comes behind an empty request nothing is known yet: see `ray_reader`
            while len(waiting) < _REQUESTS_AHEAD and (not waiting or len(waiting[-1].positions)):
                if (request := next(requests, None)) is None:
                    break
                waiting.append(request)
                if self._unasked > 0:
                    self._unasked -= len(request.positions)
                    self._ask_for(request)
            if not waiting:
                return
            yield waiting.popleft()

    def close(self) -> None:
        """End the threads."""
        self._pool.close()

    def _ask_for(self, request: Request) -> None:
        needed: dict[tuple[int, int], None] = {}
        shards, rows = self._data.locate(request.positions)
        for shard, row in zip(shards.tolist(), rows.tolist(), strict=True):
            if shard not in self._blocks:
                self._blocks[shard] = self._blocks_of(shard)
            first, last = self._blocks[shard][row].tolist()
            needed.update(((shard, block), None) for block in range(first, last + 1))
        if not self._asked and all(
            is_block_cached(self._data.files[shard], block) for shard, block in [*needed][:_PROBES]
        ):
            self._unasked = 0
            return
        for shard, block in needed:
            if (shard, block) not in self._asked:
                # an error of the disk is found again by who shows the picture
                self._pool.submit(read_block, self._data.files[shard], block)
        self._asked.update(needed)

    def _blocks_of(self, shard: int) -> npt.NDArray[np.int64]:
        """int64 [samples of the shard, 2]: first and last block of the picture in each row."""
        whole = self._data.whole
        shapes = whole.shapes_at(whole.shard_positions(shard))
        starts = picture_starts(shapes, whole.pixel_bytes)
        last_bytes = starts + shapes.prod(axis=1) * whole.pixel_bytes - 1
        return np.stack((starts, last_bytes), axis=1) // BLOCK_BYTES


def read_block(path: str | os.PathLike[str], number: int) -> None:
    """Read a block of the file at `path` into the system's cache, if possible as a huge page.

    Raises:
        OSError: the file cannot be opened, or read.
    """
    start = number * BLOCK_BYTES
    with open_regular(path) as file:
        count = min(BLOCK_BYTES, os.fstat(file.fileno()).st_size - start)
        if count > 0 and not _load(file.fileno(), start, count):
            os.preadv(file.fileno(), [bytearray(count)], start)


def is_block_cached(path: str | os.PathLike[str], number: int) -> bool:
    """Whether the middle of a block is in the system's cache; False where the file cannot be opened."""
    with suppress(OSError, OpenFilesError), open_regular(path) as file:
        start = number * BLOCK_BYTES
        return is_cached(
            file.fileno(), (start + min(start + BLOCK_BYTES, os.fstat(file.fileno()).st_size)) // 2
        )
    return False


def is_cached(descriptor: int, start: int) -> bool:
    """Whether the byte at `start` can be read without waiting for the disk; False behind the end.

    Linux begins to read what is not there, in small pages.
    """
    try:
        return os.preadv(descriptor, [bytearray(1)], start, os.RWF_NOWAIT) > 0
    except (AttributeError, OSError):  # no such call, or it would wait
        return False


def _load(descriptor: int, start: int, count: int) -> bool:
    """Map a part of a file, and have Linux fill it; False where it does not, whatever the reason is."""
    if sys.platform != "linux":
        return False
    mapped = np.frombuffer(mmap.mmap(descriptor, count, prot=mmap.PROT_READ, offset=start), np.uint8)
    prefer_blocks(mapped)
    return advise(mapped, 0, count, _MADV_POPULATE_READ)


def map_pages(mapped: npt.NDArray[np.uint8]) -> None:
    """Put all pages of a mapped file into the page table at once; those not in the cache are read."""
    if sys.platform == "linux":
        advise(mapped, 0, len(mapped), _MADV_POPULATE_READ)


def prefer_blocks(mapped: npt.NDArray[np.uint8]) -> None:
    """Ask Linux to read the whole block, and no other, where it lacks a page of a mapped file."""
    if sys.platform == "linux":
        advise(mapped, 0, len(mapped), mmap.MADV_HUGEPAGE)
        advise(mapped, 0, len(mapped), mmap.MADV_RANDOM)


def advise(mapped: npt.NDArray[np.uint8], start: int, count: int, advice: int) -> bool:
    """Call madvise for `count` bytes of a mapped file from `start` on; False: the system does without."""
    begin = start - start % mmap.PAGESIZE
    address = ctypes.c_void_p(mapped.ctypes.data + begin)
    # of ctypes, which lets other threads run
    return not _libc().madvise(address, ctypes.c_size_t(start + count - begin), advice)


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
