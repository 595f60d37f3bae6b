"""Pictures that are told apart by their colour, so that a few steps learn it."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from precache import Recipe, convert

CLASSES, IMAGES, TRAINED, SIZE = 3, 60, 45, 32
"""A quarter of the pictures is split `val`."""


@pytest.fixture(scope="package")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 pictures in each of three folders: noise, and more of one colour."""
    root = tmp_path_factory.mktemp("colours") / "tree"
    random = np.random.default_rng(0)
    for number in range(IMAGES):
        label = number % CLASSES
        pixels = random.integers(0, 120, (SIZE, SIZE, 3)).astype(np.uint8)
        pixels[..., label] += 110
        (root / f"colour {label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(root / f"colour {label}" / f"{number}.png")
    return root


@pytest.fixture(scope="package")
def data(tree: Path) -> Path:
    """The tree as shards, with splits `train` and `val`."""
    recipe = Recipe(
        format="shards", size=SIZE, fit="crop", shard_bytes=11 * SIZE**2 * 3, splits="train=0.75,val=0.25"
    )
    convert(tree, tree.parent / "shards", recipe, workers=0)
    return tree.parent / "shards"
