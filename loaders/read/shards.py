"""Backend `shards`: threads copy decoded pixels from memory-mapped files straight into each batch."""

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import starmap
from pathlib import Path

import numpy as np

from loaders.augment.crops import Crops
from loaders.batch import DecodedBatch, Request
from loaders.dataset import SplitData
from loaders.read.blocks import BlockReader, advise, is_cached, map_file, map_pages, prefer_blocks
from loaders.read.filler import BatchFiller, Pictures
from loaders.read.integrity import SampleCheck, check_index
from loaders.read.main_memory import has_room
from loaders.read.opening import OpenShards
from loaders.settings import LoaderSpec
from precache.errors import DatasetError, OpenFilesError, os_reason
from precache.formats.shards import DATA_START, ShardFile
from precache.pictures.jpeg import Pixels
from precache.storage import open_regular
from precache.storage.locks import lock

# Pictures of a batch that are probed to see whether the disk has to be read; each costs a system call.
_PROBES = 4
_BATCHES_AHEAD = 2  # the shards at a URL of so many batches are fetched ahead, in a full shuffle
_MAX_OPEN = 256  # mapped shards, where not all of them stay mapped
_MAX_MAPS = 32_768  # half of the 65,530 that Linux allows a process
_MAX_OPEN_OF_URL = 32  # each keeps a file open: a process may have 1,024 by default, on macOS 256


