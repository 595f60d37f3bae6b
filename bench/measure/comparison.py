"""Loaders, trainers and other libraries' loaders measured in turns, each trial in a process of its own."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from bench.machine import page_cache
from bench.machine.hardware import describe_machine, resolve_amp
from bench.machine.monitor import OtherProcesses
from bench.measure import imagefolder
from bench.measure.candidates import Candidate, folder_of, open_candidates, same_pictures
from bench.measure.fresh import DoesNotFit, run_fresh
from bench.measure.peers import PeerCandidate, run_peer, work_of, write_data
from bench.measure.settings import Settings, check_fills_batch
from bench.measure.trainers import resolve
from bench.measure.trial import (
    DECODING,
    measure,
    measure_trainer,
    measure_transfer,
    probe_files,
    time_stages,
)
from bench.measure.trials import Trials
from bench.report import loaders
from bench.report.grid import Point, find_reason_to_skip, point_of
from bench.report.loaders import COLD, FED, LOADER, NO_TRAINER, PEER, PEER_COLD, STAGES, TRAINER, TRANSFER
from bench.report.result import Result, Trial
from loaders.examples.models import MODELS
from precache.engines import available_cpus
from precache.errors import (
    DatasetError,
    ImageError,
    MissingDependencyError,
    SettingError,
    SourceError,
    WorkerError,
)
from precache.reporting import Progress, no_progress
from precache.storage.urls import Location

AnyCandidate: TypeAlias = Candidate | PeerCandidate
# Of a file's pages: some stay that were read ahead, or that another process reads.
_COLD_SHARE = 0.05
_FAILURES = (DatasetError, ImageError, MissingDependencyError, SettingError, SourceError, WorkerError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What is compared.

    Attributes:
        candidates: loaders of this project and torchvision's ImageFolder.
        settings: what all trials have in common.
        peers: loaders of other libraries, measured alone.
        trainers: names; by default that of `settings`.
        workers, batch_sizes: every combination of them is measured; by default those of `settings`.
        convert_s: seconds that converting to a folder took, by the folder.
    """

    candidates: Sequence[Candidate]
    settings: Settings
    peers: Sequence[PeerCandidate] = ()
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
    """Measure each loader alone and with each trainer, and each peer, taking turns, `repeats` times.

    A loader that fails, for want of its folder or package or over a damaged picture, is skipped, with the
    reason.

    Args:
        path: file of the result; trials that it holds are not measured again. None: nothing is kept.
        gpu_price: dollars per hour of the accelerator, for the answer.

    Raises:
        DatasetError: no loader can run, or they do unequal work.
        SettingError: unknown trainer, or the file at `path` is of other settings.
    """
    settings = comparison.settings
    opened, skipped = open_candidates(comparison.candidates)
    trainers = [resolve(name, settings.device) for name in comparison.trainers or (settings.trainer,)]
    batch_sizes = sorted(comparison.batch_sizes or (settings.batch_size,))
    workers = sorted(comparison.workers or (settings.workers_alone,))
    with same_pictures(opened) as (ours, notes):
        _check_any(ours, skipped)
        _check_equal({one.label: f"{len(one.data):,} pictures" for one in ours})
        for batch_size in batch_sizes:
            check_fills_batch(batch_size, min(len(one.data) for one in ours))
        written = {
            "trainers": trainers,
            "workers": workers,
            "batch_sizes": batch_sizes,
            **{name: getattr(settings, name) for name in _WRITTEN},
            "device": str(settings.device),
            "amp": resolve_amp(settings.amp, settings.device) if MODELS.keys() & set(trainers) else "off",
            "cpus": available_cpus(),
            "data": _describe_data(ours, notes, comparison.convert_s),
        }
        trials = Trials(path, "loaders", describe_machine(settings.device), written)
        trials.skipped.update(skipped)
        ready = _with_data(comparison.peers, settings, trials.skipped)
        classes = max(len(one.data.classes) for one in ours)
        turns = _Turns(replace(settings, classes=classes), trainers, trials, on_progress)
        turns.run([*ours, *ready], [Point(size, count) for size in batch_sizes for count in workers])
        result = loaders.make_result(trials.machine, trials.settings, trials.all(), trials.skipped, gpu_price)
        trials.finish(result)
        return result


