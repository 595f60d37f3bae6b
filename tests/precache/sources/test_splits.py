"""Split lists, and warnings of splits and classes that get no pictures."""

import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from precache import Recipe, convert, open_dataset, verify_deep
from precache.errors import PrecacheError, SettingError
from precache.sources.tree import scan_tree
from tests.conftest import IMAGES, small_recipe
from tests.precache.pictures.drawing import encode_image
from tests.precache.sources.tars import put


def test_a_split_list_assigns_each_picture(raw_tree: Path, tmp_path: Path) -> None:
    samples = list(scan_tree(raw_tree).samples)
    split_of = {s.path: ("val" if s.id % 5 == 0 else "train") for s in samples if s.id % 7}
    list_file, out, recipe = tmp_path / "list.csv", tmp_path / "out", small_recipe("shards", size=8)
    lines = ["path,split", *(f"./{path},{split}" for path, split in split_of.items())]  # as find prints paths
    list_file.write_text("\n".join(lines), encoding="utf-8-sig")  # as Excel writes text
    manifest = convert(raw_tree, out, recipe, workers=0, split_list=list_file).manifest
    for split in ("train", "val"):
        index = open_dataset(out).read_index(split)
        assert set(index.ids.tolist()) == {s.id for s in samples if split_of.get(s.path) == split}
        assert [samples[i].label for i in index.ids] == index.labels.tolist()
    unlisted = {path for path, reason in manifest.ignored if reason == "not in the list of splits"}
    assert unlisted == {s.path for s in samples} - split_of.keys()
    assert manifest.scanned == IMAGES == manifest.samples + len(unlisted)
    assert verify_deep(out, raw_tree, workers=0) == []
    assert convert(raw_tree, out, recipe, workers=0, split_list=list_file).converted == 0
    with pytest.raises(SettingError, match=r"a=0\.5,b=0\.5"):
        convert(raw_tree, out, Recipe(format="shards", splits="a=0.5,b=0.5"), workers=0, split_list=list_file)
    with pytest.raises(PrecacheError, check=lambda error: str(error).startswith(f"{out}: ")):
        convert(raw_tree, out, recipe, workers=0)


BAD: list[tuple[bytes | None, list[str]]] = [
    (b"", []),
    (b"a,b,c\n", ["line 1", "'a,b,c'"]),
    (b"001.anchor/gone.jpg,train\n", ["'001.anchor/gone.jpg'", "1 such line"]),
    (b"x.jpg,train\n.//x.jpg,val\n", ["line 2", "'x.jpg'"]),
    (b"a" * 200_000 + b",x\n", []),
    (b"a\0,x\n", []),
    (None, []),
]
"""Content of a list, or None for a pipe, and the lines and paths that its error must have."""


@pytest.mark.parametrize(("content", "details"), BAD, ids=range(len(BAD)))
def test_a_bad_split_list_is_refused_in_one_line(
    content: bytes | None, details: list[str], raw_tree: Path, tmp_path: Path
) -> None:
    list_file = tmp_path / "list.csv"
    if content is None:
        os.mkfifo(list_file)
    else:
        list_file.write_bytes(content)
    with pytest.raises(PrecacheError, match=r"list\.csv") as raised:
        convert(raw_tree, tmp_path / "out", Recipe(format="shards"), workers=0, split_list=list_file)
    line = str(raised.value)
    assert "\n" not in line
    assert [detail for detail in details if detail not in line] == []


EMPTY_SPLITS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("a/0 a/1 a/2 b/3", {"splits": "train=0.75,val=0.25"}, ["split val has no picture of 1 class of 2: b"]),
    ("a/0 a/1", {"splits": "train=0.9,val=0.1"}, ["split val has no picture"]),
    ("train/a/0 train/b/1 val/a/2", {}, ["split val has no picture of 1 class of 2: b"]),
    ("a/0 a/1 b/2! c/3!", {}, ["classes b, c have no picture left"]),
    ("train/a/0 val/a/1!", {}, ["split val has no picture"]),
    ("train/a/0 val/a/", {}, ["split val has no picture"]),
    ("a/0 b/1", {}, []),
]


"""Names of pictures, settings of the recipe, and warnings; NAME! cannot be decoded, NAME/ is a folder."""


@pytest.mark.parametrize(("names", "settings", "warnings"), EMPTY_SPLITS)
def test_convert_warns_of_splits_and_classes_without_pictures(
    names: str,
    settings: dict[str, Any],
    warnings: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    good = encode_image(Image.new("RGB", (9, 9)))
    pictures = [name for name in names.split() if not name.endswith("/")]
    put(tmp_path / "tree", {f"{name}.png": b"no picture" if "!" in name else good for name in pictures})
    for folder in {*names.split()} - {*pictures}:
        (tmp_path / "tree" / folder).mkdir(parents=True)
    recipe = Recipe(format="shards", size=8, **settings)
    convert(tmp_path / "tree", tmp_path / "out", recipe, workers=0, max_rejects=0.5)
    messages = [line.split("; ")[0] for line in caplog.messages if "no picture" in line]
    assert messages == [f"{tmp_path / 'out'}: {warning}" for warning in warnings]
