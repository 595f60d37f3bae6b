"""A manifest of a stranger cannot name files outside of the dataset's folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precache import convert, open_dataset
from precache.dataset import converted as opening
from precache.dataset.manifest import MANIFEST_NAME, parse_manifest
from precache.errors import DatasetError
from precache.sharing.push_pull import pull, push
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url
from tests.conftest import small_recipe
from tests.damage import edit_manifest, rename_split
from tests.precache.destinations import THESIS, contents

NAMES: list[Any] = ["/etc/x", "../x", "a/b", "..", ".", "", ".x", "-x", "a b", "a\nb", "a\0b", "\ud800"]
NAMES += ["x" * 300, 5, None]
"""Names that a forged manifest may give to a file or a split."""


@pytest.mark.parametrize("name", NAMES)
def test_open_dataset_refuses_an_index_of_this_name(
    name: Any, converted: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(converted["shards"], tmp_path / "set"))
    index = json.loads((path / MANIFEST_NAME).read_bytes())["index"]
    edit_manifest(path, index={**index, "name": name})
    with pytest.raises(DatasetError, check=lambda error: error.path == path / MANIFEST_NAME):
        open_dataset(path)


@pytest.mark.parametrize("name", [name for name in NAMES if name is not None])  # a key of JSON is a text
def test_open_dataset_refuses_a_split_of_this_name(
    name: Any, converted: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(converted["shards"], tmp_path / "set"))
    rename_split(path, name)
    with pytest.raises(DatasetError, check=lambda error: error.path == path / MANIFEST_NAME):
        open_dataset(path)


def test_a_dataset_replaced_while_it_is_opened_is_not_called_damaged(
    converted: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, others = tmp_path / "set", [converted["webdataset"], converted["dali"]]
    shutil.copytree(converted["shards"], path)
    parse = parse_manifest

    def replace_and_parse(*arguments: Any) -> Any:
        if others:
            shutil.rmtree(path)
            shutil.copytree(others.pop(), path)
        return parse(*arguments)

    monkeypatch.setattr(opening, "parse_manifest", replace_and_parse)
    dataset = open_dataset(path)
    assert dataset.manifest.recipe.format == "webdataset"
    assert len(dataset.read_index()) == dataset.manifest.samples
    (path / "dataset.index").unlink()
    with pytest.raises(DatasetError, match="missing"):
        open_dataset(path)


CONSUMERS: dict[str, Callable[[Path, Path, Url], object]] = {
    "read": lambda path, tree, url: convert(path, path.with_name("new"), small_recipe("dali"), workers=0),
    "without": lambda path, tree, url: convert(
        tree, path.with_name("new"), small_recipe("shards"), workers=0, without=[path]
    ),
    "overwrite": lambda path, tree, url: convert(tree, path, small_recipe("dali"), workers=0, overwrite=True),
    "pull": lambda path, tree, url: pull(url, path.with_name("new")),
    "push": lambda path, tree, url: push(path, url / "other"),
}


@pytest.mark.parametrize("name", CONSUMERS)
def test_forged_split_leads_no_command_to_files_of_another_folder(
    name: str, bucket: Url, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(converted["shards"], tmp_path / "set"))
    (tmp_path / "user").mkdir()
    for shard in open_dataset(path).manifest.shards:
        (tmp_path / "user" / shard.file_name).write_bytes(THESIS)
    rename_split(path, "../user/train")
    ObjectStore(bucket).upload(path / MANIFEST_NAME, MANIFEST_NAME)
    before = contents(tmp_path)
    with pytest.raises(DatasetError, match=MANIFEST_NAME):
        CONSUMERS[name](path, raw_tree, bucket)
    (tmp_path / ".set.precache-lock").unlink(missing_ok=True)
    assert contents(tmp_path) == before
