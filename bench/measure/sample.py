"""Sample of a tree: copies of some of its pictures, and the time that converting them takes.

The sample is converted and loaded for real. Its pictures are copied several times, until a conversion takes
seconds and every worker has shards to write; with fewer, mostly the start of processes would be measured.
Its pictures are spread over the sizes of the tree's files, so that its mean size, which decides what decoding
and storing cost, is that of the tree.
"""

import math
import os
import shlex
import shutil
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bench.measure.processes import run_command
from bench.measure.settings import Settings
from precache.dataset.converted import open_dataset
from precache.errors import ImageError, SourceError
from precache.pictures import images, kinds
from precache.recipe import Recipe
from precache.sources.base import Scan

SMALL_IMAGES = 24
"""Limit of pictures in the small tree, whose conversion takes hardly longer than its processes' start."""
_MIN_SHARDS_PER_WORKER = 2
_MAX_SHARDS = 40
_MAX_STORED_BYTES = 1e9  # of a converted sample


@dataclass(frozen=True, slots=True)
class Trees:
    """Two trees on disk with the pictures of the sample: a small one, and a large one with copies.

    Attributes:
        small, large: folders of the trees; the large one holds each picture equally often.
        small_images: number of pictures in the small tree.
        copies: number of times that the large tree holds each picture.
        pictures: number of pictures of the sample, each counted once.
        image_bytes: mean size of a file of the sample.
        paths: paths below the scanned tree of all pictures that were tried, damaged ones included.
        damaged: reasons why precache cannot decode some of them, by path.
        undecodable: kinds of the damaged ones for which this Pillow has no decoder, by path.
    """

    small: Path
    large: Path
    small_images: int
    copies: int
    pictures: int
    image_bytes: float
    paths: tuple[str, ...] = ()
    damaged: dict[str, str] = field(default_factory=dict)
    undecodable: dict[str, str] = field(default_factory=dict)

    @property
    def large_images(self) -> int:
        """Number of pictures in the large tree."""
        return self.copies * self.pictures


def train_images(scan: Scan) -> int:
    """Return the number of pictures of an epoch: those of the split `train`, or all if there is none."""
    names = scan.samples.split_names
    if "train" not in names:
        return len(scan.samples)
    return int((scan.samples.splits == names.index("train")).sum())


def make_trees(
    scan: Scan,
    recipe: Recipe,
    settings: Settings,
    folder: Path,
    pictures: int = 200,
    choosing_s: float = math.inf,
    same_as: tuple[int, int] | None = None,
) -> Trees:
    """Copy a sample of the scanned tree into `folder`, as a small and a large tree.

    Args:
        recipe: recipe of the conversion, for the size of stored pictures.
        settings: settings of the trials; the large tree has enough pictures for `seconds` and a batch.
        pictures: most pictures of the sample.
        choosing_s: seconds of decoding after which the sample has enough pictures.
        same_as: (pictures, copies) of an earlier sample, to make the same one again; None: a new sample.

    Raises:
        SourceError: no picture of the sample can be decoded.
    """
    max_pictures = same_as[0] if same_as is not None else pictures
    by_size = np.argsort(scan.samples.file_bytes, kind="stable")
    count = min(pictures, len(by_size))
    rows = by_size[((np.arange(count) + 0.5) * len(by_size) / count).astype(int)]
    usable: list[tuple[str, str]] = []
    paths: list[str] = []
    damaged: dict[str, str] = {}
    undecodable: dict[str, str] = {}
    sizes, stored_bytes, decode_s = [], 0, 0.0
    rendering = replace(recipe, format="shards").rendering
    refs = [scan.samples[row] for row in np.random.default_rng(41).permutation(rows).tolist()]
    for ref in refs:
        if len(usable) == max_pictures:
            break
        if same_as is None and len(usable) >= SMALL_IMAGES and decode_s > choosing_s:
            break  # fewer of large pictures; the order is random, so these are a random part
        path = f"{scan.root}/{ref.path}"
        paths.append(ref.path)
        start_s = time.perf_counter()
        data = b""
        try:
            data = images.read_bytes(path)
            pixels, _ = images.render(data, path, rendering)
        except SourceError as error:  # a conversion would stop here: the picture may be intact
            damaged[ref.path] = str(error).removeprefix(f"{path}: ")
            continue
        except ImageError as error:  # a conversion would leave it out, too
            damaged[ref.path] = error.reason_and_remedy
            if data and (kind := kinds.undecodable_kind(data)):
                undecodable[ref.path] = kind
            continue
        decode_s += time.perf_counter() - start_s
        usable.append((path, scan.classes[ref.label]))
        sizes.append(ref.bytes)
        stored_bytes += pixels.nbytes
    if not usable:
        path, reason = next(iter(damaged.items()))
        raise SourceError(
            f"none of {count:,} pictures taken from it can be decoded; first: {path}, {reason}",
            path=scan.root,
        )
    if same_as is not None:
        copies = same_as[1]
    else:
        copies_for_seconds = settings.seconds * settings.workers_alone / max(decode_s, 1e-9)
        copies_for_a_batch = math.ceil(settings.batch_size / len(usable))
        copies = max(copies_for_a_batch, int(min(copies_for_seconds, _MAX_STORED_BYTES / stored_bytes)))
    _copy_tree(usable[:SMALL_IMAGES], 1, folder / "small")
    _copy_tree(usable, copies, folder / "large")
    return Trees(
        small=folder / "small",
        large=folder / "large",
        small_images=min(SMALL_IMAGES, len(usable)),
        copies=copies,
        pictures=len(usable),
        image_bytes=float(np.mean(sizes)),
        paths=tuple(paths),
        damaged=damaged,
        undecodable=undecodable,
    )


def _copy_tree(pictures: list[tuple[str, str]], copies: int, tree: Path) -> None:
    """Make a tree of `copies` files of each (path, class name); all but the first are hard links to it."""
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
    """Convert the small tree, and the large one into `folder`, by the command that a user runs.

    The large one gets as many shards as the whole tree would have, at most 40, and shards for all workers. A
    loader that reads whole shards ahead reads those of the next epoch while it holds the last ones of this
    epoch; with few shards they are often the same and would not be read again, as they would be in training.

    Args:
        whole_images: number of pictures in the whole tree.
        workers: processes of each conversion.

    Returns:
        (seconds, pictures) of the small and of the large conversion, start of processes included; and mean
        bytes of a stored picture.

    Raises:
        WorkerError: a conversion failed.
    """

    def convert(tree: Path, destination: Path, recipe: Recipe) -> float:
        words = ["convert", str(tree.resolve()), str(destination), "--format", recipe.format]
        words += [*shlex.split(recipe.to_flags()), "--workers", str(workers)]
        return run_command([sys.executable, "-m", "precache", *words])[0]

    small_s = convert(trees.small, folder.with_name(f"{folder.name}-small"), recipe)
    whole_shards = math.ceil(whole_images / recipe.samples_per_shard)
    shards = max(_MIN_SHARDS_PER_WORKER * workers, min(_MAX_SHARDS, whole_shards))
    shard_images = min(recipe.samples_per_shard, math.ceil(trees.large_images / shards))
    large_s = convert(trees.large, folder, replace(recipe, shard_bytes=shard_images * recipe.picture_bytes))
    image_bytes = open_dataset(folder).manifest.stored_bytes / trees.large_images
    return (small_s, trees.small_images), (large_s, trees.large_images), image_bytes
