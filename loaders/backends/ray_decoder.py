"""What runs on a node of a Ray cluster: a backend's own reader, asked for one batch at a time, in a task.

Ray gives tasks of one program to processes that have run such before: their readers stay open.
"""

import os
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

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
from precache.errors import DatasetError, ImageError, SettingError
from precache.pictures.codecs import made_by
from precache.pictures.jpeg import Pixels

Decoded: TypeAlias = tuple[Pixels, dict[int, ImageError]]
"""`images` and `refused` of a DecodedBatch; what else it has, the one who asked knows."""
NOTHING = Request(0, np.empty(0, np.int64))
_MOST_OPEN = 4  # jobs of a process: those of loaders that are gone end when others come


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be decoded, and how.

    Attributes:
        folder: that relative paths are in.
        versions: as of `versions`, of the one who asks.
    """

    folder: str
    backend: str
    spec: LoaderSpec
    data: SplitData
    crops: Crops
    versions: dict[str, str]


def versions() -> dict[str, str]:
    """What the served pixels depend on, name -> version."""
    resizer = f"torch {torch.__version__}" if torch_is_fast() else "pillow"
    return {"precache": precache.__version__, **made_by(), "opencv": cv2.__version__, "resizer": resizer}


def decode(job: list[Any], request: Request) -> Decoded | Exception:
    """One batch; an error is returned, since Ray would make another one of what is raised.

    Args:
        job: Ray's reference to the Job, in a list: it is fetched once, not for each batch.
    """
    try:
        opened = _open(job[0])
        if not len(request.positions):  # to see whether it would be decoded
            return np.empty(0, np.uint8), {}
        batch = opened.decode(request)
    except Exception as error:
        return error
    return batch.images.numpy(), dict(batch.refused)


_opened: "OrderedDict[Any, _Opened]" = OrderedDict()


def _open(reference: Any) -> "_Opened":
    """The reader of a job, opened when it is first asked for."""
    if reference not in _opened:
        import ray

        torch.set_num_threads(1)
        cv2.setNumThreads(1)
        opened = _Opened(ray.get(reference))
        while len(_opened) >= _MOST_OPEN:
            _opened.popitem(last=False)[1].close()
        _opened[reference] = opened
    _opened.move_to_end(reference)
    return _opened[reference]


class _Opened:
    """The reader of a job; its files stay open from batch to batch.

    Raises:
        SettingError: the one who asks has other versions.
        DatasetError: what it is to read is not here.
    """

    def __init__(self, job: Job) -> None:
        with suppress(OSError):  # where there is no such folder, the path is not there either
            os.chdir(job.folder)
        _check_versions(job.versions)
        _check_sees(job.data)
        self._reader: Reader = BACKENDS[job.backend](job.spec, job.data, job.crops)
        self._asked: deque[Request] = deque()
        self._batches: Iterator[DecodedBatch] | None = None

    def decode(self, request: Request) -> DecodedBatch:
        # readers look one batch ahead: behind each comes an empty one, that they have something to look at
        self._asked.extend((request, NOTHING))
        if self._batches is None:
            self._batches = self._reader.read(iter(self._asked.popleft, None))
        try:
            return next(batch for batch in self._batches if len(batch.ids) or batch.refused)
        except BaseException:
            self._leave()
            raise

    def close(self) -> None:
        self._leave()
        self._reader.close()

    def _leave(self) -> None:
        batches, self._batches = self._batches, None
        self._asked.clear()
        if batches is not None and (close := getattr(batches, "close", None)) is not None:
            close()


def _check_versions(theirs: dict[str, str]) -> None:
    ours = versions()
    for name in sorted(ours.keys() | theirs.keys()):
        here, there = ours.get(name, "none"), theirs.get(name, "none")
        if here != there:
            raise SettingError(
                f"engine 'ray': {name} is {here} on a node of the cluster and {there} here, so pixels would "
                f"differ; install the same versions on every node"
            )


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
