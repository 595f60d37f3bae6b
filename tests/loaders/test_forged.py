"""Forged datasets with right checksums: using one works, or raises an error that names its path."""

import random
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import loaders
from precache import Recipe, convert, open_dataset, verify
from precache.dataset import inspection
from precache.errors import PrecacheError
from tests import forgery
from tests.building import build_loader
from tests.precache.sources.examples import FIELDS, SAMPLES, example_source

KINDS: dict[str, Callable[[Path], Iterator[tuple[str, forgery.Forge]]]] = {
    "manifest": forgery.forge_manifest,
    "header": forgery.forge_header,
    "columns": forgery.forge_columns,
    "shards": forgery.forge_shards,
}
QUICK_CASES = 60
EXTRA_BYTES = 3 << 30
"""Address space beyond what the process uses, for threads and libraries; forgeries would take more."""
SIDE = 16


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Datasets of every format and target, with fields and rejected pictures."""
    root, paths = tmp_path_factory.mktemp("originals"), []
    fields = FIELDS | {"nothing": [[]] * SAMPLES}
    settings: dict[str, Any] = {"workers": 0, "max_rejects": 1}
    for name, target, fit in (
        ("shards", "class", "keep"),
        ("webdataset", "classes", "crop"),
        ("dali", "number", "keep"),
    ):
        recipe = make_recipe(name, fit)
        convert(example_source(target, fields, missing=(3,)), root / name, recipe, **settings)
        paths.append(root / name)
    return paths


def make_recipe(name: str, fit: str) -> Recipe:
    shard_bytes = 4 * SIDE * SIDE * 3
    return Recipe(format=name, size=SIDE, fit=fit, shard_bytes=shard_bytes, splits="train=0.75,val=0.25")


@pytest.fixture
def little_memory() -> Iterator[None]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def load(path: Path, **settings: Any) -> None:
    """Serve an epoch by the backend of the dataset's format, or by `webdataset` if DALI is not installed."""
    kind = open_dataset(path).manifest.recipe.format
    if kind == "dali" and find_spec("nvidia") is None:
        kind = "webdataset"
    with build_loader(path, backend=kind, size=8, batch_size=5, workers=1, **settings) as loader:
        assert len(loader.dataset.targets) == len(loader.dataset)
        for _ in loader:
            pass


def read_one_by_one(path: Path) -> None:
    dataset = loaders.ImageDataset(path, decode="tensor")
    for number in range(len(dataset)):
        dataset[number]


def inspect(path: Path) -> None:
    inspection.facts(open_dataset(path))
    inspection.summary(open_dataset(path).manifest)
    inspection.write_html(open_dataset(path), path.with_name("page.html"))


USES: dict[str, Callable[[Path], object]] = {
    "full": partial(load, shuffle="full"),
    "window": partial(load, shuffle="window", augment="train"),
    "in order": partial(load, shuffle=False, augment="crop", on_error="skip"),
    "one by one": read_one_by_one,
    "verify": verify,
    "inspect": inspect,
    "convert": lambda path: convert(
        path, path.with_name("again"), Recipe(format="shards", size=8), workers=0
    ),
    "without": lambda path: convert(
        example_source("none"),
        path.with_name("again"),
        make_recipe("shards", "crop"),
        workers=0,
        without=[path],
    ),
}


def check_case(original: Path, forge: forgery.Forge, uses: Iterable[str], folder: Path) -> list[str]:
    """Use a forgery of `original`, and return the uses that raise no error which names its path."""
    path, wrong = folder / "forged" / "set", []
    for use in ("open", *uses):
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        shutil.copytree(original, path)
        forge(path)
        try:
            open_dataset(path).read_index() if use == "open" else USES[use](path)
        except PrecacheError as error:
            if str(path.parent) not in str(error):
                wrong.append(f"{use}: {error}")
        except Exception as error:
            wrong.append(f"{use}: {error!r:.300}")
    return wrong


def check_cases(kind: str, originals: list[Path], folder: Path, count: int | None) -> None:
    cases = [(path, *case) for path in originals for case in KINDS[kind](path)]
    draw = random.Random(kind)
    draw.shuffle(cases)
    wrong = []
    for path, name, forge in cases[:count]:
        uses = draw.sample(sorted(USES), 1)
        wrong += [f"{path.name}, {name}, {fault}" for fault in check_case(path, forge, uses, folder)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_forged_dataset_is_used_or_its_path_is_named(
    kind: str, originals: list[Path], tmp_path: Path, little_memory: None
) -> None:
    check_cases(kind, originals, tmp_path, QUICK_CASES)


def test_an_empty_field_with_forged_sides_is_used_or_refused(
    originals: list[Path], tmp_path: Path, little_memory: None
) -> None:
    for shape in ([0, 0], [0, 2**62], [0, 2**70], [0, 2**62, 2**62]):
        forge = forgery.set_header("value:nothing", ("shape",), shape)
        assert check_case(originals[0], forge, USES, tmp_path) == []


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_every_forged_dataset_is_used_or_its_path_is_named(
    kind: str, originals: list[Path], tmp_path: Path, little_memory: None
) -> None:
    check_cases(kind, originals, tmp_path, None)


def test_an_honest_dataset_passes_every_use(originals: list[Path], tmp_path: Path) -> None:
    """The other tests would pass if every use raised an error."""
    for path in originals:
        assert check_case(path, lambda path: None, USES, tmp_path) == []
