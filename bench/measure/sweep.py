"""Every point of a sweep measured in a process of its own, each finished trial a line of a file.

{"sweep": 1, "machine": {...}, "data": {folder: digest}, "settings": {...}}     the first line
{"data": {folder: digest}}                          folders that a later sweep added
{"point": {...}, "repeat": 0, "trial": {...}}       a trial, see `both`
{"point": {...}, "pruned": "why"}                   a point that needs no measuring
{"point": {...}, "failed": "why"}                   a point that does not fit into memory
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.machine import page_cache
from bench.machine.monitor import OtherProcesses
from bench.measure.candidates import folder_of
from bench.measure.fresh import DoesNotFit, in_one_line, run_fresh
from bench.measure.lines import Lines, check_same
from bench.measure.settings import Settings
from bench.measure.trainers import NullTrainer
from bench.measure.trial import measure, measure_trainer
from bench.report import stats
from bench.report.row import Row
from bench.report.sweep import Found, Point, prune
from precache.reporting import Progress, unseen
from precache.storage.urls import locate

_VERSION = 1


class Trials:
    """What is finished.

    Attributes:
        of: the trials of each point, by repeat.
        pruned, failed: point -> why.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Open the file at `path`, or begin it with `header`: machine, data and settings.

        Raises:
            SettingError: it is the file of another machine or other settings, a folder holds other data than
                it did, or it is the file of something else.
        """
        self.of: dict[Point, dict[int, dict[str, Any]]] = {}
        self.pruned: dict[Point, str] = {}
        self.failed: dict[Point, str] = {}
        self.lines = Lines(path, "bench sweep")
        if not self.lines.found:
            self.lines.add({"sweep": _VERSION, **header})
            return
        first, *others = self.lines.found
        try:
            if first["sweep"] != _VERSION:
                raise KeyError("sweep")
            known = dict(first["data"])
            for line in others:
                if "data" in line:
                    known |= line["data"]
                else:
                    self._take(line)
            asked = header["data"]
            ours = {name: digest for name, digest in asked.items() if name in known}
            check_same(
                str(path), {**first, "data": {name: known[name] for name in ours}}, {**header, "data": ours}
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise self.lines.error(error) from error
        if new := {name: digest for name, digest in asked.items() if name not in known}:
            self.lines.add({"data": new})

    def add(self, point: Point, **found: Any) -> None:
        """Write one of the lines described above."""
        line = {"point": point._asdict(), **found}
        self.lines.add(line)
        self._take(line)

    def found(self, points: Sequence[Point]) -> Found:
        """What the trials of these points say."""
        trials = [trial for point in points for trial in self.of.get(point, {}).values()]
        shares = [share for trial in trials if (share := trial.get("other_cpu")) is not None]
        return Found(
            points,
            {point: self._row(point) for point in points if point in self.of},
            {**self.pruned, **self.failed},
            sum(shares) / len(shares) if shares else None,
        )

    def _row(self, point: Point) -> Row:
        trials = self.of[point].values()
        together = [trial["together"] for trial in trials]
        alone = [trial["trainer"] for trial in trials if trial["trainer"] is not None]
        return Row(
            backend=point.backend,
            data=point.data,
            trainer_name=self.lines.found[0]["settings"].get("trainer", ""),
            loader=stats.estimate(together),
            together=stats.estimate(together),
            trainer=stats.estimate(alone) if alone else None,
            ratio=stats.ratio(together, alone) if alone else None,
        )

    def _take(self, line: dict[str, Any]) -> None:
        point = Point(**line["point"])
        if "trial" in line:
            self.of.setdefault(point, {})[line["repeat"]] = line["trial"]
        elif "pruned" in line:
            self.pruned[point] = line["pruned"]
        else:
            self.failed[point] = line["failed"]


def run(
    points: Sequence[Point],
    settings: Settings,
    trials: Trials,
    classes: Mapping[str, int],
    on_progress: Progress = unseen,
) -> None:
    """Measure what `trials` lack of `points`, all of them once, then again; prune in the first round.

    Args:
        classes: how many the data of each folder has.

    Raises:
        PrecacheError: a loader cannot be built, which is found out before anything is measured, or a
            trial failed otherwise than for want of memory.
    """
    left_out = {**trials.pruned, **trials.failed}
    missing = [
        (repeat, point)
        for repeat in range(settings.repeats)
        for point in points
        if point not in left_out and repeat not in trials.of.get(point, {})
    ]
    for point in {point[:2]: point for _, point in reversed(missing)}.values():
        # raises what its trials would, before hours are spent on others
        probe = point._replace(batch_size=1, workers=0)
        run_fresh(open_once, _at(settings, probe, classes[point.data]))
    total = len(points) * settings.repeats
    on_progress(total - len(missing), total)
    for number, (repeat, point) in enumerate(missing, 1):
        if point not in trials.pruned and point not in trials.failed:
            _measure(point, repeat, settings, trials, classes)
        on_progress(total - len(missing) + number, total)


def _measure(
    point: Point, repeat: int, settings: Settings, trials: Trials, classes: Mapping[str, int]
) -> None:
    # once begun, a point gets all its trials: else chance would choose which have few
    measured = trials.found(list(trials.of)).measured
    reason = None if point in trials.of else prune(point, measured, trials.failed)
    if reason is not None:
        trials.add(point, pruned=reason)
        return
    warm = page_cache.warm(folder_of(locate(point.data)))
    others = OtherProcesses()
    try:
        trial = run_fresh(both, _at(settings, point, classes[point.data]))
    except DoesNotFit:
        trials.add(point, failed=f"batch {point.batch_size:,} does not fit into memory")
    else:
        trials.add(
            point, repeat=repeat, trial={**trial, "page_cache_warm": warm, "other_cpu": others.share()}
        )


def _at(settings: Settings, point: Point, classes: int) -> Settings:
    """The trial of `point`, which says how many samples and workers."""
    own = {"batch_size": point.batch_size, "workers": point.workers}
    return settings.of(point.backend, locate(point.data), classes, **own)


def open_once(settings: Settings) -> None:
    """Build the loader; what keeps it from that is raised."""
    with settings.open_loader(settings.make_trainer().dtype):
        pass


def both(settings: Settings) -> dict[str, Any]:
    """The trainer alone, then fed by the loader, with one trainer: it tunes and compiles once.

    Returns:
        together, trainer: images/s, trainer is None where there is none.
        first_batch_s, batch_s_median, batch_s_p95: see `bench.report.row.Row`.

    Raises:
        DoesNotFit: the batch does not fit into memory.
    """
    with in_one_line(settings.batch_size, settings.size):
        trainer = settings.make_trainer()
    alone = None if isinstance(trainer, NullTrainer) else measure_trainer(settings, trainer)
    trial = measure(settings, trainer)
    return {
        "together": trial.images_per_s,
        "trainer": None if alone is None else alone.images_per_s,
        "first_batch_s": trial.first_batch_s,
        "batch_s_median": stats.percentile(trial.batch_s, 0.5),
        "batch_s_p95": stats.percentile(trial.batch_s, 0.95),
    }
