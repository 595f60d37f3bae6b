"""What other data sets in the place of a watched one would take, measured on a sample of its pictures."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.measure.fresh import run_fresh
from bench.measure.recommend import convert_twice, make_trees, ready, train_images
from bench.measure.settings import Settings
from bench.measure.trial import measure
from bench.report.forecast import fit_conversion, stored_size
from bench.report.stats import Estimate, estimate
from bench.report.waiting import Replaced, convert_cost
from loaders import ImageDataset
from precache.recipe import DEFAULT_SIZE, Recipe
from precache.sources.tree import scan_tree
from precache.storage.staging import temporary_folder

_PICTURES = 100
_CHOOSING_S = 3.0
_SECONDS = 0.5  # of each run of a loader
_TURNS = 3
_TIMED = 48  # pictures of each turn
_BESIDE = 0.8  # of its own rate a loader keeps, at least, while a training computes beside it


def recipe_for(side: int) -> Recipe:
    """How pictures are stored for a training at `side` pixels."""
    return Recipe(format="shards", size=stored_size(side))


def measure_replaced(info: Mapping[str, Any], parts: Mapping[str, float], dst: Path) -> list[Replaced]:
    """Measure what stands in for the ImageFolder of a stream, on its tree and on what that is converted to.

    Args:
        info: of the stream, see `bench.watch.hook`: its `root` is a tree.
        parts: seconds of a sample by stage.
        dst: where it would be converted to.

    Raises:
        PrecacheError: the tree cannot be read, or no picture of it be decoded.
    """
    tree, side = Path(info["root"]).resolve(), int(info["side"])
    scan, recipe = scan_tree(tree), recipe_for(side)
    batch = min(int(info["batch_size"] or 64), train_images(scan))
    settings = ready(Settings(size=side, batch_size=batch, seconds=_SECONDS))
    with temporary_folder() as folder:
        trees = make_trees(scan, recipe, settings, folder, _PICTURES, _CHOOSING_S)
        shards = folder / "shards"
        cpus = settings.workers_alone
        small, large, image_bytes = convert_twice(trees, len(scan.samples), recipe, cpus, shards)
        raw, stored = ImageDataset(trees.large), ImageDataset(shards)
        paths = [path for path, _ in raw.samples]
        today, by_tree, by_shards = _take_turns(
            [
                (len(paths), lambda place: _as_today(paths[place])),
                (len(raw), lambda place: raw[place][0].convert("RGB")),
                (len(stored), lambda place: stored[place][0].convert("RGB")),
            ]
        )
        pixels = _fewer(stored, paths)
        rates = {"build": _rate(settings, "pytorch", trees.large, len(raw.classes))}
        rates["build on shards"] = _rate(settings, "shards", shards, len(raw.classes))
    startup_s, image_s = fit_conversion(small, large, cpus)
    images = len(scan.samples)
    cost = convert_cost(images * image_bytes, startup_s + images * image_s / cpus)
    at, into = (_as_typed(path) for path in (tree, dst))
    served = f"batch_size={batch}, size={side}, augment='train')"
    convert = f"precache convert {at} {into} --format shards --size {recipe.size}; then"
    sized = "" if recipe.size == DEFAULT_SIZE else f"recipe=Recipe(format='shards', size={recipe.size}), "
    return [
        Replaced(
            "ImageDataset",
            factor_of(parts, [b / a for a, b in zip(today, by_tree, strict=True)], 1.0),
            None,
            f"loaders.ImageDataset({at!r}, transform=...) instead of ImageFolder",
        ),
        Replaced(
            "shards",
            factor_of(parts, [b / a for a, b in zip(today, by_shards, strict=True)], pixels),
            None,
            f"{convert} loaders.ImageDataset({into!r}, transform=...) instead of ImageFolder",
            cost,
        ),
        Replaced(
            "build",
            Estimate(1.0, 1.0, 1.0),
            rates["build"],
            f"loaders.build({at!r}, {served} instead of the DataLoader",
        ),
        Replaced(
            "build on shards",
            Estimate(1.0, 1.0, 1.0),
            rates["build on shards"],
            f"{convert} loaders.build({into!r}, {served} instead of the DataLoader; or, to convert while it "
            f"trains, loaders.build({at!r}, precache={into!r}, {sized}{served}",
            cost,
        ),
    ]


def factor_of(parts: Mapping[str, float], loading: Sequence[float], pixels: float) -> Estimate:
    """Seconds of a sample over those of today, from those of loading its picture over those of today.

    Args:
        loading: turn by turn.
        pixels: those of stored pictures over those of the originals, in which resizing takes time.
    """
    total_s, resize_s = sum(parts.values()), parts.get("resize", 0.0)
    shares = [
        1 - (parts.get("decode", 0.0) * (1 - share) + saved_s) / total_s
        for share in loading
        for saved_s in (resize_s * (1 - pixels), 0.0)  # random crops are resized from all sizes
    ]
    return estimate(shares)


def _as_typed(path: Path) -> str:
    """Relative where it lies below the working folder."""
    below = os.path.relpath(path)
    return os.path.abspath(path) if below.startswith("..") else below


def _as_today(path: str) -> Any:
    from torchvision.datasets.folder import pil_loader

    return pil_loader(path)


def _fewer(stored: ImageDataset, paths: Sequence[str]) -> float:
    """Pixels of the stored pictures over those of their files, at most 1."""
    from PIL import Image

    few = range(0, min(len(stored), len(paths)), max(1, len(paths) // _TIMED))
    kept = sum(stored[place][0].width * stored[place][0].height for place in few)
    total = 0
    for place in few:
        with Image.open(paths[place]) as picture:
            total += picture.width * picture.height
    return min(1.0, float(kept) / total)


def _take_turns(loads: Sequence[tuple[int, Callable[[int], Any]]]) -> list[list[float]]:
    """Seconds of the CPU for a picture, of each way to load it, turn by turn; a first turn is not counted."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds: list[list[float]] = [[] for _ in loads]
    for turn in range(1 + _TURNS):
        for mine, (count, load) in zip(seconds, loads, strict=True):
            begin_s, places = time.process_time(), range(0, count, max(1, count // _TIMED))
            for place in places:
                load(place)
            if turn:
                mine.append((time.process_time() - begin_s) / len(places))
    torch.set_num_threads(threads)
    return seconds


def _rate(settings: Settings, backend: str, path: Path, classes: int) -> Estimate:
    spec = settings.of(backend, path, classes, warmup=0, batches=1, monitored=False, first_epoch=True)
    rates = [run_fresh(measure, replace(spec, trainer="none")).images_per_s for _ in range(_TURNS - 1)]
    found = estimate(rates)
    return replace(found, low=found.low * _BESIDE)
