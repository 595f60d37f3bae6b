"""The types that pass between a loader, its backend and the training loop."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from precache.errors import ImageError, SettingError, check_choice, check_range
from precache.images import MAX_SIZE

Positions: TypeAlias = npt.NDArray[np.int64]
"""int64 [n]: ranks of samples in the stored order of a split."""

Shuffle: TypeAlias = bool | Literal["full", "window"]
DTYPES = (torch.uint8, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Batch:
    """What a training step takes: `images, labels = batch`.

    Attributes:
        images: [n, 3, size, size] in channels-last memory, RGB; uint8 0-255, or floating point,
            normalised with ImageNet's mean and standard deviation.
        labels: int64 [n].
        ids: int64 [n], on the CPU: each picture's rank in the sorted scan of the source tree.
    """

    images: torch.Tensor
    labels: torch.Tensor
    ids: torch.Tensor

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.images, self.labels))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The batch with images and labels on `device`; Lightning calls this on each batch."""
        return Batch(
            self.images.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            self.ids,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """The samples that a backend is asked for as one batch.

    Attributes:
        epoch: that they are served in.
        positions: int64 [n].
    """

    epoch: int
    positions: Positions


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """What a backend hands over.

    Attributes:
        images: uint8 [n, size, size, 3], RGB, on the CPU or the loader's device.
        labels: int64 [n], on the CPU.
        ids: int64 [n], on the CPU.
        refused: id -> why, of the pictures asked for that could not be decoded; the others are there,
            in the order asked.
    """

    images: torch.Tensor
    labels: torch.Tensor
    ids: torch.Tensor
    refused: Mapping[int, ImageError] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSpec:
    """The settings of a loader, checked once; `loaders.build` describes them."""

    path: str | os.PathLike[str]
    backend: str
    split: str
    batch_size: int
    shuffle: Shuffle
    seed: int
    device: torch.device
    size: int | None
    dtype: torch.dtype
    last: str
    workers: int
    threads: int
    rank: int
    world_size: int
    check: str
    cache: str
    memory_bytes: int | None
    on_error: str

    def __post_init__(self) -> None:
        check_range("batch_size", self.batch_size, 1)
        check_range("seed", self.seed, 0, 2**63 - 1)
        check_range("workers", self.workers, 0)
        check_range("threads", self.threads, 1)
        check_range("world_size", self.world_size, 1)
        check_range("rank", self.rank, 0, self.world_size - 1)
        check_choice("last", self.last, ("drop", "pad", "partial"))
        check_choice("check", self.check, ("always", "first-read", "never"))
        check_choice("cache", self.cache, ("device", "none", "ram"))
        check_choice("on_error", self.on_error, ("raise", "skip"))
        if self.size is not None:
            check_range("size", self.size, 1, MAX_SIZE)
        if self.memory_bytes is not None:
            check_range("memory_bytes", self.memory_bytes, 1)
        if not isinstance(self.shuffle, bool):
            check_choice("shuffle", self.shuffle, ("full", "window"))
        if self.dtype not in DTYPES:
            raise SettingError(
                f"unknown dtype {self.dtype}; choose from: {', '.join(str(dtype) for dtype in DTYPES)}"
            )
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise SettingError(f"device {str(self.device)!r} asked for, but torch finds no GPU; use 'cpu'")


class Reader(Protocol):
    """A backend: decodes the samples that it is asked for, in the order asked.

    Attributes:
        random_access: whether any order is as good as the stored one.
    """

    random_access: bool

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per request; runs in a thread, ahead of the training.

        `requests` go on from epoch to epoch without end. A reader may look ahead in them. It is left
        midway, by closing the generator, where the caller wants another epoch than the next.
        """

    def close(self) -> None:
        """Free threads, processes and files; idempotent."""


class Loader(Protocol):
    """What `loaders.build` returns.

    Iterating serves one epoch, each sample of the split once over all ranks (`last` says what happens
    to those that fill no batch); the next iteration serves the next.
    One iterator runs at a time: a new one ends the one before.
    """

    classes: tuple[str, ...]
    samples: int
    size: int

    def __iter__(self) -> Iterator[Batch]: ...

    def __len__(self) -> int:
        """Batches per epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Serve epoch `epoch` next; without this call epochs count up from 0."""

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as plain JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; SettingError if it is of other data or another seed."""

    def close(self) -> None:
        """Free threads, processes and files; idempotent."""

    def __enter__(self) -> "Loader": ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
