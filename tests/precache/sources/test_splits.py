"""Split lists, and warnings of splits and classes that get no pictures."""

import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from precache import Recipe, convert, open_dataset, verify_deep
from precache.dataset.index import Rejected
from precache.errors import PrecacheError, SettingError
from precache.sources.rejected_list import read_list, write_list
from precache.sources.splits import apply_list
from precache.sources.tree import scan_tree
from tests.conftest import IMAGES, small_recipe
from tests.precache.pictures.drawing import encode_image
from tests.precache.sources.tars import put, scan_of


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


LIST_FORMS: dict[str, Callable[[str], bytes]] = {
    "byte order mark": lambda text: text.encode("utf-8-sig"),
    "UTF-16": lambda text: text.encode("utf-16"),
    "CR": lambda text: text.replace("\n", "\r").encode(),
    "CR LF": lambda text: text.replace("\n", "\r\n").encode("utf-16"),
    "semicolons": lambda text: text.replace(",", ";").encode("utf-8-sig"),
    "tabs": lambda text: text.replace(",", "\t").encode(),
}
"""Functions that save the text of a list as people's programs do."""


@pytest.mark.parametrize("form", LIST_FORMS)
def test_lists_are_read_as_people_have_them(form: str, converted: dict[str, Path], tmp_path: Path) -> None:
    """Lists of splits, ids and rejected pictures may be saved by Excel, and on Windows."""
    encode, file = LIST_FORMS[form], tmp_path / "list.csv"
    scan = scan_of(converted["shards"])
    paths = [sample.path for sample in scan.samples][:9:2]
    for separator, header in (("/", "path,split"), ("\\", "Image,Split")):
        names = [path.replace("/", separator) for path in paths]
        file.write_bytes(encode(f"{header}\n" + "".join(f"{name},val\n" for name in names)))
        listed, _ = apply_list(scan, Recipe(format="shards"), file)
        assert [(sample.path, sample.split) for sample in listed.samples] == [(path, "val") for path in paths]
        for lines in (names, ["0", *names[1:4], "8"]):
            file.write_bytes(encode("".join(f"{line}\n" for line in lines)))
            assert [*scan_of(converted["shards"], ids=str(file)).samples.list_paths()] == paths
    rejected = tuple(Rejected(path, "no picture", bytes=3, modified_ns=1) for path in paths)
    write_list(file, rejected)
    file.write_bytes(encode(file.read_text().replace("\r", "")))
    assert read_list(file) == rejected


SPANISH = {"entrenamiento": "train", "prueba": "test", "validaci\u00f3n": "val"}


def test_folders_of_splits_may_have_the_names_of_a_list(tmp_path: Path) -> None:
    files = {
        f"{split}/{name}/{number}.png": encode_image(Image.new("RGB", (9, 9), (number, 0, 0)))
        for number, (split, name) in enumerate(product(SPANISH, ("cat", "dog", "dog/deep")))
    }
    tree = put(tmp_path / "tree", files)
    list_file, recipe = tmp_path / "list.csv", Recipe(format="shards", size=8)
    list_file.write_text("".join(f"{folder},{split}\n" for folder, split in SPANISH.items()))
    manifest = convert(tree, tmp_path / "out", recipe, workers=0, split_list=list_file).manifest
    assert manifest.classes == ("cat", "dog")
    for split, count in manifest.split_samples.items():
        index = open_dataset(tmp_path / "out").read_index(split)
        (folder,) = (name for name, listed in SPANISH.items() if listed == split)
        assert count == 3
        for row in range(count):
            assert index.path(row).split("/")[:2] == [folder, manifest.classes[index.labels[row]]]
    assert verify_deep(tmp_path / "out", tree, workers=0) == []
    (warning,) = scan_tree(tree).warnings
    assert "'entrenamiento,train'" in warning
    put(tree, {"sueltas/0.png": files["prueba/cat/3.png"], "m\u00e1s/prueba/cat/0.png": b""})
    (tree / "vac\u00eda").mkdir()
    for folder in ("entrenamiento/cat", "sueltas", "m\u00e1s/prueba", "vac\u00eda", "."):
        list_file.write_text(f"entrenamiento,train\n{folder},test\n")
        with pytest.raises(PrecacheError, match=f"lists '{folder}', which is not a folder directly in"):
            convert(tree, tmp_path / "other", recipe, workers=0, split_list=list_file)


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
