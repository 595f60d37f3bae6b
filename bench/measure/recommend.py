"""What each format would bring: a sample measured, the whole predicted; once converted, both compared."""

import json
import math
import mmap
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.machine import disk, page_cache
from bench.machine.hardware import describe_machine
from bench.machine.others import OtherProcesses
from bench.measure import sample
from bench.measure.sample import Sampling, Trees
from bench.measure.settings import Settings, check_fills_batch
from bench.measure.trainers import check_trainer, resolve
from bench.report import forecast, stats
from bench.report.forecast import AS_IT_IS, BACKENDS, Inputs, Loaded, Profile, Stored
from bench.report.row import RAW_TREE, Row
from precache.cli.commandline import human_bytes
from precache.conversion.destination import AUTO_NAME
from precache.conversion.journal import JOURNAL_NAME, read_header
from precache.conversion.shard_writer import predict_bytes
from precache.dataset.converted import is_converted, open_dataset
from precache.errors import (
    DatasetError,
    MissingDependencyError,
    PrecacheError,
    SettingError,
    WorkerError,
    check_choice,
)
from precache.recipe import FORMAT_NAMES, Recipe
from precache.reporting import Progress, unseen
from precache.sources.base import Scan
from precache.storage import atomic_write

CHECK = "never"
"""No checksums: a training compares each picture once, and a sample is served again and again."""
AUGMENT = "train"
"""What training does; centre crops are less work for some loaders than for others."""
_DISK_FILE_BYTES = 256 << 20
_DISK_SECONDS = 0.5
_MEMORY_BYTES_PER_S = 1e10  # of files in a file system that is in memory
_PICTURES = 100  # that tell the size of all
_FIRST_EPOCH_S = 10.0  # one that takes longer does not go before what is measured


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A finished prediction, with what one needs to repeat it.

    Attributes:
        machine: of `bench.machine.hardware.describe_machine`.
        rows: predicted, the tree as it is first; ranges are over the turns.
        skipped: format -> why it could not be measured.
    """

    settings: dict[str, Any]
    machine: dict[str, str]
    inputs: Inputs
    profiles: list[Profile]
    rows: list[Row]
    skipped: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"version": 1, **asdict(self)}

    def what_if(self, inputs: Inputs) -> "Recommendation":
        """The same measurements, for other `inputs`."""
        return replace(self, inputs=inputs, rows=forecast.predict(self.profiles, inputs))


def recommend(
    scan: Scan,
    sampling: Sampling,
    settings: Settings,
    *,
    formats: Sequence[str] = FORMAT_NAMES,
    on_progress: Progress = unseen,
) -> Recommendation:
    """Measure a sample of a tree in every format and predict what the whole would give.

    Args:
        scan: of the tree.
        settings: of batches and the trainer; `repeats` turns of `seconds` each.
        formats: to convert to.

    Raises:
        SourceError: no picture of the sample decodes.
        SettingError: unknown format or trainer, a batch is more than an epoch, or what is measured does not
            fit into the page cache.
        PrecacheError: the raw tree's loader fails.
    """
    for name in formats:
        check_choice("format", name, FORMAT_NAMES)
    settings = ready(settings)
    check_fills_batch(settings.batch_size, train_images(scan))
    names = [name for name in BACKENDS if name in AS_IT_IS or name in formats]
    workers, others = settings.workers_alone, OtherProcesses()
    until_s = time.perf_counter() + sampling.limit_s
    on_progress(0, settings.repeats + 1)
    disk_bytes_per_s, read_s = _measure_disk(Path(tempfile.gettempdir()))
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="bench-recommend-") as scratch:
        folder = Path(scratch)
        trees = sample.make_trees(scan, sampling, settings, folder)
        profiles = _convert(scan, trees, names, sampling, workers, folder, skipped)
        on_progress(1, settings.repeats + 1)
        places = {name: trees.large if name in AS_IT_IS else folder / name for name in profiles}
        runs: dict[str, list[Loaded]] = {name: [] for name in profiles}
        turn_s, repeats = 0.0, 0
        while repeats < settings.repeats and (repeats == 0 or time.perf_counter() + turn_s <= until_s):
            start_s = time.perf_counter()
            serve_all(places, settings, runs, skipped)
            repeats, turn_s = repeats + 1, time.perf_counter() - start_s
            on_progress(1 + repeats, settings.repeats + 1)
    on_progress(settings.repeats + 1, settings.repeats + 1)
    found = [_with_runs(profiles[name], runs[name], scan, trees) for name in places if name not in skipped]
    inputs = Inputs(
        images=len(scan.samples),
        train_images=train_images(scan),
        cpus=workers,
        gpus=1,
        trainer_images_per_s=median(run.trainer for profile in found for run in profile.runs),
        disk_bytes_per_s=disk_bytes_per_s,
        read_s=read_s,
        memory_bytes=float(psutil.virtual_memory().total),
    )
    written = {
        **{name: getattr(settings, name) for name in ("size", "batch_size", "seconds", "augment", "check")},
        **{name: getattr(sampling, name) for name in ("stored_size", "quality", "pictures")},
        "source": scan.root.name,
        "workers": workers,
        "trainer": settings.trainer,
        "page_cache": "warm",
        "limit_s": sampling.limit_s if math.isfinite(sampling.limit_s) else None,
        "repeats": repeats,
        "sample_images": trees.large_images,
        "sample_pictures": trees.pictures,
        "other_cpu": others.share(),
    }
    machine = describe_machine(settings.device)
    return Recommendation(written, machine, inputs, found, forecast.predict(found, inputs), skipped)


def _convert(
    scan: Scan,
    trees: Trees,
    names: Sequence[str],
    sampling: Sampling,
    workers: int,
    folder: Path,
    skipped: dict[str, str],
) -> dict[str, Profile]:
    """Convert the sample to each format, into `folder`; without runs. What fails goes to `skipped`."""
    image_bytes = float(scan.samples.file_bytes.mean())
    profiles = {}
    for name in names:
        profiles[name] = Profile(name=name, image_bytes=image_bytes, runs=(), cpus=workers)
        if name in AS_IT_IS:
            continue
        try:
            small, large, stored_bytes = sample.convert_twice(
                trees, len(scan.samples), sampling.recipe(name), workers, folder / name
            )
        except (DatasetError, MissingDependencyError, WorkerError) as error:
            skipped[name] = str(error)
            del profiles[name]
            continue
        startup_s, image_s = forecast.fit_conversion(small, large, workers)
        image_s *= _larger(scan, trees)
        profiles[name] = replace(
            profiles[name], image_bytes=stored_bytes, startup_s=startup_s, image_s=image_s
        )
    return profiles


def serve_all(
    places: Mapping[str, Path],
    settings: Settings,
    runs: Mapping[str, list[Loaded]],
    skipped: dict[str, str],
) -> None:
    """One turn: each loader that did not fail before, added to `runs`; what fails goes to `skipped`."""
    for name in [name for name in places if name not in skipped]:
        try:
            sample.warm(places[name])
            runs[name].append(sample.serve(places[name], name, settings))
        except (DatasetError, MissingDependencyError, WorkerError) as error:
            if name == RAW_TREE:
                raise
            skipped[name] = str(error)


def _with_runs(profile: Profile, runs: Sequence[Loaded], scan: Scan, trees: Trees) -> Profile:
    slower = _larger(scan, trees) if profile.name in AS_IT_IS else 1.0
    return replace(profile, runs=[replace(run, loader=run.loader / slower) for run in runs])


def _larger(scan: Scan, trees: Trees) -> float:
    """Decoding takes time in proportion to the files' bytes, and a sample misses the few largest ones."""
    return float(scan.samples.file_bytes.mean()) / trees.image_bytes


