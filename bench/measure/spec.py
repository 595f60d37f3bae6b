"""What to run: one trial, and what all trials of a command have in common."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import loaders
from bench.measure import imagefolder
from bench.measure.full_batches import LAST, Feed
from bench.measure.refusals import in_one_line
from bench.measure.trainers import Trainer, check_trainer, make_trainer, resolve
from loaders.augment import NAMES as AUGMENTATIONS
from loaders.settings import Shuffle
from precache.errors import SettingError, check_choice, check_range
from precache.executors import available_cpus
from precache.images import MAX_SIZE
from precache.storage.urls import Location

CACHES = ("none", "ram", "device")
SHUFFLES: dict[str, Shuffle] = {"auto": True, "full": "full", "none": False, "window": "window"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSpec:
    """One trial, whoever asks for it: what differs between commands is a field. It pickles.

    Attributes:
        backend, path: of the loader; not looked at where there is none.
        trainer, amp, compiled: see `bench.measure.trainers.make_trainer`.
        classes: of the data.
        batch_size: samples per batch, of this rank.
        workers: of the loader; None: the CPUs, shared out among the ranks.
        size: side of the served square in pixels.
        warmup, batches: before the timed ones, and timed.
        warmup_s, seconds: at least so long, the former after `warmup`, the latter instead of `batches`;
            0: not asked for.
        first_epoch: whether a whole epoch goes before all that; so it does where there is a cache to fill.
        device: where batches go and the trainer runs.
        augment, last, rank, world_size: see `loaders.build`.
        check, cache: see `loaders.Reading`.
        shuffle: one of SHUFFLES.
        pin: whether batches are copied from pinned memory; else from pageable, in the training's thread.
        monitored: whether the machine is watched while a trainer is fed.
        around: called in the trial's process and entered around the run; tests slow a stage down with it.
    """

    backend: str
    path: Location
    trainer: str
    classes: int
    batch_size: int
    workers: int | None
    size: int
    warmup: int
    batches: int
    device: torch.device
    warmup_s: float = 0.0
    seconds: float = 0.0
    first_epoch: bool = False
    augment: str = "eval"
    shuffle: str = "auto"
    amp: str = "auto"
    compiled: bool = False
    check: str = "first-read"
    cache: str = "none"
    pin: bool = True
    last: str = LAST
    rank: int | None = None
    world_size: int | None = None
    monitored: bool = True
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def pageable(self) -> bool:
        """Whether the loader serves in main memory, and the training's thread copies."""
        return self.device.type == "cuda" and not self.pin

    @contextmanager
    def running(self) -> Iterator[None]:
        """What goes around every run."""
        with self.around(), in_one_line(self.batch_size, self.size):
            yield

    def make_trainer(self) -> Trainer:
        """Build the trainer."""
        return make_trainer(self.trainer, self.device, self.classes, amp=self.amp, compiled=self.compiled)

    def import_libraries(self) -> None:
        """Import what this loader needs and others do not, as a training has before it builds its loader."""
        if self.backend == imagefolder.NAME:
            import torchvision  # noqa: F401

    def open_loader(self, dtype: torch.dtype) -> Feed:
        """Build the loader; `imagefolder` serves float32 whatever `dtype` is."""
        workers: int | Literal["auto"] = "auto" if self.workers is None else self.workers
        if self.backend == imagefolder.NAME:
            return self._open_imagefolder()
        return loaders.build(
            self.path,
            backend=self.backend,
            batch_size=self.batch_size,
            size=self.size,
            device="cpu" if self.pageable else self.device,
            dtype=torch.uint8 if self.pageable else dtype,
            augment=self.augment,
            shuffle=SHUFFLES[self.shuffle],
            last=self.last,
            rank=self.rank,
            world_size=self.world_size,
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
            workers=available_cpus() if self.workers is None else self.workers,
            device=self.device,
            augment=self.augment,
            shuffle=self.shuffle != "none",
            pin=self.pin,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """What all trials of a command have in common, whatever they run; checked once.

    Attributes:
        trainers: names, see `bench.measure.trainers.CHOICES`; none where the command chooses them later.
        batch_size: samples per batch, of each rank.
        workers: of each loader; None: the CPUs, shared out among the ranks.
        size: side of the served square in pixels.
        warmup: batches before the timed ones, of each trial.
        batches: timed batches of each trial.
        repeats: trials of each kind, interleaved.
        device: where batches go and the trainer runs.
        augment: a name, see `loaders.build`.
        shuffle: one of SHUFFLES.
        cold: whether to measure each loader with a cold page cache, too.
        amp, compiled: of the trainers that compute, see `bench.measure.trainers.make_trainer`.
        cache: of the loaders, see `loaders.Reading`; a first epoch, which fills it, is not timed.
    """

    trainers: tuple[str, ...]
    batch_size: int
    workers: int | None
    size: int
    warmup: int
    batches: int
    repeats: int
    device: torch.device
    augment: str = "eval"
    shuffle: str = "auto"
    cold: bool = False
    amp: str = "auto"
    compiled: bool = False
    cache: str = "none"

    def __post_init__(self) -> None:
        check_range("batch_size", self.batch_size, 1)
        if self.workers is not None:
            check_range("workers", self.workers, 0)
        check_range("size", self.size, 1, MAX_SIZE)
        check_range("warmup", self.warmup, 0)
        check_range("batches", self.batches, 1)
        check_range("repeats", self.repeats, 1)
        check_choice("augment", self.augment, AUGMENTATIONS)
        check_choice("shuffle", self.shuffle, SHUFFLES)
        check_choice("cache", self.cache, CACHES)
        if self.cold and self.cache != "none":
            raise SettingError(
                f"cache {self.cache!r} is full before anything is timed, so no file is read from a cold page "
                f"cache; leave out --cold or --cache"
            )
        for name in self.trainers:
            full_name = resolve(name, self.device)
            check_trainer(full_name, self.size, amp=self.amp, compiled=self.compiled)

    @property
    def trainer(self) -> str:
        """The only one."""
        (name,) = self.trainers
        return name

    @property
    def workers_alone(self) -> int:
        """Of a loader that has all CPUs of this machine."""
        return available_cpus() if self.workers is None else self.workers

    def trial(self, *, backend: str, path: Location, trainer: str, classes: int) -> TrialSpec:
        """The trial of a loader and a trainer; what else it asks for, its caller replaces."""
        return TrialSpec(
            backend=backend,
            path=path,
            trainer=trainer,
            classes=classes,
            batch_size=self.batch_size,
            workers=self.workers,
            size=self.size,
            warmup=self.warmup,
            batches=self.batches,
            device=self.device,
            augment=self.augment,
            shuffle=self.shuffle,
            amp=self.amp,
            compiled=self.compiled,
            cache=self.cache,
        )
