"""Compare the speed of augmentation recipes: `loaders.build`, and what people have today.

    pip install timm
    python -m bench.lab.recipes data/raw data/shards
    python -m bench.lab.recipes data/raw data/shards --recipes torchvision,dino

`loaders.build` reads what is converted, the others the tree:

    torchvision  its transforms, in a DataLoader
    timm         `create_loader`, with bilinear interpolation; the recipes that its options can say
    DALI         its own operators on the CPU, see `bench.lab.dali_recipes`

All have as many workers, and serve uint8, which a GPU normalises. torchvision's own recipe is an exception:
it erases after normalising, and mixes floats in the workers. DeiT mixes on the GPU, and so does timm with
torchvision's transforms, so in these rows only `loaders.build` and timm's loader mix. A picture of several
views counts once.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import click
import torch
from torch.utils.data import DataLoader

import loaders
from bench.lab import harness
from bench.lab.harness import FigureColumn
from bench.machine.hardware import is_installed
from bench.measure.imagefolder import AUGMENTATIONS as NAMES
from bench.measure.processes import run_in_process
from bench.measure.recipes import make_mix, make_transform, mix_samples
from bench.report.table import Table
from loaders.augment.policies import AUGMENTATIONS, RandomAugmentation
from precache.errors import DatasetError, check_choice
from precache.packages import DALI

_SIZE = 224
_NORMALISED = ("torchvision",)
_TIMM_POLICIES = {None: None, "three": "3a"}
Batches: TypeAlias = tuple[Iterator[Any], Callable[[Any], int]]
"""Batches without end, and a function that returns the number of pictures of one."""


def _count_rate(batches: Iterator[Any], count: Callable[[Any], int], seconds: float) -> float:
    """Take batches for twice `seconds`, and return the images/s of the second half."""
    start_s, counted, is_warm = time.perf_counter(), 0, False
    for batch in batches:
        counted += count(batch)
        elapsed_s = time.perf_counter() - start_s
        if elapsed_s <= seconds:
            continue
        if is_warm:
            break
        start_s, counted, is_warm = time.perf_counter(), 0, True
    return counted / elapsed_s


def _repeat_epochs(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of epoch after epoch.

    Raises:
        DatasetError: an epoch has no batch.
    """
    while True:
        batch = None
        for batch in loader:
            yield batch
        if batch is None:
            raise DatasetError("an epoch has no full batch", remedy="give a smaller --batch-size")


def _settings(recipe: str) -> RandomAugmentation:
    settings = AUGMENTATIONS[recipe]  # type: ignore[index]  # a checked name
    assert settings is not None
    return settings


def serve_build(path: Path, recipe: str, workers: int, batch_size: int) -> Batches:
    """Serve by `loaders.build`."""
    loader = loaders.build(
        path,
        batch_size=batch_size,
        size=_SIZE,
        augment=_settings(recipe),
        dtype="uint8",
        reading=loaders.Reading(workers=workers),
    )
    return _repeat_epochs(loader), lambda batch: len(batch.ids)


def serve_torchvision(tree: Path, recipe: str, workers: int, batch_size: int) -> Batches:
    """Serve by torchvision's transforms in a DataLoader."""
    from torchvision.datasets import ImageFolder  # imports torch's compiler: as slow as importing torch

    transform = make_transform(recipe, _SIZE, floats=recipe in _NORMALISED)
    data = ImageFolder(str(tree), transform)
    mix = make_mix(recipe, len(data.classes)) if recipe in _NORMALISED else None
    loader = DataLoader(
        data, batch_size, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0,
        collate_fn=None if mix is None else partial(mix_samples, mix),
    )  # fmt: skip
    return _repeat_epochs(loader), lambda batch: len(batch[1])


