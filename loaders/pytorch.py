"""Backend `pytorch`: the raw tree through a DataLoader's worker processes.

Pictures are decoded and resized exactly as the converter does it, so that what a model sees is what
shards of the same size hold. Batches cross the process boundary as uint8.
"""

import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from loaders.batch import DecodedBatch, LoaderSpec, Positions
from loaders.dataset import SplitData
from precache import images
from precache.errors import ImageError, WorkerError


def open_reader(spec: LoaderSpec, data: SplitData, size: int) -> "PytorchReader":
    """A reader over `data`, a raw tree."""
    return PytorchReader(data, size, spec.workers)


class PytorchReader:
    """Keeps its worker processes from the first batch to `close`."""

    random_access = True

    def __init__(self, data: SplitData, size: int, workers: int) -> None:
        self._sampler = _Sampler()
        self._loader: DataLoader[Any] = DataLoader(
            _RawTree(data, size),
            batch_sampler=self._sampler,
            num_workers=workers,
            collate_fn=_as_is,
            persistent_workers=workers > 0,
        )
        _readers.add(self)

    def read(self, batches: Iterator[Positions]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per array of positions."""
        self._sampler.batches = batches
        try:
            for batch in self._start():
                if isinstance(batch, ImageError):
                    raise batch
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
_readers: "weakref.WeakSet[PytorchReader]" = weakref.WeakSet()


def _disown() -> None:
    for reader in _readers:
        iterator = getattr(reader._loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown = True  # torch's own mark that there is nothing left to do


os.register_at_fork(after_in_child=_disown)


class _Sampler:
    """Hands the positions of one `read` to the DataLoader, which is built before them."""

    batches: Iterator[Positions] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return (positions.tolist() for positions in self.batches)


class _RawTree(Dataset[Any]):
    """Batches of a raw tree, decoded where this is called: in a worker."""

    def __init__(self, data: SplitData, size: int) -> None:
        self._data = data
        self._size = size

    def __len__(self) -> int:
        return len(self._data.ids)

    def __getitems__(self, positions: list[int]) -> tuple[torch.Tensor, ...] | ImageError:
        """(images, labels, ids); an error is returned, for raising it here would fold in a traceback."""
        pixels = torch.empty((len(positions), self._size, self._size, 3), dtype=torch.uint8)
        rows = pixels.numpy()
        try:
            for row, position in enumerate(positions):
                rows[row] = images.load(self._data.files[position], self._size)
        except ImageError as error:
            return error
        taken = np.array(positions)
        return (
            pixels,
            torch.from_numpy(self._data.labels[taken]),
            torch.from_numpy(self._data.ids[taken]),
        )


def _as_is(batch: Any) -> Any:
    return batch
