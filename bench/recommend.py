"""What each format would bring: a sample measured, the whole predicted, and both compared."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from bench import measurements, model, sampling, stats
from bench.loader_run import LoaderRun
from bench.measurements import Hardware, HardwareSpec
from bench.model import JPEG_NAMES, RAW_NAME, Inputs, Prediction, Profile
from bench.sampling import BACKENDS, Converted, RecommendSpec, Trees
from bench.trainers import make_trainer
from precache.errors import WorkerError, check_choice
from precache.recipe import FORMAT_NAMES
from precache.source import Scan, scan_tree

_RANDOM_READS = (RAW_NAME, "shards")
_DISK_BLOCKS = {4 << 10: "disk, random 4 KiB", 128 << 10: "disk, random 128 KiB"}


@dataclass(frozen=True, slots=True)
class Check:
    """A prediction and what was then measured on the whole tree, in the same unit."""

    name: str
    quantity: str
    unit: str
    predicted: float
    measured: stats.Estimate

    @property
    def error(self) -> float:
        """How far off the prediction is, as a share of what was measured; positive if too high."""
        return self.predicted / self.measured.median - 1


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A finished prediction, with what one needs to repeat it.

    Attributes:
        skipped: format -> why it could not be measured.
        checks: empty unless the tree was converted for real.
    """

    settings: dict[str, Any]
    hardware: Hardware
    inputs: Inputs
    profiles: list[Profile]
    predictions: list[Prediction]
    skipped: dict[str, str]
    checks: list[Check]

    @property
    def crossovers(self) -> dict[str, float | None]:
        """JPEG format -> disk rate in bytes/s below which it loads faster than raw pixels, cold."""
        found = {prediction.name: prediction for prediction in self.predictions}
        if "shards" not in found:
            return {}
        return {
            name: model.crossover_bytes_per_s(found["shards"], found[name], self.inputs.images)
            for name in JPEG_NAMES
            if name in found
        }

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        checks = [{**asdict(check), "error": check.error} for check in self.checks]
        content = {**asdict(self), "hardware": self.hardware.to_json(), "checks": checks}
        return {"version": 1, **content, "crossovers_bytes_per_s": self.crossovers}

    def what_if(self, inputs: Inputs) -> "Recommendation":
        """The same measurements, for other `inputs`."""
        return replace(self, inputs=inputs, predictions=model.predict(self.profiles, inputs), checks=[])


@dataclass(slots=True)
class _Runs:
    """Of one format: small and large conversions of the sample, its loader; and the whole tree's."""

    small: list[Converted]
    large: list[Converted]
    loaders: list[LoaderRun]
    whole: list[Converted]
    whole_loaders: list[LoaderRun]


