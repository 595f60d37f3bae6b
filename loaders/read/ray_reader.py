"""`Reading(engine="ray")`: a backend's reader on the nodes of a Ray cluster, its batches in order here.

Each request is a task of one CPU, which answers with pixels alone. As many as there are workers are on their
way, and as many more wait here for their turn; a batch is copied out of Ray's memory in its turn, and freed
there. Ray gives the task of a process or node that dies to another one: decoding depends on nothing but the
request, so a batch is neither lost nor served twice.

On a node a task asks the backend's own reader for one batch. Ray gives tasks of one program to processes that
have run such before: their readers stay open.
"""

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any, TypeAlias

import cv2
import numpy as np
import torch

from loaders.augment import Crops, torch_is_fast
from loaders.batch import DecodedBatch, Request
from loaders.dataset import RAW, SplitData
from loaders.read import BACKENDS
from loaders.settings import LoaderSpec, Reading
from loaders.threads import stop_check
from precache.dataset.converted import open_dataset
from precache.engines import connector
from precache.errors import DatasetError, ImageError, SettingError, WorkerError
from precache.pictures.jpeg import Pixels

Decoded: TypeAlias = tuple[Pixels, dict[int, ImageError]]
"""`images` and `refused` of a DecodedBatch."""
_NOTHING = Request(0, np.empty(0, np.int64))
_MOST_OPEN = 4  # readers of a process: those of loaders that are gone end when others come


def versions() -> dict[str, str]:
    """What the served pixels depend on, name -> version."""
    resizer = f"torch {torch.__version__}" if torch_is_fast() else "pillow"
    return {**connector.versions(), "opencv": cv2.__version__, "resizer": resizer}


def decode(job: list[Any], request: Request) -> Decoded | Exception:
    """One batch; an error is returned, since Ray would make another one of what is raised.

    Args:
        job: Ray's reference to it, in a list: it is fetched once, not for each batch.
    """
    try:
        asked, batches = _open(job[0])
        if not len(request.positions):  # to see whether it would be decoded
            return np.empty(0, np.uint8), {}
        # readers look one batch ahead: behind each comes an empty one, that they have something to look at
        asked.extend((request, _NOTHING))
        batch = next(batch for batch in batches if len(batch.images) or batch.refused)
    except Exception as error:
        _open.cache_clear()  # a reader that has failed reads no more
        return error
    return batch.images.numpy(), dict(batch.refused)


@lru_cache(_MOST_OPEN)
def _open(reference: Any) -> tuple[deque[Request], Iterator[DecodedBatch]]:
    """What a job's reader is asked for, and its batches: its files stay open, its threads end with them.

    Raises:
        SettingError: the one who asks has other versions.
        DatasetError: what it is to read is not here.
    """
    import ray

    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    folder, backend, spec, data, crops, theirs = ray.get(reference)
    with suppress(OSError):  # where there is no such folder, the path is not there either
        os.chdir(folder)  # that relative paths are in
    node = connector.this_node()
    connector.check_versions(node, versions(), theirs)
    connector.check_readable(node, partial(_look_at, data))
    asked: deque[Request] = deque()
    reader = BACKENDS[backend](spec, data, crops)
    return asked, iter(reader.read(iter(asked.popleft, None)))


def _look_at(data: SplitData) -> None:
    """Raise DatasetError where the path holds something else than where the loader was built."""
    if data.remote is not None:
        return  # a URL is the same everywhere, and what is fetched of it has its manifest's checksum
    if data.kind == RAW:
        if not os.path.isdir(str(data.path)):
            raise DatasetError(f"{data.path}: is not there")
    elif open_dataset(data.path).digest != data.whole.digest:
        raise DatasetError(f"{data.path}: is another dataset there")


DECODING = ("pytorch", "shards", "webdataset")
"""Backends that decode on a CPU, in any order that they are asked in."""
_MOST_DEATHS = 3  # of processes at one batch
_LOOK_S = 0.2  # between looks at whether somebody is there to answer
_NO_NODE_S = 10.0  # without any node that could
_PATIENCE_S = 300.0  # for an answer, on a cluster that others use


