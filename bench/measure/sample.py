"""A sample of a tree, converted and loaded for real: what the predictions of `bench recommend` rest on.

The sample is repeated until a conversion takes seconds and every worker has shards to write: with few
pictures, what is measured is the start. Its pictures are spread over the sizes of the tree's files, so
that its mean size, which decides what decoding and storing cost, is the tree's.
"""

import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.machine import page_cache
from bench.measure.candidates import Candidate
from bench.measure.fresh import run_fresh, run_watched
from bench.measure.settings import Settings
from bench.measure.trainers import NullTrainer
from bench.measure.trial import measure, measure_trainer
from bench.report.forecast import AS_IT_IS, BACKENDS
from loaders.dataset import open_split
from precache import images
from precache.dataset.converted import open_dataset
from precache.errors import ImageError, SettingError, SourceError, check_range
from precache.pictures.reading import MAX_PIXELS
from precache.recipe import FORMAT_NAMES, Recipe
from precache.sources.ahead import read_ahead
from precache.sources.base import SampleRef, Scan
from precache.storage.urls import Url

SMALL_IMAGES = 24  # of the conversion that takes hardly longer than its start
_ROUNDS = 2  # shards per worker, at least
_MOST_SHARDS = 40
_CHOOSING_SHARE = 0.1  # of `limit_s`, that goes to decoding pictures of the sample once
_MOST_BYTES = 2e9  # that a converted sample may take


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """What is sampled, and how pictures are stored; checked once.

    Attributes:
        pictures: of the sample.
        stored_size, quality: of the conversions, whose other settings are the defaults of `Recipe`.
        scratch: the folder to convert into.
        limit_s: no further turn is begun that would end later than this; the first always is.
    """

    stored_size: int
    quality: int
    scratch: Path
    pictures: int = 200
    limit_s: float = math.inf

    def __post_init__(self) -> None:
        check_range("pictures", self.pictures, 1)
        for name in FORMAT_NAMES:
            self.recipe(name)  # SettingError now, not after measuring
        if not self.scratch.is_dir():
            raise SettingError(f"{self.scratch}: no such folder; name one with room for the conversions")

    def recipe(self, format_name: str, shard_images: int | None = None) -> Recipe:
        """The recipe of the conversion to `format_name`, with so many pictures a shard if given."""
        recipe = Recipe(format=format_name, size=self.stored_size, quality=self.quality)
        if shard_images is None:
            return recipe
        return replace(recipe, shard_bytes=shard_images * recipe.picture_bytes)


@dataclass(frozen=True, slots=True)
class Trees:
    """The sample, in two sizes.

    Attributes:
        small, large: trees; the latter holds each picture as often as the others.
        small_images, large_images: of them.
        pictures: of the sample, each counted once.
        shard_images: pictures of a shard, at most, for the larger one to have shards for all workers.
        image_bytes: of a file of the sample, on average.
    """

    small: Path
    large: Path
    small_images: int
    large_images: int
    pictures: int
    shard_images: int
    image_bytes: float


@dataclass(frozen=True, slots=True)
class Converted:
    """One conversion: how long it took, and bytes of all files."""

    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """One loader alone, the trainer alone, and both together, each in a process of its own.

    Attributes:
        loader, trainer, together: images/s; the trainer alone has a batch that stays on the device.
        serial_s: CPU time per picture, of the loader alone, of the busiest thread that there is one of,
            without what it does of the filling of batches: more workers relieve it of that.
    """

    loader: float
    trainer: float
    together: float
    serial_s: float


