"""A manifest is somebody else's word: what it names lies in its folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precache import convert, export, open_dataset
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError
from precache.sharing.push_pull import pull, push
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url
from tests.conftest import small_recipe
from tests.damage import edit_manifest, rename_split
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
    rename_split(path, name)
    with pytest.raises(DatasetError, match=MANIFEST_NAME):
        open_dataset(path)


CONSUMERS: dict[str, Callable[[Path, Path, Url], object]] = {
    "export": lambda path, tree, url: export(path, path.with_name("new"), workers=0),
    "read": lambda path, tree, url: convert(path, path.with_name("new"), small_recipe("dali"), workers=0),
    "update": lambda path, tree, url: convert(tree, path, small_recipe("shards"), workers=0, update=True),
    "overwrite": lambda path, tree, url: convert(tree, path, small_recipe("dali"), workers=0, overwrite=True),
    "pull": lambda path, tree, url: pull(url, path.with_name("new")),
    "push": lambda path, tree, url: push(path, url / "other"),
}


@pytest.mark.parametrize("name", CONSUMERS)
def test_nothing_outside_is_touched(
    name: str, bucket: Url, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    """Nor believed: a folder of the user's has files of the names that its split and a number make."""
    path = Path(shutil.copytree(converted["shards"], tmp_path / "set"))
    (tmp_path / "user").mkdir()
    for shard in open_dataset(path).manifest.shards:
        (tmp_path / "user" / shard.file_name).write_bytes(THESIS)
    rename_split(path, "../user/train")
    ObjectStore(bucket).upload(path / MANIFEST_NAME, MANIFEST_NAME)
    before = contents(tmp_path)
    with pytest.raises(DatasetError, match="splits"):
        CONSUMERS[name](path, raw_tree, bucket)
    (tmp_path / ".set.precache-lock").unlink(missing_ok=True)
    assert contents(tmp_path) == before