def ready(settings: Settings) -> Settings:
    """As a recommendation measures: random crops, no checksums; SettingError for an unknown trainer."""
    trainer = resolve(settings.trainer, settings.device)
    check_trainer(trainer, settings.size)  # an error now, not later
    return replace(settings, trainer=trainer, augment=AUGMENT, check=CHECK)


def train_images(scan: Scan) -> int:
    """Pictures of an epoch: of the split `train` where there is one."""
    names = scan.samples.split_names
    if "train" not in names:
        return len(scan.samples)
    return int((scan.samples.splits == names.index("train")).sum())


def _measure_disk(folder: Path) -> tuple[float, float]:
    """Bytes per second of sequential reads, and seconds until a read begins to give data."""
    try:
        with disk.readable_file(folder, _DISK_FILE_BYTES) as file:
            sequential = file.sequential_rate(_DISK_SECONDS) * 1e6
            random = file.random_rate(mmap.PAGESIZE, _DISK_SECONDS / 2) * 1e6
    except SettingError:  # on no disk
        return _MEMORY_BYTES_PER_S, 0.0
    return sequential, max(0.0, mmap.PAGESIZE / random - mmap.PAGESIZE / sequential)


@dataclass(frozen=True, slots=True)
class Choice:
    """How pictures are stored, and which formats fit.

    Attributes:
        sizes: format -> bytes that it will take.
        formats: those that fit.
        first: whether it is the way that keeps most of the pictures.
        limit: what they fit into, in words.
    """

    stored: Stored
    sizes: Mapping[str, float]
    formats: tuple[str, ...]
    first: bool
    limit: str


