"""What other data sets in the place of a watched one would take, measured on a sample of its pictures."""

import tempfile
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
from bench.report.forecast import fit_conversion
from bench.report.stats import Estimate, estimate
from bench.report.waiting import Replaced, convert_cost
from bench.watch.advice import Advice
from loaders import ImageDataset
from precache.recipe import Recipe
from precache.sources.tree import scan_tree

_PICTURES = 100
_CHOOSING_S = 3.0
_SECONDS = 0.5  # of each run of a loader
_TURNS = 3
_TIMED = 48  # pictures of each turn


def measure_replaced(
    advised: Sequence[Advice], batch_size: int | None, parts: Mapping[str, float]
) -> list[Replaced]:
    """Measure what may stand in for an ImageFolder, on its tree and on what that is converted to.

    Args:
        advised: what may, by name; all are of one root and serve one size.
        batch_size: of the DataLoader; None: it has none.
        parts: seconds of a sample by stage; empty: not known, so that only whole loaders are measured.

    Raises:
        PrecacheError: the tree cannot be read, or no picture of it be decoded.
    """
    names = {each.name for each in advised}
    stored_sizes = [each.stored for each in advised if each.stored]
    tree, side = Path(advised[0].root), advised[0].size
    scan = scan_tree(tree)
    recipe = Recipe(format="shards", size=stored_sizes[0] if stored_sizes else side)
    batch = min(batch_size or 64, train_images(scan))
    settings = ready(Settings(size=side, batch_size=batch, seconds=_SECONDS))
    cpus = settings.workers_alone
    found: list[Replaced] = []
    with tempfile.TemporaryDirectory(prefix="bench-watch-") as scratch:
        folder = Path(scratch)
        trees = make_trees(scan, recipe, settings, folder, _PICTURES, _CHOOSING_S)
        shards, cost = folder / "shards", ""
        if stored_sizes:
            images = len(scan.samples)
            small, large, image_bytes = convert_twice(trees, images, recipe, cpus, shards)
            startup_s, image_s = fit_conversion(small, large, cpus)
            cost = convert_cost(images * image_bytes, startup_s + images * image_s / cpus)
        raw = ImageDataset(trees.large)
        paths = [path for path, _ in raw.samples]
        as_today = (len(paths), lambda place: _as_today(paths[place]))
        if parts and "ImageDataset" in names:
            today, by_tree = _take_turns([as_today, (len(raw), lambda place: _as_rgb(raw, place))])
            factor = factor_of(parts, _ratios(by_tree, today), 1.0)
            found.append(Replaced("ImageDataset", factor, None))
        if parts and "ImageDataset on shards" in names:
            stored = ImageDataset(shards)
            today, by_shards = _take_turns([as_today, (len(stored), lambda place: _as_rgb(stored, place))])
            factor = factor_of(parts, _ratios(by_shards, today), _fewer(stored, paths))
            found.append(Replaced("ImageDataset on shards", factor, None, cost))
        classes = len(raw.classes)
        if "build" in names:
            found.append(Replaced("build", None, _rate(settings, "pytorch", trees.large, classes)))
        if "build on shards" in names:
            rate = _rate(settings, "shards", shards, classes)
            found.append(Replaced("build on shards", None, rate, cost))
    return found


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


def _ratios(after: Sequence[float], before: Sequence[float]) -> list[float]:
    return [new / old for new, old in zip(after, before, strict=True)]


def _as_today(path: str) -> Any:
    from torchvision.datasets.folder import pil_loader

    return pil_loader(path)


def _as_rgb(dataset: ImageDataset, place: int) -> Any:
    return dataset[place][0].convert("RGB")


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
    return estimate([run_fresh(measure, replace(spec, trainer="none")).images_per_s for _ in range(_TURNS - 1)])