class MappedShard:
    """Shows pixels of a shard in the system's cache, without copying them, to any number of threads.

    The file need not stay open. If it is truncated in place meanwhile, or its disk fails, touching pixels
    ends the process (SIGBUS): our writers replace files and never truncate them.

    Args:
        shard: the open shard; it may be closed afterwards.
        in_blocks: whether all of it will be read and stays in the system's cache.
        locked: a shard to close together with the map; until then it keeps the file in the cache of a URL.
    """

    def __init__(self, shard: ShardFile, *, in_blocks: bool, locked: ShardFile | None) -> None:
        self._locked = locked
        self._path, self._shapes, self._starts = shard.path, shard.shapes, shard.starts
        self._channels = shard.channels
        self._mapped = _map(shard)
        if in_blocks:
            prefer_blocks(self._mapped)
        # All pictures, if they have one size: uint8 [n, height, width, channels].
        self._same_size_pictures: Pixels | None = None
        if len(self._shapes) and (self._shapes == self._shapes[0]).all():
            shape = (len(self._shapes), *self._shapes[0].tolist(), self._channels)
            pixels = self._mapped[DATA_START:]
            self._same_size_pictures = pixels[: int(np.prod(shape))].reshape(shape)

    def picture(self, row: int) -> Pixels:
        """Picture in `row`, uint8 [height, width, channels], read-only; the array keeps it valid."""
        if self._same_size_pictures is not None:
            picture: Pixels = self._same_size_pictures[row]
            return picture
        start, picture_bytes = self._byte_range(row)
        height, width = self._shapes[row].tolist()
        return self._mapped[start : start + picture_bytes].reshape(height, width, self._channels)

    def map_pages(self) -> None:
        """Map all pages, which are in the system's cache, at once instead of each at its first use."""
        map_pages(self._mapped)

    def is_cached(self, row: int) -> bool:
        """Whether the middle of the picture in `row` is in the system's cache."""
        start, picture_bytes = self._byte_range(row)
        with suppress(OSError, OpenFilesError), open_regular(self._path) as file:
            return is_cached(file.fileno(), start + picture_bytes // 2)
        return False

    def will_need(self, row: int) -> None:
        """Ask the system to read the picture in `row` from the disk, without waiting for it."""
        if hasattr(mmap, "MADV_WILLNEED"):
            advise(self._mapped, *self._byte_range(row), mmap.MADV_WILLNEED)

    def close(self, *, drop_cached: bool = False) -> None:
        """Unmap the file as soon as no picture of it is in use; idempotent.

        Args:
            drop_cached: ask the system to drop the file from its cache, but for pages that are in use.
        """
        self._mapped, self._same_size_pictures = self._mapped[:0].copy(), None
        if drop_cached and hasattr(os, "posix_fadvise"):
            with suppress(OSError, OpenFilesError), open_regular(self._path) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if self._locked is not None:
            self._locked.close()

    def _byte_range(self, row: int) -> tuple[int, int]:
        """Start of the picture in `row`, and its length, in bytes."""
        height, width = self._shapes[row].tolist()
        return int(self._starts[row]), height * width * self._channels


def _map(shard: ShardFile) -> Pixels:
    """Map the whole file, uint8.

    Raises:
        DatasetError: the system refuses.
    """
    try:
        return map_file(shard.descriptor, shard.bytes)
    except OSError as error:
        raise DatasetError(
            f"cannot be mapped ({os_reason(error)})",
            path=shard.path,
            remedy="raise the number of maps that a process may have ('sysctl vm.max_map_count'), or its "
            "limit of address space ('ulimit -v')",
        ) from error


class ShardsReader:
    """Reads single samples at random, or shard after shard for `shuffle="window"` and False."""

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        self.random_access = data.download_cache is None or spec.shuffle == "full"
        self._data = data
        self._batch_size = spec.batch_size
        self._filler = BatchFiller(data, crops, spec.batch_size, spec.workers, spec.device)
        self._check = SampleCheck(data, spec.reading.check)
        self._blocks = BlockReader(data)
        self._sequential = spec.shuffle in (False, "window") or not self.random_access
        memory_bytes = spec.reading.memory_bytes
        self._window_shards = data.window_shards(memory_bytes)
        split_bytes = int(data.shard_bytes.sum())
        self._drops_cached = self._sequential and memory_bytes is not None and split_bytes > memory_bytes
        self._reads_blocks = (
            not self._sequential
            and data.download_cache is None
            and has_room(split_bytes)
            and len(data.files) <= _MAX_MAPS
        )
        self._max_open = _MAX_OPEN if data.download_cache is None else _MAX_OPEN_OF_URL
        if self._reads_blocks:
            self._max_open = len(data.files)
        # Samples for which the disk is still asked ahead: see `_read_ahead`.
        self._samples_to_request = 0 if self._sequential or self._reads_blocks else len(data)

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one batch per request."""
        data, open_shard, close_shard = self._data, self._open, self._close
        if self._sequential:
            shards = OpenShards.in_windows(data, self._window_shards, open_shard, close_shard)
        else:
            shards = OpenShards.at_random(
                data,
                self._max_open,
                open_shard,
                close_shard,
                fetch_samples=_BATCHES_AHEAD * self._batch_size,
                blocks=self._blocks if self._reads_blocks else None,
            )
        # Shards are closed when the filling has ended, too: until then it reads from them.
        with closing(shards):
            yield from self._filler.fill_each(starmap(self._pictures, shards.read(requests)))

    def _pictures(self, request: Request, samples: list[tuple[MappedShard, int]]) -> Pictures:
        """Pictures of a request in its open shards."""
        self._read_ahead(samples)

        def picture_at(slot: int) -> Pixels:
            shard, row = samples[slot]
            return shard.picture(row)

        return Pictures(
            request, picture_at, in_memory=True, compare=self._check.batch_comparison(request.positions)
        )

    def close(self) -> None:
        """End the threads."""
        self._blocks.close()
        self._filler.close()

    def _read_ahead(self, samples: list[tuple[MappedShard, int]]) -> None:
        """Ask the disk for all pictures of a batch together; otherwise each thread would wait for one.

        Only until as many samples were read as the split has: then they are in the system's cache, if it is
        large enough.
        """
        if self._samples_to_request <= 0:
            return
        self._samples_to_request -= len(samples)
        if not all(shard.is_cached(row) for shard, row in samples[:_PROBES]):
            for shard, row in samples:
                shard.will_need(row)

    def _open(self, number: int) -> MappedShard:
        return self._data.read(number, partial(self._map_file, number))

    def _close(self, shard: MappedShard) -> None:
        shard.close(drop_cached=self._drops_cached)

    def _map_file(self, number: int, path: Path) -> MappedShard:
        """Map the file of shard `number`, once it agrees with manifest and index."""
        self._check.compare_size(number)
        with ExitStack() as opened:
            file = opened.enter_context(ShardFile(path))
            check_index(self._data, number, file.ids, file.labels)
            whole = self._data.whole
            shapes = whole.shapes_at(whole.shard_positions(number))
            if file.channels != whole.channels or not np.array_equal(file.shapes, shapes):
                raise DatasetError(
                    "holds pictures of other sizes or channels than manifest and index say",
                    path=path,
                    remedy=self._data.verify_remedy(number),
                )
            if self._sequential:
                self._blocks.read_shard(file)
            in_blocks = self._sequential or self._reads_blocks
            if self._data.find_shard(number)[0].downloads is None:
                mapped = MappedShard(file, in_blocks=in_blocks, locked=None)
            else:
                # The shared lock keeps the file in the cache of the URL until the map is closed.
                lock(file.descriptor, exclusive=False, wait=True)
                mapped = MappedShard(file, in_blocks=in_blocks, locked=file)
                opened.pop_all()
        if self._sequential:
            mapped.map_pages()
        return mapped
