"""Coloured squares that a small network tells apart within seconds, as a tree and converted."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from bench.measure import splits, validation
from bench.measure.training import Recipe
from bench.measure.training_sources import Arm, Pictures, find_pictures, opener, parse_arm
from bench.measure.trainings import Source, Task
from precache import Recipe as Conversion
from precache import convert

SIDE = 24
COLOURS = {"blue": (40, 60, 200), "green": (40, 180, 60), "red": (200, 50, 40)}
TRAIN, VAL = 16, 10
CPU = torch.device("cpu")


def tiny(classes: int) -> nn.Module:
    """A model that learns colours in some thirty steps, each of a millisecond."""
    stem = [nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))


def draw_tree(folder: Path) -> None:
    """Squares on noise, a folder per colour."""
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
    """The tree at `folder / tree`, and in `folder / shards` what was converted of it."""

    folder: Path

    @property
    def tree(self) -> Path:
        return self.folder / "tree"

    @property
    def shards(self) -> Path:
        return self.folder / "shards"

    @property
    def listed(self) -> Path:
        return self.folder / "splits.csv"

    def convert(self, name: str, splits_list: Path | None = None, fit: str = "crop") -> Path:
        recipe = Conversion(format="shards", size=SIDE, fit=fit)
        convert(self.tree, self.folder / name, recipe, workers=0, split_list=splits_list or self.listed)
        return self.folder / name

    def open(self, *arms: str) -> tuple[list[Arm], Pictures]:
        """With `shards` for the converted folder."""
        arms = tuple(text.replace("=shards", f"={self.shards}") for text in arms)
        return find_pictures(self.tree, [parse_arm(text, self.tree) for text in arms])

    def sources(self, *arms: str) -> list[Source]:
        opened, pictures = self.open(*arms)
        return [
            Source(arm.name, opener(arm, pictures, batch_size=8, size=16, workers=0, device=CPU), arm.told)
            for arm in opened
        ]

    def task(self, out: Path) -> Task:
        out.mkdir(parents=True, exist_ok=True)
        _, pictures = self.open(str(self.shards))
        recipe = Recipe(model="tiny", size=16, epochs=5, batch_size=8, lr=0.1, amp="off")
        return Task(
            recipe=recipe,
            classes=len(COLOURS),
            images=validation.load(pictures.files(pictures.val), 16, out, 1),
            labels=pictures.labels(pictures.val),
            batches=3 * TRAIN // recipe.batch_size,
            device=CPU,
            conditions={**recipe.written, "workers": 0, "threads": 1},
            machine={"date": "2026-11-22", "cpu": "test"},
            folder=out,
        )


def make(folder: Path) -> Squares:
    squares = Squares(folder)
    draw_tree(squares.tree)
    splits.write(squares.listed, squares.tree, TRAIN)
    squares.convert("shards")
    return squares


def unseen(done: int, total: int = 0) -> None:
    """Progress that nobody looks at."""


def curves(lines: Iterable[dict[str, object]]) -> list[list[tuple[int, float]]]:
    """Epochs and top-1, without times."""
    return [[(epoch, top1) for epoch, top1, _ in line["curve"]] for line in lines]  # type: ignore[attr-defined]