_WRITTEN = (
    *("size", "warmup", "batches", "repeats", "augment", "shuffle", "cold", "compiled", "cache"),
    *("warmup_s", "seconds", "first_epoch"),
)
"""Settings that a result says, by the names of their fields."""


class _Turns:
    """What runs, repeat by repeat; `trials` holds what it measured so far."""

    def __init__(
        self, settings: Settings, trainers: Sequence[str], trials: Trials, on_progress: Progress
    ) -> None:
        self.settings = settings
        self.trainers = trainers
        self.trials = trials
        self._on_progress = on_progress
        self._done = self._total = 0
        self._page_cache_is_warm = True  # of what runs next

    def run(self, running: list[AnyCandidate], points: Sequence[Point]) -> None:
        """Measure all repeats of all points; what fails goes from `running` to `trials.skipped`."""
        batch_sizes = list(dict.fromkeys(point.batch_size for point in points))
        each = sum(len(self._plan_runs(one, points[0], 0)) for one in running)
        shared = len(self.trainers) + sum(name != NO_TRAINER for name in self.trainers)
        self._total = self.settings.repeats * (len(batch_sizes) * shared + len(points) * each)
        self._on_progress(0, self._total)
        too_large: dict[AnyCandidate, set[Point]] = {one: set() for one in running}
        for repeat in range(self.settings.repeats):
            for batch_size in batch_sizes:
                same_size = [point for point in points if point.batch_size == batch_size]
                try:
                    self._measure_trainers(batch_size, repeat)
                except DoesNotFit as error:
                    if len(points) == 1:
                        raise
                    self.trials.skipped[f"batch {batch_size:,}"] = str(error)
                    for points_too_large in too_large.values():
                        points_too_large.update(same_size)
                    continue
                for point in same_size:
                    for one in tuple(running):
                        try:
                            self._measure(one, point, repeat, len(points) > 1, too_large[one])
                        except _FAILURES as error:
                            running.remove(one)
                            self.trials.skipped[one.label] = str(error)
                    _check_any([one for one in running if isinstance(one, Candidate)], self.trials.skipped)
                    self._check_served(running, point, repeat)
        self._on_progress(self._total, self._total)  # what failed or was left out took fewer steps

    def _measure_trainers(self, batch_size: int, repeat: int) -> None:
        """Measure each trainer alone, and the transfer in the dtype that it takes."""
        for name in self.trainers:
            settings = replace(self.settings, trainer=name, batch_size=batch_size)
            of = {"trainer": name, "batch_size": batch_size, "repeat": repeat}
            self._run(_Run({"what": TRANSFER, **of}, partial(run_fresh, measure_transfer, settings)))
            if name != NO_TRAINER:
                self._run(_Run({"what": TRAINER, **of}, partial(run_fresh, measure_trainer, settings)))

    def _measure(
        self, one: AnyCandidate, point: Point, repeat: int, is_grid: bool, too_large: set[Point]
    ) -> None:
        """Measure one repeat of all that concerns one loader with these settings."""
        label = f"{one.label} with {point.words}"
        if label in self.trials.skipped:
            return
        runs = self._plan_runs(one, point, repeat)
        # settings that were begun get all repeats: noise in a later round must not leave them with few
        is_begun = any(self.trials.find(run.key) for run in self._plan_runs(one, point, 0))
        if is_grid and isinstance(one, Candidate) and not is_begun:
            reason = self._find_reason_to_skip(one, point, too_large)
            if reason is not None:
                self.trials.skipped[label] = reason
                return
        for run in runs:
            if self.trials.find(run.key) is None and not self._prepare_page_cache(one, run):
                continue
            try:
                self._run(run)
            except DoesNotFit as error:
                if not is_grid:
                    raise
                too_large.add(point)
                self.trials.skipped[label] = str(error)
                return

    def _plan_runs(self, one: AnyCandidate, point: Point, repeat: int) -> list["_Run"]:
        """One repeat of a loader with these settings, in the order of measuring."""
        of = {
            "backend": one.name if isinstance(one, PeerCandidate) else one.backend,
            "data": str(one.path),
            "workers": point.workers,
            "batch_size": point.batch_size,
            "repeat": repeat,
        }
        if isinstance(one, PeerCandidate):
            facts = {"work": " ".join(map(str, one.work)), "data": one.described}
            run_alone = partial(self._run_peer, one, point)
            kinds = (PEER_COLD, PEER) if self.settings.cold else (PEER,)
            return [_Run({"what": what, **of}, run_alone, facts) for what in kinds]
        settings = replace(
            self.settings.of(one.backend, one.reads, self.settings.classes),
            workers=point.workers,
            batch_size=point.batch_size,
            trainer=NO_TRAINER,
            monitored=repeat == self.settings.repeats - 1,
        )
        work = work_of(one, self.settings.size, self.settings.augment)
        facts = {} if work is None else {"work": " ".join(map(str, work))}
        runs = []
        for what in (COLD, LOADER) if self.settings.cold else (LOADER,):
            runs.append(_Run({"what": what, **of}, partial(run_fresh, measure, settings), facts))
        for name in self.trainers:
            if name != NO_TRAINER:
                fed = partial(run_fresh, measure, replace(settings, trainer=name))
                runs.append(_Run({"what": FED, **of, "trainer": name}, fed))
        # from a full cache nothing is read or decoded
        if one.backend in DECODING and self.settings.cache == "none":
            timed = partial(run_fresh, time_stages, settings, one.data.kind, probe_files(one.data))
            runs.append(_Run({"what": STAGES, **of}, timed))
        return runs

    def _prepare_page_cache(self, one: AnyCandidate, run: "_Run") -> bool:
        """Drop or read in the files that the trial reads; False where they cannot be dropped."""
        folder = folder_of(one.reads) if isinstance(one, Candidate) else one.path
        if run.key["what"] in (COLD, PEER_COLD):
            left = page_cache.drop(folder)
            if left > _COLD_SHARE:
                why = f"{left:.0%} of its bytes stay in memory: it is in use, or lies in a memory file system"
                self.trials.skipped[f"cold cache of {one.label}"] = why
                return False
            return True
        # each time anew: the system may have dropped what another loader did not read
        self._page_cache_is_warm = page_cache.warm(folder)
        return True

    def _run(self, run: "_Run") -> None:
        """Measure it, unless it was before; note what else the machine did meanwhile."""

        def run_beside_others() -> Trial:
            others = OtherProcesses()
            trial = run.function()
            numbers = {**trial.numbers, "page_cache_is_warm": float(self._page_cache_is_warm)}
            share = others.share()
            if share is not None:
                numbers["other_cpu_share"] = share
            return replace(trial, numbers=numbers, facts={**trial.facts, **run.facts})

        self.trials.measure(run.key, run_beside_others)
        self._done += 1
        self._on_progress(min(self._done, self._total), self._total)

    def _run_peer(self, peer: PeerCandidate, point: Point) -> Trial:
        return run_peer(
            peer,
            batch_size=point.batch_size,
            size=self.settings.size,
            workers=point.workers,
            warmup=self.settings.warmup,
            batches=self.settings.batches,
        )

    def _find_reason_to_skip(self, one: Candidate, point: Point, too_large: Collection[Point]) -> str | None:
        """Why these settings need no measuring with any trainer; None if they do."""
        reason = None
        rows = loaders.make_rows(self.trials.settings, self.trials.all())
        for trainer in self.trainers:
            measured = {
                point_of(row): row
                for row in rows
                if row.key["backend"] == one.backend
                and row.key["data"] == loaders.name_data(str(one.path), self.trials.settings)
                and row.key["trainer"] == trainer
                and point_of(row) != point
            }
            reason = find_reason_to_skip(point, measured, too_large)
            if reason is None:
                return None
        return reason

    def _check_served(self, running: Sequence[AnyCandidate], point: Point, repeat: int) -> None:
        by_trainer: dict[str, dict[Candidate, Trial]] = {}
        for one in running:
            if not isinstance(one, Candidate):
                continue
            for run in self._plan_runs(one, point, repeat):
                trial = self.trials.find(run.key)
                if run.key["what"] in (LOADER, FED) and trial is not None:
                    by_trainer.setdefault(run.key.get("trainer", NO_TRAINER), {})[one] = trial
        for served in by_trainer.values():
            check_served(served)


