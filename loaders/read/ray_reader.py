"""`Reading(engine="ray")`: run a backend's reader on the nodes of a Ray cluster, with its batches in order.

Each request is a task of one CPU, whose result is pixels. As many tasks as there are `workers` run at a time,
and as many results may wait here for their turn; a batch is copied out of Ray's memory in its turn, and freed
there. When a process or a node dies, Ray gives its task to another one: a batch depends on its request alone,
so that none is lost or served twice.

On a node a task asks the backend's own reader for one batch. Ray runs the tasks of a program in processes
that have run such tasks before: their readers stay open.
"""

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Any, TypeAlias

import cv2
import numpy as np
import torch

from loaders.augment.crops import Crops
from loaders.augment.geometry import torch_is_fast
from loaders.batch import DecodedBatch, Request
from loaders.dataset import RAW, SplitData
from loaders.read import BACKENDS
from loaders.read.worker import EMPTY_REQUEST, WorkerReader, check_backend, has_random_access, worker_spec
from loaders.settings import LoaderSpec
from loaders.threads import stop_check
from precache.dataset.converted import open_dataset
from precache.engines import connector
from precache.errors import DatasetError, ImageError, WorkerError
from precache.pictures.jpeg import Pixels

Decoded: TypeAlias = tuple[list[Pixels], dict[int, ImageError]]
"""`views` and `refused` of a DecodedBatch."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Description of a loader for a node."""

    origin: connector.Origin
    backend: str
    spec: LoaderSpec
    data: SplitData
    crops: Crops


_MAX_READERS = 4  # open readers of a process: a new one closes the least recently used


def versions() -> dict[str, str]:
    """Versions of everything that the served pixels depend on, by name."""
    resizer = f"torch {torch.__version__}" if torch_is_fast() else "pillow"
    return {**connector.versions(), "opencv": cv2.__version__, "resizer": resizer}


def decode(job: list[Any], request: Request) -> Decoded | Exception:
    """Decode one batch on a node; return an error, because Ray would wrap a raised one.

    Args:
        job: Ray's reference to the job, in a list: Ray would resolve a plain reference for each batch.
        request: an empty one only opens the reader.
    """
    try:
        reader = _open(job[0])
        if not len(request.positions):
            return [], {}
        batch = reader.read(request)
        return [view.numpy() for view in batch.views], dict(batch.refused)
    except Exception as error:
        _open.cache_clear()  # a reader that has failed serves nothing more
        return error


@lru_cache(_MAX_READERS)
def _open(reference: Any) -> WorkerReader:
    """Open the reader of a job. Its files stay open, and its threads run, until it is gone.

    Raises:
        SettingError: this node has other versions than the loader.
        DatasetError: this node does not see the same data.
    """
    import ray

    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    job: _Job = ray.get(reference)
    node = connector.enter_node(job.origin, versions())
    connector.check_readable(node, partial(_check_same_data, job.data))
    return WorkerReader(BACKENDS[job.backend], job.spec, job.data, job.crops)


def _check_same_data(data: SplitData) -> None:
    """Raise DatasetError where a path on this node holds something else than where the loader was built."""
    for dataset in data.datasets:
        if dataset.downloads is not None:
            continue  # a URL is the same everywhere, and fetched files are compared with their checksums
        if data.kind == RAW:
            if not os.path.isdir(str(dataset.path)):
                raise DatasetError("is not there", path=dataset.path)
        elif open_dataset(dataset.path).digest != dataset.digest:
            raise DatasetError("is another dataset there", path=dataset.path)


_MAX_DEATHS = 3  # of processes at one batch
_LOOK_S = 0.2  # time between two looks at whether the cluster has nodes
_NO_NODE_S = 10.0  # wait for a node to come back
_PATIENCE_S = 300.0  # wait for a result, on a cluster that others use


