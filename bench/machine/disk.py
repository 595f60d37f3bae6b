"""Rates of reading from the disk of a folder, without the page cache."""

import errno
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.machine import page_cache
from precache.errors import SettingError
from precache.storage.staging import temporary_folder

_SEQUENTIAL_BYTES = 8 << 20
_MAX_RESIDENT_SHARE = 0.05
"""Share of a file's bytes that may stay in memory after its pages were dropped; more: it is on no disk."""
_SEED = 31


@dataclass(frozen=True, slots=True)
class UncachedFile:
    """A file whose reads do not go through the page cache.

    Attributes:
        bytes: size of the file.
    """

    path: Path
    bytes: int

    def sequential_rate(self, seconds: float) -> float:
        """Return MB/s of reading the file from its start to its end, or for `seconds`."""
        block = min(_SEQUENTIAL_BYTES, self.bytes)
        return self._rate(block, range(0, self.bytes - block + 1, block), seconds)

    def random_rate(self, block_bytes: int, seconds: float) -> float:
        """Return MB/s of reading blocks in random order, each once and one at a time, for `seconds`."""
        order = np.random.default_rng(_SEED).permutation(self.bytes // block_bytes)
        return self._rate(block_bytes, (order * block_bytes).tolist(), seconds)

    def _rate(self, block_bytes: int, offsets: Iterable[int], seconds: float) -> float:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        try:
            # direct I/O needs an address that is a multiple of the disk's block, as a mapping's is
            with mmap.mmap(-1, block_bytes) as buffer:
                count = 0
                start_s = time.perf_counter()
                for offset in offsets:
                    count += os.preadv(descriptor, [buffer], offset)
                    if (elapsed_s := time.perf_counter() - start_s) >= seconds:
                        break
                return count / elapsed_s / 1e6
        finally:
            os.close(descriptor)


@contextmanager
def uncached_file(folder: Path, size: int) -> Iterator[UncachedFile]:
    """Yield a file of `size` random bytes in `folder`, none of them in memory; it is removed after the block.

    Raises:
        SettingError: the pages of files in `folder` stay in memory, as those of tmpfs; or its file system or
            the operating system has no direct I/O (macOS, Windows).
        StorageError: no file can be made in `folder`.
        OSError: the file cannot be written.
    """
    block = np.random.default_rng(_SEED).bytes(min(size, _SEQUENTIAL_BYTES))
    with temporary_folder(folder) as own_folder:
        path = own_folder / "read"
        with open(path, "wb") as file:
            for number in range(-(-size // len(block))):
                # blocks differ by their number: storage that finds duplicates would keep only one of them
                stop = min(len(block), size - number * len(block))
                file.write(number.to_bytes(8, "little") + block[8:stop])
        resident_share = page_cache.drop(path)
        if resident_share > _MAX_RESIDENT_SHARE:
            raise SettingError(
                f"{resident_share:.0%} of a file stays in memory: it is on no disk", path=folder
            )
        uncached = UncachedFile(path, size)
        try:
            uncached.random_rate(mmap.PAGESIZE, 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise SettingError(
                "its file system has no direct I/O", path=folder, remedy="name another --scratch"
            ) from error
        yield uncached
