"""Compare the speed of augmentation recipes: `loaders.build`, and torchvision's transforms in a DataLoader.

    python -m bench.lab.recipes data/raw data/shards
    python -m bench.lab.recipes data/raw data/shards --recipes torchvision,dino

Ours reads what is converted, the DataLoader the tree, as people do today; both have as many workers, and serve
uint8 unless the recipe itself normalises. A picture of several views counts as one picture.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
import torch
import torchvision
from torch.utils.data import DataLoader, default_collate
from torchvision.transforms import InterpolationMode, v2

import loaders
from bench.lab import harness
from bench.lab.harness import FigureColumn
from bench.measure.processes import run_in_process
from bench.report.table import Table
from loaders.settings import AugmentName
from loaders.transfer import IMAGENET_MEAN, IMAGENET_STD
from precache.errors import check_choice

_SIZE = 224
_OURS, _THEIRS = "`build`, `shards`", "torchvision in a DataLoader"


def _crop(scale: tuple[float, float] = (0.08, 1.0), size: int = _SIZE) -> list[Any]:
    bicubic = InterpolationMode.BICUBIC if scale != (0.08, 1.0) else InterpolationMode.BILINEAR
    return [v2.RandomResizedCrop(size, scale, interpolation=bicubic, antialias=True), v2.RandomHorizontalFlip()]


def _normalise() -> list[Any]:
    return [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]


def _jitter(strength: float, hue: float) -> Any:
    return v2.RandomApply([v2.ColorJitter(strength, strength, strength / 2 if hue == 0.1 else strength, hue)], 0.8)


def _blur(probability: float) -> Any:
    return v2.RandomApply([v2.GaussianBlur(23, (0.1, 2.0))], probability)


class _DinoCrops:
    """Two global and eight local crops of a picture, as `DataAugmentationDINO` of main_dino.py makes them."""

    def __init__(self) -> None:
        colours = [_jitter(0.4, 0.1), v2.RandomGrayscale(0.2)]
        end = [v2.PILToTensor()]
        solarize = [_blur(0.1), v2.RandomSolarize(128, 0.2)]
        local = v2.Compose([*_crop((0.05, 0.4), 96), *colours, _blur(0.5), *end])
        first = v2.Compose([*_crop((0.4, 1.0)), *colours, _blur(1.0), *end])
        self._crops = [first, v2.Compose([*_crop((0.4, 1.0)), *colours, *solarize, *end]), *[local] * 8]

    def __call__(self, picture: Any) -> list[torch.Tensor]:
        return [crop(picture) for crop in self._crops]


def make_transform(recipe: str) -> Callable[[Any], Any]:
    """Return torchvision's transform of a PIL image for the recipe."""
    to_tensor = [v2.PILToTensor()]
    bilinear = InterpolationMode.BILINEAR
    three = v2.RandomChoice([v2.Grayscale(3), v2.RandomSolarize(128, 1.0), v2.GaussianBlur(9, (0.1, 2.0))])
    strong = v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], 0.8)
    steps: dict[str, list[Any]] = {
        "train": to_tensor,
        "torchvision": [v2.TrivialAugmentWide(interpolation=bilinear), *_normalise(), v2.RandomErasing(0.1)],
        "timm-a1": [v2.RandAugment(2, 21, interpolation=bilinear), *to_tensor],
        "timm-a2": [v2.RandAugment(2, 21, interpolation=bilinear), *to_tensor],
        "timm-a3": [v2.RandAugment(2, 18, interpolation=bilinear), *to_tensor],
        "deit3": [three, v2.ColorJitter(0.3, 0.3, 0.3), *to_tensor],
        "simclr": [strong, v2.RandomGrayscale(0.2), _blur(0.5), *to_tensor],
    }
    return _DinoCrops() if recipe == "dino" else v2.Compose([*_crop(), *steps[recipe]])


