"""A backend's reader in a worker, a process of this machine or of a Ray cluster: one batch at a time."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch

from loaders.augment.crops import Crops
from loaders.batch import DecodedBatch, Reader, Request
from loaders.dataset import SplitData
from loaders.settings import LoaderSpec, Reading, Sampling
from precache.errors import SettingError, WorkerError

CPU_BACKENDS = ("pytorch", "shards", "webdataset")
"""Backends that decode on a CPU, in the order of the requests."""
EMPTY_REQUEST = Request(0, np.empty(0, np.int64))
OpenReader: TypeAlias = Callable[[LoaderSpec, SplitData, Crops], Reader]
"""Function that opens the reader of a backend."""


class WorkerReader:
    """Reader of which each batch is asked for by itself; its files stay open.

    A reader that has failed serves nothing more: another one is then to be opened.

    Args:
        open_reader: function of `loaders.read.BACKENDS`.
        spec: settings that `worker_spec` returned.
    """

    def __init__(self, open_reader: OpenReader, spec: LoaderSpec, data: SplitData, crops: Crops) -> None:
        self._requests: deque[Request] = deque()
        if crops.per_picture is not None:
            crops.per_picture.own_process()
        reader = open_reader(spec, data, crops)
        self._batches: Iterator[DecodedBatch] = iter(reader.read(iter(self._requests.popleft, None)))

    def read(self, request: Request) -> DecodedBatch:
        """Read one batch, of at least one sample."""
        # Readers take one request more than they serve: an empty one follows, for them to take.
        self._requests.extend((request, EMPTY_REQUEST))
        for batch in self._batches:
            if len(batch.views[0]) or batch.refused:  # not the batch of an empty request
                return batch
        raise WorkerError("the backend's reader ended early")


def check_backend(backend: str, engine: str) -> None:
    """Raise SettingError where no worker can read with `backend`: it decodes on a GPU, or not at all."""
    if backend not in CPU_BACKENDS:
        raise SettingError(
            f"engine {engine!r} decodes with backend {', '.join(CPU_BACKENDS)}, not with {backend!r}",
            remedy="choose one of them, or engine 'local'",
        )


def has_random_access(backend: str, spec: LoaderSpec, data: SplitData) -> bool:
    """Whether workers read samples in any order as fast as in the stored one."""
    fetches_few = data.download_cache is None or spec.shuffle == "full"  # as of `ShardsReader`
    return backend == "pytorch" or (backend == "shards" and fetches_few)


def worker_spec(backend: str, spec: LoaderSpec) -> LoaderSpec:
    """Return the settings of the reader in a worker: one thread, random access."""
    workers = 0 if backend == "pytorch" else 1
    reading = Reading(workers=workers, threads=1, check=spec.reading.check, on_error=spec.reading.on_error)
    return replace(
        spec,
        device=torch.device("cpu"),
        shuffle="full",
        reading=reading,
        # not sent along: what they say is in the data and the crops already
        path=None,
        augment=None,
        sampling=Sampling(),
    )
