"""Backend `pytorch`: the raw tree through a DataLoader's worker processes, or through threads.

Pictures are decoded and resized exactly as the converter does it, so that what a model sees is what
shards of the same size hold. Batches cross the process boundary as uint8.
"""

import gc
import os
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from loaders.batch import DecodedBatch, LoaderSpec, Reader, Request
from loaders.crops import Crops, place
from loaders.dataset import SplitData
from loaders.filler import BatchFiller
from precache import images
from precache.errors import ImageError, WorkerError
from precache.jpeg import Pixels


def open_reader(spec: LoaderSpec, data: SplitData, crops: Crops) -> Reader:
    """A reader over `data`, a raw tree."""
    if spec.workers == 0:
        return ThreadsReader(spec, data, crops)
    return ProcessesReader(data, crops, spec.workers)


class ThreadsReader:
    """Decodes in threads: the decoder and the resizer release the interpreter lock."""

    random_access = True

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        self._data = data
        self._crops = crops
        self._filler = BatchFiller(data, crops, spec.batch_size, spec.threads, spec.device)

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        for request in requests:
            files = [self._data.files[position] for position in request.positions.tolist()]
            yield self._filler.fill(request, partial(self._decode, files))

    def _decode(self, files: list[str], slot: int, first: int, space: Pixels) -> Pixels:
        return images.load(files[slot], self._crops.stored)[first : first + len(space)]

    def close(self) -> None:
        """End the threads."""
        self._filler.close()


class ProcessesReader:
    """Keeps its worker processes from the first batch to `close`."""

    random_access = True

    def __init__(self, data: SplitData, crops: Crops, workers: int) -> None:
        self._sampler = _Sampler()
        self._loader: DataLoader[Any] = DataLoader(
            _RawTree(data, crops),
            batch_sampler=self._sampler,  # type: ignore[arg-type]  # the dataset takes what it yields
            num_workers=workers,
            collate_fn=_as_is,
            persistent_workers=True,
        )
        _readers.add(self)

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        self._sampler.requests = requests
        try:
            for batch in self._start():
                yield DecodedBatch(*batch)
        except (RuntimeError, EOFError, OSError) as error:
            # the latter two: it died between announcing a batch and handing over its memory
            if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                raise
            raise WorkerError(
                f"a worker died ({' '.join(str(error).split()) or type(error).__name__}); the machine may be "
                f"out of memory: build the loader with fewer workers or a smaller batch_size"
            ) from error

    def _start(self) -> Iterator[Any]:
        # A forked worker inherits the objects of this process. To collect one there can run a
        # finaliser that waits for a thread which exists only here; DALI's pipeline has such a one.
        gc.collect()
        gc.freeze()
        try:
            return iter(self._loader)
        finally:
            gc.unfreeze()

    def close(self) -> None:
        """End the worker processes."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None


# Of this process: a forked one that collects its copy must not tell the workers of its parent to end.
_readers: "weakref.WeakSet[ProcessesReader]" = weakref.WeakSet()


def _disown() -> None:
    for reader in _readers:
        iterator = getattr(reader._loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown = True  # torch's own mark that there is nothing left to do


os.register_at_fork(after_in_child=_disown)


class _Sampler:
    """Hands the requests of one `read` to the DataLoader, which is built before them."""

    requests: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.requests


class _RawTree(Dataset[Any]):
    """Batches of a raw tree, decoded where this is called: in a worker."""

    def __init__(self, data: SplitData, crops: Crops) -> None:
        self._data = data
        self._crops = crops

    def __len__(self) -> int:
        return len(self._data.ids)

    def __getitems__(self, request: Request) -> tuple[Any, ...]:
        """What a DecodedBatch is made of; errors too: raising them here would fold in a traceback."""
        ids = self._data.ids[request.positions]
        side = self._crops.size
        pixels = torch.empty((len(ids), side, side, 3), dtype=torch.uint8)
        rows = pixels.numpy()
        boxes, mirrored = self._crops.of(request.epoch, ids)
        kept: list[int] = []
        refused: dict[int, ImageError] = {}
        parts = zip(request.positions.tolist(), boxes.tolist(), mirrored.tolist(), strict=True)
        for position, (left, top, width, height), flip in parts:
            try:
                square = images.load(self._data.files[position], self._crops.stored)
            except ImageError as error:
                refused[int(self._data.ids[position])] = error
            else:
                place(square[top : top + height, left : left + width], flip, rows[len(kept)])
                kept.append(position)
        taken = np.array(kept, np.int64)
        labels = torch.from_numpy(self._data.labels[taken])
        return pixels[: len(kept)], labels, torch.from_numpy(self._data.ids[taken]), refused


def _as_is(batch: Any) -> Any:
    return batch
