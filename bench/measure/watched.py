"""What other data sets in the place of a watched one would take, measured on a sample of its pictures."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.measure.fresh import run_fresh
from bench.measure.recommend import ready
from bench.measure.sample import Trees, convert_twice, make_trees, train_images
from bench.measure.settings import Settings
from bench.measure.trial import measure
from bench.report.forecast import fit_conversion, stored_size
from bench.report.stats import Estimate, estimate
from bench.report.waiting import MeasuredReplacement
from bench.report.watch import convert_cost
from bench.watch.advice import Advice
from loaders import ImageDataset
from precache.pictures.sizes import sides
from precache.recipe import Recipe
from precache.sources.tree import scan_tree
from precache.storage.staging import temporary_folder

_PICTURES = 100
_CHOOSING_S = 3.0
_SECONDS = 0.5  # of each run of a loader
_TURNS = 3
_TIMED = 48  # pictures of each turn


def measure_replaced(
    advised: Sequence[Advice], batch_size: int | None, parts: Mapping[str, float]
) -> list[MeasuredReplacement]:
    """Measure what may stand in for an ImageFolder, on its tree and on what that is converted to.

    Args:
        advised: what may; all are of one root and serve one size.
        batch_size: of the DataLoader; None: it has none.
        parts: seconds of a sample by stage; empty: not known, so that only whole loaders are measured.

    Raises:
        PrecacheError: the tree cannot be read, or no picture of it be decoded.
    """
    scan = scan_tree(Path(advised[0].root))
    batch = min(batch_size or 64, train_images(scan))
    settings = ready(Settings(size=max(sides(advised[0].size)), batch_size=batch, seconds=_SECONDS))
    with temporary_folder() as folder:
        whole = Recipe(format="shards", size=stored_size(settings.size))
        trees = make_trees(scan, whole, settings, folder, _PICTURES, _CHOOSING_S)
        converted: dict[Recipe, tuple[Path, str]] = {}
        for advice in advised:
            if advice.recipe is not None and advice.recipe not in converted:
                shards = folder / f"shards-{len(converted)}"
                cost = _convert(trees, advice.pictures, advice.recipe, settings, shards)
                converted[advice.recipe] = shards, cost
        found = []
        for advice in advised:
            data, cost = trees.large, ""
            if advice.recipe is not None:
                data, cost = converted[advice.recipe]
            if advice.keeps_loader:
                if parts:
                    factor = _factor(parts, trees.large, data)
                    found.append(MeasuredReplacement(advice.name, factor, None, cost))
            else:
                backend = "pytorch" if advice.recipe is None else "shards"
                rate = _rate(settings, backend, data, len(scan.classes))
                found.append(MeasuredReplacement(advice.name, None, rate, cost))
    return found


def _convert(trees: Trees, images: int, recipe: Recipe, settings: Settings, shards: Path) -> str:
    """Convert the sample, and say what converting all pictures takes."""
    cpus = settings.workers_alone
    small, large, image_bytes = convert_twice(trees, images, recipe, cpus, shards)
    startup_s, image_s = fit_conversion(small, large, cpus)
    return convert_cost(images * image_bytes, startup_s + images * image_s / cpus)


def _factor(parts: Mapping[str, float], tree: Path, data: Path) -> Estimate:
    """Seconds of a sample over those of today, where its picture comes from `data`."""
    loaded = ImageDataset(data)
    paths = [path for path, _ in ImageDataset(tree).samples]
    as_today = (len(paths), lambda place: _as_today(paths[place]))
    today, after = _take_turns([as_today, (len(loaded), lambda place: _as_rgb(loaded, place))])
    pixels = 1.0 if data == tree else _fewer(loaded, paths)
    return factor_of(parts, _ratios(after, today), pixels)


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
    return estimate(
        [run_fresh(measure, replace(spec, trainer="none")).images_per_s for _ in range(_TURNS - 1)]
    )
