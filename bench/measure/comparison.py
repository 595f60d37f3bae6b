"""All loaders against all trainers, taking turns and repeated, each trial in a process of its own."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from bench.machine import page_cache
from bench.machine.hardware import describe_machine, resolve_amp
from bench.machine.monitor import OtherProcesses
from bench.measure import imagefolder
from bench.measure.candidates import Candidate, folder_of, open_candidates, same_pictures
from bench.measure.fresh import run_fresh
from bench.measure.peers import PeerCandidate, run_peer, work_of, write_data
from bench.measure.settings import Settings, check_fills_batch
from bench.measure.trainers import MODELS, NullTrainer, resolve
from bench.measure.trial import (
    DECODING,
    Served,
    Trial,
    measure,
    measure_trainer,
    measure_transfer,
    probe_files,
    time_stages,
)
from bench.peers.libraries import LIMIT
from bench.report import stats
from bench.report.row import SYNTHETIC, Key, Result, Row
from bench.report.stats import Estimate
from bench.report.verdict import analyse, explained
from precache.engines import available_cpus
from precache.errors import (
    DatasetError,
    ImageError,
    MissingDependencyError,
    SettingError,
    SourceError,
    WorkerError,
)
from precache.reporting import Progress, unseen

AnyCandidate: TypeAlias = Candidate | PeerCandidate
_NONE = NullTrainer.name
# Of a file's pages: some stay that were read ahead, or that another process reads.
_COLD_SHARE = 0.05
_SKIPPED = (DatasetError, ImageError, MissingDependencyError, SettingError, SourceError, WorkerError)
_DECODERS = ("dali", "nvjpeg", imagefolder.NAME, *DECODING)


@dataclass(slots=True)
class Measured:
    """The trials of one loader, repeat by repeat.

    Attributes:
        fed: by trainer's name; those of no trainer are of the loader alone.
        cold: alone, its files dropped from the cache before.
        stages: images/s of each stage that could be run apart, see `bench.measure.trial`.
        warmed: whether its files were read into the page cache before.
    """

    fed: dict[str, list[Trial]] = field(default_factory=dict)
    cold: list[Trial] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)
    warmed: bool = True


def compare(
    candidates: Sequence[Candidate],
    settings: Settings,
    on_progress: Progress = unseen,
    peers: Sequence[PeerCandidate] = (),
    trainers: Sequence[str] = (),
) -> Result:
    """Measure each loader alone and with each trainer, and each peer, taking turns, `settings.repeats` times.

    A loader that fails, for want of its folder or package or over a damaged picture, is skipped, with the
    reason.

    Args:
        trainers: names; by default that of `settings`.

    Raises:
        DatasetError: no loader can run, or they do unequal work.
        SettingError: unknown trainer.
    """
    opened, skipped = open_candidates(candidates)
    names = [resolve(name, settings.device) for name in trainers or (settings.trainer,)]
    with same_pictures(opened) as (ours, notes):
        linked = {one.path: one.linked for one in ours if one.linked is not None}
        theirs = [replace(peer, path=linked.get(peer.path, peer.path)) for peer in peers]
        _check_any(ours, skipped)
        _check_equal({one.label: f"{len(one.data):,} pictures" for one in ours})
        check_fills_batch(settings.batch_size, min(len(one.data) for one in ours))
        running: list[AnyCandidate] = [*ours, *_with_data(theirs, settings, skipped)]
        classes = max(len(one.data.classes) for one in ours)
        turns = _Turns(replace(settings, classes=classes), names, on_progress)
        others = OtherProcesses()
        turns.run(running, skipped)
        return _result(turns, running, skipped, notes, others.share())


class _Turns:
    """What runs, and what it measured so far."""

    def __init__(self, settings: Settings, names: Sequence[str], on_progress: Progress) -> None:
        self.settings = settings
        self.names = names
        self.trained = [name for name in names if name != _NONE]
        self.measured: dict[AnyCandidate, Measured] = {}
        self.alone: dict[str, list[Trial]] = {name: [] for name in self.trained}
        self.transfer: dict[str, list[Trial]] = {}
        self.versions: dict[str, str] = {}
        self._on_progress = on_progress
        self._done = self._total = 0

    def run(self, running: list[AnyCandidate], skipped: dict[str, str]) -> None:
        """All repeats; what fails goes from `running` to `skipped`."""
        cold = int(self.settings.cold)
        each = [
            1 + cold + (0 if isinstance(one, PeerCandidate) else len(self.trained) + self._runs_apart(one))
            for one in running
        ]
        self._total = self.settings.repeats * (1 + 2 * len(self.trained) + sum(each))
        self._on_progress(0, self._total)
        self.measured = {one: Measured() for one in running}
        for _ in range(self.settings.repeats):
            self._measure_trainers()
            for one in tuple(running):
                try:
                    self._measure(one, self.measured[one], skipped)
                except _SKIPPED as error:
                    running.remove(one)
                    skipped[one.label] = str(error)
            ours = [one for one in running if isinstance(one, Candidate)]
            _check_any(ours, skipped)
            for name in {_NONE, *self.trained}:
                served = {one: self.measured[one].fed[name][-1].served for one in ours}
                check_served({one: work for one, work in served.items() if work is not None})
        if self._done < self._total:  # what failed took fewer steps
            self._on_progress(self._total, self._total)

    def _measure_trainers(self) -> None:
        """Each alone, and the transfer in the dtype that it takes."""
        for name in (_NONE, *self.trained):
            moved = run_fresh(measure_transfer, replace(self.settings, trainer=name))
            self.transfer.setdefault(name, []).append(moved)
            self._step()
        for name in self.trained:
            self.alone[name].append(run_fresh(measure_trainer, replace(self.settings, trainer=name)))
            self._step()

    def _measure(self, one: AnyCandidate, found: Measured, skipped: dict[str, str]) -> None:
        """One repeat of all that concerns it."""
        folder = folder_of(one.reads) if isinstance(one, Candidate) else one.path
        if self.settings.cold:
            self._step()
            left = page_cache.drop(folder)
            if left > _COLD_SHARE:
                why = f"{left:.0%} of its bytes stay in memory, as of files in a memory file system or in use"
                skipped[f"cold cache of {one.label}"] = why
            else:
                found.cold.append(self._trial(one, _NONE))
        # each time anew: the system may have dropped what another loader did not read
        found.warmed &= page_cache.warm(folder)
        for name in (_NONE,) if isinstance(one, PeerCandidate) else (_NONE, *self.trained):
            found.fed.setdefault(name, []).append(self._trial(one, name))
            self._step()
        if isinstance(one, Candidate) and self._runs_apart(one):
            spec = self.settings.of(one.backend, one.reads, self.settings.classes)
            found.stages.append(run_fresh(time_stages, spec, one.data.kind, probe_files(one.data)))
            self._step()

    def _trial(self, one: AnyCandidate, trainer: str) -> Trial:
        settings = self.settings
        if isinstance(one, Candidate):
            return run_fresh(measure, settings.of(one.backend, one.reads, settings.classes, trainer=trainer))
        trial, self.versions[one.name] = run_peer(
            one,
            batch_size=settings.batch_size,
            size=settings.size,
            workers=settings.workers_alone,
            warmup=settings.warmup,
            batches=settings.batches,
        )
        return trial

    def _runs_apart(self, one: Candidate) -> bool:
        """Whether its stages do: from a full cache nothing is read or decoded."""
        return one.backend in DECODING and self.settings.cache == "none"

    def _step(self) -> None:
        self._done += 1
        self._on_progress(self._done, self._total)


def _result(
    turns: _Turns,
    running: Sequence[AnyCandidate],
    skipped: dict[str, str],
    notes: list[str],
    other_cpu: float | None,
) -> Result:
    settings = turns.settings
    written = ("batch_size", "workers", "size", "warmup", "batches", "repeats", "augment", "shuffle", "cold")
    warmed = all(found.warmed for found in turns.measured.values())
    computes = MODELS.keys() & set(turns.names)
    ours = [one for one in running if isinstance(one, Candidate)]
    return Result(
        describe_machine(settings.device),
        {
            **{name: getattr(settings, name) for name in (*written, "compiled", "cache")},
            "device": str(settings.device),
            "trainers": turns.names,
            "amp": resolve_amp(settings.amp, settings.device) if computes else "off",
            "page_cache": "warm" if warmed else "not warmed: larger than memory",
            "peers": turns.versions,
            "other_cpu": other_cpu,
            "notes": [*notes, *_notes(ours)],
            "data": {
                name: {"samples": len(one.data), "digest": one.data.digest, "path": str(one.path)}
                for name, one in _named(ours).items()
            },
        },
        make_rows(turns, running),
        skipped,
        _host_to_device_gbps(turns),
    )


def make_rows(turns: _Turns, running: Sequence[AnyCandidate]) -> tuple[Row, ...]:
    """Ours trainer by trainer, each with its advice, then the peers."""
    settings = turns.settings
    ours = [one for one in running if isinstance(one, Candidate)]
    works = {one: one.work for one in running if isinstance(one, PeerCandidate)}
    rows: list[Row] = []
    for name in turns.names:
        made = [_row(one, name, turns, works) for one in ours]
        rows += explained(made, settings.batch_size, settings.workers_alone, available_cpus())
    rows += [_peer_row(one, turns, works) for one in works]
    return tuple(rows)


def _row(one: Candidate, trainer: str, turns: _Turns, works: Mapping[PeerCandidate, Any]) -> Row:
    settings, found = turns.settings, turns.measured[one]
    fed, alone = found.fed[trainer], _rates(found.fed[_NONE])
    work = work_of(one, settings.size, settings.augment)
    over = _over(one, work, turns, works)
    of_limit = over.pop(LIMIT, None)
    if of_limit is None and work is not None:  # of random crops: the limit copies centres
        limits = [peer for peer in works if (peer.name, peer.path) == (LIMIT, one.path)]
        of_limit = stats.ratio(alone, _rates(turns.measured[limits[0]].fed[_NONE])) if limits else None
    warmed = found.warmed or settings.cache != "none" or one.backend == SYNTHETIC
    does = "decode" if one.backend in _DECODERS and settings.cache == "none" else "collate"
    loader, cold = stats.estimate(alone), _estimate(found.cold)
    told = warmed or (cold is not None and cold.high < loader.low)
    image_bytes = one.image_bytes if settings.cache == "none" else None  # a full cache reads nothing
    converted = one.data.kind != "raw" and one.backend != SYNTHETIC
    row = Row(
        backend=one.backend,
        data=one.described,
        trainer_name=trainer,
        loader=loader,
        cold=cold,
        together=loader,
        of_limit=of_limit,
        over=over,
        transfer=_estimate(turns.transfer.get(trainer)),
        read=stats.estimate([each["read"] for each in found.stages]) if found.stages else None,
        decode=stats.estimate([each["decode"] for each in found.stages]) if found.stages else None,
        rest="collate" if found.stages else does if told else f"storage or {does}",
        image_bytes=image_bytes,
        size_bytes=image_bytes * len(one.data) if image_bytes is not None and converted else None,
        **_batches(fed, found.fed[_NONE]),
    )
    if trainer == _NONE:
        return row
    trained = _rates(turns.alone[trainer])
    ratio, last = stats.ratio(_rates(fed), trained), fed[-1]
    return replace(
        row,
        trainer=stats.estimate(trained),
        together=stats.estimate(_rates(fed)),
        ratio=ratio,
        first_step_s=stats.estimate([trial.first_step_s for trial in fed]),
        data_wait=stats.estimate([trial.wait_share for trial in fed]),
        utilisation=Estimate(*(min(1.0, part) for part in (ratio.median, ratio.low, ratio.high))),
        wait_s=last.wait_s,
        step_s=last.step_s,
        epoch_starts=last.epoch_starts,
        spikes=analyse(last.wait_s, last.step_s, last.epoch_starts, settings.workers_alone),
        monitor=last.watched,
    )


def _peer_row(one: PeerCandidate, turns: _Turns, works: Mapping[PeerCandidate, Any]) -> Row:
    """Of another library's loader, alone."""
    found = turns.measured[one]
    return Row(
        backend=one.name,
        data=one.described,
        trainer_name=_NONE,
        peer=True,
        loader=stats.estimate(_rates(found.fed[_NONE])),
        cold=_estimate(found.cold),
        of_limit=_over(one, works[one], turns, works).get(LIMIT),
        **_batches(found.fed[_NONE], found.fed[_NONE]),
    )


