"""Worker processes of a DataLoader in which a backend reads and decodes, so that the training does not wait.

Threads of this process would take turns with the training at the interpreter's lock: each picture costs a
training that launches its operations from Python more time than the lock is held for, since it is handed
over several times. A batch of a worker process costs one copy. Backend `pytorch` is always run so, unless
`workers` is 0; the others with `Reading(engine="processes")`.

Batches cross the process boundary as uint8, in shared memory, and are copied out of it: what is served
belongs to this process alone, so that no worker and no forked process writes into it. The memory is not
torch's, which a worker hands over through a socket for each batch: that would keep a file open, and fail
where the program has set a timeout for sockets.
"""

import atexit
import gc
import multiprocessing
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from loaders.augment.crops import Crops, carve
from loaders.batch import DecodedBatch, Reader, Request
from loaders.dataset import SplitData
from loaders.read import decoding
from loaders.read.filler import BufferPool, SharedBuffers
from loaders.read.worker import OpenReader, WorkerReader, check_backend, has_random_access, worker_spec
from loaders.settings import LoaderSpec
from loaders.threads import dead_worker_error, start_method
from precache.errors import (
    ImageError,
    PrecacheError,
    WorkerError,
    check_open_files,
    os_reason,
    thread_errors,
)

_AHEAD_PER_WORKER = 2
_END_S = 2.0  # wait for a thread or process that ends at once, or never


def open_tree(spec: LoaderSpec, data: SplitData, crops: Crops) -> Reader:
    """Open a reader over `data`, a raw tree: with worker processes, or with threads where `workers` is 0."""
    if spec.workers == 0:
        return decoding.ThreadsReader(spec, data, crops)
    return ProcessesReader("pytorch", decoding.ThreadsReader, spec, data, crops)


class ProcessesReader:
    """Reads with a backend in worker processes, which live from the first batch until `close`.

    Args:
        backend: name of the backend.
        open_reader: opens its reader.

    Raises:
        SettingError: `backend` decodes on a GPU or not at all.
    """

    def __init__(
        self, backend: str, open_reader: OpenReader, spec: LoaderSpec, data: SplitData, crops: Crops
    ) -> None:
        check_backend(backend, "processes")
        self.random_access = has_random_access(backend, spec, data)
        self._views, self._channels = crops.views, data.channels
        self._per_picture = crops.per_picture
        bytes = spec.batch_size * crops.pixels * data.channels
        # Workers fill the batches ahead while one is copied.
        self._shared = SharedBuffers(spec.workers * _AHEAD_PER_WORKER + 1, bytes)
        self._own = BufferPool(bytes, spec.device)
        self._sampler = _Sampler(self._shared)
        open_worker = partial(WorkerReader, open_reader, worker_spec(backend, spec), data, crops)
        self._loader: DataLoader[Any] = DataLoader(
            _Batches(open_worker, self._shared, crops.per_picture is not None),
            batch_sampler=self._sampler,  # type: ignore[arg-type]  # _Batches takes the requests
            num_workers=spec.workers,
            prefetch_factor=_AHEAD_PER_WORKER,
            collate_fn=_identity,
            worker_init_fn=_begin_worker,
            persistent_workers=True,
            generator=torch.Generator("cpu"),  # else each epoch would draw from the program's own
        )

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request; once a worker has died, the next call starts all anew."""
        self._sampler.requests = requests
        try:
            for answer in self._start():
                if answer.error is not None:
                    raise answer.error
                yield self._copy_images(answer)
        except RuntimeError as error:
            if (death := dead_worker_error(error)) is not None:
                self.close()
                raise death from error
            raise

    def _copy_images(self, answer: "_Answer") -> DecodedBatch:
        """Return an answer's batch with its images in memory of this process."""
        if answer.views is not None:
            self._shared.free(answer.buffer)
            return DecodedBatch(tuple(map(torch.from_numpy, answer.views)), answer.refused)
        copy = self._own.take(answer.bytes)
        # torch's copy_ starts threads, for which the workers leave no CPU
        np.copyto(copy.numpy(), self._shared.memory[answer.buffer][: answer.bytes])
        self._shared.free(answer.buffer)
        views = carve(copy, answer.samples, self._views, self._channels)
        return DecodedBatch(tuple(views), answer.refused)

    def _start(self) -> Iterator[Any]:
        """Start an epoch of the DataLoader, and its workers before the first one."""
        if self._loader._iterator is None:
            # asked for here, since a script may set it after `build`
            method = start_method()
            if self._per_picture is not None and method != "fork":
                self._per_picture.check_pickles(method)
            self._loader.multiprocessing_context = multiprocessing.get_context(method)
        was_enabled = gc.isenabled()
        gc.disable()  # inherited by the workers, each of which enables it in `_begin_worker`
        try:
            with thread_errors():
                iterator = iter(self._loader)
            _iterators.add(iterator)
            return iterator
        except OSError as error:
            check_open_files(error, error.filename)
            if isinstance(error, BrokenPipeError) and (death := dead_worker_error(error)) is not None:
                raise death from error
            raise WorkerError(
                f"no worker process can be started ({os_reason(error)})",
                remedy="build the loader with fewer workers, or raise the limit ('ulimit -u', and the pids "
                "limit of a container)",
            ) from error
        finally:
            if was_enabled:
                gc.enable()
            # Registered again after torch's own handler, so that it runs before that: atexit calls handlers
            # in reverse order.
            atexit.unregister(_kill_workers)
            atexit.register(_kill_workers)

    def close(self) -> None:
        """End the worker processes and the threads that send them requests, and wait for them."""
        iterator: Any = self._loader._iterator
        if iterator is None:
            return
        iterator._shutdown_workers()
        for worker in iterator._workers:
            if worker.is_alive():  # torch has waited 5 s, and sent SIGTERM
                worker.kill()
            worker.join(_END_S)
        _end_queues(iterator)
        _iterators.discard(iterator)
        self._loader._iterator = None


