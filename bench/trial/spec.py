"""Settings of a comparison."""

from dataclasses import dataclass

import torch

from bench.trial.run import CACHES, SHUFFLES
from bench.trial.trainers import check_trainer, resolve
from loaders.augment import NAMES as AUGMENTATIONS
from precache.errors import SettingError, check_choice, check_range
from precache.images import MAX_SIZE


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSpec:
    """Settings of a comparison, the same for every arm; checked once.

    Attributes:
        trainers: names, see `bench.trial.trainers.CHOICES`.
        batch_size: samples per batch.
        workers: of each loader; see `loaders.build`.
        size: side of the served square in pixels.
        warmup: batches before the timed ones, of each trial.
        batches: timed batches of each trial.
        repeats: trials of each kind.
        device: where batches go and the trainer runs.
        augment: a name, see `loaders.build`.
        shuffle: one of `bench.trial.run.SHUFFLES`.
        cold: whether to measure each loader with a cold page cache, too.
        amp, compiled: of the trainers that compute, see `bench.trial.trainers.make_trainer`.
        cache: of the loaders, see `loaders.build`; a first epoch, which fills it, is not timed.
    """

    trainers: tuple[str, ...]
    batch_size: int
    workers: int
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