def serve_timm(tree: Path, recipe: str, workers: int, batch_size: int) -> Batches:
    """Serve by timm's `create_loader`: what its workers make, before it is normalised on the GPU."""
    from timm.data import FastCollateMixup, create_dataset, create_loader

    settings, mix = _settings(recipe), None
    data = create_dataset("", root=str(tree), is_training=True)
    if settings.mixes:
        classes = len(data.reader.class_to_idx)
        mix = FastCollateMixup(settings.mixup, settings.cutmix, num_classes=classes)
    prefetching = create_loader(
        data, (3, _SIZE, _SIZE), batch_size, is_training=True, num_workers=workers, collate_fn=mix,
        persistent_workers=workers > 0, color_jitter=settings.brightness,
        auto_augment=_TIMM_POLICIES.get(settings.policy, settings.policy), device=torch.device("cpu"),
    )  # fmt: skip
    return _repeat_epochs(prefetching.loader), lambda batch: len(batch[1])


def serve_dali(tree: Path, recipe: str, workers: int, batch_size: int) -> Batches:
    """Serve by a pipeline of DALI's."""
    from bench.lab import dali_recipes

    return dali_recipes.serve(tree, _settings(recipe), _SIZE, batch_size, workers), int


_BUILD, _TORCHVISION = "`build`, `shards`", "torchvision in a DataLoader"
_TIMM, _DALI = "timm's loader", "DALI"
_PACKAGES: dict[str, Sequence[str]] = {_TIMM: ["timm"], _DALI: DALI}
_LOADERS: dict[str, Callable[[Path, str, int, int], Batches]] = {
    _TORCHVISION: serve_torchvision,
    _TIMM: serve_timm,
    _DALI: serve_dali,
    _BUILD: serve_build,
}


def measure(
    loader: str, path: Path, recipe: str, workers: int, batch_size: int, seconds: float
) -> Mapping[str, float]:
    """Measure a loader of `_LOADERS` in this process."""
    return {"images_per_s": _count_rate(*_LOADERS[loader](path, recipe, workers, batch_size), seconds)}


def _can_serve(loader: str, recipe: str) -> bool:
    """Whether a loader's package is installed, and has the operations of a recipe."""
    if loader == _TIMM and not recipe.startswith(("train", "timm", "deit")):
        return False
    packages = _PACKAGES.get(loader)
    return packages is None or any(map(is_installed, packages))


@click.command()
@click.argument("tree", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("converted", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--recipes", default=",".join(name for name in NAMES if name != "eval"), show_default=True)
@click.option("--workers", default=2, show_default=True)
@click.option(
    "--seconds", default=4.0, show_default=True, help="Seconds of each run, after as many of warm-up."
)
@click.option("--batch-size", default=64, show_default=True)
@click.option("--repeats", default=3, show_default=True, help="Turns.")
def command(
    tree: Path, converted: Path, recipes: str, workers: int, seconds: float, batch_size: int, repeats: int
) -> None:
    """Print images/s of each recipe by `loaders.build` over CONVERTED and by the others over TREE."""
    runs: dict[str, harness.Run] = {}
    names = recipes.split(",")
    for recipe in names:
        check_choice("recipe", recipe, NAMES)
        for loader in _LOADERS:
            path = converted if loader == _BUILD else tree
            arguments = loader, path, recipe, workers, batch_size, seconds
            if _can_serve(loader, recipe):
                runs[f"{loader}, {recipe}"] = partial(run_in_process, measure, *arguments)
    turns = harness.take_turns(runs, repeats)
    rate, rows = FigureColumn("images/s", "images_per_s"), []
    for recipe in names:
        times = FigureColumn("times", "images_per_s", ".1f", divisor=f"{_TORCHVISION}, {recipe}")
        cells = [
            turns.cells(f"{loader}, {recipe}", [rate])[0] if _can_serve(loader, recipe) else "-"
            for loader in _LOADERS
        ]
        rows.append([recipe, *cells, *turns.cells(f"{_BUILD}, {recipe}", [times])])
    table = Table(["recipe", *_LOADERS, "times torchvision's"], rows)
    harness.show(
        table, turns, f"images/s, {workers} workers, batches of {batch_size} of {_SIZE}x{_SIZE}",
        ("python", "torch", "torchvision", "pillow", "timm", *DALI),
    )  # fmt: skip


if __name__ == "__main__":
    harness.main(command, "recipes")