def recommend(
    source: Path,
    spec: RecommendSpec,
    *,
    formats: tuple[str, ...] = FORMAT_NAMES,
    check: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Recommendation:
    """Measure a sample of the tree `source` in every format and predict what the whole would give.

    Args:
        formats: to convert to.
        check: convert and load the whole tree, too, by turns with the sample.

    Raises:
        SourceError: no such tree, or no picture of the sample decodes.
        SettingError: unknown format or trainer, or what is measured does not fit into the page cache.
        WorkerError: the raw tree's loader fails.
    """
    for name in formats:
        check_choice("format", name, FORMAT_NAMES)
    make_trainer(spec.trainer, torch.device("cpu"), 2)  # an unknown one is an error now, not later
    names = [name for name in BACKENDS if name == RAW_NAME or name in formats]
    scan = scan_tree(source)
    total, done = spec.repeats * len(names) * (2 if check else 1) + 1, 0

    def step() -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    on_progress(0, total)
    quick = HardwareSpec(scratch=spec.scratch, repeats=spec.repeats, seconds=min(0.2, spec.seconds))
    data = {"pictures": len(scan.samples), "file_bytes": int(scan.samples.file_bytes.sum())}
    hardware = measurements.measure(quick, measurements.sample_jpegs(scan), data)
    step()
    skipped: dict[str, str] = {}
    runs = {name: _Runs([], [], [], [], []) for name in names}
    with tempfile.TemporaryDirectory(dir=spec.scratch, prefix="bench-recommend-") as scratch:
        folder = Path(scratch)
        trees = sampling.make_trees(scan, spec, folder)
        for _ in range(spec.repeats):
            for name in [name for name in names if name not in skipped]:
                try:
                    _measure(runs[name], name, trees, scan.root if check else None, spec, folder, step)
                except WorkerError as error:
                    if name == RAW_NAME:
                        raise
                    skipped[name] = str(error)
    measured = {name: found for name, found in runs.items() if name not in skipped}
    profiles = [_profile(name, found, trees, scan, spec) for name, found in measured.items()]
    inputs = _inputs(scan, spec, hardware, [run for found in measured.values() for run in found.loaders])
    predictions = model.predict(profiles, inputs)
    checks = [line for found in predictions for line in _checks(found, measured[found.name])] if check else []
    settings = {**asdict(spec), "source": source.name, "scratch": str(spec.scratch), "page_cache": "warm"}
    settings["sample_images"] = trees.large_images
    return Recommendation(settings, hardware, inputs, profiles, predictions, skipped, checks)


def _measure(
    runs: _Runs,
    name: str,
    trees: Trees,
    whole: Path | None,
    spec: RecommendSpec,
    folder: Path,
    step: Callable[[], None],
) -> None:
    """Take one turn: the sample, then the whole tree if there is one."""
    if name != RAW_NAME:
        runs.small.append(sampling.convert(trees.small, folder / "out", spec.recipe(name), spec.workers))
        shutil.rmtree(folder / "out")
    for tree, conversions, loaders in (
        (trees.large, runs.large, runs.loaders),
        (whole, runs.whole, runs.whole_loaders),
    ):
        if tree is not None:
            converted, loaded = sampling.run_format(tree, name, spec, folder)
            loaders.append(loaded)
            if converted is not None:
                conversions.append(converted)
            step()


def _profile(name: str, runs: _Runs, trees: Trees, scan: Scan, spec: RecommendSpec) -> Profile:
    startup_s = image_s = 0.0
    image_bytes = float(scan.samples.file_bytes.mean())
    shard_images = spec.recipe("shards").samples_per_shard  # the same for all formats
    if name != RAW_NAME:
        startup_s, image_s = model.fit_conversion(
            median(run.seconds for run in runs.small),
            trees.small_images,
            median(run.seconds for run in runs.large),
            trees.large_images,
            shard_images,
            spec.workers,
        )
        image_bytes = runs.large[0].bytes / trees.large_images
    return Profile(
        name=name,
        image_bytes=image_bytes,
        startup_s=startup_s,
        image_s=image_s,
        shard_images=shard_images,
        loader_images_per_s=median(run.loader for run in runs.loaders),
        cpus=spec.workers,
        serial_s=median(run.serial_s for run in runs.loaders),
        overlap=min(1.0, median(run.together / min(run.loader, run.trainer) for run in runs.loaders)),
        random_reads=name in _RANDOM_READS,
    )


def _inputs(scan: Scan, spec: RecommendSpec, hardware: Hardware, runs: list[LoaderRun]) -> Inputs:
    """What this machine is, and this tree."""
    names = scan.samples.split_names
    train = scan.samples.splits == names.index("train") if "train" in names else scan.samples.splits >= 0
    reads = [(size, hardware.value(name)) for size, name in _DISK_BLOCKS.items()]
    sequential = hardware.value("disk, sequential read")
    # files that never leave memory are read as fast as memory is copied
    disk = (
        (hardware.value("memory copy, one thread") or 0.0) * 1e9 if sequential is None else sequential * 1e6
    )
    (small_bytes, small), (large_bytes, large) = reads
    read_s = 0.0
    if small is not None and large is not None:
        read_s = model.read_time((small_bytes, small * 1e6), (large_bytes, large * 1e6))
    return Inputs(
        images=len(scan.samples),
        train_images=int(train.sum()),
        cpus=spec.workers,
        gpus=1,
        trainer_images_per_s=median(run.trainer for run in runs),
        disk_bytes_per_s=disk,
        read_s=read_s,
        memory_bytes=float(psutil.virtual_memory().total),
    )


def _checks(predicted: Prediction, runs: _Runs) -> list[Check]:
    name, lines = predicted.name, []
    if runs.whole:
        sizes, seconds = [float(run.bytes) for run in runs.whole], [run.seconds for run in runs.whole]
        lines.append(Check(name, "size", "B", predicted.bytes, stats.estimate(sizes)))
        lines.append(Check(name, "conversion", "s", predicted.conversion_s, stats.estimate(seconds)))
    loader = stats.estimate([run.loader for run in runs.whole_loaders])
    together = stats.estimate([run.together for run in runs.whole_loaders])
    lines.append(Check(name, "loader", "images/s", predicted.warm_images_per_s, loader))
    lines.append(Check(name, "with trainer", "images/s", predicted.trained_images_per_s, together))
    return lines
