"""Fixtures that tests share: a tree of pictures, and datasets of it; no test may write to them."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from precache import Recipe, convert
from precache.example_data.sample_tree import make_sample
from precache.formats import FORMATS
from tests.cloud.fixtures import bucket, storage

# Several test processes, with workers each, share the CPUs: on busy CPUs several threads of torch, which wait
# for each other, take a hundred times as long as one. torch reads this variable when it is imported, also in
# programs that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A process that a shell starts in the background ignores Ctrl-C, and so would the programs that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
__all__ = ["bucket", "storage"]

IMAGES, CLASSES, STORED_SIZE, ROWS_PER_SHARD = 70, 5, 48, 12
OTHER_IMAGES = 27
"""Number of pictures of the datasets `other`."""
RECTANGLE = (36, 60)
"""Height and width of the datasets `rectangle-FORMAT`."""
_module_counts = [0]
"""Number of imported modules at each call of gc.freeze()."""


def pytest_collection_finish() -> None:
    _freeze_imports()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    _freeze_imports()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # otherwise extensions in C++ report leaks at the exit


def _freeze_imports() -> None:
    """Exclude imported modules from garbage collection, which would spend most of its time on them."""
    if len(sys.modules) > _module_counts[-1] + 50:
        gc.collect()
        gc.freeze()
        _module_counts.append(len(sys.modules))


@pytest.fixture(scope="session")
def raw_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tree of 70 generated pictures in 5 classes, at least two of each kind that a sample tree has."""
    path = tmp_path_factory.mktemp("raw") / "tree"
    make_sample(path, images=IMAGES, classes=CLASSES, seed=1, like="caltech", workers=0)
    return path


@pytest.fixture(scope="session")
def converted(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of the tree's dataset in each format, by name: 48 px, 6 shards of 11 or 12 samples."""
    root = tmp_path_factory.mktemp("converted")
    for name in FORMATS:
        convert(raw_tree, root / name, small_recipe(name), workers=0)
    return {name: root / name for name in FORMATS}


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Another tree, `raw`, and its dataset in each format: one new class, which sorts first, and old ones."""
    root = tmp_path_factory.mktemp("other")
    make_sample(root / "raw", images=OTHER_IMAGES, classes=3, seed=5, like="caltech", workers=0)
    (root / "raw/001.anchor").rename(root / "raw/000.new")
    for name in FORMATS:
        convert(root / "raw", root / name, small_recipe(name), workers=0)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="session")
def shaped(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Datasets in each format: `keep-FORMAT` (shorter side 48 px), `rectangle-FORMAT` and `grey-FORMAT`."""
    root = tmp_path_factory.mktemp("shaped")
    grey_bytes = ROWS_PER_SHARD * STORED_SIZE**2
    for name in FORMATS:
        convert(raw_tree, root / f"keep-{name}", small_recipe(name, fit="keep"), workers=0)
        convert(raw_tree, root / f"rectangle-{name}", small_recipe(name, size=RECTANGLE), workers=0)
        grey = small_recipe(name, channels="grey", shard_bytes=grey_bytes)
        convert(raw_tree, root / f"grey-{name}", grey, workers=0)
    return {path.name: path for path in root.iterdir() if path.is_dir()}


@pytest.fixture(scope="session")
def grey(shaped: dict[str, Path]) -> dict[str, Path]:
    """Folders as of `converted`, with pictures in grey."""
    return {name: shaped[f"grey-{name}"] for name in FORMATS}


def small_recipe(format_name: str, **settings: object) -> Recipe:
    """Make a recipe for several shards of squares of the small tree; `settings` change it.

    It resizes as loaders and torchvision do, so that stored pixels are near to theirs.
    """
    shard_bytes = ROWS_PER_SHARD * STORED_SIZE**2 * 3
    defaults = {"size": STORED_SIZE, "fit": "crop", "resample": "bilinear", "shard_bytes": shard_bytes}
    return Recipe(format=format_name, **{**defaults, **settings})