class RayReader:
    """Reads with `backend`; has nothing on the cluster but tasks, forgotten there with this object.

    Raises:
        MissingDependencyError: Ray is not installed.
        SettingError: `backend` is for GPUs, or has none to decode; no cluster was found; a node has other
            versions.
        WorkerError: the cluster runs no tasks.
    """

    def __init__(self, backend: str, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        if backend not in DECODING:
            raise SettingError(
                f"engine 'ray' decodes with backend {', '.join(DECODING)}, not with {backend!r}; "
                f"choose one of them, or engine 'local'"
            )
        assert isinstance(spec.reading.workers, int)
        fetches_few = data.remote is None or spec.shuffle == "full"  # as of the backend here
        self.random_access = backend == "pytorch" or (backend == "shards" and fetches_few)
        self._workers = spec.reading.workers
        self._data, self._device = data, spec.device
        connector.connect()
        self._ray = connector.import_ray()
        self._decode = self._ray.remote(
            num_cpus=1, max_retries=_MOST_DEATHS - 1, scheduling_strategy="SPREAD"
        )(decode)
        job = (os.getcwd(), backend, _for_task(backend, spec), data, crops, versions())
        self._job = [self._ray.put(job)]
        probe = self._decode.remote(self._job, _NOTHING)  # what no node can do is said now, not in an epoch
        self._wait([probe])
        self._batch(self._get(_NOTHING, probe))

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request."""
        asked: deque[Request] = deque()
        # Ray's references to the answers. Who leaves lets go of them, and cancels nothing: Ray 2.60 ends the
        # whole program where a task that is cancelled answers at the same time.
        sent: deque[Any] = deque()
        running: list[Any] = []
        held: dict[Any, Any] = {}  # what was answered, shown where it lies: its node may go before its turn
        while True:
            while len(asked) < 2 * self._workers and (request := next(requests, None)) is not None:
                asked.append(request)
            if not asked:
                return
            for request in islice(asked, len(sent), len(sent) + self._workers - len(running)):
                sent.append(self._decode.remote(self._job, request))
                running.append(sent[-1])
            if sent[0] in running:
                running = self._wait(running)
                for request, reference in zip(asked, sent, strict=False):
                    if reference not in held and reference not in running:
                        held[reference] = self._get(request, reference)
            else:
                asked.popleft()
                yield self._batch(held.pop(sent.popleft()))

    def close(self) -> None:
        """Let go of what the cluster keeps of it."""
        self._job.clear()

    def _wait(self, running: list[Any]) -> list[Any]:
        """Those that have no answer yet, as soon as one has.

        Raises:
            WorkerError: nobody is there to answer.
        """
        check = stop_check()
        begun_s = seen_s = time.monotonic()
        while len(left := self._ray.wait(running, timeout=_LOOK_S)[1]) == len(running):
            check()
            now_s = time.monotonic()
            if connector.live_nodes(cpus=1):
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
        return left  # type: ignore[no-any-return]

    def _get(self, request: Request, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:  # what `decode` meets, it returns
            raise WorkerError(
                f"workers on the Ray cluster fail to start ({connector.last_line(error)}); install "
                f"precache[loaders,ray] {versions()['precache']} on every node"
            ) from error
        except self._ray.exceptions.RayError as error:
            positions = request.positions
            batch = f", which begins with {self._data.file_at(int(positions[0]))}" if len(positions) else ""
            raise WorkerError(
                f"{_MOST_DEATHS} workers on the Ray cluster died at the same batch{batch} "
                f"({type(error).__name__}); their nodes may be out of memory: start fewer CPUs on each "
                f"('ray start --num-cpus'), or use a smaller batch_size"
            ) from error

    def _batch(self, answer: Decoded | Exception) -> DecodedBatch:
        if isinstance(answer, Exception):
            raise answer
        pixels, refused = answer
        # copied: Ray's memory is read-only, not pinned, and needed for the next batches
        images = torch.empty(pixels.shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        np.copyto(images.numpy(), pixels)
        return DecodedBatch(images, refused)


def _for_task(backend: str, spec: LoaderSpec) -> LoaderSpec:
    """The settings of the reader on a node: one thread, and any order is as good as another."""
    workers = 0 if backend == "pytorch" else 1
    reading = Reading(workers=workers, threads=1, check=spec.reading.check, on_error=spec.reading.on_error)
    return replace(spec, device=torch.device("cpu"), shuffle="full", reading=reading)
