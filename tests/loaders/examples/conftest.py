"""Data of the examples' tests: classes differ by colour, which a model learns in a few steps."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from precache import Recipe, convert

CLASSES, IMAGES, TRAINED, SIZE = 3, 60, 45, 32
"""Classes, pictures, those of them in split `train` (the others are split `val`), side in pixels."""


@pytest.fixture(scope="package")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tree of 20 pictures in each of three class folders: noise with more of one colour."""
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