class RayReader:
    """Reads with `backend` on a Ray cluster, by tasks; the cluster keeps nothing else of it.

    Raises:
        MissingDependencyError: Ray is not installed.
        SettingError: `backend` decodes on a GPU or not at all; no cluster was found; a node has other
            versions.
        WorkerError: the cluster runs no tasks.
    """

    def __init__(self, backend: str, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        check_backend(backend, "ray")
        assert isinstance(spec.reading.workers, int)
        self.random_access = has_random_access(backend, spec, data)
        self._workers = spec.reading.workers
        self._data, self._device = data, spec.device
        connector.connect()
        self._ray = connector.import_ray()
        self._decode = self._ray.remote(
            num_cpus=1, max_retries=_MAX_DEATHS - 1, scheduling_strategy="SPREAD"
        )(decode)
        job = _Job(connector.Origin.here(versions()), backend, worker_spec(backend, spec), data, crops)
        self._job = [self._ray.put(job)]
        # A probe, so that faults of the nodes are raised now and not within an epoch.
        probe = self._decode.remote(self._job, EMPTY_REQUEST)
        self._wait([probe])
        self._batch(self._result(EMPTY_REQUEST, probe))

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        pending: deque[Request] = deque()
        # Ray's references to the results of the first of `pending`. Whoever stops reading lets go of them,
        # and cancels no task: Ray 2.60 ends the whole program where a cancelled task returns at the same
        # time.
        submitted: deque[Any] = deque()
        running: list[Any] = []
        # Results whose turn has not come, mapped from Ray's memory: their node may be gone by then.
        results: dict[Any, Any] = {}
        while True:
            while len(pending) < 2 * self._workers and (request := next(requests, None)) is not None:
                pending.append(request)
            if not pending:
                return
            first = len(submitted)
            for request in islice(pending, first, first + self._workers - len(running)):
                reference = self._decode.remote(self._job, request)
                submitted.append(reference)
                running.append(reference)
            if submitted[0] in running:
                running = self._wait(running)
                for request, reference in zip(pending, submitted, strict=False):
                    if reference not in results and reference not in running:
                        results[reference] = self._result(request, reference)
            else:
                pending.popleft()
                yield self._batch(results.pop(submitted.popleft()))

    def close(self) -> None:
        """Release the job, which the cluster then forgets."""
        self._job.clear()

    def _wait(self, running: list[Any]) -> list[Any]:
        """Wait until a task has ended; return those that still run.

        Raises:
            WorkerError: the cluster has no node left, or no CPU free.
        """
        check = stop_check()
        started_s = last_node_s = time.monotonic()
        while True:
            still_running: list[Any] = self._ray.wait(running, timeout=_LOOK_S)[1]
            if len(still_running) < len(running):
                return still_running
            check()
            now_s = time.monotonic()
            if connector.live_nodes(cpus=1):
                last_node_s = now_s
            if now_s - last_node_s > _NO_NODE_S:
                raise WorkerError(
                    "no node of the Ray cluster is left with a CPU to decode on",
                    remedy="start some ('ray start --address=HEAD:6379'), or go on with "
                    "Reading(engine='local'), which takes the same state",
                )
            if now_s - started_s > _PATIENCE_S:
                raise WorkerError(
                    f"the Ray cluster has decoded nothing for {_PATIENCE_S:g} s: others use its CPUs",
                    remedy="free some, or wait for them ('ray status' says who has them)",
                )

    def _result(self, request: Request, reference: Any) -> Any:
        """Result of the task of a request: `decode` returns its errors, others are raised as WorkerError."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:  # `decode` could not even be imported
            raise WorkerError(
                f"workers on the Ray cluster fail to start ({connector.last_line(error)})",
                remedy=f"install precache[loaders,ray] {versions()['precache']} on every node",
            ) from error
        except self._ray.exceptions.RayError as error:
            positions = request.positions
            batch = ""
            if len(positions):
                batch = f", which begins with {self._data.file_at(int(positions[0]))}"
            raise WorkerError(
                f"{_MAX_DEATHS} workers on the Ray cluster died at the same batch{batch} "
                f"({type(error).__name__})",
                remedy="their nodes may be out of memory: start fewer CPUs on each ('ray start --num-cpus'), "
                "or use a smaller batch_size",
            ) from error

    def _batch(self, result: Decoded | Exception) -> DecodedBatch:
        """Copy the result of a task into a batch; an error is raised."""
        if isinstance(result, Exception):
            raise result
        pixels, refused = result
        views = []
        for view in pixels:
            # Copied, because Ray's memory is read-only, not pinned, and needed for the next batches.
            dtype = torch.from_numpy(np.empty(0, view.dtype)).dtype
            images = torch.empty(
                view.shape, dtype=dtype, device="cpu", pin_memory=self._device.type == "cuda"
            )
            np.copyto(images.numpy(), view)
            views.append(images)
        return DecodedBatch(tuple(views), refused)