def _batches(fed: Sequence[Trial], alone: Sequence[Trial]) -> dict[str, Any]:
    batch_s = [seconds for trial in fed for seconds in trial.batch_s]
    gaps = [trial.batch_s[first] for trial in fed for first in trial.epoch_starts]
    return {
        "first_batch_s": stats.estimate([trial.first_batch_s for trial in alone]),
        "batch_s_median": stats.percentile(batch_s, 0.5),
        "batch_s_p95": stats.percentile(batch_s, 0.95),
        "epoch_gap_s": max(gaps, default=None),
    }


def _over(
    one: AnyCandidate, work: object, turns: _Turns, works: Mapping[PeerCandidate, Any]
) -> dict[str, Estimate]:
    """Its rate over that of each peer that does the same work."""
    alone = _rates(turns.measured[one].fed[_NONE])
    return {
        peer.name: stats.ratio(alone, _rates(turns.measured[peer].fed[_NONE]))
        for peer, theirs in works.items()
        if peer != one and theirs == work
    }


def _rates(trials: Sequence[Trial]) -> list[float]:
    return [trial.images_per_s for trial in trials]


def _estimate(trials: Sequence[Trial] | None) -> Estimate | None:
    return stats.estimate(_rates(trials)) if trials else None


def _named(ours: Sequence[Candidate]) -> dict[str, Candidate]:
    """Those of a result by their names in it, see `bench.report.row.Key`."""
    found: dict[str, Candidate] = {}
    for one in ours:
        rank = 1
        while (name := Key(one.backend, one.described, "", rank).loader) in found:
            rank += 1
        found[name] = one
    return found


