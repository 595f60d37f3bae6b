"""Tree of coloured squares, which a small network learns to classify within seconds, and its shards."""

from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import nn

from bench.measure.accuracy import (
    Source,
    Task,
    TrainingRecipe,
    TreeSplits,
    find_pictures,
    open_source,
    write_splits,
)
from loaders.examples.models import MODELS, Model
from precache import Recipe as Conversion
from precache import convert

SIDE = 24
COLOURS = {"blue": (40, 60, 200), "green": (40, 180, 60), "red": (200, 50, 40)}
TRAIN, VAL = 16, 10


def tiny(classes: int) -> nn.Module:
    """Return a model that learns colours in some thirty steps, each of a millisecond."""
    stem = [nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))


# registered by the fixture `tiny_model` alone: the help of commands lists MODELS
TINY_MODELS = {"tiny": Model(make=tiny, lr=0.1)}
with mock.patch.dict(MODELS, TINY_MODELS):
    TINY = TrainingRecipe(
        model="tiny",
        size=16,
        epochs=5,
        batch_size=8,
        lr=0.1,
        amp="off",
        device=torch.device("cpu"),
        workers=0,
    )


def draw_tree(folder: Path) -> None:
    """Draw squares on noise into a class folder for each colour."""
    rng = np.random.default_rng(3)
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for number in range(TRAIN + VAL):
            pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
            left, top = rng.integers(0, 6, 2)
            pixels[top : top + 18, left : left + 18] = colour
            Image.fromarray(pixels).save(folder / name / f"{number:02d}.png")


@dataclass(frozen=True)
class Squares:
    """Folder with the tree, the list of its splits, and the shards that were converted from them."""

    folder: Path

    @property
    def tree(self) -> Path:
        return self.folder / "tree"

    @property
    def shards(self) -> Path:
        return self.folder / "shards"

    @property
    def split_list(self) -> Path:
        return self.folder / "splits.csv"

    def convert(self, name: str, split_list: Path | None = None) -> None:
        """Convert the tree into the folder `name`, by `split_list` or the usual list of splits."""
        recipe = Conversion(format="shards", size=SIDE, fit="crop")
        convert(self.tree, self.folder / name, recipe, workers=0, split_list=split_list or self.split_list)

    def sources(self, *texts: str) -> list[Source]:
        """Open sources by their texts, in which `shards` stands for the path of the converted folder."""
        return [open_source(text.replace("=shards", f"={self.shards}"), self.tree) for text in texts]

    @property
    def pictures(self) -> TreeSplits:
        return find_pictures(self.tree, self.sources("ours=shards"))

    def task(self, unfinished: Path) -> Task:
        """Return the task of trainings that take seconds; the one under way is kept in `unfinished`."""
        return Task(recipe=TINY, pictures=self.pictures, unfinished=unfinished)


def make(folder: Path) -> Squares:
    squares = Squares(folder)
    draw_tree(squares.tree)
    write_splits(squares.split_list, squares.tree, TRAIN)
    squares.convert("shards")
    return squares