def choose(scan: Scan, size: int, formats: Sequence[str], limit_bytes: float, limit: str) -> Choice:
    """What keeps most of the pictures, of the ways in which one of `formats` fits into `limit_bytes`.

    Raises:
        SettingError: none fits; says what would.
    """
    least: list[tuple[float, str, Stored]] = []
    for number, stored in enumerate(forecast.ways_to_store(size)):
        sizes = {name: float(predict_bytes(scan, _recipe(name, stored), _PICTURES)) for name in formats}
        needed = {name: forecast.needed_bytes(predicted) for name, predicted in sizes.items()}
        fitting = tuple(name for name in formats if needed[name] <= limit_bytes)
        if fitting:
            return Choice(stored, sizes, fitting, number == 0, limit)
        least += [(needed[name], name, stored) for name in formats]
    least_bytes, name, stored = min(least, key=lambda each: each[0])
    raise SettingError(
        f"no format fits into {limit}: the smallest, {name} of {stored.words(name)}, needs "
        f"{human_bytes(least_bytes)}; free that much, or give --max-bytes "
        f"{-int(-least_bytes // 1e6)}MB or more"
    )


def _recipe(name: str, stored: Stored) -> Recipe:
    return Recipe(format=name, size=stored.size, quality=stored.quality)


@dataclass(frozen=True, slots=True)
class Proof:
    """What converting brought.

    Attributes:
        rows: measured, in the order of `predicted`: the tree as it is, then what was converted.
        predicted: the same loaders, as they were predicted.
        other_cpu: share of the CPUs, 0 to 1, that other processes took meanwhile; None where not known.
    """

    rows: list[Row]
    predicted: list[Row]
    other_cpu: float | None

    @property
    def median_error(self) -> float:
        """How far off the predicted images/s are in the median, as a share of what was measured."""
        pairs = zip(self.predicted, self.rows, strict=True)
        return median(abs(before.rate.median / after.rate.median - 1) for before, after in pairs)

    @property
    def is_loss(self) -> bool:
        """Whether the trainer gets less from the dataset than from its tree in every turn."""
        return self.rows[-1].rate.high < self.rows[-2].rate.low


def prove(
    tree: Path,
    destination: Path,
    found: Recommendation,
    name: str,
    settings: Settings,
    convert_s: float | None,
    on_progress: Progress = unseen,
) -> Proof:
    """Feed the trainer from the tree, as today and by `loaders.build`, and from the dataset, by turns.

    Args:
        name: of the format that `destination` is in.
        convert_s: what converting took; None where an earlier call did some of it.
    """
    settings = ready(settings)
    named = {profile.name: row for profile, row in zip(found.profiles, found.rows, strict=True)}
    places = {free: tree for free in AS_IT_IS if free in named} | {name: destination}
    runs: dict[str, list[Loaded]] = {kind: [] for kind in places}
    others, total = OtherProcesses(), len(places) * settings.repeats
    on_progress(0, total)
    for turn in range(settings.repeats):
        for number, (kind, place) in enumerate(places.items(), 1):
            epoch_s = found.inputs.train_images / named[kind].loader.median
            first_epoch = page_cache.warm(place) and epoch_s < _FIRST_EPOCH_S
            runs[kind].append(sample.serve(place, kind, settings, first_epoch=first_epoch))
            on_progress(len(places) * turn + number, total)
    rows = [
        replace(
            named[kind],
            trainer_name="measured",
            loader=stats.estimate([run.loader for run in own]),
            cold=None,
            trainer=stats.estimate([run.trainer for run in own]),
            together=stats.estimate([run.together for run in own]),
            ratio=stats.estimate([run.together / run.trainer for run in own]),
        )
        for kind, own in runs.items()
    ]
    stored_bytes = open_dataset(destination).manifest.stored_bytes
    rows[-1] = replace(rows[-1], convert_s=convert_s, size_bytes=stored_bytes)
    return Proof(rows, [named[kind] for kind in places], others.share())


def find_begun(place: Path, scan: Scan, name: str, size: int) -> Recipe | None:
    """The recipe of what was begun or finished in `place`: the tree in the format `name`; else None.

    Only what `precache auto` would have chosen counts.

    Args:
        size: of training, in pixels: what is stored is no smaller.
    """
    try:
        if is_converted(place):
            manifest = open_dataset(place).manifest
            recipe, digest = manifest.recipe, manifest.source_digest
        else:
            header = read_header(place / JOURNAL_NAME) or {}
            recipe, digest = Recipe(**header["recipe"]), header["source_digest"]
    except (PrecacheError, KeyError, TypeError):
        return None
    if digest != scan.digest or recipe.format != name or not isinstance(recipe.size, int):
        return None
    plain = replace(_recipe(name, Stored(recipe.size, recipe.quality)), splits=recipe.splits)
    return recipe if recipe.size >= size and recipe == plain else None


def store(place: Path, found: Recommendation, proof: Proof) -> None:
    """Write what was predicted and what came beside the dataset in `place`."""
    content = {
        "version": 1,
        "median_error": proof.median_error,
        "measured": asdict(proof),
        "recommendation": found.to_json(),
    }
    with atomic_write(place / AUTO_NAME) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")
