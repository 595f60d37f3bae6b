"""A list for `precache convert --splits`: so many pictures of each class train, all others validate.

With 30 this is how Caltech-101 is used: Fei-Fei, Fergus, Perona, "Learning generative visual models from few
training examples" (2004), and those after it. Which pictures these are follows the seed and the class alone.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from precache.errors import SettingError, check_range
from precache.sources.base import Scan
from precache.sources.tree import scan_tree
from precache.storage import atomic_write


def choose(scan: Scan, per_class: int, seed: int) -> Iterator[tuple[str, str]]:
    """Path and split of each picture.

    Raises:
        SettingError: a class has not more pictures than that.
    """
    check_range("per_class", per_class, 1)
    check_range("seed", seed, 0)
    samples = list(scan.samples)
    labels = np.array([sample.label for sample in samples])
    for label, name in enumerate(scan.classes):
        rows = np.flatnonzero(labels == label)
        if len(rows) <= per_class:
            raise SettingError(
                f"per_class {per_class}: class {name!r} of {scan.root} has {len(rows)} pictures, and none "
                f"would be left to validate; give less"
            )
        train = set(np.random.default_rng((seed, label)).permutation(rows)[:per_class].tolist())
        for row in rows.tolist():
            yield samples[row].path, "train" if row in train else "val"


def write(path: Path, tree: Path, per_class: int, seed: int = 0) -> tuple[int, int]:
    """Write the list for the pictures of `tree`; how many train and validate."""
    rows = list(choose(scan_tree(tree), per_class, seed))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("path", "split"), *rows])
    with atomic_write(path) as file:
        file.write(text.getvalue().encode("utf-8", "surrogateescape"))
    train = sum(split == "train" for _, split in rows)
    return train, len(rows) - train
