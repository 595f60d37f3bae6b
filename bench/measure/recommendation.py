"""What each format would bring: a sample measured, the whole predicted, and both compared."""

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.machine import measurements
from bench.machine.device import choose_device
from bench.machine.measurements import Hardware, HardwareSpec
from bench.machine.others import OtherProcesses
from bench.measure import sampling
from bench.measure.loader_run import LoaderRun
from bench.measure.sampling import BACKENDS, Converted, RecommendSpec, Trees
from bench.measure.settings import check_fills_batch
from bench.measure.trainers import check_trainer, resolve
from bench.report import forecast as model
from bench.report import stats
from bench.report.forecast import AS_IT_IS, JPEG_NAMES, RAW_NAME, Inputs, Prediction, Profile
from precache.console.progress import Progress, unseen
from precache.errors import DatasetError, MissingDependencyError, WorkerError, check_choice
from precache.recipe import FORMAT_NAMES
from precache.sources.base import Scan

_RANDOM_READS = (*AS_IT_IS, "shards")
_DISK_BLOCKS = {4 << 10: "disk, random 4 KiB", 128 << 10: "disk, random 128 KiB"}


@dataclass(frozen=True, slots=True)
class Check:
    """A prediction and what was then measured on the whole tree, in the same unit.

    Attributes:
        predicted: one value for each repeat, from that repeat's sample alone.
        ratio: predicted over measured, repeat by repeat: they ran one after the other.
    """

    name: str
    quantity: str
    unit: str
    predicted: stats.Estimate
    measured: stats.Estimate
    ratio: stats.Estimate

    @property
    def error(self) -> float:
        """How far off the prediction is, as a share of what was measured; positive if too high."""
        return self.ratio.median - 1


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A finished prediction, with what one needs to repeat it.

    Attributes:
        skipped: format -> why it could not be measured.
        checks: empty unless the tree was converted for real.
        turns: the predictions from each turn's sample alone; empty where they are for other inputs.
    """

    settings: dict[str, Any]
    hardware: Hardware
    inputs: Inputs
    profiles: list[Profile]
    predictions: list[Prediction]
    skipped: dict[str, str]
    checks: list[Check]
    turns: list[list[Prediction]] = field(default_factory=list)

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
        return replace(
            self, inputs=inputs, predictions=model.predict(self.profiles, inputs), checks=[], turns=[]
        )


@dataclass(slots=True)
class Runs:
    """Of one format: small and large conversions of the sample, its loader; and the whole tree's."""

    small: list[Converted]
    large: list[Converted]
    loaders: list[LoaderRun]
    whole: list[Converted]
    whole_loaders: list[LoaderRun]


