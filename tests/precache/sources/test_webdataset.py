"""What is peculiar to tars of WebDataset: keys, parts, labels and fields."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from precache.errors import ImageError, SourceError
from tests.precache.sources.archives import JPEG, Files, files_of, make_tar, scan_of


def test_splits_are_in_the_names_of_tars(tmp_path: Path) -> None:
    for name in ("train-00000", "train-00001", "val-00000"):
        make_tar(tmp_path / f"{name}.tar", {f"{name}.jpg": JPEG, f"{name}.cls": b"1"})
    assert [(ref.path, ref.split) for ref in scan_of(tmp_path).samples] == [
        ("train-00000.jpg", "train"), ("train-00001.jpg", "train"), ("val-00000.jpg", "val")
    ]  # fmt: skip
    os.rename(tmp_path / "val-00000.tar", tmp_path / "other-00000.tar")
    assert {ref.split for ref in scan_of(tmp_path).samples} == {""}


def test_tars_of_samples_are_told_from_class_folders(raw_tree: Path, tmp_path: Path) -> None:
    def classes_of(name: str, files: Files) -> tuple[str, ...]:
        return scan_of(make_tar(tmp_path / name, files)).classes

    assert classes_of("a.tar", {"1.jpg": JPEG, "1.json": b"{}"}) == ()
    assert classes_of("b.tar", {"x/1.jpg": JPEG, "x/1.json": b"{}", "x/1.txt": b""}) == ("x",)
    assert classes_of("c.tar", {"x/1.jpg": JPEG, "x/1.cls": b"bird"}) == ("bird",)
    shutil.copytree(raw_tree, tmp_path / "tree")
    make_tar(tmp_path / "tree/x.tar", files_of(raw_tree))
    assert len(scan_of(tmp_path / "tree").samples) == 70, "beside class folders it is none of them"


def test_labels_are_indices_names_or_numbers(tmp_path: Path) -> None:
    for one, other, options, target, classes, labels in (
        ("3\n", "1", {}, "class", ("0", "1", "2", "3"), [3, 1]),
        ("dog", "cat", {}, "class", ("cat", "dog"), [1, 0]),
        ("3", "1", {"target": "class"}, "class", ("1", "3"), [1, 0]),
        ("0.5", "1.5", {}, "number", (), [0.5, 1.5]),
    ):
        files = {"0.jpg": JPEG, "0.cls": one.encode(), "1.jpg": JPEG, "1.cls": other.encode()}
        scan = scan_of(make_tar(tmp_path / "x.tar", files), **options)
        assert (scan.target, scan.classes) == (target, classes)
        assert [ref.label if classes else ref.target for ref in scan.samples] == labels


BAD: list[tuple[dict[str, bytes], dict[str, Any], list[str]]] = [
    ({"cls": b"cat"}, {}, ["sample 'b'", "'cat'", "the index"]),
    ({"cls": b"100000"}, {}, ["sample 'b'", "'100000'", "the index of a class, 0 to"]),
    ({}, {}, ["sample 'b': missing .cls"]),
    ({"cls": b"1", "json": b"[" * 9999}, {}, ["sample 'b'.json is not JSON"]),
    ({"cls": b"1", "json": b" " * (1 << 20) + b"{}"}, {}, ["'b.json' has 1,048,578 bytes"]),
    ({"cls": b"1", "png": JPEG}, {}, ["'b.png' is the second picture", "--image png"]),
    ({"cls": b"1", "json": b"{}"}, {"fields": ("some",)}, ["sample 'b' has no 'some'"]),
]


def test_what_is_wrong_with_a_sample_is_named(tmp_path: Path) -> None:
    for second, options, mentions in BAD:
        files = {"a.jpg": JPEG, "a.cls": b"0", "a.json": b'{"some": 1}', "b.jpg": JPEG}
        files |= {f"b.{extension}": content for extension, content in second.items()}
        with pytest.raises(SourceError, match=r"x\.tar: ") as caught:
            scan_of(make_tar(tmp_path / "x.tar", files), **options)
        assert [mention for mention in mentions if mention not in str(caught.value)] == []


def test_parts_of_a_sample_need_not_lie_together(tmp_path: Path) -> None:
    files = {"b.cls": b"0", "a.cls": b"1", "b.jpg": b"b", "d/a.b.jpg": b"ab", "d/a.cls": b"2", "a.JPG": b"a"}
    scan = scan_of(make_tar(tmp_path / "x.tar", files))
    read = [(ref.path, ref.label, scan.source.read(ref, 9)) for ref in scan.samples]
    assert read == [("b.jpg", 0, b"b"), ("a.JPG", 1, b"a"), ("d/a.b.jpg", 2, b"ab")]
    path = make_tar(tmp_path / "x.tar", {"a.jpg": b"picture", "a.seg.png": b"mask", "a.cls": b"0"})
    for chosen in ("jpg", "seg.png"):
        assert [ref.path for ref in scan_of(path, image=chosen).samples] == [f"a.{chosen}"]


def test_a_key_that_is_in_two_tars_is_two_samples_and_one_without_a_picture_a_reject(tmp_path: Path) -> None:
    for name in ("1.tar", "2.tar"):
        make_tar(tmp_path / name, {"a.jpg": name.encode(), "a.cls": b"0", "lone.cls": b"0"})
    scan = scan_of(tmp_path)
    refs = list(scan.samples)
    assert [ref.path for ref in refs] == ["1.tar/a.jpg", "1.tar/lone", "2.tar/a.jpg", "2.tar/lone"]
    assert [scan.source.read(ref, 9) for ref in refs[::2]] == [b"1.tar", b"2.tar"]
    with pytest.raises(ImageError, match=r"2\.tar/lone: has no picture"):
        scan.source.read(refs[3], 100)
