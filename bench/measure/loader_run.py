"""One loader alone, the trainer alone, and both together, each in a process of its own.

The loader alone is measured from the second epoch on: a first one, which opens everything, goes before,
unless that would take too long.
"""

from dataclasses import dataclass, replace

from bench.measure.fresh import run_fresh
from bench.measure.settings import Settings
from bench.measure.trainers import NullTrainer
from bench.measure.trial import measure, measure_trainer


@dataclass(frozen=True, slots=True)
class LoaderRun:
    """What was measured.

    Attributes:
        loader, trainer, together: images/s; the trainer alone has a batch that stays on the device.
        serial_s: CPU time per picture, of the loader alone, of the busiest thread that there is one of,
            without what it does of the filling of batches: more workers relieve it of that.
    """

    loader: float
    trainer: float
    together: float
    serial_s: float


def run(spec: Settings, *, first_epoch: bool = True) -> LoaderRun:
    """Measure each for at least `spec.seconds`; WorkerError, with the reason, if a process dies."""
    warm = replace(spec, warmup=0, batches=1, monitored=False)
    alone = run_fresh(measure, replace(warm, trainer=NullTrainer.name, first_epoch=first_epoch))
    half_s = spec.seconds / 2
    trainer = run_fresh(measure_trainer, replace(warm, seconds=half_s))
    together = run_fresh(measure, replace(warm, warmup_s=half_s))
    return LoaderRun(
        alone.images_per_s, trainer.images_per_s, together.images_per_s, alone.serial_s / alone.images
    )
