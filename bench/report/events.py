"""A result's series as TensorBoard events: a run per row."""

import re
from itertools import accumulate
from pathlib import Path
from typing import Any

from bench.report import table as report
from bench.report.row import Result, Row, Watched
from precache.errors import MissingDependencyError


def writer_class() -> Any:
    """torch's SummaryWriter; MissingDependencyError without the package tensorboard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingDependencyError(
            f"--tensorboard needs tensorboard ({error}); run: pip install tensorboard"
        ) from error
    return SummaryWriter


def write_events(result: Result, folder: Path) -> list[str]:
    """Write each row's series to a run of its own in `folder`; returns the runs' names.

    `batch/images_per_s`, `batch/wait_s` and `batch/step_s` have a step per timed batch, `monitor/NAME` one
    per sample; the time of an event is that since the first batch or sample. A row without series has no
    run; a run of that name that was there before is superseded.
    """
    runs: list[str] = []
    for row in result.rows:
        scalars = _batches(row, result.settings["batch_size"]) | _samples(row.monitor)
        if not scalars:
            continue
        several = report.several_trainers(result) and not row.peer
        of = f"{report.label(row)}, fed to {row.trainer_name}" if several else report.label(row)
        name = re.sub(r"[^\w.:-]+", "_", of)
        run = name if name not in runs else f"{name}_{len(runs)}"
        with writer_class()(str(folder / run), purge_step=0) as writer:
            for scalar, points in scalars.items():
                for step, (time_s, value) in enumerate(points):
                    writer.add_scalar(scalar, value, step, walltime=time_s)
        runs.append(run)
    return runs


def _batches(row: Row, batch_size: int) -> dict[str, list[tuple[float, float]]]:
    """Name -> (seconds since the start, value) of every batch."""
    times = row.batches
    if not times.step_s:
        return {}
    ends_s = list(accumulate(times.batch_s))
    series = {
        "batch/images_per_s": [batch_size / seconds for seconds in times.batch_s],
        "batch/wait_s": times.wait_s,
        "batch/step_s": times.step_s,
    }
    return {name: list(zip(ends_s, values, strict=True)) for name, values in series.items()}


def _samples(sampled: Watched | None) -> dict[str, list[tuple[float, float]]]:
    if sampled is None:
        return {}
    return {
        f"monitor/{name}": list(zip(sampled.time_s, values, strict=True))
        for name, values in sampled.series.items()
        if values
    }