@dataclass(frozen=True, slots=True)
class _Run:
    """One trial to come.

    Attributes:
        of: what it is of.
        function: measures it.
        facts: what the trial says besides.
    """

    key: dict[str, Any]
    function: Callable[[], Trial]
    facts: Mapping[str, str] = field(default_factory=dict)


def _describe_data(
    ours: Sequence[Candidate], notes: Sequence[str], convert_s: Mapping[Location, float]
) -> dict[str, dict[str, Any]]:
    """What each folder holds, for the settings of a result."""
    data: dict[str, dict[str, Any]] = {}
    for one in ours:
        folder = data.setdefault(
            str(one.path),
            {
                "name": one.described,
                "samples": len(one.data),
                "digest": one.data.digest,
                "convert_s": convert_s.get(one.path),
                "stored_bytes": None if one.image_bytes is None else one.image_bytes * len(one.data),
                "notes": [note for note in notes if str(one.path) in note],
            },
        )
        if one.has_own_recipe:
            folder["notes"].append(imagefolder.CONDITION)
            known = imagefolder.known(one.data.files)
            if known < len(one.data):
                folder["notes"].append(
                    f"{one.label} knows {known:,} of the {len(one.data):,} pictures, by the endings of their "
                    f"names"
                )
    return data


def _with_data(
    peers: Sequence[PeerCandidate], settings: Settings, skipped: dict[str, str]
) -> list[PeerCandidate]:
    """Those whose data is there, or could be written."""
    ready = []
    for peer in peers:
        try:
            write_data(peer, settings.workers_alone)
            ready.append(peer)
        except (DatasetError, WorkerError) as error:
            skipped[peer.label] = str(error)
    return ready


