"""`Reading(engine="ray")`: a backend's reader on the nodes of a Ray cluster, its batches in order here.

Each request goes as a whole to one of the workers, which knows the samples, and answers with pixels alone.
At most two requests a worker are on their way or wait here; a batch is copied out of Ray's memory in its
turn, and freed there. What a worker that dies had to do, others do: decoding depends on nothing but the
request. So a batch is neither lost nor served twice.
"""

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import torch

from loaders.augment.cpu import Crops
from loaders.backends import ray_workers
from loaders.backends.buffers import BufferPool
from loaders.backends.ray_decoder import Decoded, Job
from loaders.batch import DecodedBatch, Reader, Request
from loaders.dataset import SplitData
from loaders.deliver.threads import stop_check
from loaders.settings import LoaderSpec, Reading
from precache.errors import SettingError, WorkerError

DECODING = ("pytorch", "shards", "webdataset")
"""Backends that decode on a CPU, in any order that they are asked in."""
_IN_FLIGHT = 2  # requests a worker: one at work, one that it goes on with
_GET_S = 10.0  # for what has been said to be there
_numbers = count()


def open_reader(backend: str, spec: LoaderSpec, data: SplitData, crops: Crops) -> Reader:
    """A reader over `data` whose pictures `backend` decodes on other machines.

    Raises:
        SettingError: `backend` is for GPUs, or has none to decode.
        The others are those of `loaders.backends.ray_workers.join`.
    """
    if backend not in DECODING:
        raise SettingError(
            f"engine 'ray' decodes with backend {', '.join(DECODING)}, not with {backend!r}; "
            f"choose one of them, or engine 'local'"
        )
    return RayReader(backend, spec, data, crops)


@dataclass(eq=False, slots=True)
class _Asked:
    """A request on its way.

    Attributes:
        worker: that has it; None: it waits for one.
        deaths: of workers that had it; of those that a node takes along, one.
        died_s: when the last of these did.
        answer: None while there is none.
    """

    request: Request
    worker: ray_workers.Worker | None = None
    deaths: int = 0
    died_s: float = -1.0
    answer: Decoded | Exception | None = None


class RayReader:
    """Keeps its workers until `close`, or until it is thrown away."""

    def __init__(self, backend: str, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        assert isinstance(spec.reading.workers, int)
        fetches_few = data.remote is None or spec.shuffle == "full"  # as of the backend here
        self.random_access = backend == "pytorch" or (backend == "shards" and fetches_few)
        self.number = next(_numbers)
        self._data, self._crops = data, crops
        self._buffers = None
        if crops.size is not None:
            samples = spec.batch_size * crops.views
            self._buffers = BufferPool(samples, crops.size, spec.device, data.pixel_bytes)
        self._workers = ray_workers.join(self, spec.reading.workers)
        self._ray = self._workers.ray
        self._job = self._ray.put(Job(os.getcwd(), backend, _for_worker(backend, spec), data, crops))
        self._has_job: set[ray_workers.Worker] = set()

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        asked: deque[_Asked] = deque()
        pending: dict[Any, _Asked] = {}  # by Ray's reference to the answer
        more, check = True, stop_check()
        while True:
            while more and len(asked) < _IN_FLIGHT * self._workers.count:
                request = next(requests, None)
                if more := request is not None:
                    asked.append(_Asked(request))
            if not asked:
                return
            self._send(asked, pending)
            while asked[0].answer is None:
                check()
                self._wait(pending)
                self._send(asked, pending)
            yield self._batch(asked.popleft())

    def close(self) -> None:
        """End the workers, unless another loader uses them."""
        self._workers.remove(self)
        self._job = None
        self._has_job.clear()

    def _send(self, asked: deque[_Asked], pending: dict[Any, _Asked]) -> None:
        """Give what nobody has to those who have the least to do."""
        unsent = [one for one in asked if one.worker is None]
        if not unsent or not (running := self._workers.running()):
            return
        self._has_job.intersection_update(running)
        load = dict.fromkeys(running, 0)
        for one in pending.values():
            if one.worker in load:
                load[one.worker] += 1
        for one in unsent:
            worker = min(load, key=load.__getitem__)
            if load[worker] >= _IN_FLIGHT:
                return
            load[worker] += 1
            if worker not in self._has_job:
                worker.actor.open.remote(self.number, self._job)
                self._has_job.add(worker)
            one.worker = worker
            pending[worker.actor.decode.remote(self.number, one.request)] = one

    def _wait(self, pending: dict[Any, _Asked]) -> None:
        """Take an answer, if one comes before the next look at who is to give it."""
        if not pending:
            self._workers.wait()
            return
        ready, _ = self._ray.wait(list(pending), timeout=ray_workers.LOOK_S)
        for reference in ready:
            one = pending.pop(reference)
            try:
                one.answer = self._ray.get(reference, timeout=_GET_S)
            except self._ray.exceptions.RayTaskError:
                raise
            except self._ray.exceptions.RayError as error:
                self._lose(one, error)

    def _lose(self, one: _Asked, error: Exception) -> None:
        """Have another worker do what one has died of, or with."""
        assert one.worker is not None
        self._workers.replace(one.worker)
        if one.worker.ready_s > one.died_s:  # it was not there yet when the one before died
            one.deaths, one.died_s = one.deaths + 1, time.monotonic()
        one.worker = None
        if one.deaths >= ray_workers.MOST_DEATHS:
            first = self._data.file(int(one.request.positions[0]))
            raise WorkerError(
                f"{one.deaths} workers on the Ray cluster died at the same batch, which begins with {first} "
                f"({type(error).__name__}); their nodes may be out of memory: start fewer CPUs on each "
                f"('ray start --num-cpus'), or use a smaller batch_size"
            ) from error

    def _batch(self, one: _Asked) -> DecodedBatch:
        answer = one.answer
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        pixels, refused = answer
        # copied: Ray's memory is read-only, not pinned, and needed for the next batches
        images = torch.empty(pixels.shape, dtype=torch.uint8)
        if self._buffers is not None:
            images = self._buffers.take(len(pixels))
        np.copyto(images.numpy(), pixels)
        positions = one.request.positions
        kept = positions[~np.isin(self._data.ids[positions], list(refused))]
        labels, ids = torch.from_numpy(self._data.labels[kept]), torch.from_numpy(self._data.ids[kept])
        return DecodedBatch(images, labels, ids, refused)


def _for_worker(backend: str, spec: LoaderSpec) -> LoaderSpec:
    """The settings of the reader on a node: one thread, and any order is as good as another."""
    workers = 0 if backend == "pytorch" else 1
    reading = Reading(workers=workers, threads=1, check=spec.reading.check, on_error=spec.reading.on_error)
    return replace(spec, device=torch.device("cpu"), shuffle="full", reading=reading)
