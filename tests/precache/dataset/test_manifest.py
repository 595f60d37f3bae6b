"""A manifest is somebody else's word: what it names lies in its folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precache import Recipe, convert, export, open_dataset, verify
from precache.conversion.clean import leftovers
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError
from precache.sharing.push_pull import pull, push
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url
from tests.conftest import small_recipe
from tests.damage import edit_manifest, lead_away
from tests.precache.destinations import THESIS, contents

NAMES = (
    *("/etc/x", "../x", "a/b", "..", ".", "", ".x", "-x", "a b", "a\nb", "a\0b", "\ud800", "x" * 300),
    *(5, None),
)
"""Of a file or a split, in a manifest that somebody else has written."""


@pytest.mark.parametrize("name", NAMES)
def test_no_name_leads_out_of_the_folder(name: Any, converted: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(converted["shards"], tmp_path / "set"))
    before = (path / MANIFEST_NAME).read_bytes()
    edit_manifest(path, index={**json.loads(before)["index"], "name": name})
    with pytest.raises(DatasetError, match=MANIFEST_NAME):
        open_dataset(path)
    (path / MANIFEST_NAME).write_bytes(before)
    lead_away(path, name)
    with pytest.raises(DatasetError, match=MANIFEST_NAME):
        open_dataset(path)


def verified(path: Path) -> None:
    for problem in verify(path):
        raise DatasetError(problem)


CONSUMERS: dict[str, Callable[[Path, Path, Path], object]] = {
    "open": lambda path, tree, new: open_dataset(path),
    "verify": lambda path, tree, new: verified(path),
    "clean": lambda path, tree, new: leftovers(path).__enter__().remove(),
    "export": lambda path, tree, new: export(path, new, workers=0),
    "read": lambda path, tree, new: convert(path, new, small_recipe("dali"), workers=0),
    "again": lambda path, tree, new: convert(tree, path, small_recipe("shards"), workers=0),
    "update": lambda path, tree, new: convert(tree, path, small_recipe("shards"), workers=0, update=True),
    "overwrite": lambda path, tree, new: convert(tree, path, small_recipe("dali"), workers=0, overwrite=True),
}


@pytest.fixture
def victim(tmp_path: Path, converted: dict[str, Path]) -> Path:
    """A folder of the user's, with files of the names that `train` and a number make."""
    (tmp_path / "user").mkdir()
    for shard in open_dataset(converted["shards"]).manifest.shards:
        (tmp_path / "user" / shard.file_name).write_bytes(THESIS)
    return tmp_path / "user"


@pytest.mark.parametrize("name", CONSUMERS)
def test_nothing_outside_is_touched(
    name: str, victim: Path, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(converted["shards"], tmp_path / "set"))
    lead_away(path, f"../{victim.name}/train")
    before = contents(tmp_path)
    with pytest.raises(DatasetError, match="splits"):
        CONSUMERS[name](path, raw_tree, tmp_path / "new")
    (tmp_path / ".set.precache-lock").unlink(missing_ok=True)
    assert contents(tmp_path) == before


def test_nothing_outside_is_written_by_a_pull_or_believed_by_a_push(
    victim: Path, converted: dict[str, Path], bucket: Url, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(converted["shards"], tmp_path / "set"))
    lead_away(path, f"{victim}/train")
    store = ObjectStore(bucket / "set")
    for file in path.iterdir():
        store.upload(file, f"{victim}/{file.name}" if file.name.startswith("train") else file.name)
    before = contents(victim)
    with pytest.raises(DatasetError, match="splits"):
        pull(bucket / "set", tmp_path / "copy")
    for source, destination in ((path, bucket / "other"), (converted["shards"], bucket / "set")):
        with pytest.raises(DatasetError):
            push(source, destination)
    assert contents(victim) == before


def test_a_recipe_that_the_pictures_do_not_follow_is_refused(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    """Its checksum fits, and every value has its type."""
    path = Path(shutil.copytree(converted["shards"], tmp_path / "set"))
    content = json.loads((path / MANIFEST_NAME).read_bytes())
    wrong: tuple[dict[str, Any], ...] = ({"size": 1}, {"size": 47}, {"size": 49})
    for number, changes in enumerate((*wrong, {"channels": "grey"}, {"channels": "rgba"})):
        edit_manifest(path, recipe={**content["recipe"], **changes})
        for fit in ("keep", "crop"):
            recipe = Recipe(format="dali", size=1, fit=fit)
            with pytest.raises(DatasetError, match=r"first: 0.*, holds no \d+x\d+ pixels of "):
                convert(path, tmp_path / f"{number}-{fit}", recipe, workers=0)


def test_no_depth_of_its_json_is_a_bug(converted: dict[str, Path], tmp_path: Path) -> None:
    """What Python can read, it cannot always write: the limit is one of the stack."""
    text = (converted["dali"] / MANIFEST_NAME).read_text()
    for depth in range(700, 1020, 20):
        nested = f'{{"x": {"[" * depth}{"]" * depth},'
        (tmp_path / MANIFEST_NAME).write_text(text.replace("{", nested, 1))
        with pytest.raises(DatasetError):
            open_dataset(tmp_path)
