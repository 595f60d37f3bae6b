"""Backend `pytorch`: the raw tree through a DataLoader's worker processes, or through threads.

Pictures are decoded as the converter decodes them, and what is served is cut out of the whole upright picture
and resized once, antialiased, as by torchvision's transforms. Batches cross the process boundary as uint8, in
memory that is shared.
"""

import gc
import multiprocessing
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from loaders.augment.cpu import Crops
from loaders.batch import DecodedBatch, Reader, Request
from loaders.dataset import SplitData
from loaders.deliver import Pool, begin_exit_with, of_dead_worker
from loaders.read import decoding
from loaders.read.decoding import Encoded
from loaders.read.filler import BatchFiller, Pictures, SharedBuffers
from loaders.settings import LoaderSpec
from precache.errors import SourceError

_AHEAD_PER_WORKER = 2
_END_S = 2.0  # for what ends at once, or never
_KEPT_BUFFERS = 8  # batches that the caller and the loader hold; of more the memory is fresh


def open_reader(spec: LoaderSpec, data: SplitData, crops: Crops) -> Reader:
    """A reader over `data`, a raw tree."""
    if spec.workers == 0:
        return ThreadsReader(spec, data, crops)
    return ProcessesReader(spec, data, crops)


class ThreadsReader:
    """Decodes in threads: the decoder and the resizer release the interpreter lock."""

    random_access = True

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        self._data = data
        self._pool = Pool(max(1, spec.threads), "read")
        self._filler = BatchFiller(data, crops, spec.batch_size, spec.threads, spec.device)

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        return self._filler.fill_each(_pictures(self._data, request, self._pool.map) for request in requests)

    def close(self) -> None:
        """End the threads."""
        self._filler.close()
        self._pool.close()


def _pictures(data: SplitData, request: Request, apply: Callable[..., Iterable[Encoded]] = map) -> Pictures:
    """Those of a request, read by `apply`.

    Raises:
        SourceError: one cannot be read.
    """
    files = [data.files[position] for position in request.positions.tolist()]
    pictures = [*apply(decoding.read, files)]
    return Pictures(request, lambda slot: pictures[slot].decode(), decoding.shapes_of(pictures))


class ProcessesReader:
    """Keeps its worker processes from the first batch to `close`."""

    random_access = True

    def __init__(self, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        self._buffers: SharedBuffers | None = None
        if multiprocessing.get_start_method() == "fork" and crops.size is not None:
            buffers = spec.workers * _AHEAD_PER_WORKER + _KEPT_BUFFERS
            self._buffers = SharedBuffers(buffers, spec.batch_size * crops.views, crops.size)
        self._sampler = _Sampler(self._buffers)
        memory = None if self._buffers is None else self._buffers.memory
        self._loader: DataLoader[Any] = DataLoader(
            _RawTree(data, crops, spec.batch_size, memory),
            batch_sampler=self._sampler,  # type: ignore[arg-type]  # the dataset takes what it yields
            num_workers=spec.workers,
            prefetch_factor=_AHEAD_PER_WORKER,
            collate_fn=_as_is,
            worker_init_fn=_put_aside,
            persistent_workers=True,
        )
        _readers.add(self)

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        self._sampler.requests = requests
        try:
            for buffer, batch in self._start():
                if isinstance(batch, SourceError):
                    raise batch
                yield self._received(buffer, batch)
        except (RuntimeError, EOFError, OSError) as error:
            # the latter two: it died between announcing a batch and handing over its memory
            if (death := of_dead_worker(error)) is not None:
                raise death from error
            raise

    def _received(self, buffer: int | None, batch: DecodedBatch) -> DecodedBatch:
        if buffer is None or self._buffers is None:
            return batch
        images = self._buffers.serve(buffer, len(batch.images))
        return batch if batch.refused else replace(batch, images=images)

    def _start(self) -> Iterator[Any]:
        collecting = gc.isenabled()
        gc.disable()  # a worker inherits that, until it has put aside what else it inherits
        try:
            return iter(self._loader)
        finally:
            if collecting:
                gc.enable()
            begin_exit_with(_kill_workers)  # torch has just asked for its turn: ours comes before that

    def close(self) -> None:
        """End the worker processes, and wait until they and what fed them have ended."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is None:
            return
        iterator._shutdown_workers()
        for worker in iterator._workers:
            if worker.is_alive():  # torch has given it 5 s, and SIGTERM
                worker.kill()
            worker.join(_END_S)
        _end_queues(iterator)
        self._loader._iterator = None


# Of this process: a forked one that collects its copy must not tell the workers of its parent to end.
_readers: "weakref.WeakSet[ProcessesReader]" = weakref.WeakSet()


def _disown() -> None:
    for iterator in _iterators():
        iterator._shutdown = True  # torch's own mark that there is nothing left to do
        # or multiprocessing would end them with this process, which did not start them
        multiprocessing.process._children.difference_update(iterator._workers)  # type: ignore[attr-defined]
    _readers.clear()


os.register_at_fork(after_in_child=_disown)


def _iterators() -> list[Any]:
    """Those of torch that have workers in this process."""
    iterators = [getattr(reader._loader, "_iterator", None) for reader in _readers]
    return [iterator for iterator in iterators if iterator is not None]


def _kill_workers() -> None:
    """At the program's end, whatever they are at: they only read, and who waits for them is woken."""
    iterators = _iterators()
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

    def __init__(self, buffers: SharedBuffers | None) -> None:
        self.requests: Iterator[Request] = iter(())
        self._buffers = buffers

    def __iter__(self) -> Iterator[tuple[Request, int | None]]:
        if self._buffers is None:
            yield from ((request, None) for request in self.requests)
            return
        self._buffers.reclaim()  # torch comes here once the workers are done with what they had
        for request in self.requests:
            yield request, self._buffers.take()


class _RawTree(Dataset[Any]):
    """Batches of a raw tree, decoded where this is called: in a worker."""

    def __init__(
        self, data: SplitData, crops: Crops, batch_size: int, memory: npt.NDArray[np.uint8] | None
    ) -> None:
        self._data, self._crops, self._batch_size, self._memory = data, crops, batch_size, memory

    def __len__(self) -> int:
        return len(self._data.ids)

    def __getitems__(self, asked: tuple[Request, int | None]) -> tuple[int | None, Any]:
        """The number of the buffer that was given, and a DecodedBatch; its images lie there if it is whole.

        A SourceError instead of a batch: raising it here would fold in a traceback.
        """
        request, buffer = asked
        memory = None if buffer is None or self._memory is None else self._memory[buffer]
        filler = BatchFiller(self._data, self._crops, self._batch_size, 1, torch.device("cpu"), memory)
        try:
            batch = filler.fill(_pictures(self._data, request))
        except SourceError as error:  # it says nothing about the picture: not left out
            return buffer, error
        if memory is None or batch.refused:
            return buffer, batch
        return buffer, replace(batch, images=torch.empty((len(batch.images), 0), dtype=torch.uint8))


def _as_is(batch: Any) -> Any:
    return batch


def _put_aside(_: int) -> None:
    """Never collect what a forked worker has from its parent.

    To collect one of them can run a finaliser that waits for a thread which exists only there, as that of
    DALI's pipeline does. The parent does not put them aside: that takes up to a second, and to take it back
    would take back what the training has put aside itself.
    """
    gc.freeze()
    gc.enable()
