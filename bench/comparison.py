"""All backends against all trainers, interleaved and repeated."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import torch

import loaders
from bench import page_cache, stats
from bench.hardware import describe_machine
from bench.peer_arms import PeerArm, Work, run_peer, work_of, write_data
from bench.peer_loaders import LIMIT
from bench.result import Result, Row
from bench.trainers import NullTrainer, Trainer, make_trainer
from bench.trial import Trial, run_trainer_alone, run_trial
from loaders.batch import Batch, Loader
from loaders.dataset import RAW, open_split
from loaders.transfer import normalise
from precache.errors import (
    DatasetError,
    ImageError,
    MissingDependencyError,
    SettingError,
    SourceError,
    WorkerError,
    check_choice,
    check_range,
)
from precache.images import MAX_SIZE


@dataclass(frozen=True, slots=True)
class Arm:
    """One thing to measure: a backend over a folder."""

    backend: str
    path: Path


Trials: TypeAlias = dict[tuple[Arm | PeerArm | None, str], list[Trial]]
"""By arm, None for the trainer alone, and trainer's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSpec:
    """Settings of a comparison, the same for every arm; checked once.

    Attributes:
        trainers: names, see `bench.trainers.CHOICES`.
        batch_size: samples per batch.
        workers: of each loader; see `loaders.build`.
        size: side of the served square in pixels.
        warmup: batches before the timed ones, of each trial.
        batches: timed batches of each trial.
        repeats: trials of each kind.
        device: where batches go and the trainer runs.
    """

    trainers: tuple[str, ...]
    batch_size: int
    workers: int
    size: int
    warmup: int
    batches: int
    repeats: int
    device: torch.device

    def __post_init__(self) -> None:
        check_range("batch_size", self.batch_size, 1)
        check_range("workers", self.workers, 0)
        check_range("size", self.size, 1, MAX_SIZE)
        check_range("warmup", self.warmup, 0)
        check_range("batches", self.batches, 1)
        check_range("repeats", self.repeats, 1)


def choose_arms(data: Sequence[Path], backends: Sequence[str], root: Path) -> list[Arm]:
    """Which backend reads which folder.

    Given folders go to every backend that reads them; without any, each backend gets the folder
    under `root` that it is made for. An unknown backend is a SettingError.
    """
    for backend in backends:
        check_choice("backend", backend, [*loaders.BACKENDS, "all"])
    names = sorted(loaders.BACKENDS) if "all" in backends else list(dict.fromkeys(backends))
    if not data:
        return [Arm(name, root / loaders.READS[name][0]) for name in names]
    kinds = {path: open_split(path, "train").kind for path in data}
    arms = [Arm(name, path) for name in names for path in kinds if kinds[path] in loaders.READS[name]]
    if not arms:
        held = ", ".join(f"{path} holds {kind}" for path, kind in kinds.items())
        raise DatasetError(f"{held}: none of it is read by backend {', '.join(names)}; use --backend all")
    return arms


def compare(
    arms: Sequence[Arm],
    spec: BenchSpec,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    peers: Sequence[PeerArm] = (),
) -> Result:
    """Measure each arm alone and with each trainer, and each peer, all interleaved, `spec.repeats` times.

    An arm that fails, for want of its folder or package or over a damaged picture, is skipped, with
    the reason.

    Raises:
        DatasetError: no arm can run.
        SettingError: unknown trainer.
    """
    usable, skipped = _check_arms(arms, spec)
    _check_any(usable, skipped)
    classes = max(len(open_split(arm.path, "train").classes) for arm in usable)
    trainers = [make_trainer(name, spec.device, classes) for name in spec.trainers]
    batches = {trainer.name: _resident_batch(spec, trainer, classes) for trainer in trainers}
    measured = [trainer for trainer in trainers if not isinstance(trainer, NullTrainer)]

    total = spec.repeats * (len(usable) * (1 + len(measured)) + len(measured) + len(peers))
    trials: Trials = {}
    versions: dict[str, str] = {}
    warm = True

    def record(arm: Arm | PeerArm | None, name: str, trial: Trial) -> None:
        trials.setdefault((arm, name), []).append(trial)
        on_progress(sum(map(len, trials.values())), total)

    def measure(arm: Arm | PeerArm) -> None:
        nonlocal warm
        # each time anew: the system may have dropped what another arm did not read
        warm = page_cache.warm(arm.path) and warm
        if isinstance(arm, PeerArm):
            trial, versions[arm.name] = _run_peer(arm, spec)
            record(arm, NullTrainer.name, trial)
            return
        for trainer in (NullTrainer(), *measured):
            opener = _opener(arm, spec, trainer)
            record(arm, trainer.name, run_trial(opener, trainer, spec.device, spec.warmup, spec.batches))

    on_progress(0, total)
    running: list[Arm | PeerArm] = [*usable, *_write_data(peers, spec, skipped)]
    for _ in range(spec.repeats):
        for trainer in measured:
            alone = run_trainer_alone(trainer, batches[trainer.name], spec.device, spec.warmup, spec.batches)
            record(None, trainer.name, alone)
        for arm in tuple(running):
            try:
                measure(arm)
            except (DatasetError, ImageError, WorkerError) as error:
                running.remove(arm)
                skipped[_name(arm)] = str(error)
        _check_any([arm for arm in running if isinstance(arm, Arm)], skipped)
    settings = {
        **{name: value for name, value in asdict(spec).items() if name not in ("device", "trainers")},
        "device": str(spec.device),
        "trainers": [trainer.name for trainer in trainers],
        "page_cache": "warm" if warm else "not warmed: larger than memory",
        "peers": versions,
    }
    rows = _rows(running, [trainer.name for trainer in trainers], trials)
    return Result(describe_machine(spec.device), settings, rows, skipped)


