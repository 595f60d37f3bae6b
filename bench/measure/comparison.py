"""All backends against all trainers, interleaved and repeated, each trial in a process of its own."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import psutil

from bench.machine import page_cache
from bench.machine.device import resolve_amp
from bench.machine.hardware import describe_machine
from bench.machine.others import OtherProcesses
from bench.measure import imagefolder
from bench.measure.candidates import Candidate, choose_candidates, folder_of, open_candidates
from bench.measure.equal_work import Facts, check_facts, check_served, find_facts
from bench.measure.fresh import run_fresh
from bench.measure.peer_arm import PeerArm, run_peer, write_data
from bench.measure.rows import AnyArm, Trials, arm_names, make_rows
from bench.measure.same_pictures import Served, same_pictures
from bench.measure.settings import Settings, check_fills_batch
from bench.measure.stages import DECODING, probe_files, time_stages
from bench.measure.trainers import MODELS, NullTrainer, resolve
from bench.measure.trial import (
    Trial,
    measure,
    measure_trainer,
    measure_transfer,
)
from bench.report.changes import Means
from bench.report.row import Result
from precache.console.progress import Progress, unseen
from precache.errors import (
    DatasetError,
    ImageError,
    MissingDependencyError,
    SettingError,
    SourceError,
    WorkerError,
)
from precache.executors import available_cpus

__all__ = ["Candidate", "Settings", "choose_candidates", "compare"]

Around = Callable[[], AbstractContextManager[object]]
# Of a file's pages: some stay that were read ahead, or that another process reads.
_COLD_SHARE = 0.05
_ALWAYS_RUN = (imagefolder.NAME, "pytorch", "shards", "webdataset")  # without a package that may be missing


def compare(
    arms: Sequence[Candidate],
    spec: Settings,
    on_progress: Progress = unseen,
    peers: Sequence[PeerArm] = (),
    around: Around = nullcontext,
) -> Result:
    """Measure each arm alone and with each trainer, and each peer, all interleaved, `spec.repeats` times.

    An arm that fails, for want of its folder or package or over a damaged picture, is skipped, with
    the reason. `around` is entered in the process of each trial of ours: a test slows a stage down with it.

    Raises:
        DatasetError: no arm can run, or they do unequal work.
        SettingError: unknown trainer.
    """
    opened, skipped = open_candidates(arms)
    with same_pictures(opened) as served:
        theirs = [
            replace(peer, path=served.linked[peer.path]) if peer.path in served.linked else peer
            for peer in peers
        ]
        return _compare(served, theirs, skipped, spec, around, on_progress)


def _compare(
    served: Served,
    peers: Sequence[PeerArm],
    skipped: dict[str, str],
    spec: Settings,
    around: Around,
    on_progress: Progress,
) -> Result:
    names = [resolve(name, spec.device) for name in spec.trainers]
    _check_pictures([arm for arm in served.arms if arm.backend in _ALWAYS_RUN])
    facts = _find_facts(served.arms, spec, around, skipped)
    _check_any(facts, skipped)
    _check_pictures(facts)
    check_fills_batch(spec.batch_size, min(found.samples for found in facts.values()))
    bench = _Bench(spec, names, max(found.classes for found in facts.values()), around, on_progress)
    running: list[AnyArm] = [*facts, *_write_data(peers, spec, skipped)]
    others = OtherProcesses()
    bench.run(running, skipped)
    settings = {
        **{name: value for name, value in asdict(spec).items() if name not in ("device", "trainers")},
        "device": str(spec.device),
        "trainers": names,
        "amp": resolve_amp(spec.amp, spec.device) if MODELS.keys() & set(names) else "off",
        "page_cache": "not warmed: larger than memory" if bench.trials.not_warmed else "warm",
        "peers": bench.versions,
        "other_cpu": others.share(),
        "notes": [*served.notes, *_notes(facts)],
        "data": {
            name: {"samples": len(arm.data.ids), "digest": arm.data.digest}
            for name, arm in arm_names(running).items()
        },
    }
    means = Means(spec.workers_alone, available_cpus(), psutil.virtual_memory().available)
    rows = make_rows(running, names, bench.trials, spec.batch_size, means, spec.size, spec.augment)
    machine = describe_machine(spec.device)
    return Result(machine, settings, rows, skipped, bench.host_to_device_gbps())


def _check_pictures(arms: Collection[Candidate]) -> None:
    """DatasetError unless all have as many pictures."""
    check_facts({arm.label: Facts(len(arm.data.ids), len(arm.data.classes)) for arm in arms})


class _Bench:
    """What runs, and what it measured so far."""

    def __init__(
        self,
        spec: Settings,
        names: Sequence[str],
        classes: int,
        around: Around,
        on_progress: Progress,
    ) -> None:
        self.trials = Trials(cached=spec.cache != "none")
        self.versions: dict[str, str] = {}
        self._spec = spec
        self._measured = [name for name in names if name != NullTrainer.name]
        self._trial = partial(_trial_spec, spec, classes, around)
        self._on_progress = on_progress
        self._done = self._total = 0

    def run(self, running: list[AnyArm], skipped: dict[str, str]) -> None:
        """All repeats; what fails goes from `running` to `skipped`."""
        self.plan(running)
        for _ in range(self._spec.repeats):
            self.measure_trainers()
            for arm in tuple(running):
                try:
                    self.measure(arm, skipped)
                except (DatasetError, ImageError, SourceError, WorkerError) as error:
                    running.remove(arm)
                    skipped[arm.label] = str(error)
            _check_any([arm for arm in running if isinstance(arm, Candidate)], skipped)
            self.check_equal_work(running)

    def plan(self, arms: Sequence[AnyArm]) -> None:
        """Count what there is to do."""
        each = [
            1 + self._spec.cold if isinstance(arm, PeerArm)
            else 1 + len(self._measured) + self._spec.cold + self._runs_apart(arm)
            for arm in arms
        ]  # fmt: skip
        self._total = self._spec.repeats * (1 + 2 * len(self._measured) + sum(each))
        self._on_progress(0, self._total)

    def measure_trainers(self) -> None:
        """Each alone, and the transfer in the dtype that it takes."""
        for name in (NullTrainer.name, *self._measured):
            moved = run_fresh(measure_transfer, self._trial(None, name))
            self.trials.transfer.setdefault(name, []).append(moved)
            self._step()
        for name in self._measured:
            self._record(None, name, run_fresh(measure_trainer, self._trial(None, name)))

    def measure(self, arm: AnyArm, skipped: dict[str, str]) -> None:
        """One repeat of all that concerns `arm`."""
        if self._spec.cold:
            self._measure_cold(arm, skipped)
        # each time anew: the system may have dropped what another arm did not read
        if not page_cache.warm(_folder(arm)):
            self.trials.not_warmed.add(arm)
        if isinstance(arm, PeerArm):
            self._record(arm, NullTrainer.name, self._run_peer(arm))
            return
        for name in (NullTrainer.name, *self._measured):
            self._record(arm, name, run_fresh(measure, self._trial(arm, name)))
        if self._runs_apart(arm):
            spec = self._trial(arm, NullTrainer.name)
            stages = run_fresh(time_stages, spec, arm.data.kind, probe_files(arm.data))
            self.trials.stages.setdefault(arm, []).append(stages)
            self._step()

    def _runs_apart(self, arm: Candidate) -> bool:
        """Whether its stages do: from a full cache nothing is read or decoded."""
        return arm.backend in DECODING and not self.trials.cached

    def check_equal_work(self, arms: Sequence[AnyArm]) -> None:
        """DatasetError unless all did the same; see `bench.measure.equal_work`."""
        for name in {NullTrainer.name, *self._measured}:
            runs = {arm.label: self.trials.runs[arm, name][-1] for arm in arms if isinstance(arm, Candidate)}
            served = {label: run.served for label, run in runs.items() if run.served is not None}
            check_served(
                served, {arm.label for arm in arms if isinstance(arm, Candidate) and arm.has_own_recipe}
            )

    def host_to_device_gbps(self) -> float | None:
        """10^9 bytes per second from pinned memory; None without a GPU."""
        if self._spec.device.type != "cuda":
            return None
        trials = sorted(trial.images_per_s for trial in self.trials.transfer[NullTrainer.name])
        return trials[len(trials) // 2] * self._spec.size**2 * 3 / 1e9

    def _run_peer(self, arm: PeerArm) -> Trial:
        spec = self._spec
        trial, self.versions[arm.name] = run_peer(
            arm,
            batch_size=spec.batch_size,
            size=spec.size,
            workers=spec.workers_alone,
            warmup=spec.warmup,
            batches=spec.batches,
        )
        return trial

    def _measure_cold(self, arm: AnyArm, skipped: dict[str, str]) -> None:
        self._step()
        left = page_cache.drop(_folder(arm))
        if left > _COLD_SHARE:
            skipped[f"cold cache of {arm.label}"] = (
                f"{left:.0%} of its bytes stay in memory, as of files in a memory file system or in use"
            )
            return
        if isinstance(arm, PeerArm):
            trial = self._run_peer(arm)
        else:
            trial = run_fresh(measure, self._trial(arm, NullTrainer.name))
        self.trials.cold.setdefault(arm, []).append(trial)

    def _record(self, arm: AnyArm | None, name: str, trial: Trial) -> None:
        self.trials.runs.setdefault((arm, name), []).append(trial)
        self._step()

    def _step(self) -> None:
        self._done += 1
        self._on_progress(self._done, self._total)


def _trial_spec(
    spec: Settings, classes: int, around: Around, arm: Candidate | None, trainer: str
) -> Settings:
    backend, path = (arm.backend, arm.reads) if arm else ("", Path())
    trial = spec.trial(backend=backend, path=path, trainer=trainer, classes=classes)
    return replace(trial, around=around)


def _write_data(peers: Sequence[PeerArm], spec: Settings, skipped: dict[str, str]) -> list[PeerArm]:
    """Those whose data is there, or could be written."""
    ready = []
    for arm in peers:
        try:
            write_data(arm, spec.workers_alone)
            ready.append(arm)
        except (DatasetError, WorkerError) as error:
            skipped[arm.label] = str(error)
    return ready


def _folder(arm: AnyArm) -> Path:
    """Whose files are read."""
    return folder_of(arm.reads) if isinstance(arm, Candidate) else arm.path


def _check_any(usable: Collection[Candidate], skipped: dict[str, str]) -> None:
    if not usable:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise DatasetError(f"nothing to measure: {reasons}")


def _notes(facts: Mapping[Candidate, Facts]) -> list[str]:
    """What is not the same in all arms, a clause each."""
    notes = [imagefolder.CONDITION] if any(arm.has_own_recipe for arm in facts) else []
    return notes + [
        f"{arm.label} knows {found.samples:,} of the {len(arm.data.ids):,} pictures, "
        f"by the endings of their names"
        for arm, found in facts.items()
        if found.samples != len(arm.data.ids)
    ]


def _find_facts(
    arms: Sequence[Candidate], spec: Settings, around: Around, skipped: dict[str, str]
) -> dict[Candidate, Facts]:
    """Of the arms that can run; why the others cannot goes to `skipped`."""
    usable = {}
    for arm in arms:
        try:
            usable[arm] = run_fresh(find_facts, _trial_spec(spec, 1, around, arm, NullTrainer.name))
        except (DatasetError, MissingDependencyError, SourceError, SettingError) as error:
            skipped[arm.label] = str(error)
    return usable
