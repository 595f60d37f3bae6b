"""Settings of a trial: one dataclass, which the command line fills and every trial reads."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from bench.measure.trainers import Trainer, check_trainer, make_trainer, resolve_trainer
from loaders.settings import AugmentName, CacheName, Check, Last, Shuffle
from precache.engines import available_cpus
from precache.errors import SettingError, check_choice, check_range
from precache.pictures.images import MAX_SIZE
from precache.storage.urls import Location

SHUFFLES: dict[str, Shuffle] = {"auto": True, "full": "full", "none": False, "window": "window"}
_CPU = torch.device("cpu")
LAST: Last = "drop"
"""Argument `last` of `loaders.build` in a trial: samples that fill no batch are left out.

A short last batch is another shape, for which cuDNN would tune and torch compile inside the measurement.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything that a trial depends on, checked once; it pickles.

    A command fills the settings that all of its trials share; `for_loader` adds the loader of one of them.

    Attributes:
        backend, path: backend and folder of the loader; unused in a trial without one.
        classes: number of classes of its data.
        trainer: name, see `bench.measure.trainers.CHOICES`.
        amp, compiled, launches: settings of trainers, see `bench.measure.trainers.make_trainer`.
        device: device that batches are delivered to and the trainer runs on.
        batch_size: samples per batch, of each rank.
        workers: processes or threads of the loader; None: the CPUs, shared out among the ranks.
        size: side of the served square, pixels.
        warmup: batches of each trial before the timed ones.
        batches: timed batches of each trial.
        repeats: trials of each kind, taking turns.
        cold: whether each loader is measured with a cold page cache, too.
        warmup_s: least seconds of further batches after `warmup`; 0 for none.
        seconds: least seconds of the timed batches, instead of `batches`; 0: `batches` are timed.
        first_epoch: whether a whole epoch is served before the warm-up; always so with a `cache`, to fill it.
        augment, last, rank, world_size: see `loaders.build`.
        shuffle: name in SHUFFLES.
        check, cache: see `loaders.Reading`.
        engine: see `loaders.Reading`; None: `processes` where the trainer launches operations, as `auto`
            chooses for a GPU, else `auto`.
        monitored: whether the machine is monitored while a trainer is fed.
        around: context manager to enter around the run, in the trial's process; tests slow a stage down
            with it.
    """

    backend: str = ""
    path: Location = Path()
    classes: int = 1
    trainer: str = "none"
    amp: str = "auto"
    compiled: bool = False
    launches: int = 0
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
    cache: CacheName | None = None
    engine: Literal["local", "processes"] | None = None
    last: Last = LAST
    rank: int | None = None
    world_size: int | None = None
    monitored: bool = True
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def __post_init__(self) -> None:
        for name, least in (
            *(("batch_size", 1), ("warmup", 0), ("batches", 1), ("repeats", 1)),
            ("launches", 0),
        ):
            check_range(name, getattr(self, name), least)
        check_range("size", self.size, 1, MAX_SIZE)
        if self.workers is not None:
            check_range("workers", self.workers, 0)
        check_choice("augment", self.augment, get_args(AugmentName))
        check_choice("shuffle", self.shuffle, SHUFFLES)
        if self.cache is not None:
            check_choice("cache", self.cache, get_args(CacheName))
        if self.cold and self.cache is not None:
            raise SettingError(
                f"cache {self.cache!r} is full before anything is timed, so no file is read from a cold page "
                f"cache",
                remedy="leave out --cold or --cache",
            )
        full_name = resolve_trainer(self.trainer, self.device)
        check_trainer(full_name, self.size, amp=self.amp, compiled=self.compiled)

    def for_loader(self, backend: str, path: Location, classes: int, **changes: Any) -> "Settings":
        """Return the settings of a trial of that loader; `changes` are new values of other fields."""
        return replace(self, backend=backend, path=path, classes=classes, **changes)

    def without_trainer(self) -> "Settings":
        """Return the settings of a trial of the loader alone, without those of a trainer."""
        return replace(self, trainer="none", amp="auto", compiled=False, launches=0)

    @property
    def workers_alone(self) -> int:
        """Workers of a loader that shares the CPUs of this machine with no other rank."""
        return available_cpus(ranks=1) if self.workers is None else self.workers

    def make_trainer(self) -> Trainer:
        """Build the trainer."""
        return make_trainer(
            self.trainer,
            self.device,
            self.classes,
            amp=self.amp,
            compiled=self.compiled,
            launches=self.launches,
        )


def check_fills_batch(batch_size: int, samples: int) -> None:
    """Raise SettingError where an epoch of `samples` has no full batch."""
    if batch_size > samples:
        raise SettingError(
            f"batch_size {batch_size:,} is more than the {samples:,} pictures of an epoch, and trials are "
            f"measured on full batches",
            remedy="choose a smaller one",
        )
