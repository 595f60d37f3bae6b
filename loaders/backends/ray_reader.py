"""`Reading(engine="ray")`: a backend's reader on the nodes of a Ray cluster, its batches in order here.

Each request is a task of one CPU, which answers with pixels alone. As many as there are workers are on their
way, and as many more wait here for their turn; a batch is copied out of Ray's memory in its turn, and freed
there. Ray gives the task of a process or node that dies to another one: decoding depends on nothing but the
request, so a batch is neither lost nor served twice.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from loaders.augment.cpu import Crops
from loaders.backends.buffers import BufferPool
from loaders.backends.ray_decoder import NOTHING, Decoded, Job, decode, versions
from loaders.batch import DecodedBatch, Reader, Request
from loaders.dataset import SplitData
from loaders.deliver.threads import end_first, stop_check
from loaders.settings import LoaderSpec, Reading
from precache.errors import MissingDependencyError, SettingError, WorkerError
from precache.packages import install_extra

DECODING = ("pytorch", "shards", "webdataset")
"""Backends that decode on a CPU, in any order that they are asked in."""
_MOST_DEATHS = 3  # of processes at one batch
_LOOK_S = 0.2  # between looks at whether somebody is there to answer
_NO_NODE_S = 10.0  # without any node that could
_PATIENCE_S = 300.0  # for an answer, on a cluster that others use


def open_reader(backend: str, spec: LoaderSpec, data: SplitData, crops: Crops) -> Reader:
    """A reader over `data` whose pictures `backend` decodes on other machines.

    Raises:
        MissingDependencyError: Ray is not installed.
        SettingError: `backend` is for GPUs, or has none to decode; no cluster was found; a node has other
            versions.
        WorkerError: the cluster runs no tasks.
    """
    if backend not in DECODING:
        raise SettingError(
            f"engine 'ray' decodes with backend {', '.join(DECODING)}, not with {backend!r}; "
            f"choose one of them, or engine 'local'"
        )
    return RayReader(backend, spec, data, crops)


@dataclass(eq=False, slots=True)
class _Asked:
    """A request on its way, and what came of it."""

    request: Request
    answer: Decoded | Exception | None = None


class RayReader:
    """Has nothing on the cluster but tasks: what is asked for is forgotten there with this object."""

    def __init__(self, backend: str, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        assert isinstance(spec.reading.workers, int)
        fetches_few = data.remote is None or spec.shuffle == "full"  # as of the backend here
        self.random_access = backend == "pytorch" or (backend == "shards" and fetches_few)
        self._workers = spec.reading.workers
        self._data, self._crops = data, crops
        self._buffers = None
        if crops.size is not None:
            samples = spec.batch_size * crops.views
            self._buffers = BufferPool(samples, crops.size, spec.device, data.pixel_bytes)
        self._ray = _connect()
        self._decode = self._ray.remote(
            num_cpus=1, max_retries=_MOST_DEATHS - 1, scheduling_strategy="SPREAD"
        )(decode)
        job = Job(os.getcwd(), backend, _for_task(backend, spec), data, crops, versions())
        self._job = [self._ray.put(job)]
        first = _Asked(NOTHING)  # what no node can do is said now, not in the first epoch
        self._wait({self._decode.remote(self._job, NOTHING): first})
        if isinstance(first.answer, Exception):
            raise first.answer

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        asked: deque[_Asked] = deque()
        unsent: deque[_Asked] = deque()
        pending: dict[Any, _Asked] = {}  # by Ray's reference to the answer
        more = True
        try:
            while True:
                while more and len(asked) < 2 * self._workers:
                    request = next(requests, None)
                    if more := request is not None:
                        asked.append(_Asked(request))
                        unsent.append(asked[-1])
                if not asked:
                    return
                self._send(unsent, pending)
                while asked[0].answer is None:
                    self._wait(pending)
                    self._send(unsent, pending)
                yield self._batch(asked.popleft())
        finally:
            if self._ray.is_initialized():
                for reference in pending:
                    self._ray.cancel(reference)

    def close(self) -> None:
        """Let go of what the cluster keeps of it."""
        self._job.clear()

    def _send(self, unsent: deque[_Asked], pending: dict[Any, _Asked]) -> None:
        while unsent and len(pending) < self._workers:
            one = unsent.popleft()
            pending[self._decode.remote(self._job, one.request)] = one

    def _wait(self, pending: dict[Any, _Asked]) -> None:
        """Take answers, until there is one.

        Raises:
            WorkerError: nobody is there to answer.
        """
        check = stop_check()
        begun_s = seen_s = time.monotonic()
        while not (ready := self._ray.wait(list(pending), timeout=_LOOK_S)[0]):
            check()
            now_s = time.monotonic()
            nodes = self._ray.nodes()
            if any(node["Alive"] and node["Resources"].get("CPU", 0) >= 1 for node in nodes):
                seen_s = now_s
            if now_s - seen_s > _NO_NODE_S:
                raise WorkerError(
                    "no node of the Ray cluster is left with a CPU to decode on; start some ('ray start "
                    "--address=HEAD:6379'), or go on with Reading(engine='local'), which takes the same state"
                )
            if now_s - begun_s > _PATIENCE_S:
                raise WorkerError(
                    f"the Ray cluster has decoded nothing for {_PATIENCE_S:g} s: others use its CPUs; "
                    f"free some, or wait for them ('ray status' says who has them)"
                )
        for reference in ready:
            one = pending.pop(reference)
            try:
                one.answer = self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as error:  # what `decode` meets, it returns
                said = str(error).strip().splitlines()[-1]
                raise WorkerError(
                    f"workers on the Ray cluster fail to start ({said}); install precache[loaders,ray] "
                    f"{versions()['precache']} on every node"
                ) from error
            except self._ray.exceptions.RayError as error:
                positions = one.request.positions
                batch = f", which begins with {self._data.file(int(positions[0]))}" if len(positions) else ""
                raise WorkerError(
                    f"{_MOST_DEATHS} workers on the Ray cluster died at the same batch{batch} "
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


def _for_task(backend: str, spec: LoaderSpec) -> LoaderSpec:
    """The settings of the reader on a node: one thread, and any order is as good as another."""
    workers = 0 if backend == "pytorch" else 1
    reading = Reading(workers=workers, threads=1, check=spec.reading.check, on_error=spec.reading.on_error)
    return replace(spec, device=torch.device("cpu"), shuffle="full", reading=reading)


def _connect() -> Any:
    """Ray, connected to a cluster that runs."""
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(
            f"engine 'ray' needs Ray; install it with '{install_extra('ray')}', on every node of the cluster"
        ) from error
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
        except ConnectionError as error:
            reason = str(error).strip().partition("\n")[0]
            raise SettingError(
                f"engine 'ray' found no Ray cluster that takes it ({reason}); start one ('ray start --head' "
                f"here, 'ray start --address=HEAD:6379' on other machines), or name it in RAY_ADDRESS"
            ) from error
    end_first()  # our threads wait for what Ray's own exit takes away
    return ray
