"""What is made from a dataset that was updated, and updates of sources that are no files."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from precache import convert, open_dataset, verify_deep
from precache.conversion.export import export
from precache.formats import FORMATS
from precache.sources import SourceOptions
from precache.sources.tree import scan_tree
from tests.conftest import small_recipe
from tests.precache.conversion.updating import grow, stored, update


def paths_of(out: Path) -> dict[int, str]:
    index = open_dataset(out).read_index()
    return {int(index.ids[row]): str(index.path(row)) for row in range(len(index))}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_is_removed_is_neither_converted_on_nor_exported(tree: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    update(tree, out, name)
    grow(tree, 1)
    update(tree, out, name)
    on = convert(out, tmp_path / "on", small_recipe("shards"), workers=0).manifest
    assert on.samples == open_dataset(out).manifest.samples
    assert paths_of(tmp_path / "on") == paths_of(out)
    if name == "shards":
        assert stored(tmp_path / "on") == stored(out)
    label = SourceOptions(classes=("001.new",))
    some = convert(out, tmp_path / "some", small_recipe("shards"), workers=0, options=label)
    assert {path.split("/")[0] for path in paths_of(tmp_path / "some").values()} == {"001.new"}
    assert some.manifest.samples == sum("001.new/" in path for path in paths_of(out).values())
    export(out, tmp_path / "back", workers=0)
    files = [path for path in (tmp_path / "back").rglob("*.*") if path.suffix in (".png", ".jpg")]
    assert len(files) == on.samples
    names = sorted(Path(path).with_suffix("").name for path in paths_of(out).values())
    assert sorted(file.stem for file in files) == names


def test_a_dataset_that_was_converted_on_follows_its_updates(tree: Path, tmp_path: Path) -> None:
    out, on = tmp_path / "out", tmp_path / "on"
    for times in (0, 1):
        update(tree, out)
        result = convert(out, on, small_recipe("webdataset"), workers=0, update=True)
        grow(tree, times + 1)
    assert sorted(paths_of(on).values()) == sorted(paths_of(out).values())
    assert result.manifest.removed
    assert verify_deep(on, out, workers=0).problems == ()
    assert not convert(out, on, small_recipe("webdataset"), workers=0, update=True).published


class Pictures:
    """A dataset in memory."""

    def __init__(self, pictures: list[tuple[Any, int]]) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.pictures[index]


def test_a_dataset_in_memory_grows_and_changes(raw_tree: Path, tmp_path: Path) -> None:
    refs = list(scan_tree(raw_tree).samples)[:20]
    pictures = [(Image.open(raw_tree / ref.path).convert("RGB"), ref.label) for ref in refs]
    out = tmp_path / "out"
    convert(Pictures(pictures[:15]), out, small_recipe("shards"), workers=0, update=True)
    assert not convert(Pictures(pictures[:15]), out, small_recipe("shards"), workers=0, update=True).published
    changed = np.asarray(pictures[3][0]).copy()
    changed[0, 0, 0] ^= 1
    pictures[3] = (Image.fromarray(changed), pictures[3][1])
    result = convert(Pictures(pictures), out, small_recipe("shards"), workers=0, update=True)
    assert (result.converted, sum(result.manifest.removed.values())) == (6, 1)
    shutil.rmtree(out)
