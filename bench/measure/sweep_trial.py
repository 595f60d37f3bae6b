"""One trial of a sweep: the trainer alone, then fed by the loader, in one process of its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.measure.fresh import in_one_line, run_fresh
from bench.measure.settings import Settings
from bench.measure.trainers import NullTrainer
from bench.measure.trial import measure, measure_trainer
from bench.report import stats
from bench.report.grid import Point


def at_point(settings: Settings, point: Point, classes: int) -> Settings:
    """The trial of `point`, which says how many samples and workers, and how precisely."""
    amp = point.amp or "auto"
    own = replace(settings, batch_size=point.batch_size, workers=point.workers, amp=amp)
    trial = own.trial(backend=point.backend, path=Path(point.data), trainer=settings.trainer, classes=classes)
    return replace(trial, pin=point.pin is not False)


def run(spec: Settings) -> dict[str, Any]:
    """In a fresh process.

    Returns:
        together, trainer: images/s, see `bench.report.grid.Measured`; trainer is None where there is none.
        first_batch_s, batch_s_median, batch_s_p95: see `bench.report.row.Batches`.

    Raises:
        DoesNotFit: the batch does not fit into memory.
    """
    found: dict[str, Any] = run_fresh(both, spec)
    return found


def both(spec: Settings) -> dict[str, Any]:
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
