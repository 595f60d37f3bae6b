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
from tests.precache.pictures.drawing import encoded
from tests.precache.sources.archives import put


def write_list(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_each_picture_goes_where_the_list_puts_it(raw_tree: Path, tmp_path: Path) -> None:
    samples = list(scan_tree(raw_tree).samples)
    wanted = {s.path: ("val" if s.id % 5 == 0 else "train") for s in samples if s.id % 7}
    listed = write_list(tmp_path / "list.csv", ["path,split", *(f"./{p},{s}" for p, s in wanted.items())])
    listed.write_bytes(b"\xef\xbb\xbf" + listed.read_bytes())  # as Excel writes it, of paths as find prints
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
    names = ("a, b.png", "new\nline.png", "na\u00efve.png", "latin\udcef.png")
    put(tmp_path, {f"tree/class one/{name}": encoded(Image.new("RGB", (9, 9))) for name in names})
    listed, recipe = tmp_path / "list.csv", Recipe(format="shards")
    listed.write_bytes(b"".join(b'"class one/%s",val\n' % os.fsencode(name) for name in names))
    manifest = convert(tmp_path / "tree", tmp_path / "out", recipe, workers=0, split_list=listed).manifest
    assert manifest.split_samples == {"val": 4}


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


def test_a_bad_list_names_file_and_line(raw_tree: Path, tmp_path: Path) -> None:
    for number, (content, mentions) in enumerate(BAD):
        listed = tmp_path / f"{number}.csv"
        os.mkfifo(listed) if content is None else listed.write_bytes(content)
        with pytest.raises(PrecacheError, match=rf"{number}\.csv") as caught:
            convert(raw_tree, tmp_path / "out", Recipe(format="shards"), workers=0, split_list=listed)
        assert "\n" not in str(caught.value)
        assert [mention for mention in mentions if mention not in str(caught.value)] == []


def _lay(folder: Path, names: str) -> Path:
    """Pictures by these names; those that end in ! are none, and what ends in / is an empty folder."""
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            (folder / name).mkdir()
        else:
            content = b"no picture" if name.endswith("!") else encoded(Image.new("RGB", (9, 9)))
            (folder / f"{name.removesuffix('!')}.png").write_bytes(content)
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


def test_a_split_may_lose_what_it_has_and_several_classes_count_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = _lay(tmp_path / "tree", "train/a/0 train/b/1 val/a/2 val/b/3")
    convert(tree, tmp_path / "out", Recipe(format="shards", size=8), workers=0)
    (tree / "val/b/3.png").unlink()
    assert not caplog.messages
    convert(tree, tmp_path / "out", Recipe(format="shards", size=8), workers=0, update=True)
    table = "path,tags,fold\ntrain/a/0.png,b;c,train\ntrain/b/1.png,c,val\nval/a/2.png,,val\n"
    (tree / "t.csv").write_text(table)
    options = {"label": "tags", "separator": ";", "split": "fold"}
    convert(tree / "t.csv", tmp_path / "two", Recipe(format="shards", size=8), workers=0, **options)
    said = "split val has no picture of 1 class of 2: b"
    assert [message for message in caplog.messages if said in message] == caplog.messages[1:]
    assert len(caplog.messages) == 3
