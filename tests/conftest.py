"""Trees and converted folders that the tests share. None of them is written to by a test."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from precache import Recipe, convert
from precache.example_data.sample_tree import make_sample
from precache.formats import FORMATS
from tests.cloud.fixtures import bucket, storage

# Several processes of tests, with workers each, share the CPUs: threads of torch that wait for each other on
# busy ones take a hundred times as long as one alone. Torch reads this when it is imported, in programs too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What a shell starts in the background ignores Ctrl-C, and so would all that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
__all__ = ["bucket", "storage"]

IMAGES, CLASSES, STORED_SIZE, ROWS_PER_SHARD = 70, 5, 48, 12
RECTANGLE = (36, 60)
"""Height and width."""
_put_aside = [0]
"""Of how many modules, each time."""


def pytest_collection_finish() -> None:
    _put_imports_aside()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    _put_imports_aside()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or what is written in C++ says at the exit that it was leaked


def _put_imports_aside() -> None:
    """What was imported is not garbage: to look for some in it takes most of the time of a collection."""
    if len(sys.modules) > _put_aside[-1] + 50:
        gc.collect()
        gc.freeze()
        _put_aside.append(len(sys.modules))


@pytest.fixture(scope="session")
def raw_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70 generated pictures in 5 classes, at least two of each kind that a sample tree has."""
    path = tmp_path_factory.mktemp("raw") / "tree"
    make_sample(path, images=IMAGES, classes=CLASSES, seed=1, like="caltech", workers=0)
    return path


@pytest.fixture(scope="session")
def converted(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tree in each format: 48 px, 6 shards of 11 or 12 samples."""
    root = tmp_path_factory.mktemp("converted")
    for name in FORMATS:
        convert(raw_tree, root / name, small_recipe(name), workers=0)
    return {name: root / name for name in FORMATS}


@pytest.fixture(scope="session")
def shaped(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tree in each format, `keep-FORMAT`, shorter side 48 px, `rectangle-FORMAT` and `grey-FORMAT`."""
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
    """As `converted`, in grey."""
    return {name: shaped[f"grey-{name}"] for name in FORMATS}


def small_recipe(format_name: str, **settings: object) -> Recipe:
    """A recipe that cuts the small tree into several shards of squares, unless told otherwise.

    Shrunk as loaders and torchvision shrink pictures, so that what was stored so is near to theirs.
    """
    shard_bytes = ROWS_PER_SHARD * STORED_SIZE**2 * 3
    defaults = {"size": STORED_SIZE, "fit": "crop", "resample": "bilinear", "shard_bytes": shard_bytes}
    return Recipe(format=format_name, **{**defaults, **settings})


@pytest.fixture(scope="session", autouse=True)
def _memory_of_its_own() -> Iterator[None]:
    """What another run of these tests keeps at the same time is not found: it has none of the damage here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loaders.read.host_memory._PREFIX", f"precache-test-{os.getpid()}-")
        yield