def _name(arm: Arm | PeerArm) -> str:
    return f"{arm.backend if isinstance(arm, Arm) else arm.name} on {arm.path}"


def _write_data(peers: Sequence[PeerArm], spec: BenchSpec, skipped: dict[str, str]) -> list[PeerArm]:
    """Those whose data is there, or could be written."""
    ready = []
    for arm in peers:
        try:
            write_data(arm, spec.workers)
            ready.append(arm)
        except (DatasetError, WorkerError) as error:
            skipped[_name(arm)] = str(error)
    return ready


def _run_peer(arm: PeerArm, spec: BenchSpec) -> tuple[Trial, str]:
    return run_peer(
        arm,
        batch_size=spec.batch_size,
        size=spec.size,
        workers=spec.workers,
        warmup=spec.warmup,
        batches=spec.batches,
    )


def _check_any(usable: Sequence[Arm], skipped: dict[str, str]) -> None:
    if not usable:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise DatasetError(f"nothing to measure: {reasons}")


def _check_arms(arms: Sequence[Arm], spec: BenchSpec) -> tuple[list[Arm], dict[str, str]]:
    usable, skipped = [], {}
    for arm in arms:
        try:
            with _opener(arm, spec, NullTrainer())():
                usable.append(arm)
        except (DatasetError, MissingDependencyError, SourceError, SettingError) as error:
            skipped[f"{arm.backend} on {arm.path}"] = str(error)
    return usable, skipped


def _opener(arm: Arm, spec: BenchSpec, trainer: Trainer) -> Callable[[], Loader]:
    def build() -> Loader:
        return loaders.build(
            arm.path,
            backend=arm.backend,
            batch_size=spec.batch_size,
            workers=spec.workers,
            size=spec.size,
            device=spec.device,
            dtype=trainer.dtype,
        )

    return build


def _resident_batch(spec: BenchSpec, trainer: Trainer, classes: int) -> Batch:
    """A batch of noise on the device, of the shape and dtype that loaders deliver."""
    shape = (spec.batch_size, spec.size, spec.size, 3)
    try:
        images = torch.randint(0, 256, shape, dtype=torch.uint8, device=spec.device).permute(0, 3, 1, 2)
    except RuntimeError as error:  # torch's word for too little memory
        raise SettingError(
            f"batch_size {spec.batch_size:,} of {spec.size}x{spec.size} does not fit into memory; "
            f"choose a smaller one"
        ) from error
    if trainer.dtype.is_floating_point:
        images = normalise(images, trainer.dtype)
    labels = torch.randint(0, classes, (spec.batch_size,), device=spec.device)
    return Batch(images, labels, torch.arange(spec.batch_size))


def _rows(arms: Sequence[Arm | PeerArm], trainer_names: Sequence[str], trials: Trials) -> tuple[Row, ...]:
    """Ours trainer by trainer, then the peers."""
    works = {arm: arm.work if isinstance(arm, PeerArm) else work_of(arm.backend, arm.path) for arm in arms}
    ours = [arm for arm in arms if isinstance(arm, Arm)]
    peers = [arm for arm in arms if isinstance(arm, PeerArm)]
    rows = [_row(arm, name, trials, works) for name in trainer_names for arm in ours]
    return (*rows, *(_row(arm, NullTrainer.name, trials, works) for arm in peers))


def _row(
    arm: Arm | PeerArm, trainer_name: str, trials: Trials, works: dict[Arm | PeerArm, Work | None]
) -> Row:
    def rates(arm: Arm | PeerArm | None, name: str) -> list[float]:
        return [trial.images_per_s for trial in trials[arm, name]]

    peer = isinstance(arm, PeerArm)
    alone = trials[arm, NullTrainer.name]
    fed = trials[arm, trainer_name]
    with_trainer = (None, trainer_name) in trials
    batch_s = [seconds for trial in fed for seconds in trial.batch_s]
    gaps = [trial.batch_s[first] for trial in fed for first in trial.epoch_starts]
    alike = {
        other.name: stats.ratio(rates(arm, NullTrainer.name), rates(other, NullTrainer.name))
        for other, work in works.items()
        if isinstance(other, PeerArm) and other != arm and work == works[arm]
    }
    of_limit = alike.pop(LIMIT, None)
    return Row(
        backend=arm.name if isinstance(arm, PeerArm) else arm.backend,
        data=_describe(arm),
        trainer_name=trainer_name,
        loader=stats.estimate(rates(arm, NullTrainer.name)),
        trainer=stats.estimate(rates(None, trainer_name)) if with_trainer else None,
        together=None if peer else stats.estimate(rates(arm, trainer_name)),
        ratio=stats.ratio(rates(arm, trainer_name), rates(None, trainer_name)) if with_trainer else None,
        first_batch_s=stats.estimate([trial.first_batch_s for trial in alone]),
        batch_s_median=stats.percentile(batch_s, 0.5),
        batch_s_p95=stats.percentile(batch_s, 0.95),
        peer=peer,
        of_limit=of_limit,
        over={} if peer else alike,
        epoch_gap_s=max(gaps, default=None),
    )


def _describe(arm: Arm | PeerArm) -> str:
    """The kind of data, in words."""
    if isinstance(arm, PeerArm) and arm.writer is not None:
        return arm.writer
    kind = open_split(arm.path, "train").kind
    return kind if kind != RAW else "raw tree"