def make_trees(scan: Scan, sampling: Sampling, settings: Settings, folder: Path) -> Trees:
    """Copy the sample of `scan` into `folder`, once and repeated.

    Raises:
        SourceError: no picture of the sample can be decoded.
    """
    by_size = np.argsort(scan.samples.file_bytes, kind="stable")
    count = min(sampling.pictures, len(by_size))
    rows = by_size[((np.arange(count) + 0.5) * len(by_size) / count).astype(int)]
    kept: list[tuple[str, str]] = []
    sizes, stored_bytes, decode_s = [], 0, 0.0
    rendering = sampling.recipe("shards").rendering
    refs = [scan.samples[row] for row in np.random.default_rng(41).permutation(rows).tolist()]
    for ref, path in zip(refs, _on_disk(scan, refs, folder / "fetched"), strict=False):
        if len(kept) >= SMALL_IMAGES and decode_s > _CHOOSING_SHARE * sampling.limit_s:
            break  # large pictures: fewer of them, at random, for they are permuted
        start_s = time.perf_counter()
        try:
            pixels, _ = images.render(images.read_bytes(path), path, rendering)
        except ImageError:
            continue  # a conversion would leave it out, too
        decode_s += time.perf_counter() - start_s
        kept.append((path, scan.classes[ref.label]))
        sizes.append(ref.bytes)
        stored_bytes += pixels.nbytes
    if not kept:
        raise SourceError(f"{scan.root}: none of {count:,} pictures taken from it can be decoded")
    workers = settings.workers_alone
    wanted = settings.seconds * workers * len(kept) / max(decode_s, 1e-9)
    fill_a_batch = math.ceil(settings.batch_size / len(kept))
    copies = max(fill_a_batch, int(min(wanted / len(kept), _MOST_BYTES / stored_bytes)))
    large = copies * len(kept)
    shard_images = min(sampling.recipe("shards").samples_per_shard, math.ceil(large / (_ROUNDS * workers)))
    _copy_tree(kept[:SMALL_IMAGES], 1, folder / "small")
    _copy_tree(kept, copies, folder / "large")
    return Trees(
        small=folder / "small",
        large=folder / "large",
        small_images=min(SMALL_IMAGES, len(kept)),
        large_images=large,
        pictures=len(kept),
        shard_images=shard_images,
        image_bytes=float(np.mean(sizes)),
    )


def _on_disk(scan: Scan, refs: Sequence[SampleRef], folder: Path) -> Iterator[str]:
    """Paths of the pictures; those of a URL are fetched into `folder`."""
    if not isinstance(scan.root, Url):
        yield from (f"{scan.root}/{ref.path}" for ref in refs)
        return
    folder.mkdir()
    for number, (ref, read) in enumerate(zip(refs, read_ahead(scan.source, refs, MAX_PIXELS), strict=True)):
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


def convert(tree: Path, destination: Path, recipe: Recipe, workers: int) -> Converted:
    """Convert as a user does, in a process of its own; the time includes its start."""
    command = [sys.executable, "-m", "precache", "convert", str(tree.resolve()), str(destination)]
    command += ["--format", recipe.format, *shlex.split(recipe.to_flags()), "--workers", str(workers)]
    watched = run_watched(command)
    return Converted(watched.wall_s, open_dataset(destination).manifest.stored_bytes)


def shards_to_serve(trees: Trees, whole_images: int, recipe: Recipe) -> int:
    """Pictures of a shard that make as many shards of the sample as the whole tree has, but not more than 40.

    A loader that reads whole shards ahead meets those of the next epoch while it holds the last ones of
    this: with few shards they are often the same, and need not be read again.
    """
    shards = min(_MOST_SHARDS, math.ceil(whole_images / recipe.samples_per_shard))
    return math.ceil(trees.large_images / shards)


def run_format(
    trees: Trees, name: str, sampling: Sampling, settings: Settings, folder: Path, served: Path | None
) -> tuple[Converted | None, Loaded]:
    """Convert the larger sample to the format `name`, in `folder`, and run its loader.

    Args:
        name: of `bench.report.forecast.BACKENDS`; the tree as it is needs no conversion.
        served: what the loader reads instead.

    Raises:
        SettingError: the tree, or what it is converted to, does not fit into the page cache.
        WorkerError: the conversion or the loader fails.
    """
    path, converted = trees.large, None
    _warm(path)
    try:
        if name not in AS_IT_IS:
            path = folder / "out"
            recipe = sampling.recipe(name, trees.shard_images)
            converted = convert(trees.large, path, recipe, settings.workers_alone)
        path = path if served is None else served
        _warm(path)
        return converted, serve(path, name, settings)
    finally:
        shutil.rmtree(folder / "out", ignore_errors=True)


def serve(path: Path, name: str, settings: Settings, *, first_epoch: bool = True) -> Loaded:
    """Run the loader of the format `name` on what lies in `path`, each run for at least `settings.seconds`.

    Args:
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


def _warm(folder: Path) -> None:
    if not page_cache.warm(folder):
        raise SettingError(
            f"{folder}: is more than half of the free memory, so it cannot be measured with a warm cache; "
            f"free memory, or take a smaller tree"
        )