def recommend(
    scan: Scan,
    spec: RecommendSpec,
    *,
    formats: tuple[str, ...] = FORMAT_NAMES,
    check: bool = False,
    on_progress: Progress = unseen,
) -> Recommendation:
    """Measure a sample of a tree in every format and predict what the whole would give.

    Args:
        scan: of the tree.
        formats: to convert to.
        check: convert and load the whole tree, too, by turns with the sample.

    Raises:
        SourceError: no picture of the sample decodes.
        SettingError: unknown format or trainer, a batch is more than an epoch, or what is measured does not
            fit into the page cache.
        PrecacheError: the raw tree's loader fails.
    """
    for name in formats:
        check_choice("format", name, FORMAT_NAMES)
    spec = replace(spec, trainer=resolve(spec.trainer, choose_device("auto")))
    check_trainer(spec.trainer, spec.size)  # an error now, not later
    check_fills_batch(spec.batch_size, train_images(scan))
    names = [name for name in BACKENDS if name in AS_IT_IS or name in formats]
    total, done = spec.repeats * len(names) * (2 if check else 1) + 1, 0

    def step() -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    on_progress(0, total)
    others = OtherProcesses()
    begun_s = time.perf_counter()
    hardware = _hardware(scan, spec)
    step()
    with tempfile.TemporaryDirectory(dir=spec.scratch, prefix="bench-recommend-") as scratch:
        trees = sampling.make_trees(scan, spec, Path(scratch))
        measured, skipped = _take_turns(names, trees, scan, spec, Path(scratch), check, begun_s, step)
    on_progress(total, total)
    repeats = len(measured[RAW_NAME].loaders)
    turns = [_predict(measured, slice(n, n + 1), trees, scan, spec, hardware) for n in range(repeats)]
    profiles, inputs, predictions = _predict(measured, slice(None), trees, scan, spec, hardware)
    checks = []
    for index, name in enumerate(measured):
        checks += compare([turn[2][index] for turn in turns], measured[name]) if check else []
    settings = {
        **asdict(spec),
        "source": scan.root.name,
        "scratch": str(spec.scratch),
        "page_cache": "warm",
        "check": sampling.CHECK,
        "augment": sampling.AUGMENT,
        "limit_s": spec.limit_s if math.isfinite(spec.limit_s) else None,
        "repeats": repeats,
        "sample_images": trees.large_images,
        "sample_pictures": trees.pictures,
        "other_cpu": others.share(),
    }
    by_turn = [found for _, _, found in turns]
    return Recommendation(settings, hardware, inputs, profiles, predictions, skipped, checks, by_turn)


def _take_turns(
    names: Sequence[str],
    trees: Trees,
    scan: Scan,
    spec: RecommendSpec,
    folder: Path,
    check: bool,
    begun_s: float,
    step: Callable[[], None],
) -> tuple[dict[str, Runs], dict[str, str]]:
    """What each format gave, as often as the repeats and the limit allow, and why others gave nothing."""
    runs = {name: Runs([], [], [], [], []) for name in names}
    skipped: dict[str, str] = {}
    served: dict[str, Path] = {}
    turn_s = 0.0
    for turn in range(spec.repeats):
        start_s = time.perf_counter()
        if turn and start_s + turn_s - begun_s > spec.limit_s:
            break
        for name in [name for name in names if name not in skipped]:
            try:
                if name in JPEG_NAMES and name not in served:
                    served[name] = sampling.convert_for_loader(trees, len(scan.samples), name, spec, folder)
                whole = scan.folder if check else None
                _measure(runs[name], name, trees, served.get(name), whole, spec, folder, step)
            except (DatasetError, MissingDependencyError, WorkerError) as error:
                if name == RAW_NAME:
                    raise
                skipped[name] = str(error)
        turn_s = time.perf_counter() - start_s
    return {name: found for name, found in runs.items() if name not in skipped}, skipped


def train_images(scan: Scan) -> int:
    """Pictures of an epoch: of the split `train` where there is one."""
    names = scan.samples.split_names
    if "train" not in names:
        return len(scan.samples)
    return int((scan.samples.splits == names.index("train")).sum())


def _hardware(scan: Scan, spec: RecommendSpec) -> Hardware:
    """As quickly as `spec` asks for it."""
    sizes: dict[str, Any] = (
        {} if math.isinf(spec.limit_s) else {"buffer_bytes": 64 << 20, "file_bytes": 128 << 20}
    )
    seconds = min(0.2, spec.seconds / 5)
    quick = HardwareSpec(scratch=spec.scratch, repeats=spec.repeats, seconds=seconds, **sizes)
    data = {"pictures": len(scan.samples), "file_bytes": int(scan.samples.file_bytes.sum())}
    return measurements.measure(quick, measurements.sample_jpegs(scan), data)


def _predict(
    measured: dict[str, Runs],
    turns: slice,
    trees: Trees,
    scan: Scan,
    spec: RecommendSpec,
    hardware: Hardware,
) -> tuple[list[Profile], Inputs, list[Prediction]]:
    """From the sample's runs of some turns; the whole tree's play no part."""
    sampled = {
        name: Runs(runs.small[turns], runs.large[turns], runs.loaders[turns], [], [])
        for name, runs in measured.items()
    }
    profiles = [_profile(name, runs, trees, scan, spec) for name, runs in sampled.items()]
    inputs = _inputs(scan, spec, hardware, [run for runs in sampled.values() for run in runs.loaders])
    return profiles, inputs, model.predict(profiles, inputs)


