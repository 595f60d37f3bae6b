"""What each format would bring: a sample measured, the whole predicted; once converted, both compared.

The sample is converted and loaded for real. It is repeated until a conversion takes seconds and every worker
has shards to write: with few pictures, what is measured is the start. Its pictures are spread over the sizes
of the tree's files, so that its mean size, which decides what decoding and storing cost, is the tree's.
"""

import json
import math
import mmap
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from bench.machine import disk, page_cache
from bench.machine.hardware import describe_machine
from bench.machine.monitor import OtherProcesses
from bench.measure.candidates import Candidate
from bench.measure.fresh import run_fresh, run_watched
from bench.measure.settings import Settings, check_fills_batch
from bench.measure.trainers import NullTrainer, check_trainer, resolve
from bench.measure.trial import measure, measure_trainer
from bench.report import forecast, stats
from bench.report.forecast import AS_IT_IS, BACKENDS, Inputs, Loaded, Profile
from bench.report.row import RAW_TREE, Row
from loaders.dataset import open_split
from precache.cli.commandline import human_bytes
from precache.conversion.destination import AUTO_NAME
from precache.conversion.journal import JOURNAL_NAME, read_header
from precache.conversion.shard_writer import predict_bytes
from precache.dataset.converted import is_converted, open_dataset
from precache.errors import (
    DatasetError,
    ImageError,
    MissingDependencyError,
    PrecacheError,
    SettingError,
    SourceError,
    WorkerError,
    check_choice,
)
from precache.pictures import images
from precache.pictures.reading import MAX_PIXELS
from precache.recipe import FORMAT_NAMES, Recipe
from precache.reporting import Progress, unseen
from precache.sources.base import SampleRef, Scan, reads_of
from precache.storage import atomic_write
from precache.storage.staging import temporary_folder
from precache.storage.urls import Url

