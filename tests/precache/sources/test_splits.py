"""A list file that says which picture belongs to which split, and what is said of splits that get nothing."""

import codecs
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from precache import Recipe, convert, open_dataset, verify_deep
from precache.errors import PrecacheError
from precache.sources.tree import scan_tree
from tests.conftest import IMAGES, small_recipe
from tests.precache.pictures.drawing import encoded


def write_list(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_each_picture_goes_where_the_list_puts_it(raw_tree: Path, tmp_path: Path) -> None:
    samples = list(scan_tree(raw_tree).samples)
    wanted = {s.path: ("val" if s.id % 5 == 0 else "train") for s in samples if s.id % 7}
    listed = write_list(tmp_path / "list.csv", ["path,split", *(f"./{p},{s}" for p, s in wanted.items())])
    listed.write_bytes(codecs.BOM_UTF8 + listed.read_bytes())  # as Excel writes it, of paths as find prints
    out, recipe = tmp_path / "out", small_recipe("shards", size=8)
    manifest = convert(raw_tree, out, recipe, workers=0, split_list=listed).manifest
    for split in ("train", "val"):
        index = open_dataset(out).read_index(split)
        assert set(index.ids.tolist()) == {s.id for s in samples if wanted.get(s.path) == split}
        assert [samples[i].label for i in index.ids] == index.labels.tolist()
    left_out = {path for path, reason in manifest.ignored if reason == "not in the list of splits"}
    assert left_out == {s.path for s in samples} - wanted.keys()
    assert manifest.scanned == IMAGES == manifest.samples + len(left_out)
    assert verify_deep(out, raw_tree, workers=0).problems == ()
    assert "--splits LIST.csv" in manifest.recipe.to_flags()
    assert convert(raw_tree, out, recipe, workers=0, split_list=listed).converted == 0
    write_list(listed, [f"{sample.path},train" for sample in samples])
    for other in (listed, None):
        with pytest.raises(PrecacheError, match="out: holds another conversion"):
            convert(raw_tree, out, recipe, workers=0, split_list=other)


def test_names_with_commas_newlines_and_bytes_that_are_no_text_can_be_listed(tmp_path: Path) -> None:
    names = [b"a, b.png", b"new\nline.png", b"na\xc3\xafve.png", b"latin\xef.png"]
    folder = tmp_path / "tree" / "class one"
    folder.mkdir(parents=True)
    for name in names:
        with open(bytes(folder) + b"/" + name, "wb") as file:
            Image.new("RGB", (9, 9)).save(file, "PNG")
    listed = tmp_path / "list.csv"
    listed.write_bytes(b"".join(b'"class one/%s",val\n' % name for name in names))
    recipe = Recipe(format="webdataset", size=8)
    convert(tmp_path / "tree", tmp_path / "out", recipe, workers=0, split_list=listed)
    assert np.array_equal(np.sort(open_dataset(tmp_path / "out").read_index("val").ids), np.arange(4))


BAD: list[tuple[bytes | None, list[str]]] = [
    (b"", ["is empty"]),
    (b"001.anchor/001_0001.jpg\n", ["line 1", "expected 'path,split'"]),
    (b"a,b,c\n", ["line 1", "got 'a,b,c'"]),
    (b"x.jpg,0\n", ["line 1", "a split such as train"]),
    (b"001.anchor/gone.jpg,train\n", ["'001.anchor/gone.jpg', which is not a picture", "1 such line"]),
    (b"x.jpg,train\n.//x.jpg,val\n", ["line 2", "twice"]),
    (b"a" * 200_000 + b",x\n", []),
    (b'"a,x\n' + b"b" * 200_000, []),
    (b"a\0,x\n", []),
    (None, []),  # a pipe
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_bad_list_names_file_and_line(number: int, raw_tree: Path, tmp_path: Path) -> None:
    (content, mentions), listed = BAD[number], tmp_path / "list.csv"
    os.mkfifo(listed) if content is None else listed.write_bytes(content)
    with pytest.raises(PrecacheError, match=r"list\.csv") as caught:
        convert(raw_tree, tmp_path / "out", Recipe(format="shards"), workers=0, split_list=listed)
    assert "\n" not in str(caught.value)
    assert [mention for mention in mentions if mention not in str(caught.value)] == []


def test_a_list_beside_shares_is_refused(raw_tree: Path, tmp_path: Path) -> None:
    listed = write_list(tmp_path / "list.csv", ["x.jpg,train"])
    for recipe, given, said in (
        (Recipe(format="shards", splits="a=0.5,b=0.5"), listed, "cannot be combined"),
        (Recipe(format="shards", splits=f"list:{'0' * 64}"), None, "pass the file as split_list"),
    ):
        with pytest.raises(PrecacheError, match=said):
            convert(raw_tree, tmp_path / "out", recipe, workers=0, split_list=given)


def _lay(folder: Path, names: str) -> Path:
    """Pictures by these names; those that end in ! are none, and what ends in / is an empty folder."""
    for name in names.split():
        path = folder / (name if name.endswith("/") else f"{name.removesuffix('!')}.png")
        if name.endswith("/"):
            path.mkdir(parents=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no picture" if name.endswith("!") else encoded(Image.new("RGB", (9, 9))))
    return folder


GAPS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("a/0 a/1 b/2 b/3", {"splits": "train=0.5,val=0.5"}, []),
    ("a/0 a/1 a/2 b/3", {"splits": "train=0.75,val=0.25"}, ["split val has no picture of 1 class of 2: b"]),
    ("a/0 a/1", {"splits": "train=0.9,val=0.1"}, ["split val has no picture"]),
    ("train/a/0 train/b/1 val/a/2", {}, ["split val has no picture of 1 class of 2: b"]),
    ("train/a/0 val/a/", {}, ["split val has no picture"]),
    ("train/a/0 val/", {}, ["split val has no picture"]),
    ("a/0 b/1!", {}, ["class b has no picture left"]),
    ("a/0 a/1 b/2! c/3!", {}, ["classes b, c have no picture left"]),
    ("train/a/0 val/a/1!", {}, ["split val has no picture"]),
    ("a/0 b/", {}, []),  # it never had one
]


@pytest.mark.parametrize(("names", "settings", "says"), GAPS)
def test_what_a_split_got_nothing_of_is_said(
    names: str, settings: dict[str, Any], says: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree, recipe = _lay(tmp_path / "tree", names), Recipe(format="shards", size=8, **settings)
    convert(tree, tmp_path / "out", recipe, workers=0, max_rejects=0.5)
    said = [line.split("; ")[0] for line in caplog.messages if "no picture" in line]
    assert said == [f"{tmp_path / 'out'}: {gap}" for gap in says]
    assert ("--splits" in "".join(caplog.messages)) == any("split " in gap for gap in says)
    caplog.clear()
    convert(tree, tmp_path / "out", recipe, workers=0, max_rejects=0.5)
    assert not [line for line in caplog.messages if "no picture" in line], "nothing was converted"


def test_an_update_says_what_a_split_has_nothing_of_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree, recipe = tmp_path / "tree", Recipe(format="shards", size=8)
    _lay(tree, "train/a/0 train/b/1 val/a/2 val/b/3")
    convert(tree, tmp_path / "out", recipe, workers=0)
    (tree / "val/b/3.png").unlink()
    assert not caplog.messages
    convert(tree, tmp_path / "out", recipe, workers=0, update=True)
    assert "split val has no picture of 1 class of 2: b" in caplog.messages[-1]


def test_samples_of_several_classes_each_count_for_all_of_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _lay(tmp_path, "0 1 2")
    (tmp_path / "t.csv").write_text("path,tags,fold\n0.png,a;b,train\n1.png,b,val\n2.png,,val\n")
    options = {"label": "tags", "separator": ";", "split": "fold"}
    convert(tmp_path / "t.csv", tmp_path / "out", Recipe(format="shards", size=8), workers=0, **options)
    assert "split val has no picture of 1 class of 2: a" in caplog.messages[-1]