def make_collate(recipe: str) -> Callable[[list[Any]], Any] | None:
    """Return what mixes the batches of a recipe, for classes of Caltech-101; None: nothing."""
    if recipe not in ("torchvision", "timm-a1", "timm-a2", "timm-a3"):
        return None
    mix = v2.RandomChoice([v2.MixUp(alpha=0.2, num_classes=102), v2.CutMix(alpha=1.0, num_classes=102)])
    return partial(_mix, mix)


def _mix(mix: Any, samples: list[Any]) -> Any:
    return mix(*default_collate(samples))


def _count_rate(batches: Callable[[], Iterator[Any]], count: Callable[[Any], int], seconds: float) -> float:
    """Serve epochs for twice `seconds`, and return the images/s of the second half."""
    start_s, counted, is_warm = time.perf_counter(), 0, False
    while True:
        for batch in batches():
            counted += count(batch)
            elapsed_s = time.perf_counter() - start_s
            if elapsed_s > seconds and is_warm:
                return counted / elapsed_s
            if elapsed_s > seconds:
                start_s, counted, is_warm = time.perf_counter(), 0, True


def measure_ours(path: Path, recipe: str, workers: int, seconds: float, batch_size: int) -> Mapping[str, float]:
    """Measure our loader in this process."""
    augment: Any = recipe
    dtype: Any = "float32" if recipe == "torchvision" else "uint8"
    reading = loaders.Reading(workers=workers)
    with loaders.build(path, batch_size=batch_size, size=_SIZE, augment=augment, dtype=dtype, reading=reading) as loader:
        return {"images_per_s": _count_rate(loader.__iter__, lambda batch: len(batch.ids), seconds)}


def measure_theirs(
    tree: Path, recipe: str, workers: int, seconds: float, batch_size: int
) -> Mapping[str, float]:
    """Measure torchvision's transforms in a DataLoader in this process."""
    data = torchvision.datasets.ImageFolder(str(tree), make_transform(recipe))
    loader = DataLoader(
        data, batch_size, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=True,
        collate_fn=make_collate(recipe),
    )  # fmt: skip
    return {"images_per_s": _count_rate(loader.__iter__, lambda batch: len(batch[1]), seconds)}


@click.command()
@click.argument("tree", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("converted", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--recipes", default=",".join(sorted({*get_args(AugmentName)} - {"crop", "eval"})), show_default=True)
@click.option("--workers", default=2, show_default=True)
@click.option("--seconds", default=4.0, show_default=True, help="Seconds of each run, after as many of warm-up.")
@click.option("--batch-size", default=64, show_default=True)
@click.option("--repeats", default=3, show_default=True, help="Turns.")
def command(
    tree: Path, converted: Path, recipes: str, workers: int, seconds: float, batch_size: int, repeats: int
) -> None:
    """Print images/s of each recipe by `loaders.build` over CONVERTED and by torchvision over TREE."""
    runs: dict[str, harness.Run] = {}
    for recipe in recipes.split(","):
        check_choice("recipe", recipe, get_args(AugmentName))
        arguments = recipe, workers, seconds, batch_size
        runs[f"{_OURS}, {recipe}"] = partial(run_in_process, measure_ours, converted, *arguments)
        runs[f"{_THEIRS}, {recipe}"] = partial(run_in_process, measure_theirs, tree, *arguments)
    turns = harness.take_turns(runs, repeats)
    rows = []
    for recipe in recipes.split(","):
        ours, theirs = f"{_OURS}, {recipe}", f"{_THEIRS}, {recipe}"
        rate = FigureColumn("images/s", "images_per_s")
        times = FigureColumn("times", "images_per_s", ".1f", divisor=theirs)
        rows.append([recipe, *turns.cells(theirs, [rate]), *turns.cells(ours, [rate, times])])
    table = Table(["recipe", _THEIRS, _OURS, "times"], rows)
    harness.show(
        table, turns, f"images/s, {workers} workers, batches of {batch_size} of {_SIZE}x{_SIZE}",
        ("python", "torch", "torchvision", "pillow"),
    )  # fmt: skip


if __name__ == "__main__":
    harness.main(command, "recipes")
