"""All backends against all trainers, interleaved and repeated."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import loaders
from bench import page_cache, stats
from bench.hardware import describe_machine
from bench.trainers import NullTrainer, Trainer, make_trainer
from bench.trial import Trial, run_trainer_alone, run_trial
from bench.verdict import judge
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


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result: images/s, seconds, and what they mean.

    Attributes:
        loader: images/s of the loader alone.
        trainer: images/s of the trainer alone, on a batch that stays on the device.
        together: images/s of the trainer fed by the loader.
        ratio: together over trainer, repeat by repeat.
        first_batch_s: from before the loader is built until its first batch is there.
        batch_s_median, batch_s_p95: of the time per batch, together; over all repeats.
    """

    backend: str
    data: str
    trainer_name: str
    loader: stats.Estimate
    trainer: stats.Estimate | None
    together: stats.Estimate
    ratio: stats.Estimate | None
    first_batch_s: stats.Estimate
    batch_s_median: float
    batch_s_p95: float

    @property
    def verdict(self) -> str:
        """What the measurements mean; see `bench.verdict`."""
        return judge(self.ratio)


@dataclass(frozen=True, slots=True)
class Result:
    """A finished comparison, with what one needs to repeat it."""

    machine: dict[str, str]
    settings: dict[str, Any]
    rows: tuple[Row, ...]
    skipped: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `Result.from_json` reads them back."""
        return {"version": 1, **asdict(self)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Result":
        """Read what `to_json` gave; SettingError if it is something else."""
        try:
            rows = tuple(_row_from_json(row) for row in content["rows"])
            result = cls(content["machine"], content["settings"], rows, content["skipped"])
            missing = {"cpu", "memory", "accelerator", "date"} - result.machine.keys()
            missing |= {"trainers", "batch_size", "size", "workers", "repeats"} - result.settings.keys()
            if missing:
                raise KeyError(*sorted(missing))
            return result
        except (KeyError, TypeError, AttributeError) as error:
            raise SettingError(f"not a result of 'bench loaders' ({error!r})") from error


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
    arms: Sequence[Arm], spec: BenchSpec, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> Result:
    """Measure each arm alone and with each trainer, all interleaved, `spec.repeats` times.

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
    cache = "warm" if all(page_cache.warm(arm.path) for arm in usable) else "not warmed: larger than memory"
    batches = {trainer.name: _resident_batch(spec, trainer, classes) for trainer in trainers}
    measured = [trainer for trainer in trainers if not isinstance(trainer, NullTrainer)]

    total = spec.repeats * (len(usable) * (1 + len(measured)) + len(measured))
    trials: dict[tuple[Arm | None, str], list[Trial]] = {}

    def record(arm: Arm | None, name: str, trial: Trial) -> None:
        trials.setdefault((arm, name), []).append(trial)
        on_progress(sum(map(len, trials.values())), total)

    for _ in range(spec.repeats):
        for trainer in measured:
            alone = run_trainer_alone(trainer, batches[trainer.name], spec.device, spec.warmup, spec.batches)
            record(None, trainer.name, alone)
        for arm in tuple(usable):
            try:
                for trainer in (NullTrainer(), *measured):
                    trial = run_trial(
                        _opener(arm, spec, trainer), trainer, spec.device, spec.warmup, spec.batches
                    )
                    record(arm, trainer.name, trial)
            except (DatasetError, ImageError, WorkerError) as error:
                usable.remove(arm)
                skipped[f"{arm.backend} on {arm.path}"] = str(error)
        _check_any(usable, skipped)
    rows = tuple(_row(arm, trainer.name, trials) for trainer in trainers for arm in usable)
    settings = {
        **{name: value for name, value in asdict(spec).items() if name not in ("device", "trainers")},
        "device": str(spec.device),
        "trainers": [trainer.name for trainer in trainers],
        "page_cache": cache,
    }
    return Result(describe_machine(spec.device), settings, rows, skipped)


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


def _row(arm: Arm, trainer_name: str, trials: dict[tuple[Arm | None, str], list[Trial]]) -> Row:
    def rates(arm: Arm | None, name: str) -> list[float]:
        return [trial.images_per_s for trial in trials[arm, name]]

    alone = trials[arm, NullTrainer.name]
    fed = trials[arm, trainer_name]
    with_trainer = (None, trainer_name) in trials
    trainer = stats.estimate(rates(None, trainer_name)) if with_trainer else None
    together = stats.estimate(rates(arm, trainer_name))
    ratio = stats.ratio(rates(arm, trainer_name), rates(None, trainer_name)) if with_trainer else None
    batch_s = [seconds for trial in fed for seconds in trial.batch_s]
    kind = open_split(arm.path, "train").kind
    return Row(
        backend=arm.backend,
        data=kind if kind != RAW else "raw tree",
        trainer_name=trainer_name,
        loader=stats.estimate(rates(arm, NullTrainer.name)),
        trainer=trainer,
        together=together,
        ratio=ratio,
        first_batch_s=stats.estimate([trial.first_batch_s for trial in alone]),
        batch_s_median=stats.percentile(batch_s, 0.5),
        batch_s_p95=stats.percentile(batch_s, 0.95),
    )


def _row_from_json(content: dict[str, Any]) -> Row:
    estimates = ("loader", "trainer", "together", "ratio", "first_batch_s")
    read = {name: stats.Estimate(**content[name]) if content[name] else None for name in estimates}
    kept = {name: value for name, value in content.items() if name != "verdict"}
    return Row(**{**kept, **read})
