"""A list file that says which picture belongs to which split."""

import codecs
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from precache import Recipe, convert, open_dataset, verify_deep
from precache.errors import PrecacheError
from precache.sources.tree import scan_tree
from tests.command import check_bad_input, run_here
from tests.conftest import IMAGES, small_recipe
from tests.precache.sources.listed import encoded


def write_list(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_each_picture_goes_where_the_list_puts_it(raw_tree: Path, tmp_path: Path) -> None:
    samples = list(scan_tree(raw_tree).samples)
    wanted = {s.path: ("val" if s.id % 5 == 0 else "train") for s in samples if s.id % 7}
    listed = write_list(tmp_path / "list.csv", ["path,split", *(f"./{p},{s}" for p, s in wanted.items())])
    listed.write_bytes(codecs.BOM_UTF8 + listed.read_bytes())  # as Excel writes it, of paths as find prints
    for name in ("shards", "dali"):
        manifest = convert(
            raw_tree, tmp_path / name, small_recipe(name), workers=0, split_list=listed
        ).manifest
        dataset = open_dataset(tmp_path / name)
        for split in ("train", "val"):
            index = dataset.read_index(split)
            ids, labels = index.ids, index.labels
            assert set(ids.tolist()) == {s.id for s in samples if wanted.get(s.path) == split}
            assert all(samples[i].label == label for i, label in zip(ids, labels, strict=True))
        left_out = {path for path, reason in manifest.ignored if reason == "not in the list of splits"}
        assert left_out == {s.path for s in samples} - wanted.keys()
        assert manifest.scanned == IMAGES == manifest.samples + len(left_out)
        assert verify_deep(tmp_path / name, raw_tree, workers=0).problems == ()


def test_the_list_is_part_of_the_recipe(raw_tree: Path, tmp_path: Path) -> None:
    paths = [sample.path for sample in scan_tree(raw_tree).samples]
    out, listed = tmp_path / "out", write_list(tmp_path / "list.csv", [f"{path},train" for path in paths])
    recipe = small_recipe("shards", size=8)
    convert(raw_tree, out, recipe, workers=0, split_list=listed)
    assert convert(raw_tree, out, recipe, workers=0, split_list=listed).converted == 0
    write_list(listed, [f"{path},train" for path in paths[1:]])
    with pytest.raises(PrecacheError, match=r"out: holds another conversion \(splits list:"):
        convert(raw_tree, out, recipe, workers=0, split_list=listed)
    with pytest.raises(PrecacheError, match="holds another conversion"):
        convert(raw_tree, out, recipe, workers=0)
    assert "--splits LIST.csv" in open_dataset(out).manifest.recipe.to_flags()


def test_names_with_commas_newlines_and_bytes_that_are_no_text_can_be_listed(tmp_path: Path) -> None:
    names = [b"a, b.png", b"new\nline.png", b"na\xc3\xafve.png", b"latin\xef.png"]
    folder = tmp_path / "tree" / "class one"
    folder.mkdir(parents=True)
    for name in names:
        with open(bytes(folder) + b"/" + name, "wb") as file:
            Image.new("RGB", (9, 9)).save(file, "PNG")
    listed = tmp_path / "list.csv"
    listed.write_bytes(b"".join(b'"class one/%s",val\n' % name for name in names))
    manifest = convert(
        tmp_path / "tree", tmp_path / "out", Recipe(format="webdataset", size=8), workers=0, split_list=listed
    ).manifest
    assert manifest.samples_per_class == {"val": (4,)}
    assert np.array_equal(np.sort(open_dataset(tmp_path / "out").read_index("val").ids), np.arange(4))


@pytest.mark.parametrize(
    ("lines", "mentions"),
    [
        ([], ["list.csv", "is empty"]),
        (["001.anchor/001_0001.jpg"], ["list.csv, line 1", "expected 'path,split'"]),
        (["a,b,c"], ["line 1", "got 'a,b,c'"]),
        (["x.jpg,0"], ["line 1", "a split such as train"]),
        (
            ["001.anchor/gone.jpg,train"],
            ["lists '001.anchor/gone.jpg', which is not a picture", "1 such line"],
        ),
        (["x.jpg,train", ".//x.jpg,val"], ["line 2", "twice"]),
    ],
)
def test_a_bad_list_names_file_and_line(
    lines: list[str], mentions: list[str], raw_tree: Path, tmp_path: Path
) -> None:
    write_list(tmp_path / "list.csv", lines)
    arguments = ("convert", raw_tree, "out", "--format", "shards", "--splits", "list.csv")
    check_bad_input(run_here("precache", *arguments, cwd=tmp_path), *mentions)


def test_a_list_that_is_missing_or_beside_shares_is_refused(raw_tree: Path, tmp_path: Path) -> None:
    arguments = ("convert", raw_tree, "out", "--format", "shards", "--splits", "gone.csv")
    check_bad_input(
        run_here("precache", *arguments, cwd=tmp_path), "gone.csv", "No such file", "train=0.8,val=0.2"
    )
    listed = write_list(tmp_path / "list.csv", ["x.jpg,train"])
    with pytest.raises(PrecacheError, match="cannot be combined"):
        convert(
            raw_tree,
            tmp_path / "out",
            Recipe(format="shards", splits="a=0.5,b=0.5"),
            workers=0,
            split_list=listed,
        )
    with pytest.raises(PrecacheError, match="pass the file as split_list"):
        convert(raw_tree, tmp_path / "out", Recipe(format="shards", splits=f"list:{'0' * 64}"), workers=0)


def _lay(folder: Path, names: str) -> Path:
    """Pictures by these names; those that end in ! are none."""
    for name in names.split():
        path = folder / f"{name.removesuffix('!')}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no picture" if name.endswith("!") else encoded(Image.new("RGB", (9, 9))))
    return folder


