"""Measurement of replacements: loading times of data sets that may replace a watched one, on a sample."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from bench.measure.processes import run_in_process
from bench.measure.recommend import prepare_settings
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

_SAMPLE_PICTURES = 100
_CHOOSING_S = 3.0
_SECONDS = 0.5  # of each run of a loader
_TURNS = 3
_TIMED_PICTURES = 48  # in each turn


def measure_replacements(
    advices: Sequence[Advice], batch_size: int | None, parts: Mapping[str, float]
) -> list[MeasuredReplacement]:
    """Measure data sets and loaders that may replace an ImageFolder, on its tree and on converted folders.

    Args:
        advices: replacements to measure; all are of one root and serve one size.
        batch_size: batch size of the DataLoader; None: it has none.
        parts: seconds of a sample by stage; empty: they are not known, and only whole loaders are measured.

    Raises:
        PrecacheError: the tree cannot be read, or none of its pictures can be decoded.
    """
    scan = scan_tree(Path(advices[0].root))
    batch_size = min(batch_size or 64, train_images(scan))
    settings = prepare_settings(
        Settings(size=max(sides(advices[0].size)), batch_size=batch_size, seconds=_SECONDS)
    )
    with temporary_folder() as folder:
        recipe = Recipe(format="shards", size=stored_size(settings.size))
        trees = make_trees(scan, recipe, settings, folder, _SAMPLE_PICTURES, _CHOOSING_S)
        shards: dict[Recipe, Path] = {}
        costs: dict[Recipe, str] = {}
        for advice in advices:
            if advice.recipe is not None and advice.recipe not in shards:
                shards[advice.recipe] = folder / f"shards-{len(shards)}"
                costs[advice.recipe] = _convert(
                    trees, advice.pictures, advice.recipe, settings, shards[advice.recipe]
                )
        measured = []
        for advice in advices:
            data, cost = trees.large, ""
            if advice.recipe is not None:
                data, cost = shards[advice.recipe], costs[advice.recipe]
            if advice.keeps_loader:
                if parts:
                    factor = _measure_factor(parts, trees.large, data)
                    measured.append(MeasuredReplacement(advice.name, factor, None, cost))
            else:
                backend = "pytorch" if advice.recipe is None else "shards"
                rate = _measure_rate(settings, backend, data, len(scan.classes))
                measured.append(MeasuredReplacement(advice.name, None, rate, cost))
    return measured


def _convert(trees: Trees, images: int, recipe: Recipe, settings: Settings, shards: Path) -> str:
    """Convert the sample into `shards`; return in words what converting all `images` pictures takes."""
    cpus = settings.workers_alone
    small, large, image_bytes = convert_twice(trees, images, recipe, cpus, shards)
    startup_s, image_s = fit_conversion(small, large, cpus)
    return convert_cost(images * image_bytes, startup_s + images * image_s / cpus)


def _measure_factor(parts: Mapping[str, float], tree: Path, data: Path) -> Estimate:
    """Measure the time of a sample whose picture is loaded from `data`, over its time with ImageFolder.

    Args:
        parts: seconds of a sample by stage, with ImageFolder.
        tree: the tree that ImageFolder reads.
        data: that tree, or a converted folder.
    """
    from torchvision.datasets.folder import pil_loader

    dataset = ImageDataset(data)
    paths = [path for path, _ in ImageDataset(tree).samples]
    ratios = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for turn in range(1 + _TURNS):
        before_s = _picture_seconds(lambda place: pil_loader(paths[place]), len(paths))
        after_s = _picture_seconds(lambda place: dataset[place][0].convert("RGB"), len(dataset))
        if turn > 0:  # the first turn warms up
            ratios.append(after_s / before_s)
    torch.set_num_threads(threads)
    pixel_share = 1.0 if data == tree else _pixel_share(dataset, paths)
    return estimate_factor(parts, ratios, pixel_share)


def estimate_factor(parts: Mapping[str, float], ratios: Sequence[float], pixel_share: float) -> Estimate:
    """Estimate the time of a sample over its time before, from the times of loading its picture.

    Args:
        parts: seconds of a sample by stage, before.
        ratios: seconds of loading a picture over those before, turn by turn.
        pixel_share: pixels of stored pictures over those of the originals; resizing takes time in proportion.
    """
    total_s, resize_s = sum(parts.values()), parts.get("resize", 0.0)
    factors = [
        1 - (parts.get("decode", 0.0) * (1 - ratio) + saved_s) / total_s
        for ratio in ratios
        for saved_s in (resize_s * (1 - pixel_share), 0.0)  # small random crops may save nothing
    ]
    return estimate(factors)


def _pixel_share(stored: ImageDataset, paths: Sequence[str]) -> float:
    """Return the pixels of some stored pictures over those of their files, at most 1."""
    from PIL import Image

    places = range(0, min(len(stored), len(paths)), max(1, len(paths) // _TIMED_PICTURES))
    stored_pixels = original_pixels = 0
    for place in places:
        stored_picture = stored[place][0]
        stored_pixels += stored_picture.width * stored_picture.height
        with Image.open(paths[place]) as picture:
            original_pixels += picture.width * picture.height
    return min(1.0, float(stored_pixels) / original_pixels)


def _picture_seconds(load: Callable[[int], object], count: int) -> float:
    """Return the CPU seconds of loading a picture, the mean over some of `count` places."""
    places = range(0, count, max(1, count // _TIMED_PICTURES))
    start_s = time.process_time()
    for place in places:
        load(place)
    return (time.process_time() - start_s) / len(places)


def _measure_rate(settings: Settings, backend: str, path: Path, classes: int) -> Estimate:
    """Measure images/s of a loader without a trainer, in processes of its own."""
    settings = settings.for_loader(
        backend,
        path,
        classes,
        trainer="none",
        warmup=0,
        batches=1,
        monitored=False,
        first_epoch=True,
    )
    return estimate([run_in_process(measure, settings).images_per_s for _ in range(_TURNS - 1)])
