"""Backend `shards`: decoded pixels, copied by threads out of mapped files straight into each batch."""

import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch

from loaders.augment import Crops
from loaders.batch import DecodedBatch, Request
from loaders.dataset import SplitData
from loaders.read import host_memory
from loaders.read.blocks import BlockReader, advise, is_cached, map_pages, prefer_blocks
from loaders.read.filler import BatchFiller, Pictures
from loaders.read.integrity import SampleCheck, check_index
from loaders.read.sequential import look_ahead
from loaders.settings import LoaderSpec
from precache.errors import DatasetError, OpenFilesError, shell_command
from precache.formats.shards import DATA_START, ShardFile
from precache.pictures.jpeg import Pixels
from precache.storage import check_can_open, open_regular
from precache.storage.locks import lock

_PROBES = 4  # pictures of a batch that tell whether the disk is to be asked for any: a call each
_BATCHES_AHEAD = 2  # whose shards at a URL are fetched
_OPEN_SHARDS = 256  # maps, where not all are kept
_MOST_MAPS = 32_768  # of 65,530 that Linux gives a process
_OPEN_OF_URL = 32  # each keeps its file open: a process may have 1,024 by default, on macOS 256


class MappedShard:
    """Shows pixels of a shard where the system caches them, without copying them, to any number of threads.

    The file need not stay open. Where it was truncated in place meanwhile, or its disk fails, touching pixels
    ends the process (SIGBUS): our writers replace files and never truncate one.

    Args:
        shard: of which no more than its map is needed.
        in_blocks: all of it will be read, and stays in the system's cache.
        locked: what is closed with the map, and keeps the file in the cache of a URL until then.
    """

    def __init__(self, shard: ShardFile, *, in_blocks: bool, locked: ShardFile | None) -> None:
        self._locked = locked
        self._path, self._shapes, self._starts = shard.path, shard.shapes, shard.starts
        self._pixel_bytes = shard.channels * shard.dtype.itemsize
        self._mapped = _map(shard)
        if in_blocks:
            prefer_blocks(self._mapped)
        self._of_one_size: Pixels | None = None  # all pictures
        if len(self._shapes) and (self._shapes == self._shapes[0]).all():
            shape = (len(self._shapes), *self._shapes[0].tolist(), self._pixel_bytes)
            pixels = self._mapped[DATA_START:]
            self._of_one_size = pixels[: int(np.prod(shape))].reshape(shape)

    def picture(self, row: int) -> Pixels:
        """Uint8 [height, width, bytes of a pixel] of the picture in `row`: valid as long as it is held.

        Nobody may write to it; it could be, since torch warns of arrays that cannot.
        """
        if self._of_one_size is not None:
            picture: Pixels = self._of_one_size[row]
            return picture
        start, picture_bytes = self._place(row)
        height, width = self._shapes[row].tolist()
        return self._mapped[start : start + picture_bytes].reshape(height, width, self._pixel_bytes)

    def map_pages(self) -> None:
        """Map all pages, which are in the system's cache, at once, and not each as it is touched."""
        map_pages(self._mapped)

    def is_cached(self, row: int) -> bool:
        """Whether the middle of the picture in `row` is in the system's cache."""
        start, picture_bytes = self._place(row)
        with suppress(OSError, OpenFilesError), open_regular(self._path) as file:
            return is_cached(file.fileno(), start + picture_bytes // 2)
        return False

    def will_need(self, row: int) -> None:
        """Ask the system to fetch the picture in `row` from the disk, without waiting for it."""
        if hasattr(mmap, "MADV_WILLNEED"):
            advise(self._mapped, *self._place(row), mmap.MADV_WILLNEED)

    def close(self, *, drop_cached: bool = False) -> None:
        """Unmap the file; idempotent. Pictures that are held stay.

        Args:
            drop_cached: ask the system to drop it from its cache, too; it keeps what is held.
        """
        self._mapped, self._of_one_size = self._mapped[:0].copy(), None
        if drop_cached and hasattr(os, "posix_fadvise"):
            with suppress(OSError, OpenFilesError), open_regular(self._path) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if self._locked is not None:
            self._locked.close()

    def _place(self, row: int) -> tuple[int, int]:
        """Where the picture in `row` begins, and how many bytes it has."""
        height, width = self._shapes[row].tolist()
        return int(self._starts[row]), height * width * self._pixel_bytes


def _map(shard: ShardFile) -> Pixels:
    """Uint8 of the whole file; writable, and what is written stays in this process.

    By torch, since a map of Python's keeps a descriptor (its `trackfd` came with 3.13).
    """
    try:
        file = f"/dev/fd/{shard.descriptor}"
        return torch.from_file(file, shared=False, size=shard.bytes, dtype=torch.uint8).numpy()
    except RuntimeError as error:
        check_can_open(shard.path)
        raise DatasetError(
            f"{shard.path}: cannot be mapped ({error}); free memory, or raise the number of maps that a "
            f"process may have ('sysctl vm.max_map_count')"
        ) from error


class ShardsReader:
    """Reads single samples at random, or shard after shard for `shuffle="window"` and False."""

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        self.random_access = data.remote is None or spec.shuffle == "full"
        self._data = data
        self._batch_size = spec.batch_size
        self._filler = BatchFiller(data, crops, spec.batch_size, spec.workers, spec.device)
        self._sequential = spec.shuffle in (False, "window") or not self.random_access
        self._window_shards = data.window_shards(spec.reading.memory_bytes)
        most_bytes = spec.reading.memory_bytes
        exceeds = most_bytes is not None and int(data.shard_bytes.sum()) > most_bytes
        self._bounded = self._sequential and exceeds
        self._kept = _OPEN_SHARDS if data.remote is None else _OPEN_OF_URL
        self._check = SampleCheck(data, spec.reading.check)
        fits = host_memory.has_room(int(data.shard_bytes.sum()))
        self._in_blocks = (
            not self._sequential and data.remote is None and fits and len(data.files) <= _MOST_MAPS
        )
        if self._in_blocks:
            self._kept = len(data.files)
        self._blocks = BlockReader(data)
        self._unasked = 0 if self._sequential or self._in_blocks else len(data)

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one batch per request."""
        if self._in_blocks:
            requests = self._blocks.ahead_of(requests)
        with ExitStack() as at_end:  # of the filling, too: until then it reads from the files
            shards = look_ahead(
                *(self._data, requests, self._window_shards, self._open, self._close, at_end),
                kept=0 if self._sequential else self._kept,
                most_samples=_BATCHES_AHEAD * self._batch_size,
            )
            yield from self._filler.fill_each(self._pictures(*asked) for asked in shards)

    def _pictures(self, request: Request, opened: Mapping[int, MappedShard]) -> Pictures:
        indexes, samples = self._data.locate(request.positions)
        files = [opened[index] for index in indexes.tolist()]
        rows = samples.tolist()
        self._ask_for(files, rows)

        def picture_of(slot: int) -> Pixels:
            return files[slot].picture(rows[slot])

        compare = self._check.of_batch(request.positions)
        return Pictures(request, picture_of, in_memory=True, compare=compare)

    def close(self) -> None:
        """End the threads."""
        self._blocks.close()
        self._filler.close()

    def _ask_for(self, files: list[MappedShard], samples: list[int]) -> None:
        """Have the disk fetch all pictures of a batch at a time; each thread alone would wait for one.

        Until as many were read as there are: then they are in the system's cache, where it is large enough.
        """
        if self._unasked <= 0:
            return
        self._unasked -= len(files)
        asked = list(zip(files, samples, strict=True))
        if not all(file.is_cached(sample) for file, sample in asked[:_PROBES]):
            for file, sample in asked:
                file.will_need(sample)

    def _open(self, index: int) -> MappedShard:
        return self._data.read(index, partial(self._map_file, index))

    def _close(self, shard: MappedShard) -> None:
        shard.close(drop_cached=self._bounded)

    def _map_file(self, index: int, path: Path) -> MappedShard:
        self._check.open_file(index)
        with ExitStack() as opened:
            file = opened.enter_context(ShardFile(path))
            check_index(self._data, index, file.ids, file.labels)
            whole = self._data.whole
            shapes = whole.shapes_at(whole.shard_positions(index))
            if (file.channels, file.dtype) != (whole.channels, whole.dtype) or not np.array_equal(
                file.shapes, shapes
            ):
                raise DatasetError(
                    f"{path}: holds pictures of other sizes or channels than manifest and index say; "
                    f"run: {shell_command('precache verify', self._data.path)}"
                )
            if self._sequential:
                self._blocks.read_shard(file)
            in_blocks = self._sequential or self._in_blocks
            if self._data.remote is None:
                mapped = MappedShard(file, in_blocks=in_blocks, locked=None)
            else:
                lock(file.descriptor, exclusive=False, wait=True)  # it stays in the cache until it is closed
                mapped = MappedShard(file, in_blocks=in_blocks, locked=file)
                opened.pop_all()
        if self._sequential:
            mapped.map_pages()
        return mapped