# torch's iterators of this process. A forked process has copies of them; when it collects a copy, the copy
# must not tell the parent's workers to end.
_iterators: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _abandon_workers() -> None:
    """Leave the workers of the parent alone, in a forked process."""
    for iterator in _iterators:
        iterator._shutdown = True  # torch's own mark of an iterator that has been shut down
        # Otherwise multiprocessing would end the workers together with this process, which did not start
        # them.
        multiprocessing.process._children.difference_update(iterator._workers)  # type: ignore[attr-defined]
    _iterators.clear()


os.register_at_fork(after_in_child=_abandon_workers)


def _kill_workers() -> None:
    """Kill all workers at the program's end, and wake the threads that wait for their batches.

    They may be killed at any moment, since they only read.
    """
    iterators = [*_iterators]
    watch: Any = torch.utils.data._utils.signal_handling
    for iterator in iterators:
        iterator._shutdown = True
        if iterator._worker_pids_set:  # otherwise torch would report the workers' death
            watch._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
        for worker in iterator._workers:
            worker.kill()
    for iterator in iterators:
        for worker in iterator._workers:
            worker.join(_END_S)
        # This was the last open end for writing: whoever reads the queue now finds its end.
        iterator._worker_result_queue._writer.close()
        _end_queues(iterator)


def _end_queues(iterator: Any) -> None:
    """End the threads that write requests to the workers' queues; torch does not wait for them."""
    for requests in iterator._index_queues:
        requests.close()
        if (thread := getattr(requests, "_thread", None)) is not None:
            thread.join(_END_S)


class _Sampler:
    """Yields the requests of one `read`, each with a buffer, to the DataLoader.

    `requests` is set before each `read`, because the DataLoader is built once.
    """

    def __init__(self, buffers: SharedBuffers) -> None:
        self.requests: Iterator[Request] = iter(())
        self._buffers = buffers

    def __iter__(self) -> Iterator[tuple[Request, int | None]]:
        self._buffers.reclaim()  # torch calls this when the workers have finished the previous requests
        for request in self.requests:
            yield request, self._buffers.take()


@dataclass(frozen=True, slots=True)
class _Answer:
    """Answer of a worker to a request: a batch, or an error.

    Attributes:
        buffer: number of the buffer that the request came with, in which the views lie; None: there is none.
        samples: number of pictures.
        bytes: bytes of all views.
        views: the views, where they do not lie in a buffer.
        refused: see `DecodedBatch`.
        error: the error, returned since torch would add a traceback to the message of a raised one.
    """

    buffer: int | None
    samples: int = 0
    bytes: int = 0
    views: list[Any] | None = None
    refused: Mapping[int, ImageError] = field(default_factory=dict)
    error: PrecacheError | None = None


class _Batches(Dataset[Any]):
    """Reads batches in the worker process that calls it, with a reader that it opens there.

    Args:
        open_reader: opens that reader.
        makes_tensors: whether a function of the caller makes tensors of any size.
    """

    def __init__(
        self, open_reader: Callable[[], WorkerReader], buffers: SharedBuffers, makes_tensors: bool
    ) -> None:
        self._open_reader, self._buffers, self._makes_tensors = open_reader, buffers, makes_tensors
        self._reader: WorkerReader | None = None

    def __getitems__(self, request_and_buffer: tuple[Request, int | None]) -> _Answer:
        """Read the batch of a request, into its buffer if it has one."""
        request, buffer = request_and_buffer
        memory = None if buffer is None else self._buffers.memory[buffer]
        reader, self._reader = self._reader, None  # one that fails serves nothing more
        try:
            reader = reader or self._open_reader()
            batch = reader.read(replace(request, memory=memory))
        except PrecacheError as error:  # no fault of a picture, which could be left out
            return _Answer(buffer, error=error)
        self._reader = reader
        views = [view.numpy() for view in batch.views]
        if memory is None or self._makes_tensors:
            return _Answer(buffer, views=views, refused=batch.refused)
        if batch.refused:  # the others are copies
            stop = 0
            for view in views:
                memory[stop : stop + view.size] = view.ravel()
                stop += view.size
        return _Answer(buffer, len(views[0]), sum(view.size for view in views), refused=batch.refused)


def _identity(batch: Any) -> Any:
    return batch


def _begin_worker(_: int) -> None:
    """Keep OpenCV to one thread, and exclude what a forked worker has inherited from garbage collection.

    A finaliser of an inherited object might wait for a thread that only the parent has. The parent does not
    freeze its objects before the fork: that takes up to a second, and to unfreeze them would also unfreeze
    what the training has frozen itself.
    """
    # not 1, which ends the threads of OpenCV: a forked worker, which has inherited none, would wait for ever
    cv2.setNumThreads(0)
    gc.freeze()
    gc.enable()
