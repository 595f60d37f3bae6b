"""A list file that says which picture belongs to which split, and what is said of splits that get nothing."""

import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from precache import Recipe, convert, open_dataset, verify_deep
from precache.errors import PrecacheError
from precache.sources.tree import scan_tree
from tests.conftest import IMAGES, small_recipe
from tests.precache.pictures.drawing import encode_image
from tests.precache.sources.archives import put


def test_each_picture_goes_where_the_list_puts_it(raw_tree: Path, tmp_path: Path) -> None:
    samples = list(scan_tree(raw_tree).samples)
    wanted = {s.path: ("val" if s.id % 5 == 0 else "train") for s in samples if s.id % 7}
    listed, out, recipe = tmp_path / "list.csv", tmp_path / "out", small_recipe("shards", size=8)
    lines = ["path,split", *(f"./{path},{split}" for path, split in wanted.items())]  # as find prints paths
    listed.write_text("\n".join(lines), encoding="utf-8-sig")  # and Excel writes a list
    manifest = convert(raw_tree, out, recipe, workers=0, split_list=listed).manifest
    for split in ("train", "val"):
        index = open_dataset(out).read_index(split)
        assert set(index.ids.tolist()) == {s.id for s in samples if wanted.get(s.path) == split}
        assert [samples[i].label for i in index.ids] == index.labels.tolist()
    left_out = {path for path, reason in manifest.ignored if reason == "not in the list of splits"}
    assert left_out == {s.path for s in samples} - wanted.keys()
    assert manifest.scanned == IMAGES == manifest.samples + len(left_out)
    assert verify_deep(out, raw_tree, workers=0).problems == ()
    assert convert(raw_tree, out, recipe, workers=0, split_list=listed).converted == 0
    with pytest.raises(PrecacheError, match="cannot be combined"):
        convert(raw_tree, out, Recipe(format="shards", splits="a=0.5,b=0.5"), workers=0, split_list=listed)
    with pytest.raises(PrecacheError, match="out: holds another conversion"):
        convert(raw_tree, out, recipe, workers=0)


BAD: list[tuple[bytes | None, list[str]]] = [
    (b"", ["is empty"]),
    (b"a,b,c\n", ["line 1", "got 'a,b,c'"]),
    (b"001.anchor/gone.jpg,train\n", ["'001.anchor/gone.jpg', which is not a picture", "1 such line"]),
    (b"x.jpg,train\n.//x.jpg,val\n", ["line 2", "twice"]),
    (b"a" * 200_000 + b",x\n", []),
    (b"a\0,x\n", []),
    (None, []),  # a pipe
]


def test_a_bad_list_names_file_and_line(raw_tree: Path, tmp_path: Path) -> None:
    for number, (content, mentions) in enumerate(BAD):
        listed = tmp_path / f"{number}.csv"
        os.mkfifo(listed) if content is None else listed.write_bytes(content)
        with pytest.raises(PrecacheError, match=rf"{number}\.csv") as caught:
            convert(raw_tree, tmp_path / "out", Recipe(format="shards"), workers=0, split_list=listed)
        assert "\n" not in str(caught.value)
        assert [mention for mention in mentions if mention not in str(caught.value)] == []


GAPS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("a/0 a/1 a/2 b/3", {"splits": "train=0.75,val=0.25"}, ["split val has no picture of 1 class of 2: b"]),
    ("a/0 a/1", {"splits": "train=0.9,val=0.1"}, ["split val has no picture"]),
    ("train/a/0 train/b/1 val/a/2", {}, ["split val has no picture of 1 class of 2: b"]),
    ("a/0 a/1 b/2! c/3!", {}, ["classes b, c have no picture left"]),
    ("train/a/0 val/a/1!", {}, ["split val has no picture"]),
    ("train/a/0 val/a/", {}, ["split val has no picture"]),
    ("a/0 b/1", {}, []),
]


@pytest.mark.parametrize(("names", "settings", "says"), GAPS)
def test_convert_warns_of_splits_and_classes_without_pictures(
    names: str, settings: dict[str, Any], says: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of pictures by these names; those that end in ! are none, those that end in / folders."""
    good = encode_image(Image.new("RGB", (9, 9)))
    pictures = [name for name in names.split() if not name.endswith("/")]
    put(tmp_path / "tree", {f"{name}.png": b"no picture" if "!" in name else good for name in pictures})
    for folder in {*names.split()} - {*pictures}:
        (tmp_path / "tree" / folder).mkdir(parents=True)
    recipe = Recipe(format="shards", size=8, **settings)
    convert(tmp_path / "tree", tmp_path / "out", recipe, workers=0, max_rejects=0.5)
    said = [line.split("; ")[0] for line in caplog.messages if "no picture" in line]
    assert said == [f"{tmp_path / 'out'}: {gap}" for gap in says]