SMALL_IMAGES = 24  # of the conversion that takes hardly longer than its start
_ROUNDS = 2  # shards per worker, at least
_MOST_SHARDS = 40
_CHOOSING_SHARE = 0.1  # of `limit_s`, that goes to decoding pictures of the sample once
_MOST_BYTES = 1e9  # that a converted sample may take
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
    recipe: Recipe,
    settings: Settings,
    *,
    formats: Sequence[str] = FORMAT_NAMES,
    pictures: int = 200,
    limit_s: float = math.inf,
    on_progress: Progress = unseen,
) -> Recommendation:
    """Measure a sample of a tree in every format and predict what the whole would give.

    Args:
        scan: of the tree.
        recipe: how pictures are stored, in whichever format.
        settings: of batches and the trainer; `repeats` turns of `seconds` each.
        formats: to convert to.
        pictures: of the sample.
        limit_s: no further turn is begun that would end later than this; the first always is.

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
    workers, others = settings.workers_alone, OtherProcesses()
    until_s = time.perf_counter() + limit_s
    on_progress(0, settings.repeats + 1)
    disk_bytes_per_s, read_s = _measure_disk(Path(tempfile.gettempdir()))
    skipped: dict[str, str] = {}
    with temporary_folder() as folder:
        trees = make_trees(scan, recipe, settings, folder, pictures, _CHOOSING_SHARE * limit_s)
        # decoding takes time in proportion to the files' bytes, and a sample misses the few largest ones
        larger = float(scan.samples.file_bytes.mean()) / trees.image_bytes
        profiles, places = {}, {}
        for name in [name for name in BACKENDS if name in AS_IT_IS or name in formats]:
            mean_bytes = float(scan.samples.file_bytes.mean())
            profile = Profile(name=name, image_bytes=mean_bytes, runs=(), cpus=workers)
            if name not in AS_IT_IS:
                try:
                    small, large, stored_bytes = convert_twice(
                        trees, len(scan.samples), replace(recipe, format=name), workers, folder / name
                    )
                except (DatasetError, MissingDependencyError, WorkerError) as error:
                    skipped[name] = str(error)
                    continue
                startup_s, image_s = forecast.fit_conversion(small, large, workers)
                profile = replace(
                    profile, image_bytes=stored_bytes, startup_s=startup_s, image_s=image_s * larger
                )
            profiles[name], places[name] = profile, trees.large if name in AS_IT_IS else folder / name
        on_progress(1, settings.repeats + 1)
        runs: dict[str, list[Loaded]] = {name: [] for name in profiles}
        turn_s, repeats = 0.0, 0
        while repeats < settings.repeats and (repeats == 0 or time.perf_counter() + turn_s <= until_s):
            start_s = time.perf_counter()
            serve_all(places, settings, runs, skipped)
            repeats, turn_s = repeats + 1, time.perf_counter() - start_s
            on_progress(1 + repeats, settings.repeats + 1)
    on_progress(settings.repeats + 1, settings.repeats + 1)
    found = []
    for name in [name for name in profiles if name not in skipped]:
        slower = larger if name in AS_IT_IS else 1.0
        found.append(
            replace(profiles[name], runs=[replace(run, loader=run.loader / slower) for run in runs[name]])
        )
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
        "stored_size": recipe.size,
        "quality": recipe.quality,
        "source": scan.root.name,
        "workers": workers,
        "trainer": settings.trainer,
        "page_cache": "warm",
        "repeats": repeats,
        "sample_images": trees.large_images,
        "sample_pictures": trees.pictures,
        "other_cpu": others.share(),
    }
    machine = describe_machine(settings.device)
    return Recommendation(written, machine, inputs, found, forecast.predict(found, inputs), skipped)


def serve_all(
    places: Mapping[str, Path],
    settings: Settings,
    runs: Mapping[str, list[Loaded]],
    skipped: dict[str, str],
) -> None:
    """One turn: each loader that did not fail before, added to `runs`; what fails goes to `skipped`."""
    for name in [name for name in places if name not in skipped]:
        if not page_cache.warm(places[name]):
            raise SettingError(
                f"{places[name]}: is more than half of the free memory, so it cannot be measured with a warm "
                f"cache; free memory, or take a smaller tree"
            )
        try:
            runs[name].append(serve(places[name], name, settings))
        except (DatasetError, MissingDependencyError, WorkerError) as error:
            if name == RAW_TREE:
                raise
            skipped[name] = str(error)


def ready(settings: Settings) -> Settings:
    """As a recommendation measures: random crops, no checksums; SettingError for an unknown trainer.

    Training crops at random, and centre crops are less work for some loaders than for others. It compares
    checksums of each picture once, and a sample is served again and again.
    """
    trainer = resolve(settings.trainer, settings.device)
    check_trainer(trainer, settings.size)  # an error now, not later
    return replace(settings, trainer=trainer, augment="train", check="never")


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
class Trees:
    """The sample, in two sizes.

    Attributes:
        small, large: trees; the latter holds each picture as often as the others.
        small_images, large_images: of them.
        pictures: of the sample, each counted once.
        image_bytes: of a file of the sample, on average.
    """

    small: Path
    large: Path
    small_images: int
    large_images: int
    pictures: int
    image_bytes: float


def make_trees(
    scan: Scan,
    recipe: Recipe,
    settings: Settings,
    folder: Path,
    pictures: int = 200,
    choosing_s: float = math.inf,
) -> Trees:
    """Copy the sample of `scan` into `folder`, once and repeated.

    Args:
        choosing_s: after so many seconds of decoding them, the sample has enough pictures.

    Raises:
        SourceError: no picture of the sample can be decoded.
    """
    by_size = np.argsort(scan.samples.file_bytes, kind="stable")
    count = min(pictures, len(by_size))
    rows = by_size[((np.arange(count) + 0.5) * len(by_size) / count).astype(int)]
    usable: list[tuple[str, str]] = []
    sizes, stored_bytes, decode_s = [], 0, 0.0
    rendering = replace(recipe, format="shards").rendering
    refs = [scan.samples[row] for row in np.random.default_rng(41).permutation(rows).tolist()]
    for ref, path in zip(refs, _on_disk(scan, refs, folder / "fetched"), strict=False):
        if len(usable) >= SMALL_IMAGES and decode_s > choosing_s:
            break  # large pictures: fewer of them, at random, for they are permuted
        start_s = time.perf_counter()
        try:
            pixels, _ = images.render(images.read_bytes(path), path, rendering)
        except ImageError:
            continue  # a conversion would leave it out, too
        decode_s += time.perf_counter() - start_s
        usable.append((path, scan.classes[ref.label]))
        sizes.append(ref.bytes)
        stored_bytes += pixels.nbytes
    if not usable:
        raise SourceError(f"{scan.root}: none of {count:,} pictures taken from it can be decoded")
    wanted = settings.seconds * settings.workers_alone * len(usable) / max(decode_s, 1e-9)
    fill_a_batch = math.ceil(settings.batch_size / len(usable))
    copies = max(fill_a_batch, int(min(wanted / len(usable), _MOST_BYTES / stored_bytes)))
    _copy_tree(usable[:SMALL_IMAGES], 1, folder / "small")
    _copy_tree(usable, copies, folder / "large")
    return Trees(
        small=folder / "small",
        large=folder / "large",
        small_images=min(SMALL_IMAGES, len(usable)),
        large_images=copies * len(usable),
        pictures=len(usable),
        image_bytes=float(np.mean(sizes)),
    )


def _on_disk(scan: Scan, refs: Sequence[SampleRef], folder: Path) -> Iterator[str]:
    """Paths of the pictures; those of a URL are fetched into `folder`."""
    if not isinstance(scan.root, Url):
        yield from (f"{scan.root}/{ref.path}" for ref in refs)
        return
    folder.mkdir()
    for number, (ref, read) in enumerate(zip(refs, reads_of(scan.source, refs, MAX_PIXELS), strict=True)):
        path = folder / f"{number:06d}{Path(ref.path).suffix}"
        try:
            content = read()
        except ImageError:  # too large for a picture: nobody can decode the empty file either
            content = b""
        path.write_bytes(content if isinstance(content, bytes) else content.tobytes())
        yield str(path)


def _copy_tree(pictures: list[tuple[str, str]], copies: int, tree: Path) -> None:
    """Files named by copy and number, in folders named by class; the copies are links to the first."""
    for number, (path, class_name) in enumerate(pictures):
        (tree / class_name).mkdir(parents=True, exist_ok=True)
        suffix = Path(path).suffix
        first = tree / class_name / f"0-{number}{suffix}"
        shutil.copyfile(path, first)
        for copy in range(1, copies):
            os.link(first, first.with_name(f"{copy}-{number}{suffix}"))


def convert_twice(
    trees: Trees, whole_images: int, recipe: Recipe, workers: int, folder: Path
) -> tuple[tuple[float, int], tuple[float, int], float]:
    """Convert the small sample, and the large one into `folder`, as a user does: by a process of its own.

    The large one has as many shards as the whole tree would have, at most 40, and shards for all workers: a
    loader that reads whole shards ahead meets those of the next epoch while it holds the last ones of this,
    and with few shards they are often the same, and need not be read again.

    Returns:
        Seconds, start included, and pictures of each, and bytes of a picture as it is stored.

    Raises:
        WorkerError: it failed.
    """

    def convert(tree: Path, destination: Path, recipe: Recipe) -> float:
        words = ["convert", str(tree.resolve()), str(destination), "--format", recipe.format]
        words += [*shlex.split(recipe.to_flags()), "--workers", str(workers)]
        return run_watched([sys.executable, "-m", "precache", *words])[0]

    small_s = convert(trees.small, folder.with_name(f"{folder.name}-small"), recipe)
    shards = max(_ROUNDS * workers, min(_MOST_SHARDS, math.ceil(whole_images / recipe.samples_per_shard)))
    shard_images = min(recipe.samples_per_shard, math.ceil(trees.large_images / shards))
    large_s = convert(trees.large, folder, replace(recipe, shard_bytes=shard_images * recipe.picture_bytes))
    image_bytes = open_dataset(folder).manifest.stored_bytes / trees.large_images
    return (small_s, trees.small_images), (large_s, trees.large_images), image_bytes


def serve(path: Path, name: str, settings: Settings, *, first_epoch: bool = True) -> Loaded:
    """Run the loader of the format `name` on what lies in `path`, each run for at least `settings.seconds`.

    Args:
        name: of `bench.report.forecast.BACKENDS`.
        first_epoch: whether the loader alone is measured from the second epoch on: the first opens
            everything.

    Raises:
        WorkerError: a process dies; holds the reason.
    """
    data = open_split(path.resolve(), "train")
    reads = Candidate(BACKENDS[name], path.resolve(), data).reads
    spec = settings.of(BACKENDS[name], reads, len(data.classes), warmup=0, batches=1, monitored=False)
    alone = run_fresh(measure, replace(spec, trainer=NullTrainer.name, first_epoch=first_epoch))
    half_s = spec.seconds / 2
    trainer = run_fresh(measure_trainer, replace(spec, seconds=half_s))
    together = run_fresh(measure, replace(spec, warmup_s=half_s))
    serial_s = alone.serial_s / alone.images
    return Loaded(alone.images_per_s, trainer.images_per_s, together.images_per_s, serial_s)


def choose(
    scan: Scan, size: int, formats: Sequence[str], limit_bytes: float, limit: str
) -> tuple[Recipe, tuple[str, ...]]:
    """What keeps most of the pictures, of the ways in which one of `formats` fits into `limit_bytes`.

    Returns:
        How pictures are stored, and which formats fit.

    Raises:
        SettingError: none fits; says what would.
    """
    least: list[tuple[float, Recipe]] = []
    for stored, quality in forecast.ways_to_store(size):
        recipes = [Recipe(format=name, size=stored, quality=quality) for name in formats]
        needed = {
            recipe.format: forecast.SLACK * predict_bytes(scan, recipe, _PICTURES) for recipe in recipes
        }
        if fitting := tuple(name for name in formats if needed[name] <= limit_bytes):
            return recipes[0], fitting
        least += [(needed[recipe.format], recipe) for recipe in recipes]
    least_bytes, recipe = min(least, key=lambda each: each[0])
    raise SettingError(
        f"no format fits into {limit}: the smallest, {recipe.format} of {forecast.stored_words(recipe)}, "
        f"needs {human_bytes(least_bytes)}; free that much, or give --max-bytes "
        f"{-int(-least_bytes // 1e6)}MB or more"
    )


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
    settings: Settings,
    convert_s: float | None,
    on_progress: Progress = unseen,
) -> Proof:
    """Feed the trainer from the tree, as today and by `loaders.build`, and from the dataset, by turns.

    Both, predicted and measured, are kept beside the dataset, in AUTO_NAME.

    Args:
        convert_s: what converting took; None where an earlier call did some of it.
    """
    settings, manifest = ready(settings), open_dataset(destination).manifest
    named = {profile.name: row for profile, row in zip(found.profiles, found.rows, strict=True)}
    places = {name: tree for name in AS_IT_IS if name in named} | {manifest.recipe.format: destination}
    runs: dict[str, list[Loaded]] = {kind: [] for kind in places}
    others, total = OtherProcesses(), len(places) * settings.repeats
    on_progress(0, total)
    for turn in range(settings.repeats):
        for number, (kind, place) in enumerate(places.items(), 1):
            epoch_s = found.inputs.train_images / named[kind].loader.median
            first_epoch = page_cache.warm(place) and epoch_s < _FIRST_EPOCH_S
            runs[kind].append(serve(place, kind, settings, first_epoch=first_epoch))
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
    rows[-1] = replace(rows[-1], convert_s=convert_s, size_bytes=manifest.stored_bytes)
    proof = Proof(rows, [named[kind] for kind in places], others.share())
    content = {
        "version": 1,
        "median_error": proof.median_error,
        "measured": asdict(proof),
        "recommendation": found.to_json(),
    }
    with atomic_write(destination / AUTO_NAME) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")
    return proof


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
    plain = Recipe(format=name, size=recipe.size, quality=recipe.quality, splits=recipe.splits)
    return recipe if recipe.size >= size and recipe == plain else None
