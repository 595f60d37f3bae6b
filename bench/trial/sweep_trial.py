"""One trial of a sweep: the trainer alone, then fed by the loader, in one process of its own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.findings import stats
from bench.findings.grid import Point
from bench.trial.fresh import run_fresh
from bench.trial.refusals import in_one_line
from bench.trial.run import measure, measure_trainer
from bench.trial.spec import CACHES, TrialSpec
from bench.trial.trainers import NullTrainer, check_trainer
from precache.errors import check_choice, check_range
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

    def spec(self, point: Point, classes: int) -> TrialSpec:
        """The trial of `point`."""
        return TrialSpec(
            backend=point.backend,
            path=Path(point.data),
            trainer=self.trainer,
            classes=classes,
            batch_size=point.batch_size,
            workers=point.workers,
            size=self.size,
            warmup=self.warmup,
            batches=self.batches,
            device=torch.device(self.device),
            amp=point.amp or "auto",
            compiled=self.compiled,
            cache=self.cache,
            pin=point.pin is not False,
        )


def run(spec: TrialSpec) -> dict[str, Any]:
    """In a fresh process.

    Returns:
        together, trainer: images/s, see `bench.findings.grid.Measured`; trainer is None where there is none.
        first_batch_s, batch_s_median, batch_s_p95: see `bench.findings.row.Batches`.

    Raises:
        DoesNotFit: the batch does not fit into memory.
    """
    found: dict[str, Any] = run_fresh(both, spec)
    return found


def both(spec: TrialSpec) -> dict[str, Any]:
    """In this process, with one trainer: it tunes and compiles once."""
    with in_one_line(spec.batch_size, spec.size):
        trainer = spec.make_trainer()
    alone = None if isinstance(trainer, NullTrainer) else measure_trainer(spec, trainer)
    trial = measure(spec, trainer)
    return {
        "together": trial.images_per_s,
        "trainer": None if alone is None else alone.images_per_s,
        "first_batch_s": trial.first_batch_s,
        "batch_s_median": stats.percentile(trial.batch_s, 0.5),
        "batch_s_p95": stats.percentile(trial.batch_s, 0.95),
    }
