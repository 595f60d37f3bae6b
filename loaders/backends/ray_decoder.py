"""What runs on a node of a Ray cluster: a backend's own reader, asked for one batch at a time.

Nothing here imports Ray: `loaders.backends.ray_workers` makes an actor of it.
"""

import os
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import cv2
import numpy as np
import torch

import precache
from loaders.augment.cpu import Crops, torch_is_fast
from loaders.backends import BACKENDS
from loaders.batch import DecodedBatch, Reader, Request
from loaders.dataset import RAW, SplitData
from loaders.settings import LoaderSpec
from precache.dataset.converted import open_dataset
from precache.errors import DatasetError, ImageError
from precache.pictures.codecs import made_by
from precache.pictures.jpeg import Pixels

Decoded: TypeAlias = tuple[Pixels, dict[int, ImageError]]
"""`images` and `refused` of a DecodedBatch; what else it has, the one who asked knows."""
_NOTHING = Request(0, np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be decoded, and how.

    Attributes:
        folder: that relative paths are in.
    """

    folder: str
    backend: str
    spec: LoaderSpec
    data: SplitData
    crops: Crops


def versions() -> dict[str, str]:
    """What the served pixels depend on, name -> version."""
    resizer = f"torch {torch.__version__}" if torch_is_fast() else "pillow"
    return {"precache": precache.__version__, **made_by(), "opencv": cv2.__version__, "resizer": resizer}


class Decoder:
    """Decodes for the loaders of one process, in one thread."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        cv2.setNumThreads(1)
        self._jobs: dict[int, _Opened | Exception] = {}

    def versions(self) -> dict[str, str]:
        """As `versions`, of this node."""
        return versions()

    def open(self, number: int, job: Job) -> None:
        """Have a reader for `job`; what is wrong with it, `decode` says."""
        with suppress(OSError):  # where there is no such folder, the path is not there either
            os.chdir(job.folder)
        try:
            self._jobs[number] = _Opened(job)
        except Exception as error:
            self._jobs[number] = error

    def decode(self, number: int, request: Request) -> Decoded | Exception:
        """The batch; an error is returned, since Ray would make another one of what is raised."""
        try:
            opened = self._jobs[number]
            if isinstance(opened, Exception):
                return opened
            batch = opened.decode(request)
        except Exception as error:
            return error
        return batch.images.numpy(), dict(batch.refused)

    def keep(self, numbers: Collection[int]) -> None:
        """Close the readers of all other jobs."""
        for number in self._jobs.keys() - set(numbers):
            opened = self._jobs.pop(number)
            if isinstance(opened, _Opened):
                opened.close()


class _Opened:
    """The reader of a job; its files stay open from batch to batch."""

    def __init__(self, job: Job) -> None:
        _check_sees(job.data)
        self._reader: Reader = BACKENDS[job.backend](job.spec, job.data, job.crops)
        self._asked: deque[Request] = deque()
        self._batches: Iterator[DecodedBatch] | None = None

    def decode(self, request: Request) -> DecodedBatch:
        # readers look one batch ahead: behind each comes an empty one, that they have something to look at
        self._asked.extend((request, _NOTHING))
        if self._batches is None:
            self._batches = self._reader.read(iter(self._asked.popleft, None))
        try:
            return next(batch for batch in self._batches if len(batch.ids) or batch.refused)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        batches, self._batches = self._batches, None
        self._asked.clear()
        if batches is not None and (close := getattr(batches, "close", None)) is not None:
            close()

    def close(self) -> None:
        self.leave()
        self._reader.close()


def _check_sees(data: SplitData) -> None:
    """DatasetError where the path holds something else on this node than where the loader was built."""
    if data.remote is not None:
        return  # a URL is the same everywhere, and what is fetched of it has its manifest's checksum
    remedy = "put it on storage that every node sees at the same path"
    if data.kind == RAW:
        if not os.path.isdir(str(data.path)):
            raise DatasetError(f"{data.path}: is not there on a node of the Ray cluster; {remedy}")
        return
    try:
        digest = open_dataset(data.path).digest
    except DatasetError as error:
        raise DatasetError(f"{error} (on a node of the Ray cluster; {remedy})") from error
    if digest != data.whole.digest:
        raise DatasetError(f"{data.path}: is another dataset on a node of the Ray cluster; {remedy}")
