"""What each format would bring: a sample measured, the whole predicted; once converted, both compared."""

import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.machine import measurements, page_cache
from bench.machine.measurements import Hardware, HardwareSpec
from bench.machine.others import OtherProcesses
from bench.measure import sample
from bench.measure.sample import Converted, Loaded, Sampling, Trees
from bench.measure.settings import Settings, check_fills_batch
from bench.measure.trainers import check_trainer, resolve
from bench.report import forecast, stats
from bench.report.forecast import AS_IT_IS, BACKENDS, JPEG_NAMES, Inputs, Profile, Stored
from bench.report.row import RAW_TREE, Row
from precache.console.commandline import human_bytes
from precache.console.progress import Progress, unseen
from precache.conversion.estimate import predict_bytes
from precache.conversion.journal_header import JOURNAL_NAME, read_header
from precache.dataset.converted import is_converted, open_dataset
from precache.destination import AUTO_NAME
from precache.errors import (
    DatasetError,
    MissingDependencyError,
    PrecacheError,
    SettingError,
    WorkerError,
    check_choice,
)
from precache.recipe import FORMAT_NAMES, Recipe
from precache.sources.base import Scan
from precache.storage import atomic_write, read_regular

CHECK = "never"
"""No checksums: a training compares each picture once, and a sample is served again and again."""
AUGMENT = "train"
"""What training does; centre crops are less work for some loaders than for others."""
_RANDOM_READS = (*AS_IT_IS, "shards")
_DISK_BLOCKS = {4 << 10: "disk, random 4 KiB", 128 << 10: "disk, random 128 KiB"}
_PICTURES = 100  # that tell the size of all
_FIRST_EPOCH_S = 10.0  # one that takes longer does not go before what is measured


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A finished prediction, with what one needs to repeat it.

    Attributes:
        rows: predicted, the tree as it is first; ranges are over the turns.
        skipped: format -> why it could not be measured.
    """

    settings: dict[str, Any]
    hardware: Hardware
    inputs: Inputs
    profiles: list[Profile]
    rows: list[Row]
    skipped: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"version": 1, **asdict(self), "hardware": self.hardware.to_json()}

    def what_if(self, inputs: Inputs) -> "Recommendation":
        """The same measurements, for other `inputs`."""
        return replace(self, inputs=inputs, rows=forecast.predict(self.profiles, inputs))


@dataclass(slots=True)
class _Runs:
    """Of one format, turn by turn: small and large conversions of the sample, and its loader."""

    small: list[Converted] = field(default_factory=list)
    large: list[Converted] = field(default_factory=list)
    loaders: list[Loaded] = field(default_factory=list)

    def of(self, turns: slice) -> "_Runs":
        """Those of some turns."""
        return _Runs(self.small[turns], self.large[turns], self.loaders[turns])


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
    total, done = settings.repeats * len(names) + 1, 0

    def step() -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    on_progress(0, total)
    others, begun_s = OtherProcesses(), time.perf_counter()
    hardware = _hardware(scan, sampling, settings)
    step()
    with tempfile.TemporaryDirectory(dir=sampling.scratch, prefix="bench-recommend-") as scratch:
        folder = Path(scratch)
        trees = sample.make_trees(scan, sampling, settings, folder)
        turns = _Turns(scan, sampling, settings, trees, folder, hardware, begun_s + sampling.limit_s)
        turns.run(names, step)
    on_progress(total, total)
    repeats = len(turns.runs[RAW_TREE].loaders)
    profiles, inputs = turns.predicted_from(slice(None))
    by_turn = [forecast.predict(*turns.predicted_from(slice(n, n + 1))) for n in range(repeats)]
    written = {
        **{name: getattr(settings, name) for name in ("size", "batch_size", "seconds", "augment", "check")},
        **{name: getattr(sampling, name) for name in ("stored_size", "quality", "pictures")},
        "source": scan.root.name,
        "scratch": str(sampling.scratch),
        "workers": settings.workers_alone,
        "trainer": settings.trainer,
        "page_cache": "warm",
        "limit_s": sampling.limit_s if math.isfinite(sampling.limit_s) else None,
        "repeats": repeats,
        "sample_images": trees.large_images,
        "sample_pictures": trees.pictures,
        "other_cpu": others.share(),
    }
    rows = forecast.widened(forecast.predict(profiles, inputs), by_turn)
    return Recommendation(written, hardware, inputs, profiles, rows, turns.skipped)


def ready(settings: Settings) -> Settings:
    """As a recommendation measures: random crops, no checksums; SettingError for an unknown trainer."""
    trainer = resolve(settings.trainer, settings.device)
    check_trainer(trainer, settings.size)  # an error now, not later
    return replace(settings, trainer=trainer, augment=AUGMENT, check=CHECK)


@dataclass(slots=True)
class _Turns:
    """The sample in every format, turn by turn, as often as the repeats and the time allow."""

    scan: Scan
    sampling: Sampling
    settings: Settings
    trees: Trees
    folder: Path
    hardware: Hardware
    until_s: float
    runs: dict[str, _Runs] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def run(self, names: Sequence[str], step: Callable[[], None]) -> None:
        """What each format gave goes to `runs`, why others gave nothing to `skipped`."""
        self.runs = {name: _Runs() for name in names}
        served: dict[str, Path] = {}
        turn_s = 0.0
        for turn in range(self.settings.repeats):
            start_s = time.perf_counter()
            if turn and start_s + turn_s > self.until_s:
                break
            for name in [name for name in names if name not in self.skipped]:
                try:
                    if name in JPEG_NAMES and name not in served:
                        served[name] = self._convert_to_serve(name)
                    self._measure(name, served.get(name))
                except (DatasetError, MissingDependencyError, WorkerError) as error:
                    if name == RAW_TREE:
                        raise
                    self.skipped[name] = str(error)
                step()
            turn_s = time.perf_counter() - start_s
        self.runs = {name: runs for name, runs in self.runs.items() if name not in self.skipped}

    def _convert_to_serve(self, name: str) -> Path:
        path, recipe = self.folder / f"served-{name}", self.sampling.recipe(name)
        shard_images = sample.shards_to_serve(self.trees, len(self.scan.samples), recipe)
        recipe = self.sampling.recipe(name, shard_images)
        sample.convert(self.trees.large, path, recipe, self.settings.workers_alone)
        return path

    def _measure(self, name: str, served: Path | None) -> None:
        runs, out = self.runs[name], self.folder / "out"
        if name not in AS_IT_IS:
            recipe, workers = self.sampling.recipe(name), self.settings.workers_alone
            runs.small.append(sample.convert(self.trees.small, out, recipe, workers))
            shutil.rmtree(out)
        converted, loaded = sample.run_format(
            self.trees, name, self.sampling, self.settings, self.folder, served
        )
        runs.loaders.append(loaded)
        runs.large += [] if converted is None else [converted]

    def predicted_from(self, turns: slice) -> tuple[list[Profile], Inputs]:
        """What predictions from some of the turns rest on."""
        runs = {name: each.of(turns) for name, each in self.runs.items()}
        profiles = [self._profile(name, each) for name, each in runs.items()]
        return profiles, self._inputs([loaded for each in runs.values() for loaded in each.loaders])

    def _profile(self, name: str, runs: _Runs) -> Profile:
        startup_s = image_s = 0.0
        image_bytes, trees = float(self.scan.samples.file_bytes.mean()), self.trees
        # Decoding takes time in proportion to the files' bytes, and a sample misses the few largest ones.
        larger = image_bytes / trees.image_bytes
        if name not in AS_IT_IS:
            startup_s, image_s = forecast.fit_conversion(
                median(run.seconds for run in runs.small),
                trees.small_images,
                median(run.seconds for run in runs.large),
                trees.large_images,
                trees.shard_images,
                self.settings.workers_alone,
            )
            image_bytes = runs.large[0].bytes / trees.large_images
        return Profile(
            name=name,
            image_bytes=image_bytes,
            startup_s=startup_s,
            image_s=image_s * larger,
            shard_images=self.sampling.recipe("shards").samples_per_shard,  # the same for all formats
            loader_images_per_s=median(run.loader for run in runs.loaders)
            / (larger if name in AS_IT_IS else 1.0),
            cpus=self.settings.workers_alone,
            serial_s=median(run.serial_s for run in runs.loaders),
            overlap=min(1.0, median(run.together / min(run.loader, run.trainer) for run in runs.loaders)),
            random_reads=name in _RANDOM_READS,
        )

    def _inputs(self, runs: Sequence[Loaded]) -> Inputs:
        """What this machine is, and this tree."""
        reads = [(size, self.hardware.value(name)) for size, name in _DISK_BLOCKS.items()]
        sequential = self.hardware.value("disk, sequential read")
        copied = self.hardware.value("memory copy, one thread") or 0.0
        (small_bytes, small), (large_bytes, large) = reads
        read_s = 0.0
        if small is not None and large is not None:
            read_s = forecast.read_time((small_bytes, small * 1e6), (large_bytes, large * 1e6))
        return Inputs(
            images=len(self.scan.samples),
            train_images=train_images(self.scan),
            cpus=self.settings.workers_alone,
            gpus=1,
            trainer_images_per_s=median(run.trainer for run in runs),
            # files that never leave memory are read as fast as memory is copied
            disk_bytes_per_s=copied * 1e9 if sequential is None else sequential * 1e6,
            read_s=read_s,
            memory_bytes=float(psutil.virtual_memory().total),
        )


def train_images(scan: Scan) -> int:
    """Pictures of an epoch: of the split `train` where there is one."""
    names = scan.samples.split_names
    if "train" not in names:
        return len(scan.samples)
    return int((scan.samples.splits == names.index("train")).sum())


def _hardware(scan: Scan, sampling: Sampling, settings: Settings) -> Hardware:
    """As quickly as it is asked for."""
    sizes: dict[str, Any] = (
        {} if math.isinf(sampling.limit_s) else {"buffer_bytes": 64 << 20, "file_bytes": 128 << 20}
    )
    seconds = min(0.2, settings.seconds / 5)
    quick = HardwareSpec(scratch=sampling.scratch, repeats=settings.repeats, seconds=seconds, **sizes)
    data = {"pictures": len(scan.samples), "file_bytes": int(scan.samples.file_bytes.sum())}
    return measurements.measure(quick, measurements.sample_jpegs(scan), data)


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


def choose(scan: Scan, size: int, formats: Sequence[str], room_bytes: float, limit: str) -> Choice:
    """What keeps most of the pictures, of the ways in which one of `formats` fits into `room_bytes`.

    Raises:
        SettingError: none fits; says what would.
    """
    least: list[tuple[float, str, Stored]] = []
    for number, stored in enumerate(forecast.ways_to_store(size)):
        sizes = {name: float(predict_bytes(scan, _recipe(name, stored), _PICTURES)) for name in formats}
        needed = {name: forecast.needed_bytes(predicted) for name, predicted in sizes.items()}
        fitting = tuple(name for name in formats if needed[name] <= room_bytes)
        if fitting:
            return Choice(stored, sizes, fitting, number == 0, limit)
        least += [(needed[name], name, stored) for name in formats]
    least_bytes, name, stored = min(least, key=lambda each: each[0])
    raise SettingError(
        f"no format fits into {limit}: the smallest, {name} of {stored.words(name)}, needs "
        f"{human_bytes(least_bytes)}; make that room, or give --max-bytes "
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
    rows = [_measured(named[kind], own) for kind, own in runs.items()]
    stored_bytes = open_dataset(destination).manifest.stored_bytes
    rows[-1] = replace(rows[-1], convert_s=convert_s, size_bytes=stored_bytes)
    return Proof(rows, [named[kind] for kind in places], others.share())


def _measured(predicted: Row, runs: Sequence[Loaded]) -> Row:
    return replace(
        predicted,
        trainer_name="measured",
        loader=stats.estimate([run.loader for run in runs]),
        cold=None,
        trainer=stats.estimate([run.trainer for run in runs]),
        together=stats.estimate([run.together for run in runs]),
        ratio=stats.estimate([run.together / run.trainer for run in runs]),
    )


@dataclass(frozen=True, slots=True)
class Begun:
    """A conversion of the same tree by an earlier call, or by `precache convert`."""

    place: Path
    recipe: Recipe
    finished: bool

    @property
    def stored(self) -> Stored:
        """How its pictures are stored."""
        assert isinstance(self.recipe.size, int), "one side, see `find_begun`"
        return Stored(self.recipe.size, self.recipe.quality)


def find_begun(place: Path, scan: Scan, name: str, size: int) -> Begun | None:
    """The conversion of the tree to the format `name` in `place`; None without one of `precache auto`.

    Args:
        size: of training, in pixels: what is stored is no smaller.
    """
    finished = is_converted(place)
    try:
        if finished:
            manifest = open_dataset(place).manifest
            recipe, digest = manifest.recipe, manifest.source_digest
        else:
            header = read_header(place / JOURNAL_NAME) or {}
            recipe, digest = Recipe(**header["recipe"]), header["source_digest"]
    except (PrecacheError, KeyError, TypeError):
        return None
    if digest != scan.digest or recipe.format != name:
        return None
    if not isinstance(recipe.size, int) or recipe.size < size:
        return None
    found = Begun(place, recipe, finished)
    return found if replace(_recipe(name, found.stored), splits=recipe.splits) == recipe else None


def store(place: Path, source_digest: str, found: Recommendation, proof: Proof, said: list[str]) -> None:
    """Write what was predicted and what came beside the dataset in `place`."""
    content = {
        "version": 1,
        "source_digest": source_digest,
        "said": said,
        "median_error": proof.median_error,
        "measured": asdict(proof),
        "recommendation": found.to_json(),
    }
    with atomic_write(place / AUTO_NAME) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")


def read_said(place: Path, scan: Scan) -> list[str] | None:
    """What was said of the dataset of this tree when it was made; None if nothing whole is there."""
    try:
        content: dict[str, Any] = json.loads(read_regular(place / AUTO_NAME))
        said: list[str] = content["said"]
        ours = content["version"] == 1 and content["source_digest"] == scan.digest
        return said if ours and all(isinstance(line, str) for line in said) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
