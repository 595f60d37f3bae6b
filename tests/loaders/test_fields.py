"""Targets and fields of every kind, served by every backend over every format."""

import shutil
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import loaders
from loaders import ImageDataset
from precache import Recipe, convert, open_dataset
from precache.errors import SourceError
from tests.building import build_loader
from tests.damage import flip_a_bit
from tests.loader_contract import ids_of
from tests.loaders.cases import CONVERTED_CASES
from tests.precache.sources.examples import CLASSES, FIELDS, SAMPLES, TARGETS, example_source

SIZE = 16
MakeFolder = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """Function from a kind of target and a format to a converted folder of the listed pictures."""

    @cache
    def make(target: str, name: str) -> Path:
        path = tmp_path_factory.mktemp("fields") / name
        recipe = Recipe(format=name, size=SIZE, fit="crop", shard_bytes=7 * SIZE * SIZE * 3)
        convert(example_source(target), path, recipe, workers=0)
        return path

    return make


def check_fields(fields: Any, ids: list[int]) -> None:
    """Compare the fields of a batch with those of the samples `ids` in the source."""
    assert fields.keys() == FIELDS.keys()
    for name, values in FIELDS.items():
        served, expected = fields[name], [values[i] for i in ids]
        if isinstance(expected[0], str):
            assert served == expected
        elif isinstance(served, torch.Tensor):
            assert served.dtype in (torch.int64, torch.float64)
            assert served.tolist() == expected
        else:
            assert [value.tolist() for value in served] == expected


def check_served(loader: Any, target: str) -> list[int]:
    """Compare labels and fields of an epoch with the source, and return the ids of the samples."""
    values, dtype = TARGETS[target], torch.int64 if target in ("class", "none") else torch.float32
    served = list(loader)
    for batch in served:
        ids = (batch.ids % SAMPLES).tolist()  # of a list, too, of the same dataset several times
        expected = [-1] * len(ids) if values is None else [values[i] for i in ids]
        if target == "classes":
            expected = [[float(number in values[i]) for number in range(len(CLASSES))] for i in ids]
        assert batch.labels.dtype == dtype
        assert torch.equal(batch.labels, torch.tensor(expected, dtype=dtype))
        check_fields(batch.fields, ids)
    return ids_of(served)


def build(path: Any, backend: str = "shards", **settings: Any) -> loaders.Loader:
    return build_loader(path, backend=backend, **{"batch_size": 5, "workers": 2, **settings})


@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize(("backend", "kind"), CONVERTED_CASES)
def test_every_sample_has_its_target_and_fields(
    target: str, backend: str, kind: str, folder: MakeFolder
) -> None:
    """Labels and fields do not depend on order and padding."""
    path = folder(target, kind)
    with build(path, backend, augment="train", size=8) as loader:
        assert sorted(check_served(loader, target)) == list(range(SAMPLES))
        classes = CLASSES if target.startswith("class") else ()
        assert loader.classes == loader.dataset.classes == classes
        values = TARGETS[target] or [-1] * SAMPLES
        stored = open_dataset(path).read_index("train").ids.tolist()
        assert loader.dataset.targets == [values[i] for i in stored]
    if target == "classes":
        with build(path, backend, last="pad", rank=1, world_size=3, shuffle=False) as loader:
            for _ in range(2):
                check_served(loader, target)


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_list_has_the_targets_and_fields_of_all_its_datasets(target: str, folder: MakeFolder) -> None:
    path = folder(target, "shards")
    targets = loaders.build(path).dataset.targets
    with build([path] * 3) as loader:
        assert sorted(check_served(loader, target)) == list(range(3 * SAMPLES))
        assert loader.dataset.targets == targets * 3


@pytest.mark.parametrize(("backend", "kind"), CONVERTED_CASES)
def test_fields_stay_aligned_when_a_sample_is_skipped(
    backend: str, kind: str, folder: MakeFolder, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(folder("number", kind), tmp_path / kind))
    _, damaged = flip_a_bit(path)
    with build(path, backend, on_error="skip") as loader:
        assert sorted([*check_served(loader, "number"), damaged]) == list(range(SAMPLES))


def test_writing_to_a_batch_changes_no_other_batch(folder: MakeFolder) -> None:
    """The next epoch has the stored values, whatever was written to this one."""
    with build(folder("number", "shards"), batch_size=SAMPLES, shuffle=False) as loader:
        first = next(iter(loader))
        for part in (first.fields["place"], first.fields["tokens"][3], first.labels):
            part.zero_()
        check_served(loader, "number")


LARGE: dict[str, list[Any]] = {
    "counts": [16_777_217, 5, 7], "seconds": [1_700_000_001, 1_700_000_002, 0],
    "negative": [-16_777_219, 0, 1], "fractions": [1_700_000_000.5, 0.5, 0.25],
    "beyond float32": [1e300, 1.0, 2.0], "vectors": [[1, 2**25 + 1]] * 3,
}  # fmt: skip
SMALL: dict[str, list[Any]] = {
    "even": [16_777_218, 2**40, 0], "small": [0.1, 1e-300, 16_777_215], "vectors": [[0.1, 1e6 + 0.1]] * 3,
}  # fmt: skip


def convert_numbers(values: list[Any], folder: Path) -> Path:
    pictures = [np.full((SIZE, SIZE, 3), number, np.uint8) for number in range(len(values))]
    source = [(Image.fromarray(picture), value) for picture, value in zip(pictures, values, strict=True)]
    convert(source, folder, Recipe(format="shards", size=SIZE), workers=0, target="number")
    return folder


@pytest.mark.parametrize("name", LARGE)
def test_numbers_that_float32_rounds_are_named(name: str, tmp_path: Path) -> None:
    path = convert_numbers(LARGE[name], tmp_path / "numbers")
    with pytest.warns(UserWarning, match=f"^{path}: labels are served as float32, which rounds"):
        loader = loaders.build(path, shuffle=False)
    assert sorted(loader.dataset.targets) == sorted(LARGE[name])
    with pytest.warns(UserWarning, match="float32"):
        ImageDataset(path, decode="tensor")


@pytest.mark.parametrize("name", SMALL)
def test_numbers_that_float32_holds_are_served(name: str, tmp_path: Path) -> None:
    path = convert_numbers(SMALL[name], tmp_path / "numbers")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaders.build(path)
        ImageDataset(path, decode="tensor")


@pytest.mark.parametrize("values", [[2**53 + 1, 0], [-(2**60) - 1, 0], [[1, 2**62 + 1], [0, 0]]], ids=str)
def test_numbers_that_float64_rounds_are_refused(values: list[Any], tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="larger than float64 holds exactly"):
        convert_numbers(values, tmp_path / "numbers")