def _measure(
    runs: Runs,
    name: str,
    trees: Trees,
    served: Path | None,
    whole: Path | None,
    spec: RecommendSpec,
    folder: Path,
    step: Callable[[], None],
) -> None:
    """Take one turn: the sample, then the whole tree if there is one."""
    if name not in AS_IT_IS:
        runs.small.append(sampling.convert(trees.small, folder / "out", spec.recipe(name), spec.workers))
        shutil.rmtree(folder / "out")
    converted, loaded = sampling.run_format(trees.large, name, spec, folder, trees.shard_images, served)
    runs.loaders.append(loaded)
    runs.large += [] if converted is None else [converted]
    step()
    if whole is not None:
        converted, loaded = sampling.run_format(whole, name, spec, folder)
        runs.whole_loaders.append(loaded)
        runs.whole += [] if converted is None else [converted]
        step()


def _profile(name: str, runs: Runs, trees: Trees, scan: Scan, spec: RecommendSpec) -> Profile:
    startup_s = image_s = 0.0
    image_bytes = float(scan.samples.file_bytes.mean())
    # Decoding takes time in proportion to the files' bytes, and a sample misses the few largest ones.
    larger = image_bytes / trees.image_bytes
    shard_images = spec.recipe("shards").samples_per_shard  # the same for all formats
    if name not in AS_IT_IS:
        startup_s, image_s = model.fit_conversion(
            median(run.seconds for run in runs.small),
            trees.small_images,
            median(run.seconds for run in runs.large),
            trees.large_images,
            trees.shard_images,
            spec.workers,
        )
        image_bytes = runs.large[0].bytes / trees.large_images
    decodes_files = larger if name in AS_IT_IS else 1.0
    return Profile(
        name=name,
        image_bytes=image_bytes,
        startup_s=startup_s,
        image_s=image_s * larger,
        shard_images=shard_images,
        loader_images_per_s=median(run.loader for run in runs.loaders) / decodes_files,
        cpus=spec.workers,
        serial_s=median(run.serial_s for run in runs.loaders),
        overlap=min(1.0, median(run.together / min(run.loader, run.trainer) for run in runs.loaders)),
        random_reads=name in _RANDOM_READS,
    )


def _inputs(scan: Scan, spec: RecommendSpec, hardware: Hardware, runs: list[LoaderRun]) -> Inputs:
    """What this machine is, and this tree."""
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
        train_images=train_images(scan),
        cpus=spec.workers,
        gpus=1,
        trainer_images_per_s=median(run.trainer for run in runs),
        disk_bytes_per_s=disk,
        read_s=read_s,
        memory_bytes=float(psutil.virtual_memory().total),
    )


def compare(predicted: list[Prediction], runs: Runs) -> list[Check]:
    """`predicted` from each turn's sample, against each turn's whole tree."""

    def line(quantity: str, unit: str, values: list[float], found: list[float]) -> Check:
        estimates = stats.estimate(values), stats.estimate(found), stats.ratio(values, found)
        return Check(predicted[0].name, quantity, unit, *estimates)

    lines = []
    if runs.whole:
        lines += [
            line("size", "B", [p.bytes for p in predicted], [float(run.bytes) for run in runs.whole]),
            line("conversion", "s", [p.conversion_s for p in predicted], [run.seconds for run in runs.whole]),
        ]
    alone, together = ([p.warm_images_per_s for p in predicted], [p.trained_images_per_s for p in predicted])
    return [
        *lines,
        line("loader", "images/s", alone, [run.loader for run in runs.whole_loaders]),
        line("with trainer", "images/s", together, [run.together for run in runs.whole_loaders]),
    ]
