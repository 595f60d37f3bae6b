"""Compare sizes in which pictures can be stored: bytes, speed, and distance from torchvision's pixels.

    python -m bench.lab.stored_sizes TREE [--size 224]

Distances are measured on pictures of TREE: mean and lowest peak signal-to-noise ratio, of random crops and of
validation, against one antialiased resize by Pillow of the same part of the original. Bytes and speed are
measured on photographs as large as ImageNet's, which the program makes.
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
from bench.lab.harness import FigureColumn
from bench.machine import page_cache
from bench.report.table import Table
from loaders.augment.geometry import centre_boxes
from loaders.augment.policies import RandomAugmentation, draw_augmentation
from loaders.dataset import RAW, open_split
from loaders.settings import AugmentName
from precache import Recipe, convert
from precache.example_data.sample_tree import make_sample
from precache.pictures import images
from precache.pictures.jpeg import psnr
from precache.storage.staging import temporary_folder

_CLASSES, _BATCH = 8, 32
_MAX_DB = 99.0  # of equal pictures, whose ratio is infinite
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
_COLUMNS = (FigureColumn("images/s", "warm"), FigureColumn("from disk", "cold"))


@dataclass(frozen=True, slots=True)
class StorageMethod:
    """Form in which pictures are stored.

    Attributes:
        name: name of the row.
        format, fit, resample: fields of `precache.Recipe`; an empty format: the raw tree is read.
        times: stored shorter side over the served side; None: all pixels are stored.
    """

    name: str
    format: str = ""
    fit: str = "keep"
    times: float | None = None
    resample: str = "lanczos"

    def recipe(self, size: int) -> Recipe:
        """Return the recipe for pictures that are served with side `size`."""
        stored = images.MAX_SIZE if self.times is None else round(self.times * size)
        return Recipe(format=self.format, fit=self.fit, size=stored, resample=self.resample)


METHODS = (
    StorageMethod("pytorch"),
    StorageMethod("squares", "shards", "crop", 8 / 7, "bilinear"),
    StorageMethod("8/7", "shards", times=8 / 7),
    StorageMethod("1.5 times", "shards", times=1.5),
    StorageMethod("twice", "shards", times=2),
    StorageMethod("all pixels", "shards"),
    StorageMethod("twice, JPEG", "webdataset", times=2),
)


def reference_pixels(
    original: Image.Image, sample_id: int, stored: npt.NDArray[np.int64], size: int, *, random: bool
) -> npt.NDArray[np.uint8]:
    """Return the pixels that a model should get of an upright picture, in one antialiased resize by Pillow.

    Args:
        stored: int64 [1, 2], height and width of the stored picture, by which crops are drawn.
        random: whether to crop at random, by seed 0 and epoch 0; else it is the middle, as by torchvision's
            `Resize` and `CenterCrop`.

    Returns:
        uint8 [size, size, 3], RGB, 0-255.
    """
    shape = np.array([[original.height, original.width]])
    mirrored = False
    if random:
        draws = draw_augmentation(RandomAugmentation(), stored, size, 0, 0, np.array([sample_id]))
        mirrored = bool(draws.mirrored[0])
        left, top, width, height = (draws.boxes[0] * np.tile((shape / stored)[0, ::-1], 2)).tolist()
        if np.array_equal(shape, stored):  # a crop of whole pixels: antialiasing sees none around them
            original = original.crop((int(left), int(top), int(left + width), int(top + height)))
            left = top = 0.0
    else:
        left, top, width, height = centre_boxes(shape, size, 0.875)[0].tolist()
    box = (left, top, left + width, top + height)
    resized = np.asarray(original.resize((size, size), Image.Resampling.BILINEAR, box))
    return resized[:, ::-1] if mirrored else resized


def distances(tree: Path, path: Path, size: int, *, random: bool) -> dict[str, float]:
    """Return the peak signal-to-noise ratio, dB, of each picture that is served, by its file.

    Args:
        tree: the tree of the original pictures.
        path: the tree, or a folder that it was converted to.
        random: whether random crops are served, or the middle.
    """
    data = open_split(path, "train")
    rows = {sample_id: row for row, sample_id in enumerate(np.asarray(data.ids[:]).tolist())}
    augment: AugmentName = "train" if random else "eval"
    psnr_db = {}
    with loaders.build(path, size=size, augment=augment, dtype="uint8", shuffle=False) as loader:
        for batch in loader:
            for picture, sample_id in zip(batch.images, batch.ids.tolist(), strict=True):
                file = tree / loader.path_of(sample_id)
                original = images.decode(file.read_bytes(), str(file))
                shape = np.array([[original.height, original.width]])
                stored = shape if data.kind == RAW else data.shapes_at(np.array([rows[sample_id]]))
                expected = reference_pixels(original, sample_id, stored, size, random=random)
                psnr_db[str(file)] = min(_MAX_DB, psnr(picture.permute(1, 2, 0).numpy(), expected))
    return psnr_db


def first_epochs(path: Path, size: int, workers: int) -> dict[str, float]:
    """Return images/s of first epochs after their first batch: `cold` from the disk, `warm` from memory."""
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
    """Copy `pictures` pictures, evenly spread over the tree, into a new tree `folder`, and return that."""
    files = open_split(tree, "train").files
    for row in np.unique(np.linspace(0, len(files) - 1, pictures).round().astype(int)).tolist():
        copy = folder / Path(files[row]).relative_to(tree)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(files[row], copy)
    return folder


def store_by_each_method(tree: Path, size: int, folder: Path) -> dict[StorageMethod, Path]:
    """Convert the tree by each of METHODS into `folder`; return the paths of the data."""
    paths = {}
    for number, method in enumerate(METHODS):
        if method.format:
            convert(tree, folder / str(number), method.recipe(size))
            paths[method] = folder / str(number)
        else:
            paths[method] = tree
    return paths


@click.command()
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
        sample = copy_some(tree, pictures, folder / "sample")
        stored_samples = store_by_each_method(sample, size, folder / "stored-sample")
        photographs = folder / "photographs"
        make_sample(photographs, images=pictures, classes=_CLASSES, seed=0, like="imagenet")
        stored_photographs = store_by_each_method(photographs, size, folder / "stored-photographs")
        runs = {
            method.name: partial(first_epochs, path, size, workers)
            for method, path in stored_photographs.items()
        }
        turns = harness.take_turns(runs, repeats)
        rows = []
        for method, path in stored_photographs.items():
            picture_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / pictures
            row = [
                method.name,
                f"{picture_bytes / 1e3:,.0f} kB",
                f"{picture_bytes * _IMAGENET / 1e9:,.0f} GB",
                *turns.cells(method.name, _COLUMNS),
            ]
            for random in (True, False):
                if random and method.fit == "crop":
                    row.append("another part")
                    continue
                psnr_db = distances(sample, stored_samples[method], size, random=random).values()
                row.append(f"{statistics.mean(psnr_db):.1f} ({min(psnr_db):.0f})")
            rows.append(row)
    settings = f"side {size}, {pictures} pictures each, {workers} workers, random crops, uint8, first epochs"
    harness.show(Table(_TITLES, rows), turns, settings, ("torch", "torchvision", "pillow", "simplejpeg"))


if __name__ == "__main__":
    harness.main(command, "stored_sizes")
