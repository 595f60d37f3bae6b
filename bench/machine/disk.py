"""Rates at which the disk of a folder is read, past the page cache."""

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
_MOST_RESIDENT = 0.05  # share of a file whose pages were dropped: where more is left, it is on no disk
_TAG = 31


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A file to read from, past the page cache."""

    path: Path
    bytes: int

    def sequential_rate(self, seconds: float) -> float:
        """MB/s of reading the file from its start to its end, or for `seconds`."""
        block = min(_SEQUENTIAL_BYTES, self.bytes)
        return self._rate(block, range(0, self.bytes - block + 1, block), seconds)

    def random_rate(self, block_bytes: int, seconds: float) -> float:
        """MB/s of reading blocks in random order, each once and one at a time, for `seconds`."""
        order = np.random.default_rng(_TAG).permutation(self.bytes // block_bytes)
        return self._rate(block_bytes, (order * block_bytes).tolist(), seconds)

    def _rate(self, block_bytes: int, offsets: Iterable[int], seconds: float) -> float:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        try:
            # direct I/O wants an address that is a multiple of the disk's block: a mapping has one
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
def readable_file(folder: Path, size: int) -> Iterator[ReadFile]:
    """A file of `size` random bytes in `folder`, on its disk alone, for the duration of the block.

    Raises:
        SettingError: pages of `folder` do not leave memory, as those of tmpfs; or there is no direct I/O
            to read past the cache with (macOS, Windows, some file systems).
        StorageError: nothing can be made in `folder`.
        OSError: it cannot be written.
    """
    block = np.random.default_rng(_TAG).bytes(min(size, _SEQUENTIAL_BYTES))
    with temporary_folder(folder) as own_folder:
        path = own_folder / "read"
        with open(path, "wb") as file:
            for number in range(-(-size // len(block))):
                # no two blocks alike: storage that finds duplicates would keep one
                file.write(
                    number.to_bytes(8, "little") + block[8 : min(len(block), size - number * len(block))]
                )
        resident = page_cache.drop(path)
        if resident > _MOST_RESIDENT:
            raise SettingError(f"{folder}: {resident:.0%} of a file stays in memory: it is on no disk")
        found = ReadFile(path, size)
        try:
            found.random_rate(mmap.PAGESIZE, 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise SettingError(
                f"{folder}: its file system has no direct I/O; name another --scratch"
            ) from error
        yield found