def _host_to_device_gbps(turns: _Turns) -> float | None:
    """10^9 bytes per second from pinned memory; None without a GPU."""
    if turns.settings.device.type != "cuda":
        return None
    return stats.estimate(_rates(turns.transfer[_NONE])).median * turns.settings.size**2 * 3 / 1e9


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


def _notes(ours: Sequence[Candidate]) -> list[str]:
    """What ImageFolder does that the others do not, a clause each."""
    notes = [imagefolder.CONDITION] if any(one.has_own_recipe for one in ours) else []
    for one in ours:
        if one.has_own_recipe and (known := imagefolder.known(one.data.files)) < len(one.data):
            of = f"{known:,} of the {len(one.data):,} pictures"
            notes.append(f"{one.label} knows {of}, by the endings of their names")
    return notes


def check_served(served: Mapping[Candidate, Served]) -> None:
    """DatasetError, with the numbers, unless all served as many distinct ids, of one shape and dtype.

    Loaders with a recipe of their own deliver a dtype of their own and may know fewer pictures of the tree:
    their images and shapes are as many and the same.
    """
    _check_equal(
        {
            one.label: f"{work.images:,} images, {work.ids:,} distinct ids, {' and '.join(work.shapes)}"
            for one, work in served.items()
            if not one.has_own_recipe
        }
    )
    _check_equal({one.label: f"{work.images:,} images, {work.squares}" for one, work in served.items()})


def _check_equal(works: Mapping[str, str]) -> None:
    if len(set(works.values())) > 1:
        each = "; ".join(f"{name}: {work}" for name, work in works.items())
        raise DatasetError(
            f"the loaders do unequal work and cannot be compared: {each}; name folders made from one tree"
        )