GAPS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "none": ("a/0 a/1 b/2 b/3", {"splits": "train=0.5,val=0.5"}, []),
    "a share without a class": (
        "a/0 a/1 a/2 b/3",
        {"splits": "train=0.75,val=0.25"},
        ["split val has no picture of 1 class of 2: b"],
    ),
    "a share of nothing": ("a/0 a/1", {"splits": "train=0.9,val=0.1"}, ["split val has no picture"]),
    "folders": ("train/a/0 train/b/1 val/a/2", {}, ["split val has no picture of 1 class of 2: b"]),
    "a folder without pictures": ("train/a/0 val/a/", {}, ["split val has no picture"]),
    "an empty folder": ("train/a/0 val/", {}, ["split val has no picture"]),
    "a class that is rejected": ("a/0 b/1!", {}, ["class b has no picture left"]),
    "classes that are rejected": ("a/0 a/1 b/2! c/3!", {}, ["classes b, c have no picture left"]),
    "a split that is rejected": ("train/a/0 val/a/1!", {}, ["split val has no picture"]),
    "what never had one": ("a/0 b/", {}, []),
}


@pytest.mark.parametrize("case", GAPS)
def test_what_a_split_got_nothing_of_is_said(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names, settings, says = GAPS[case]
    tree = _lay(tmp_path / "tree", " ".join(name for name in names.split() if not name.endswith("/")))
    for name in names.split():
        if name.endswith("/"):
            (tree / name).mkdir(parents=True)
    recipe = Recipe(format="shards", size=8, **settings)
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
    tree, recipe = (
        _lay(tmp_path / "tree", "train/a/0 train/b/1 val/a/2 val/b/3"),
        Recipe(format="shards", size=8),
    )
    convert(tree, tmp_path / "out", recipe, workers=0)
    (tree / "val/b/3.png").unlink()
    assert not caplog.messages
    convert(tree, tmp_path / "out", recipe, workers=0, update=True)
    assert "split val has no picture of 1 class of 2: b" in caplog.messages[-1]


def test_a_table_of_several_classes_each_says_what_a_split_got_none_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _lay(tmp_path, "0 1 2")
    rows = "0.png,a;b,train\n1.png,b,val\n2.png,,val\n"
    (tmp_path / "t.csv").write_text(f"path,tags,fold\n{rows}")
    options = {"label": "tags", "separator": ";", "split": "fold"}
    convert(tmp_path / "t.csv", tmp_path / "out", Recipe(format="shards", size=8), workers=0, **options)
    assert "split val has no picture of 1 class of 2: a" in caplog.messages[-1]