def _check_any(usable: Collection[Candidate], skipped: Mapping[str, str]) -> None:
    if not usable:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise DatasetError(f"nothing to measure: {reasons}")


def check_served(served: Mapping[Candidate, Trial]) -> None:
    """Raise DatasetError, with the numbers, unless all served as many distinct ids, of one shape and dtype.

    Loaders with a recipe of their own deliver a dtype of their own and may know fewer pictures of the tree:
    only the number of images and their height and width have to be the same.
    """
    works, sizes = {}, {}
    for one, trial in served.items():
        images, ids = int(trial.numbers["served_images"]), int(trial.numbers["served_ids"])
        shapes = trial.facts["shapes"]
        squares = " and ".join(sorted({shape.partition(" ")[0] for shape in shapes.split(" and ")}))
        sizes[one.label] = f"{images:,} images, {squares}"
        if not one.has_own_recipe:
            works[one.label] = f"{images:,} images, {ids:,} distinct ids, {shapes}"
    _check_equal(works)
    _check_equal(sizes)


def _check_equal(works: Mapping[str, str]) -> None:
    if len(set(works.values())) > 1:
        each = "; ".join(f"{name}: {work}" for name, work in works.items())
        raise DatasetError(
            f"the loaders do unequal work and cannot be compared: {each}; name folders made from one tree"
        )
