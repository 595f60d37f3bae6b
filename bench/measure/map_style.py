"""ImageFolder beside `loaders.ImageDataset` in the same DataLoader with the same transform: one line differs.

    python -m bench.measure.map_style TREE [FOLDER ...]

TREE is a tree of class folders, a FOLDER what `precache convert` made of it. Prints images/s of each: median
and range of epochs that take turns, each epoch behind one that is not counted. The page cache is warm.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets

from bench.measure.fresh import in_one_line
from bench.measure.imagefolder import AUGMENTATIONS, recipe
from loaders import ImageDataset
from precache.errors import PrecacheError


def images_per_s(dataset: Dataset[Any], batch_size: int, workers: int, batches: int) -> float:
    """Of a new DataLoader that shuffles, from its second batch on, at most `batches`."""
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=batch_size, shuffle=True, num_workers=workers, drop_last=True
    )
    served = iter(loader)
    next(served)
    start_s = time.perf_counter()
    pictures = sum(len(labels) for _, labels in islice(served, batches))
    return pictures / (time.perf_counter() - start_s)


def measure(
    arms: dict[str, Dataset[Any]], batch_size: int, workers: int, batches: int, repeats: int
) -> dict[str, list[float]]:
    """Images/s of each arm, in turns; the first turn is not counted."""
    figures: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(repeats + 1):
        for name, dataset in arms.items():
            figure = images_per_s(dataset, batch_size, workers, batches)
            figures[name] += [figure] if turn else []
    return figures


def main() -> None:
    """Measure what the command line names; bad input ends in one line and exit code 2."""
    try:
        _main()
    except (PrecacheError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.measure.map_style", description=__doc__)
    parser.add_argument("tree", type=Path)
    parser.add_argument("folders", type=Path, nargs="*")
    for name, default in (("batch-size", 64), ("workers", 2), ("batches", 40), ("repeats", 5), ("size", 224)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--augment", choices=AUGMENTATIONS, default="train")
    given = parser.parse_args()
    transform: Callable[[Any], Any] = recipe(given.augment, given.size)
    with in_one_line(given.batch_size, given.size):
        arms: dict[str, Dataset[Any]] = {"ImageFolder": datasets.ImageFolder(str(given.tree), transform)}
        for path in (given.tree, *given.folders):
            arms[f"ImageDataset {path}"] = ImageDataset(path, transform=transform)
        figures = measure(arms, given.batch_size, given.workers, given.batches, given.repeats)
    wide = max(map(len, figures))
    for name, values in figures.items():
        print(
            f"{name:{wide}}  {statistics.median(values):7,.0f} images/s "
            f"({min(values):,.0f} to {max(values):,.0f} of {len(values)})"
        )
    print(
        f"batch {given.batch_size}, {given.workers} workers, {given.augment} {given.size}, up to "
        f"{given.batches} batches, page cache warm, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
