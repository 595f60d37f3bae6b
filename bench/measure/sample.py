"""A sample of a tree: its pictures, what cannot be read among them, and what converting it takes.

The sample is converted and loaded for real. It is repeated until a conversion takes seconds and every worker
has shards to write: with few pictures, what is measured is the start. Its pictures are spread over the sizes
of the tree's files, so that its mean size, which decides what decoding and storing cost, is the tree's.
"""

import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bench.measure.fresh import run_watched
from bench.measure.settings import Settings
from precache.dataset.converted import open_dataset
from precache.errors import ImageError, SourceError
from precache.pictures import images, kinds
from precache.pictures.reading import MAX_PIXELS
from precache.recipe import Recipe
from precache.sources.base import SampleRef, Scan, picture_readers
from precache.storage.urls import Url

SMALL_IMAGES = 24  # of the conversion that takes hardly longer than its start
_ROUNDS = 2  # shards per worker, at least
_MOST_SHARDS = 40
_MOST_BYTES = 1e9  # that a converted sample may take


@dataclass(frozen=True, slots=True)
class Trees:
    """The sample as two trees on disk.

    Attributes:
        small, large: the trees; the latter holds each picture as often as the others.
        small_images: pictures of the small tree.
        copies: how often the large tree holds each picture.
        pictures: of the sample, each counted once.
        image_bytes: mean size of a file of the sample.
        paths: of the pictures that were taken, below the scanned tree, those that cannot be decoded included.
        damaged: why precache cannot decode some of them, by path.
        undecodable: kinds of those among them for which this Pillow has no decoder, by path.
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
        """Pictures of the large tree."""
        return self.copies * self.pictures


def train_images(scan: Scan) -> int:
    """Pictures of an epoch: of the split `train` where there is one."""
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
    """Copy the sample of `scan` into `folder`, once and repeated.

    Args:
        choosing_s: after so many seconds of decoding them, the sample has enough pictures.
        same_as: pictures and copies of a sample that was made before, to make that again.

    Raises:
        SourceError: no picture of the sample can be decoded.
    """
    most = same_as[0] if same_as is not None else pictures
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
    for ref, path in zip(refs, _on_disk(scan, refs, folder / "fetched"), strict=False):
        if len(usable) == most or (same_as is None and len(usable) >= SMALL_IMAGES and decode_s > choosing_s):
            break  # large pictures: fewer of them, at random, for they are permuted
        paths.append(ref.path)
        start_s = time.perf_counter()
        data = b""
        try:
            data = images.read_bytes(path)
            pixels, _ = images.render(data, path, rendering)
        except SourceError as error:  # a conversion would stop: it may be intact
            damaged[ref.path] = str(error).removeprefix(f"{path}: ")
            continue
        except ImageError as error:  # a conversion would leave it out, too
            damaged[ref.path] = error.reason
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
            f"{scan.root}: none of {count:,} pictures taken from it can be decoded; first: {path}, {reason}"
        )
    if same_as is not None:
        copies = same_as[1]
    else:
        wanted = settings.seconds * settings.workers_alone * len(usable) / max(decode_s, 1e-9)
        fill_a_batch = math.ceil(settings.batch_size / len(usable))
        copies = max(fill_a_batch, int(min(wanted / len(usable), _MOST_BYTES / stored_bytes)))
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


def _on_disk(scan: Scan, refs: Sequence[SampleRef], folder: Path) -> Iterator[str]:
    """Paths of the pictures; those of a URL are fetched into `folder`."""
    if not isinstance(scan.root, Url):
        yield from (f"{scan.root}/{ref.path}" for ref in refs)
        return
    folder.mkdir()
    for number, (ref, read) in enumerate(
        zip(refs, picture_readers(scan.source, refs, MAX_PIXELS), strict=True)
    ):
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
