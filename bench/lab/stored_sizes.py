"""Sizes in which pictures can be stored: bytes, speed, and distance from what torchvision would show a model.

    python -m bench.lab.stored_sizes TREE [--size 224]

Distances are of pictures of TREE: peak signal-to-noise ratio, mean and worst, of random crops and of
validation, against Pillow's one antialiased resize of the same part of the original. Bytes and speed are of
photographs as large as ImageNet's, which it makes.
"""

import shutil
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from PIL import Image

import loaders
from bench.lab import harness
from bench.lab.harness import Column
from bench.machine import page_cache
from bench.report.table import Table
from loaders.augment import RandomAugmentation, centre_boxes, draw_augmentation
from loaders.dataset import RAW, open_split
from loaders.settings import AugmentName
from precache import Recipe, convert
from precache.cli import commandline
from precache.example_data.sample_tree import make_sample
from precache.pictures import images
from precache.pictures.jpeg import psnr
from precache.storage.staging import temporary_folder

_CLASSES, _BATCH = 8, 32
_MOST_DB = 99.0  # stands for pictures that are equal
_IMAGENET = 1_281_167  # pictures to train on in ImageNet-1k: https://www.image-net.org/about.php
_TITLES = (
    "stored",
    "a picture",
    "ImageNet-1k",
    "images/s",
    "from disk",
    "crops, dB",
    "validation, dB",
)
_COLUMNS = (Column("images/s", "warm"), Column("from disk", "cold"))


@dataclass(frozen=True, slots=True)
class Stored:
    """A way to store pictures: `times` the side that is served; None: all pixels, or the tree itself."""

    name: str
    format: str = ""
    fit: str = "keep"
    times: float | None = None
    resample: str = "lanczos"

    def recipe(self, size: int) -> Recipe:
        """Recipe of this way for pictures that are served with side `size`."""
        stored = images.MAX_SIZE if self.times is None else round(self.times * size)
        return Recipe(format=self.format, fit=self.fit, size=stored, resample=self.resample)


WAYS = (
    Stored("pytorch"),
    Stored("squares", "shards", "crop", 8 / 7, "bilinear"),
    Stored("8/7", "shards", times=8 / 7),
    Stored("1.5 times", "shards", times=1.5),
    Stored("twice", "shards", times=2),
    Stored("all pixels", "shards"),
    Stored("twice, JPEG", "webdataset", times=2),
)


def shown(
    original: Image.Image, sample_id: int, stored: npt.NDArray[np.int64], size: int, *, random: bool
) -> npt.NDArray[np.uint8]:
    """uint8 [size, size, 3]: what a model is to be shown of an upright picture, in one antialiased resize.

    Args:
        stored: int64 [1, 2], height and width of what is stored, by which crops are drawn.
        random: the crop of epoch 0 and seed 0; or else the middle, as `Resize` and `CenterCrop` show it.
    """
    shape = np.array([[original.height, original.width]])
    mirrored = False
    if random:
        boxes, (mirrored,), _ = draw_augmentation(
            RandomAugmentation(), stored, size, 0, 0, np.array([sample_id])
        )
        left, top, width, height = (boxes[0] * np.tile((shape / stored)[0, ::-1], 2)).tolist()
        if np.array_equal(shape, stored):  # whole pixels: what lies around them has no part in it
            original = original.crop((int(left), int(top), int(left + width), int(top + height)))
            left = top = 0.0
    else:
        left, top, width, height = centre_boxes(shape, size, 0.875)[0].tolist()
    box = (left, top, left + width, top + height)
    resized = np.asarray(original.resize((size, size), Image.Resampling.BILINEAR, box))
    return resized[:, ::-1] if mirrored else resized


