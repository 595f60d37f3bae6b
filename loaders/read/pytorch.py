"""Backend `pytorch`: the raw tree through a DataLoader's worker processes, or through threads.

Pictures are decoded as the converter decodes them, and what is served is cut out of the whole upright picture
and resized once, antialiased, as by torchvision's transforms. Batches cross the process boundary as uint8, in
memory that is shared.
"""

import atexit
import gc
import multiprocessing
import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from loaders.augment import Crops
from loaders.batch import DecodedBatch, Reader, Request
from loaders.dataset import SplitData
from loaders.read import decoding
from loaders.read.filler import BatchFiller, SharedBuffers
from loaders.settings import LoaderSpec
from loaders.threads import dead_worker_error
from precache.errors import OpenFilesError, SourceError, check_open_files

_AHEAD_PER_WORKER = 2
_END_S = 2.0  # for what ends at once, or never
_KEPT_BUFFERS = 8  # batches that the caller and the loader hold; of more the memory is fresh


def open_reader(spec: LoaderSpec, data: SplitData, crops: Crops) -> Reader:
    """A reader over `data`, a raw tree."""
    if spec.workers == 0:
        return decoding.ThreadsReader(spec, data, crops)
    return ProcessesReader(spec, data, crops)


class ProcessesReader:
    """Keeps its worker processes from the first batch to `close`."""

    random_access = True

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        forks = multiprocessing.get_start_method() == "fork"
        buffers = spec.workers * _AHEAD_PER_WORKER + _KEPT_BUFFERS if forks and crops.size is not None else 0
        self._buffers = SharedBuffers(buffers, spec.batch_size * crops.views, crops.size or 1)
        self._sampler = _Sampler(self._buffers)
        self._loader: DataLoader[Any] = DataLoader(
            _RawTree(data, crops, spec.batch_size, self._buffers.memory),
            batch_sampler=self._sampler,  # type: ignore[arg-type]  # the dataset takes what it yields
            num_workers=spec.workers,
            prefetch_factor=_AHEAD_PER_WORKER,
            collate_fn=_as_is,
            worker_init_fn=_put_aside,
            persistent_workers=True,
        )

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        self._sampler.requests = requests
        try:
            for buffer, batch in self._start():
                if isinstance(batch, SourceError | OpenFilesError):
                    raise batch
                yield self._received(buffer, batch)
        except (RuntimeError, EOFError, OSError) as error:
            if isinstance(error, OSError):
                check_open_files(error, error.filename)
            # the latter two: it died between announcing a batch and handing over its memory
            if (death := dead_worker_error(error)) is not None:
                raise death from error
            raise

    def _received(self, buffer: int | None, batch: DecodedBatch) -> DecodedBatch:
        if buffer is None:
            return batch
        images = self._buffers.serve(buffer, len(batch.images))
        return batch if batch.refused else replace(batch, images=images)

    def _start(self) -> Iterator[Any]:
        collecting = gc.isenabled()
        gc.disable()  # a worker inherits that, until it has put aside what else it inherits
        try:
            iterator = iter(self._loader)
            _iterators.add(iterator)
            return iterator
        finally:
            if collecting:
                gc.enable()
            atexit.unregister(_kill_workers)
            atexit.register(_kill_workers)  # torch has just asked for its turn: ours comes before that

    def close(self) -> None:
        """End the worker processes, and wait until they and what fed them have ended."""
        iterator: Any = self._loader._iterator
        if iterator is None:
            return
        iterator._shutdown_workers()
        for worker in iterator._workers:
            if worker.is_alive():  # torch has given it 5 s, and SIGTERM
                worker.kill()
            worker.join(_END_S)
        _end_queues(iterator)
        _iterators.discard(iterator)
        self._loader._iterator = None


# Torch's, of this process: a forked one that collects its copy must not tell its parent's workers to end.
_iterators: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _disown() -> None:
    for iterator in _iterators:
        iterator._shutdown = True  # torch's own mark that there is nothing left to do
        # or multiprocessing would end them with this process, which did not start them
        multiprocessing.process._children.difference_update(iterator._workers)  # type: ignore[attr-defined]
    _iterators.clear()


os.register_at_fork(after_in_child=_disown)


def _kill_workers() -> None:
    """At the program's end, whatever they are at: they only read, and who waits for them is woken."""
    iterators = [*_iterators]
    watch: Any = torch.utils.data._utils.signal_handling
    for iterator in iterators:
        iterator._shutdown = True
        if iterator._worker_pids_set:  # or torch would report their death
            watch._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
        for worker in iterator._workers:
            worker.kill()
    for iterator in iterators:
        for worker in iterator._workers:
            worker.join(_END_S)
        iterator._worker_result_queue._writer.close()  # the last one: the reader finds the end there
        _end_queues(iterator)


def _end_queues(iterator: Any) -> None:
    """End the threads that write what workers are asked for; torch does not wait for them."""
    for requests in iterator._index_queues:
        requests.close()
        if (thread := getattr(requests, "_thread", None)) is not None:
            thread.join(_END_S)


class _Sampler:
    """Hands the requests of one `read`, each with a buffer, to the DataLoader, which is built before them."""

    def __init__(self, buffers: SharedBuffers) -> None:
        self.requests: Iterator[Request] = iter(())
        self._buffers = buffers

    def __iter__(self) -> Iterator[tuple[Request, int | None]]:
        self._buffers.reclaim()  # torch comes here once the workers are done with what they had
        for request in self.requests:
            yield request, self._buffers.take()


class _RawTree(Dataset[Any]):
    """Batches of a raw tree, decoded where this is called: in a worker."""

    def __init__(self, data: SplitData, crops: Crops, batch_size: int, memory: npt.NDArray[np.uint8]) -> None:
        self._data, self._crops, self._batch_size, self._memory = data, crops, batch_size, memory

    def __getitems__(self, asked: tuple[Request, int | None]) -> tuple[int | None, Any]:
        """The number of the buffer that was given, and a DecodedBatch; its images lie there if it is whole.

        A SourceError or OpenFilesError instead of a batch: raising it here would fold in a traceback.
        """
        request, buffer = asked
        memory = None if buffer is None else self._memory[buffer]
        filler = BatchFiller(self._data, self._crops, self._batch_size, 1, torch.device("cpu"), memory)
        try:
            pictures = [decoding.read(self._data.files[position]) for position in request.positions.tolist()]
            batch = filler.fill(decoding.to_fill(request, pictures))
        except (SourceError, OpenFilesError) as error:  # it says nothing about the picture: not left out
            return buffer, error
        if memory is None or batch.refused:
            return buffer, batch
        return buffer, replace(batch, images=torch.empty((len(batch.images), 0), dtype=torch.uint8))


def _as_is(batch: Any) -> Any:
    return batch


def _put_aside(_: int) -> None:
    """Never collect what a forked worker has from its parent: a finaliser may wait for a thread of that.

    The parent does not put it aside: that takes up to a second, and to take it back would take back what the
    training has put aside itself.
    """
    gc.freeze()
    gc.enable()
