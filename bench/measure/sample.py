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
from bench.report.forecast import BACKENDS, Loaded
from loaders.dataset import open_split
from precache.dataset.converted import open_dataset
from precache.errors import ImageError, SettingError, SourceError, check_range
from precache.pictures import images
from precache.pictures.reading import MAX_PIXELS
from precache.recipe import FORMAT_NAMES, Recipe
from precache.sources.base import SampleRef, Scan, reads_of
from precache.storage.urls import Url

SMALL_IMAGES = 24  # of the conversion that takes hardly longer than its start
_ROUNDS = 2  # shards per worker, at least
_MOST_SHARDS = 40
_CHOOSING_SHARE = 0.1  # of `limit_s`, that goes to decoding pictures of the sample once
_MOST_BYTES = 1e9  # that a converted sample may take


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """What is sampled, and how pictures are stored; checked once.

    Attributes:
        pictures: of the sample.
        stored_size, quality: of the conversions, whose other settings are the defaults of `Recipe`.
        limit_s: no further turn is begun that would end later than this; the first always is.
    """

    stored_size: int
    quality: int
    pictures: int = 200
    limit_s: float = math.inf

    def __post_init__(self) -> None:
        check_range("pictures", self.pictures, 1)
        for name in FORMAT_NAMES:
            self.recipe(name)  # SettingError now, not after measuring

    def recipe(self, format_name: str) -> Recipe:
        """The recipe of the conversion to `format_name`."""
        return Recipe(format=format_name, size=self.stored_size, quality=self.quality)


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


def make_trees(scan: Scan, sampling: Sampling, settings: Settings, folder: Path) -> Trees:
    """Copy the sample of `scan` into `folder`, once and repeated.

    Raises:
        SourceError: no picture of the sample can be decoded.
    """
    by_size = np.argsort(scan.samples.file_bytes, kind="stable")
    count = min(sampling.pictures, len(by_size))
    rows = by_size[((np.arange(count) + 0.5) * len(by_size) / count).astype(int)]
    usable: list[tuple[str, str]] = []
    sizes, stored_bytes, decode_s = [], 0, 0.0
    rendering = sampling.recipe("shards").rendering
    refs = [scan.samples[row] for row in np.random.default_rng(41).permutation(rows).tolist()]
    for ref, path in zip(refs, _on_disk(scan, refs, folder / "fetched"), strict=False):
        if len(usable) >= SMALL_IMAGES and decode_s > _CHOOSING_SHARE * sampling.limit_s:
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


def convert(tree: Path, destination: Path, recipe: Recipe, workers: int) -> float:
    """Convert as a user does, in a process of its own; seconds, its start included.

    Raises:
        WorkerError: it failed.
    """
    command = [sys.executable, "-m", "precache", "convert", str(tree.resolve()), str(destination)]
    command += ["--format", recipe.format, *shlex.split(recipe.to_flags()), "--workers", str(workers)]
    return run_watched(command).wall_s


def convert_twice(
    trees: Trees, whole_images: int, recipe: Recipe, workers: int, folder: Path
) -> tuple[tuple[float, int], tuple[float, int], float]:
    """Convert the small sample, and the large one into `folder`.

    The large one has as many shards as the whole tree would have, at most 40, and shards for all workers: a
    loader that reads whole shards ahead meets those of the next epoch while it holds the last ones of this,
    and with few shards they are often the same, and need not be read again.

    Returns:
        Seconds and pictures of each, and bytes of a picture as it is stored.
    """
    small_s = convert(trees.small, folder.with_name(f"{folder.name}-small"), recipe, workers)
    shards = max(_ROUNDS * workers, min(_MOST_SHARDS, math.ceil(whole_images / recipe.samples_per_shard)))
    shard_images = min(recipe.samples_per_shard, math.ceil(trees.large_images / shards))
    recipe = replace(recipe, shard_bytes=shard_images * recipe.picture_bytes)
    large_s = convert(trees.large, folder, recipe, workers)
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


def warm(folder: Path) -> None:
    """Read all of it; SettingError where the page cache has no space for it."""
    if not page_cache.warm(folder):
        raise SettingError(
            f"{folder}: is more than half of the free memory, so it cannot be measured with a warm cache; "
            f"free memory, or take a smaller tree"
        )
