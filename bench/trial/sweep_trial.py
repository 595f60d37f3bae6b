"""One trial of a sweep, in a process of its own: `python -m bench.trial.sweep_trial JSON` prints JSON.

It takes {"point": see `bench.findings.grid.Point`, "settings": see `Settings`} and gives what `measure`
returns, or {"failed": why} where the batch does not fit into memory, or {"error": message}.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import loaders
from bench.findings import stats
from bench.findings.grid import Point
from bench.trial.full_batches import LAST
from bench.trial.refusals import DoesNotFit, in_one_line
from bench.trial.run import CACHES, feed, feed_again
from bench.trial.trainers import NullTrainer, Trainer, check_trainer, make_trainer
from loaders.batch import Batch, Loader
from loaders.dataset import open_split
from loaders.transfer import normalise
from precache.errors import PrecacheError, check_choice, check_range
from precache.images import MAX_SIZE


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What all trials of a sweep have in common.

    Attributes:
        trainer, compiled: see `bench.trial.trainers.make_trainer`; the trainer by its full name.
        device: where batches go and the trainer runs.
        size: side of the served square in pixels.
        warmup, batches: of each trial, before the timed ones and timed.
        cache: of the loader, see `loaders.build`; it is full before anything is timed.
    """

    trainer: str
    device: str
    size: int
    warmup: int
    batches: int
    compiled: bool = False
    cache: str = "none"

    def __post_init__(self) -> None:
        check_range("size", self.size, 1, MAX_SIZE)
        check_range("warmup", self.warmup, 0)
        check_range("batches", self.batches, 1)
        check_choice("cache", self.cache, CACHES)
        check_trainer(self.trainer, self.size, compiled=self.compiled)


class FromPageable:
    """Hands batches in main memory on to `trainer`: copied from pageable memory, in the training's thread."""

    dtype = torch.uint8

    def __init__(self, trainer: Trainer, device: torch.device) -> None:
        self.name = trainer.name
        self._trainer = trainer
        self._device = device

    def step(self, batch: Batch) -> None:
        """Copy `batch`, bring it into the trainer's dtype, train."""
        moved = batch.to(self._device)
        self._trainer.step(_as(moved, self._trainer.dtype))


def measure(point: Point, settings: Settings) -> dict[str, Any]:
    """The trainer alone, then fed by the loader.

    Returns:
        together, trainer: images/s, see `bench.findings.grid.Measured`; trainer is None where there is none.
        first_batch_s, batch_s_median, batch_s_p95: see `bench.findings.result.Row`.
    """
    device = torch.device(settings.device)
    classes = len(open_split(point.data, "train").classes)
    amp = point.amp or "auto"
    trainer = make_trainer(settings.trainer, device, classes, amp=amp, compiled=settings.compiled)
    alone = None
    if not isinstance(trainer, NullTrainer):
        batch = _as(_noise(point.batch_size, settings.size, classes, device), trainer.dtype)
        alone = feed_again(batch, trainer, device, settings.warmup, settings.batches)
        del batch  # its memory is the loader's now
    pageable = device.type == "cuda" and point.pin is False
    fed = FromPageable(trainer, device) if pageable else trainer
    loader = _opener(point, settings, "cpu" if pageable else settings.device, fed.dtype)
    fill = settings.cache != "none"
    trial = feed(loader, fed, device, settings.warmup, settings.batches, fill_cache=fill)
    return {
        "together": trial.images_per_s,
        "trainer": None if alone is None else alone.images_per_s,
        "first_batch_s": trial.first_batch_s,
        "batch_s_median": stats.percentile(trial.batch_s, 0.5),
        "batch_s_p95": stats.percentile(trial.batch_s, 0.95),
    }


def _opener(point: Point, settings: Settings, device: str, dtype: torch.dtype) -> Callable[[], Loader]:
    def build() -> Loader:
        return loaders.build(
            point.data,
            backend=point.backend,
            batch_size=point.batch_size,
            size=settings.size,
            device=device,
            dtype=dtype,
            last=LAST,
            reading=loaders.Reading(workers=point.workers, cache=settings.cache),
        )

    return build


def _noise(batch_size: int, size: int, classes: int, device: torch.device) -> Batch:
    """A batch on the device, of the shape and layout that loaders deliver."""
    images = torch.randint(0, 256, (batch_size, size, size, 3), dtype=torch.uint8, device=device)
    labels = torch.randint(0, classes, (batch_size,), device=device)
    return Batch(images.permute(0, 3, 1, 2), labels, torch.arange(batch_size))


def _as(batch: Batch, dtype: torch.dtype) -> Batch:
    if not dtype.is_floating_point:
        return batch
    return Batch(normalise(batch.images, dtype), batch.labels, batch.ids)


def main() -> None:
    """Measure what the command line asks for."""
    asked = json.loads(sys.argv[1])
    point = Point(**asked["point"])
    answer: dict[str, Any]
    try:
        settings = Settings(**asked["settings"])
        with in_one_line(point.batch_size, settings.size):
            answer = measure(point, settings)
    except DoesNotFit:
        answer = {"failed": f"batch {point.batch_size:,} does not fit into memory"}
    except PrecacheError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
