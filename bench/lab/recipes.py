"""Compare the speed of augmentation recipes: `loaders.build`, and torchvision's transforms in a DataLoader.

    python -m bench.lab.recipes data/raw data/shards
    python -m bench.lab.recipes data/raw data/shards --recipes torchvision,dino

`loaders.build` reads what is converted, the DataLoader the tree, as people do today; both have as many
workers. Both serve uint8, which a GPU normalises. torchvision's own recipe is an exception: it erases after
normalising, and mixes floats in the workers. timm and DeiT mix on the GPU, so in their rows only
`loaders.build` mixes. A picture of several views counts once.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
from torch.utils.data import DataLoader

import loaders
from bench.lab import harness
from bench.lab.harness import FigureColumn
from bench.measure.imagefolder import AUGMENTATIONS
from bench.measure.processes import run_in_process
from bench.measure.recipes import make_mix, make_transform, mix_samples
from bench.report.table import Table
from precache.errors import DatasetError, check_choice

_SIZE = 224
_NORMALISED = ("torchvision",)
_BUILD, _TORCHVISION = "`build`, `shards`", "torchvision in a DataLoader"


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


def measure_build(
    path: Path, recipe: str, workers: int, seconds: float, batch_size: int
) -> Mapping[str, float]:
    """Measure `loaders.build` in this process."""
    augment: Any = recipe
    reading = loaders.Reading(workers=workers)
    with loaders.build(
        path, batch_size=batch_size, size=_SIZE, augment=augment, dtype="uint8", reading=reading
    ) as loader:
        return {"images_per_s": _count_rate(_repeat_epochs(loader), lambda batch: len(batch.ids), seconds)}


def measure_torchvision(
    tree: Path, recipe: str, workers: int, seconds: float, batch_size: int
) -> Mapping[str, float]:
    """Measure torchvision's transforms in a DataLoader in this process."""
    from torchvision.datasets import ImageFolder  # imports torch's compiler: as slow as importing torch

    transform = make_transform(recipe, _SIZE, floats=recipe in _NORMALISED)
    data = ImageFolder(str(tree), transform)
    mix = make_mix(recipe, len(data.classes)) if recipe in _NORMALISED else None
    loader = DataLoader(
        data, batch_size, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0,
        collate_fn=None if mix is None else partial(mix_samples, mix),
    )  # fmt: skip
    return {"images_per_s": _count_rate(_repeat_epochs(loader), lambda batch: len(batch[1]), seconds)}


@click.command()
@click.argument("tree", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("converted", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--recipes", default=",".join(name for name in AUGMENTATIONS if name != "eval"), show_default=True
)
@click.option("--workers", default=2, show_default=True)
@click.option(
    "--seconds", default=4.0, show_default=True, help="Seconds of each run, after as many of warm-up."
)
@click.option("--batch-size", default=64, show_default=True)
@click.option("--repeats", default=3, show_default=True, help="Turns.")
def command(
    tree: Path, converted: Path, recipes: str, workers: int, seconds: float, batch_size: int, repeats: int
) -> None:
    """Print images/s of each recipe by `loaders.build` over CONVERTED and by torchvision over TREE."""
    runs: dict[str, harness.Run] = {}
    for recipe in recipes.split(","):
        check_choice("recipe", recipe, AUGMENTATIONS)
        arguments = recipe, workers, seconds, batch_size
        runs[f"{_BUILD}, {recipe}"] = partial(run_in_process, measure_build, converted, *arguments)
        runs[f"{_TORCHVISION}, {recipe}"] = partial(run_in_process, measure_torchvision, tree, *arguments)
    turns = harness.take_turns(runs, repeats)
    rows = []
    for recipe in recipes.split(","):
        build, transforms = f"{_BUILD}, {recipe}", f"{_TORCHVISION}, {recipe}"
        rate = FigureColumn("images/s", "images_per_s")
        times = FigureColumn("times", "images_per_s", ".1f", divisor=transforms)
        rows.append([recipe, *turns.cells(transforms, [rate]), *turns.cells(build, [rate, times])])
    table = Table(["recipe", _TORCHVISION, _BUILD, "times"], rows)
    harness.show(
        table, turns, f"images/s, {workers} workers, batches of {batch_size} of {_SIZE}x{_SIZE}",
        ("python", "torch", "torchvision", "pillow"),
    )  # fmt: skip


if __name__ == "__main__":
    harness.main(command, "recipes")
