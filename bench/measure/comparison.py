"""Comparison of loaders and trainers: the trials of `bench loaders`, in turns.

Each trial has a process of its own.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from bench.machine import page_cache
from bench.machine.hardware import describe_machine, resolve_amp
from bench.machine.monitor import OtherProcesses
from bench.measure.candidates import (
    DECODING_BACKENDS,
    Candidate,
    local_folder,
    open_candidates,
    same_pictures,
)
from bench.measure.processes import BatchTooLargeError, measure_trial, run_in_process
from bench.measure.settings import Settings, check_fills_batch
from bench.measure.trainers import MODELS, resolve_trainer
from bench.measure.trials import Trials
from bench.report import loaders
from bench.report.gain import TODAY_BACKEND
from bench.report.grid import Point, find_reason_to_skip, point_of
from bench.report.loaders import COLD, FED, LOADER, NO_TRAINER, STAGES, TRAINER, TRANSFER
from bench.report.result import Result, Trial, name_data
from precache.engines import available_cpus
from precache.errors import (
    DatasetError,
    ImageError,
    MissingDependencyError,
    SettingError,
    SourceError,
    WorkerError,
)
from precache.pictures.kinds import IMAGE_FOLDER_EXTENSIONS
from precache.reporting import Progress, no_progress
from precache.storage.urls import Location

_MAX_RESIDENT_SHARE = 0.05
"""Limit of the share of a folder in memory in a cold trial: pages read ahead, or by other processes."""
_SETTINGS_IN_RESULT = (
    *("size", "warmup", "batches", "repeats", "augment", "shuffle", "cold", "compiled", "cache"),
    *("launches", "warmup_s", "seconds", "first_epoch"),
)
"""Fields of `Settings` that a result's file has under the same names."""
_IMAGE_FOLDER_CONDITION = (
    f"{TODAY_BACKEND} has torchvision's transforms for this augment, with Pillow, and delivers normalised "
    f"float32, whatever the trainer takes"
)
_FAILURES = (DatasetError, ImageError, MissingDependencyError, SettingError, SourceError, WorkerError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Loaders to compare, and the settings under which they are measured.

    Attributes:
        candidates: loaders of this project, and torchvision's ImageFolder.
        settings: settings that all trials share.
        trainers: names of trainers to feed; empty: that of `settings`.
        workers, batch_sizes: values whose combinations are all measured; empty: those of `settings`.
        convert_s: seconds that converting into a folder took, by the folder.
    """

    candidates: Sequence[Candidate]
    settings: Settings
    trainers: Sequence[str] = ()
    workers: Sequence[int] = ()
    batch_sizes: Sequence[int] = ()
    convert_s: Mapping[Location, float] = field(default_factory=dict)


def compare(
    comparison: Comparison,
    path: Path | None = None,
    on_progress: Progress = no_progress,
    gpu_price: float | None = None,
) -> Result:
    """Measure each loader alone and with each trainer, taking turns, `repeats` times.

    A loader that fails, because its folder or package is missing or a picture is damaged, is skipped, with
    the reason.

    Args:
        path: file of the result; trials that it holds are not measured again. None: nothing is kept.
        on_progress: called with the numbers of finished and of all trials.
        gpu_price: dollars per hour of the accelerator, for the answer.

    Raises:
        DatasetError: no loader can run, or they do unequal work.
        SettingError: unknown trainer, or the file at `path` is of other settings.
    """
    settings = comparison.settings
    opened, skipped = open_candidates(comparison.candidates)
    trainers = [resolve_trainer(name, settings.device) for name in comparison.trainers or (settings.trainer,)]
    batch_sizes = sorted(comparison.batch_sizes or (settings.batch_size,))
    workers = sorted(comparison.workers or (settings.workers_alone,))
    with same_pictures(opened) as (candidates, notes):
        _check_any(candidates, skipped)
        _check_equal({candidate.label: f"{len(candidate.data):,} pictures" for candidate in candidates})
        for batch_size in batch_sizes:
            check_fills_batch(batch_size, min(len(candidate.data) for candidate in candidates))
        result_settings = {
            "trainers": trainers,
            "workers": workers,
            "batch_sizes": batch_sizes,
            **{name: getattr(settings, name) for name in _SETTINGS_IN_RESULT},
            "device": str(settings.device),
            "amp": resolve_amp(settings.amp, settings.device) if {*MODELS} & set(trainers) else "off",
            "cpus": available_cpus(),
            "data": _describe_data(candidates, notes, comparison.convert_s),
        }
        trials = Trials(path, "loaders", describe_machine(settings.device), result_settings)
        trials.skipped.update(skipped)
        classes = max(len(candidate.data.classes) for candidate in candidates)
        turns = _Turns(replace(settings, classes=classes), trainers, trials, on_progress)
        turns.run(list(candidates), [Point(size, count) for size in batch_sizes for count in workers])
        result = loaders.make_result(trials.machine, trials.settings, trials.all(), trials.skipped, gpu_price)
        trials.finish(result)
        return result


class _Turns:
    """Runs the trials of all loaders and trainers, repeat by repeat.

    Attributes:
        settings: settings that all trials share, with the number of classes.
        trainers: full names.
        trials: holds the trials so far, and why others are skipped.
    """

    def __init__(
        self, settings: Settings, trainers: Sequence[str], trials: Trials, on_progress: Progress
    ) -> None:
        self.settings = settings
        self.trainers = trainers
        self.trials = trials
        self._on_progress = on_progress
        self._done = 0
        self._total = 0
        self._page_cache_is_warm = True  # for the files of the next trial

    def run(self, running: list[Candidate], points: Sequence[Point]) -> None:
        """Measure all repeats at all points.

        Args:
            running: loaders to measure; one that fails is removed, and added to `trials.skipped`.
            points: combinations of batch size and workers.
        """
        batch_sizes = list(dict.fromkeys(point.batch_size for point in points))
        trials_per_point = sum(len(self._plan_trials(candidate, points[0], 0)) for candidate in running)
        trials_per_batch_size = len(self.trainers)  # transfers
        trials_per_batch_size += sum(name != NO_TRAINER for name in self.trainers)
        trials_per_repeat = len(batch_sizes) * trials_per_batch_size + len(points) * trials_per_point
        self._total = self.settings.repeats * trials_per_repeat
        self._on_progress(0, self._total)
        too_large: dict[Candidate, set[Point]] = {candidate: set() for candidate in running}
        for repeat in range(self.settings.repeats):
            for batch_size in batch_sizes:
                same_size = [point for point in points if point.batch_size == batch_size]
                try:
                    self._measure_trainers(batch_size, repeat)
                except BatchTooLargeError as error:
                    if len(points) == 1:
                        raise
                    self.trials.skipped[f"batch {batch_size:,}"] = str(error)
                    for points_too_large in too_large.values():
                        points_too_large.update(same_size)
                    continue
                for point in same_size:
                    for candidate in tuple(running):
                        try:
                            self._measure(candidate, point, repeat, len(points) > 1, too_large[candidate])
                        except _FAILURES as error:
                            running.remove(candidate)
                            self.trials.skipped[candidate.label] = str(error)
                    _check_any(running, self.trials.skipped)
                    self._check_served(running, point, repeat)
        self._on_progress(self._total, self._total)  # trials that failed or were left out are not counted

    def _measure_trainers(self, batch_size: int, repeat: int) -> None:
        """Measure each trainer alone, and the transfer in the dtype that it takes."""
        for name in self.trainers:
            settings = replace(self.settings, trainer=name, batch_size=batch_size)
            key = {"trainer": name, "batch_size": batch_size, "repeat": repeat}
            self._run(_PlannedTrial({"kind": TRANSFER, **key}, settings))
            if name != NO_TRAINER:
                self._run(_PlannedTrial({"kind": TRAINER, **key}, settings))

    def _measure(
        self, candidate: Candidate, point: Point, repeat: int, is_grid: bool, too_large: set[Point]
    ) -> None:
        """Measure one repeat of all trials of a loader at a point.

        Args:
            is_grid: whether the comparison has several points, so that one that cannot win is left out.
            too_large: points at which the loader's batch did not fit into memory; this one is added if it
                does not.
        """
        label = f"{candidate.label} with {point.words}"
        if label in self.trials.skipped:
            return
        # a point with a trial gets all repeats, even where noise in a later repeat would rule it out
        is_begun = any(self.trials.find(planned.key) for planned in self._plan_trials(candidate, point, 0))
        if is_grid and not is_begun:
            reason = self._find_reason_to_skip(candidate, point, too_large)
            if reason is not None:
                self.trials.skipped[label] = reason
                return
        for planned in self._plan_trials(candidate, point, repeat):
            is_missing = self.trials.find(planned.key) is None
            if is_missing and not self._prepare_page_cache(candidate, planned):
                continue
            try:
                self._run(planned)
            except BatchTooLargeError as error:
                if not is_grid:
                    raise
                too_large.add(point)
                self.trials.skipped[label] = str(error)
                return

    def _plan_trials(self, candidate: Candidate, point: Point, repeat: int) -> list["_PlannedTrial"]:
        """Return one repeat's trials of a loader at a point, in the order of measuring."""
        key = {
            "backend": candidate.backend,
            "data": str(candidate.path),
            "workers": point.workers,
            "batch_size": point.batch_size,
            "repeat": repeat,
        }
        settings = replace(
            self.settings.for_loader(candidate.backend, candidate.loader_path, self.settings.classes),
            workers=point.workers,
            batch_size=point.batch_size,
            monitored=repeat == self.settings.repeats - 1,
        )
        alone = settings.without_trainer()
        planned = []
        for kind in (COLD, LOADER) if self.settings.cold else (LOADER,):
            planned.append(_PlannedTrial({"kind": kind, **key}, alone))
        for name in self.trainers:
            if name != NO_TRAINER:
                fed_settings = replace(settings, trainer=name)
                planned.append(_PlannedTrial({"kind": FED, **key, "trainer": name}, fed_settings))
        # from a full cache nothing is read or decoded
        if candidate.backend in DECODING_BACKENDS and self.settings.cache is None:
            work = (candidate.data.kind, candidate.probe_files())
            planned.append(_PlannedTrial({"kind": STAGES, **key}, alone, work))
        return planned

    def _prepare_page_cache(self, candidate: Candidate, planned: "_PlannedTrial") -> bool:
        """Drop the files of a cold trial from memory, or read those of a warm one; False if they stay."""
        folder = local_folder(candidate.loader_path)
        if planned.key["kind"] == COLD:
            resident = page_cache.drop(folder)
            if resident > _MAX_RESIDENT_SHARE:
                self.trials.skipped[f"cold cache of {candidate.label}"] = (
                    f"{resident:.0%} of its bytes stay in memory: it is in use, or lies in a memory file "
                    f"system"
                )
                return False
            return True
        # before each trial: the system may have dropped what another loader did not read
        self._page_cache_is_warm = page_cache.warm(folder)
        return True

    def _run(self, planned: "_PlannedTrial") -> None:
        """Measure a trial unless it is there; note what other processes took of the CPUs meanwhile."""

        def measure_beside_others() -> Trial:
            others = OtherProcesses()
            trial = run_in_process(measure_trial, planned.key["kind"], planned.settings, *planned.work)
            numbers = {**trial.numbers, "page_cache_is_warm": float(self._page_cache_is_warm)}
            share = others.share()
            if share is not None:
                numbers["other_cpu_share"] = share
            return structs.replace(trial, numbers=numbers)

        self.trials.measure(planned.key, measure_beside_others)
        self._done += 1
        self._on_progress(min(self._done, self._total), self._total)

    def _find_reason_to_skip(
        self, candidate: Candidate, point: Point, too_large: Collection[Point]
    ) -> str | None:
        """Return why no trainer needs a measurement of the loader at this point; None if one does."""
        reason = None
        rows = loaders.make_rows(self.trials.settings, self.trials.all())
        for trainer in self.trainers:
            measured = {
                point_of(row): row
                for row in rows
                if row.key["backend"] == candidate.backend
                and row.key["data"] == name_data(str(candidate.path), self.trials.settings)
                and row.key["trainer"] == trainer
                and point_of(row) != point
            }
            reason = find_reason_to_skip(point, measured, too_large)
            if reason is None:
                return None
        return reason

    def _check_served(self, candidates: Sequence[Candidate], point: Point, repeat: int) -> None:
        """Raise DatasetError unless the loaders have served equal work to each trainer at this point."""
        by_trainer: dict[str, dict[Candidate, Trial]] = {}
        for candidate in candidates:
            for planned in self._plan_trials(candidate, point, repeat):
                trial = self.trials.find(planned.key)
                if planned.key["kind"] in (LOADER, FED) and trial is not None:
                    trainer = planned.key.get("trainer", NO_TRAINER)
                    by_trainer.setdefault(trainer, {})[candidate] = trial
        for served in by_trainer.values():
            check_served(served)


@dataclass(frozen=True, slots=True)
class _PlannedTrial:
    """A trial to be measured.

    Attributes:
        key: the trial's key.
        settings: its settings.
        work: further arguments of the function of `bench.measure.trial.KINDS` that measures it.
    """

    key: dict[str, Any]
    settings: Settings
    work: tuple[object, ...] = ()


def _describe_data(
    candidates: Sequence[Candidate], notes: Sequence[str], convert_s: Mapping[Location, float]
) -> dict[str, dict[str, Any]]:
    """Return a description of each folder for the settings of a result, by the folder's path."""
    data: dict[str, dict[str, Any]] = {}
    for candidate in candidates:
        split, image_bytes = candidate.data, candidate.image_bytes
        folder = data.setdefault(
            str(candidate.path),
            {
                "kind": split.kind,
                "samples": len(split),
                "digest": split.digest,
                "convert_s": convert_s.get(candidate.path),
                "stored_bytes": None if image_bytes is None else image_bytes * len(split),
                "notes": [note for note in notes if str(candidate.path) in note],
            },
        )
        if candidate.has_own_recipe:
            folder["notes"].append(_IMAGE_FOLDER_CONDITION)
            listed = sum(file.lower().endswith(IMAGE_FOLDER_EXTENSIONS) for file in split.files)
            if listed < len(split):
                folder["notes"].append(
                    f"{candidate.label} knows {listed:,} of the {len(split):,} pictures, by the endings of "
                    f"their names"
                )
    return data


def _check_any(candidates: Collection[Candidate], skipped: Mapping[str, str]) -> None:
    """Raise DatasetError, with the reasons of `skipped`, where no candidate is left."""
    if not candidates:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise DatasetError(f"nothing to measure: {reasons}")


def check_served(served: Mapping[Candidate, Trial]) -> None:
    """Raise DatasetError, with the numbers, unless all served as many distinct ids, of one shape and dtype.

    For loaders with a recipe of their own (`Candidate.has_own_recipe`), which serve another dtype and may
    know fewer pictures of the tree, only the number of images, their height and their width are compared.
    """
    works, sizes = {}, {}
    for candidate, trial in served.items():
        images, ids = int(trial.numbers["served_images"]), int(trial.numbers["served_ids"])
        sizes[candidate.label] = f"{images:,} images, {trial.facts['sides']}"
        if not candidate.has_own_recipe:
            works[candidate.label] = f"{images:,} images, {ids:,} distinct ids, {trial.facts['shapes']}"
    _check_equal(works)
    _check_equal(sizes)


def _check_equal(works: Mapping[str, str]) -> None:
    """Raise DatasetError unless the work of all loaders, in words by their labels, is the same."""
    if len(set(works.values())) > 1:
        differences = "; ".join(f"{label}: {work}" for label, work in works.items())
        raise DatasetError(
            f"the loaders do unequal work and cannot be compared: {differences}",
            remedy="name folders made from one tree",
        )
