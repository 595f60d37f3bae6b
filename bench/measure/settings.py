"""What to run: one dataclass, which the command line fills and every trial reads."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

import loaders
from bench.measure import imagefolder
from bench.measure.fresh import in_one_line
from bench.measure.trainers import Trainer, check_trainer, make_trainer, resolve
from loaders.augment import AUGMENTATIONS
from loaders.batch import Batch
from loaders.settings import AugmentName, CacheName, Check, Last, Shuffle
from precache.engines import available_cpus
from precache.errors import SettingError, check_choice, check_range
from precache.pictures.images import MAX_SIZE
from precache.pictures.sizes import Size
from precache.storage.urls import Location

CACHES = ("none", "ram", "device")
SHUFFLES: dict[str, Shuffle] = {"auto": True, "full": "full", "none": False, "window": "window"}
_CPU = torch.device("cpu")
LAST: Last = "drop"
"""What the loader of a trial does with the samples that fill no batch, see `loaders.build`.

A short last batch is another shape, for which cuDNN would tune and torch compile inside the measurement.
"""


class Feed(AbstractContextManager[Any], Protocol):
    """What a trial needs of a loader: one of `loaders.build`, or one that people use today."""

    batch_size: int
    samples: int
    classes: tuple[str, ...]

    @property
    def size(self) -> Size:
        """Of the served pictures."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __len__(self) -> int:
        """Batches per epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything that a trial depends on; checked once. It pickles.

    A command fills what all of its trials have in common; `of` names the loader of one of them.

    Attributes:
        backend, path: of the loader; not looked at where there is none.
        classes: of its data.
        trainer: name, see `bench.measure.trainers.CHOICES`.
        amp, compiled: of trainers that compute, see `bench.measure.trainers.make_trainer`.
        device: where batches go and the trainer runs.
        batch_size: samples per batch, of each rank.
        workers: of the loader; None: the CPUs, shared out among the ranks.
        size: side of the served square, pixels.
        warmup, batches: before the timed ones, and timed, of each trial.
        repeats: trials of each kind, taking turns.
        cold: whether each loader is measured with a cold page cache, too.
        warmup_s, seconds: at least so long, the former after `warmup`, the latter instead of `batches`;
            0: not asked for.
        first_epoch: whether a whole epoch goes before all that; so it does where there is a cache to fill.
        augment, last, rank, world_size: see `loaders.build`.
        shuffle: one of SHUFFLES.
        check, cache: see `loaders.Reading`.
        monitored: whether the machine is watched while a trainer is fed.
        around: called in the trial's process and entered around the run; tests slow a stage down with it.
    """

    backend: str = ""
    path: Location = Path()
    classes: int = 1
    trainer: str = "none"
    amp: str = "auto"
    compiled: bool = False
    device: torch.device = _CPU
    batch_size: int = 64
    workers: int | None = None
    size: int = 224
    warmup: int = 4
    batches: int = 40
    repeats: int = 3
    cold: bool = False
    warmup_s: float = 0.0
    seconds: float = 0.0
    first_epoch: bool = False
    augment: AugmentName = "eval"
    shuffle: str = "auto"
    check: Check = "first-read"
    cache: CacheName = "none"
    last: Last = LAST
    rank: int | None = None
    world_size: int | None = None
    monitored: bool = True
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("warmup", 0), ("batches", 1), ("repeats", 1)):
            check_range(name, getattr(self, name), least)
        check_range("size", self.size, 1, MAX_SIZE)
        if self.workers is not None:
            check_range("workers", self.workers, 0)
        check_choice("augment", self.augment, AUGMENTATIONS)
        check_choice("shuffle", self.shuffle, SHUFFLES)
        check_choice("cache", self.cache, CACHES)
        if self.cold and self.cache != "none":
            raise SettingError(
                f"cache {self.cache!r} is full before anything is timed, so no file is read from a cold page "
                f"cache; leave out --cold or --cache"
            )
        full_name = resolve(self.trainer, self.device)
        check_trainer(full_name, self.size, amp=self.amp, compiled=self.compiled)

    def of(self, backend: str, path: Location, classes: int, **others: Any) -> "Settings":
        """Those of a trial of that loader; `others` are other fields."""
        return replace(self, backend=backend, path=path, classes=classes, **others)

    @property
    def workers_alone(self) -> int:
        """Of a loader that has all CPUs of this machine."""
        return available_cpus() if self.workers is None else self.workers

    @contextmanager
    def running(self) -> Iterator[None]:
        """What goes around every run."""
        with self.around(), in_one_line(self.batch_size, self.size):
            yield

    def make_trainer(self) -> Trainer:
        """Build the trainer."""
        return make_trainer(self.trainer, self.device, self.classes, amp=self.amp, compiled=self.compiled)

    def open_loader(self, dtype: torch.dtype) -> Feed:
        """Build the loader; `imagefolder` serves float32 whatever `dtype` is."""
        if self.backend == imagefolder.NAME:
            return self._open_imagefolder()
        backend: Any = self.backend  # `loaders.build` knows its name
        workers: int | Literal["auto"] = "auto" if self.workers is None else self.workers
        return loaders.build(
            self.path,
            backend=backend,
            batch_size=self.batch_size,
            size=self.size,
            device=self.device,
            augment=self.augment,
            shuffle=SHUFFLES[self.shuffle],
            dtype=dtype,
            sampling=loaders.Sampling(last=self.last),
            ranks=loaders.Ranks(rank=self.rank, world_size=self.world_size),
            reading=loaders.Reading(workers=workers, check=self.check, cache=self.cache),
        )

    def _open_imagefolder(self) -> Feed:
        refused = {"cache": (self.cache, "none"), "last": (self.last, LAST)}
        for name, (value, usual) in refused.items():
            if value != usual:
                raise SettingError(
                    f"{imagefolder.NAME} takes no {name} {value!r}: torch's DataLoader has none"
                )
        check_choice("shuffle", self.shuffle, ("auto", "full", "none"))
        assert isinstance(self.path, Path), "it reads trees alone, and those are on disk"
        return imagefolder.ImageFolderLoader(
            self.path,
            batch_size=self.batch_size,
            size=self.size,
            workers=self.workers_alone,
            device=self.device,
            augment=self.augment,
            shuffle=self.shuffle != "none",
            skip_refused=True,
        )


def check_fills_batch(batch_size: int, samples: int) -> None:
    """Raise SettingError where an epoch of `samples` has no full batch."""
    if batch_size > samples:
        raise SettingError(
            f"batch_size {batch_size:,} is more than the {samples:,} pictures of an epoch, and trials are "
            f"measured on full batches; choose a smaller one"
        )