def distances(tree: Path, path: Path, size: int, *, random: bool) -> dict[str, float]:
    """dB of what is served of each picture of `tree`, by file, from `path`: the tree, or what it became."""
    data = open_split(path, "train")
    rows = {sample_id: row for row, sample_id in enumerate(np.asarray(data.ids[:]).tolist())}
    augment: AugmentName = "train" if random else "eval"
    found = {}
    with loaders.build(path, size=size, augment=augment, dtype="uint8", shuffle=False) as loader:
        for batch in loader:
            for picture, sample_id in zip(batch.images, batch.ids.tolist(), strict=True):
                file = tree / loader.path_of(sample_id)
                original = images.decode(file.read_bytes(), str(file))
                shape = np.array([[original.height, original.width]])
                stored = shape if data.kind == RAW else data.shapes_at(np.array([rows[sample_id]]))
                expected = shown(original, sample_id, stored, size, random=random)
                found[str(file)] = min(_MOST_DB, psnr(picture.permute(1, 2, 0).numpy(), expected))
    return found


def first_epochs(path: Path, size: int, workers: int) -> dict[str, float]:
    """Images/s of first epochs after their first batch, `cold` from the disk and `warm` from memory."""
    rates = {}
    for state, prepare in (("cold", page_cache.drop), ("warm", page_cache.warm)):
        prepare(path)
        reading = loaders.Reading(workers=workers)
        with loaders.build(
            path, size=size, augment="train", dtype="uint8", batch_size=_BATCH, reading=reading
        ) as loader:
            batches = iter(loader)
            next(batches)
            start_s = time.perf_counter()
            served = sum(len(batch.ids) for batch in batches)
            rates[state] = served / (time.perf_counter() - start_s)
    return rates


def copy_some(tree: Path, pictures: int, folder: Path) -> Path:
    """Copy so many pictures of the tree, evenly spread over it, into a tree of their own, `folder`."""
    files = open_split(tree, "train").files
    for row in np.unique(np.linspace(0, len(files) - 1, pictures).round().astype(int)).tolist():
        copied = folder / Path(files[row]).relative_to(tree)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(files[row], copied)
    return folder


def store_each_way(tree: Path, size: int, folder: Path) -> dict[Stored, Path]:
    """Convert the tree in each of WAYS into `folder`; where what is to be read lies."""
    paths = {}
    for number, way in enumerate(WAYS):
        if way.format:
            convert(tree, folder / str(number), way.recipe(size))
            paths[way] = folder / str(number)
        else:
            paths[way] = tree
    return paths


@click.command(cls=commandline.Command)
@click.argument("tree", type=click.Path(path_type=Path))
@click.option("--size", default=224, show_default=True, help="Side of the served squares, pixels.")
@click.option(
    "--pictures",
    default=500,
    show_default=True,
    help="Pictures of TREE, and as many photographs that are made.",
)
@click.option("--workers", default=2, show_default=True, help="Threads of each loader.")
@click.option("--repeats", default=5, show_default=True, help="First epochs of each loader, taking turns.")
def command(tree: Path, size: int, pictures: int, workers: int, repeats: int) -> None:
    """Print a row for each way to store the pictures of TREE."""
    with temporary_folder() as folder:
        chosen = copy_some(tree, pictures, folder / "chosen")
        near = store_each_way(chosen, size, folder / "near")
        photographs = folder / "photographs"
        make_sample(photographs, images=pictures, classes=_CLASSES, seed=0, like="imagenet")
        paths = store_each_way(photographs, size, folder / "like")
        runs = {way.name: partial(first_epochs, path, size, workers) for way, path in paths.items()}
        turns = harness.take_turns(runs, repeats)
        rows = []
        for way, path in paths.items():
            stored_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / pictures
            row = [way.name, f"{stored_bytes / 1e3:,.0f} kB", f"{stored_bytes * _IMAGENET / 1e9:,.0f} GB"]
            row += turns.cells(way.name, _COLUMNS)
            for random in (True, False):
                if random and way.fit == "crop":
                    row.append("another part")
                    continue
                found = distances(chosen, near[way], size, random=random).values()
                row.append(f"{statistics.mean(found):.1f} ({min(found):.0f})")
            rows.append(row)
    settings = f"side {size}, {pictures} pictures each, {workers} workers, random crops, uint8, first epochs"
    harness.show(Table(_TITLES, rows), turns, settings, ("torch", "torchvision", "pillow", "simplejpeg"))


if __name__ == "__main__":
    harness.main(command, "stored_sizes")
