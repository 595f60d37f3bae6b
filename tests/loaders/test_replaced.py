"""A loader serves the dataset that it opened, even if another one takes its place in the folder."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import loaders
from precache import convert
from precache.errors import DatasetError
from precache.formats import FORMATS
from tests.building import build_loader
from tests.conftest import small_recipe
from tests.loader_contract import check_another_dataset_in_its_place_is_never_served, ids_of
from tests.loaders.cases import backend_params

PICTURES = 48


@dataclass(frozen=True)
class Place:
    """Tree of two classes with different colours, and its dataset with two pictures per shard.

    In `another` the first class is renamed, so that its pictures have other ids, and both classes other
    labels.
    """

    folder: Path
    format: str

    @property
    def tree(self) -> Path:
        return self.folder.with_name("tree")

    @property
    def another(self) -> Path:
        return self.folder.with_name("another")

    @property
    def elsewhere(self) -> Path:
        return self.folder.with_name("elsewhere")

    def convert(self, **options: Any) -> None:
        recipe = small_recipe(self.format, size=16, shard_bytes=2 * 16 * 16 * 3)
        convert(self.tree, self.folder, recipe, workers=0, **options)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Place]:
    places = {}
    for name in FORMATS:
        place = Place(tmp_path_factory.mktemp("place") / "data", name)
        for number in range(PICTURES):
            path = place.tree / "ab"[number * 2 // PICTURES] / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            red = 200 if path.parent.name == "b" else 0
            Image.new("RGB", (16, 16), (red, number, 0)).save(path)
        (place.tree / "a").rename(place.tree / "z")
        place.convert()
        place.folder.rename(place.another)
        (place.tree / "z").rename(place.tree / "a")
        place.convert()
        places[name] = place
    return places


@pytest.fixture
def place(places: dict[str, Place], tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    """Copy of one of `places`, which the test may change."""
    name = request.param
    shutil.copytree(places[name].folder.parent, tmp_path / "place")
    return Place(tmp_path / "place" / "data", name)


def overwrite(place: Place) -> None:
    (place.tree / "a").rename(place.tree / "z")
    place.convert(overwrite=True)


def move_another_there(place: Place) -> None:
    place.folder.rename(place.elsewhere)
    place.another.rename(place.folder)


def copy_another_there(place: Place) -> None:
    """Replace the dataset file by file, as rsync does."""
    for path in sorted(place.another.iterdir()):
        os.replace(path, place.folder / path.name)


def convert_anew(place: Place) -> None:
    (place.tree / "a").rename(place.tree / "z")
    shutil.rmtree(place.folder)
    place.convert()


def convert_the_same(place: Place) -> None:
    shutil.rmtree(place.folder)
    place.convert()


def touch(place: Place) -> None:
    for path in place.folder.iterdir():
        os.utime(path)


REPLACED: dict[str, Callable[[Place], Any]] = {
    "overwritten": overwrite,
    "removed": lambda place: shutil.rmtree(place.folder),
    "moved": lambda place: place.folder.rename(place.elsewhere),
    "converted anew": convert_anew,
    "another moved there": move_another_there,
    "another copied there": copy_another_there,
}
RESTORED: dict[str, Callable[[Place], Any]] = {
    "the same converted anew": convert_the_same,
    "moved there and back": lambda place: place.folder.rename(place.elsewhere).rename(place.folder),
}
STILL_OPEN: dict[str, Callable[[Place], Any]] = {"touched": touch}
CHANGES = {**REPLACED, **RESTORED, **STILL_OPEN}
READERS = [
    *(pytest.param("shards", "shards", shuffle, id=f"shards-{shuffle}") for shuffle in (True, "window")),
    pytest.param("webdataset", "webdataset", False, id="webdataset-False"),
    *(
        pytest.param(*case.values, "window", id=case.id, marks=case.marks)
        for case in backend_params(("dali", "dali"))
    ),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("backend", "place", "shuffle"), READERS, indirect=["place"])
def test_another_dataset_is_never_served(backend: str, place: Place, change: str, shuffle: Any) -> None:
    check_another_dataset_in_its_place_is_never_served(
        partial(build_loader, place.folder, backend=backend, shuffle=shuffle, batch_size=4, workers=1),
        partial(CHANGES[change], place),
        place.folder,
        stays=change in STILL_OPEN,
        serves=change not in REPLACED,
    )


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", FORMATS, indirect=True)
def test_an_image_dataset_never_reads_a_replaced_dataset(place: Place, change: str) -> None:
    dataset = loaders.ImageDataset(place.folder, decode="tensor")
    before = [(picture.numpy().tobytes(), label) for picture, label in dataset]
    CHANGES[change](place)
    if change not in REPLACED:
        assert [(picture.numpy().tobytes(), label) for picture, label in dataset] == before
        return
    for row in range(PICTURES):
        with pytest.raises(DatasetError, match=str(place.folder)):
            dataset[row]


@pytest.mark.parametrize("place", FORMATS, indirect=True)
def test_a_replaced_dataset_is_not_reported_as_damaged(place: Place) -> None:
    """The replacement is reported even without checksums, and the new dataset can be opened."""
    with build_loader(place.folder, shuffle="window", batch_size=4, check="never") as loader:
        assert len(ids_of(loader)) == PICTURES
        overwrite(place)
        with pytest.raises(DatasetError, match=f"{place.folder}: .* was replaced"):
            list(chain(loader, loader))  # some batches of the first epoch were read ahead
    with build_loader(place.folder) as loader:
        assert len(ids_of(loader)) == PICTURES


@pytest.mark.parametrize("place", ["webdataset"], indirect=True)
def test_a_conversion_never_reads_a_replaced_dataset(place: Place, tmp_path: Path) -> None:
    """A conversion that reads a dataset raises an error that names it if it is replaced meanwhile."""
    with pytest.raises(DatasetError, match=f"{place.folder}: .* was replaced"):
        convert(
            place.folder,
            tmp_path / "out",
            small_recipe("webdataset", size=16),
            workers=0,
            on_start=lambda *sizes: copy_another_there(place),
        )
