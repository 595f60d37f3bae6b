"""`loaders.ImageDataset` beside `ImageFolder`, in the same DataLoader with the same transform.

    python -m bench.lab.image_dataset TREE [FOLDER ...]

TREE is a folder per class, a FOLDER what `precache convert` made of it. One line of a training differs; the
first turn is not counted: it brings the files into the page cache.
"""

import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import click
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms

from bench.lab import harness
from bench.lab.harness import Column
from bench.report.table import Table
from loaders import ImageDataset
from precache.cli import commandline
from precache.errors import check_range

_TODAY = "ImageFolder"
_COLUMNS = (Column("images/s", "rate"), Column(f"beside {_TODAY}", "rate", ".2f", _TODAY))


def images_per_s(dataset: Dataset[Any], batch_size: int, workers: int, batches: int) -> dict[str, float]:
    """Of a new DataLoader that shuffles, from its second batch on, at most `batches`."""
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=batch_size, shuffle=True, num_workers=workers, drop_last=True
    )
    served = iter(loader)
    next(served)
    start_s = time.perf_counter()
    pictures = sum(len(labels) for _, labels in islice(served, batches))
    return {"rate": pictures / (time.perf_counter() - start_s)}


@click.command(cls=commandline.Command)
@click.argument("tree", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("folders", type=click.Path(path_type=Path), nargs=-1)
@click.option("--batch-size", default=64, show_default=True, help="Samples per batch.")
@click.option("--workers", default=2, show_default=True, help="Of the DataLoader.")
@click.option("--batches", default=40, show_default=True, help="Timed ones of each turn, at most.")
@click.option("--repeats", default=5, show_default=True, help="Turns of each data set.")
@click.option("--size", default=224, show_default=True, help="Side of the random crops, pixels.")
def command(
    tree: Path,
    folders: tuple[Path, ...],
    batch_size: int,
    workers: int,
    batches: int,
    repeats: int,
    size: int,
) -> None:
    """Print images/s of ImageFolder on TREE, and of ImageDataset on TREE and each of FOLDERS."""
    steps = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    transform = transforms.Compose(steps)
    compared: dict[str, Any] = {_TODAY: datasets.ImageFolder(str(tree), transform)}
    for path in (tree, *folders):
        compared[f"ImageDataset {path}"] = ImageDataset(path, transform=transform)
    check_range("batch_size", batch_size, 1, min(len(dataset.targets) for dataset in compared.values()) // 2)
    runs = {
        name: partial(images_per_s, dataset, batch_size, workers, batches)
        for name, dataset in compared.items()
    }
    turns = harness.Turns(runs, repeats, uncounted=1)
    table = Table(["data set", *(column.title for column in _COLUMNS)], turns.rows(_COLUMNS))
    settings = (
        f"batch {batch_size}, {workers} workers, random crops of {size}, {batches} batches, files in memory"
    )
    turns.show(table, settings, ("torch", "torchvision", "pillow"))


if __name__ == "__main__":
    harness.main(command, "image_dataset")
