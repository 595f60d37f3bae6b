"""What is peculiar to tars of WebDataset: keys, parts, labels and fields."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from precache import open_dataset
from precache.errors import ImageError, SourceError
from tests.precache.sources.archives import JPEG, Files, files_of, make_tar, scan_of


def test_what_this_project_writes_it_reads(converted: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tars").mkdir()
    for path in converted["webdataset"].glob("*.tar"):
        shutil.copy(path, tmp_path / "tars")
    scan = scan_of(tmp_path / "tars")
    index, fields = open_dataset(converted["webdataset"]).read_index("train"), scan.samples.fields
    assert scan.samples.labels.tolist() == index.labels.tolist()
    assert [ref.path for ref in scan.samples] == [f"{number:08d}.jpg" for number in index.ids]
    for row, size in enumerate(index.source_sizes.tolist()):
        assert [fields[name].value(row) for name in ("width", "height")] == size
        assert fields["path"].value(row) == index["paths"].value(row)


def test_splits_are_in_the_names_of_tars(tmp_path: Path) -> None:
    for name in ("train-00000", "train-00001", "val-00000"):
        make_tar(tmp_path / f"{name}.tar", {f"{name}.jpg": JPEG, f"{name}.cls": b"1"})
    assert [(ref.path, ref.split) for ref in scan_of(tmp_path).samples] == [
        ("train-00000.jpg", "train"), ("train-00001.jpg", "train"), ("val-00000.jpg", "val")
    ]  # fmt: skip
    os.rename(tmp_path / "val-00000.tar", tmp_path / "other-00000.tar")
    assert {ref.split for ref in scan_of(tmp_path).samples} == {""}


def test_tars_of_samples_are_told_from_class_folders(raw_tree: Path, tmp_path: Path) -> None:
    def of(name: str, files: Files) -> Any:
        return scan_of(make_tar(tmp_path / name, files))

    assert of("a.tar", {"1.jpg": JPEG, "1.json": b"{}"}).target == "none"
    assert of("b.tar", {"x/1.jpg": JPEG, "x/1.json": b"{}", "x/1.txt": b""}).classes == ("x",)
    assert of("c.tar", {"x/1.jpg": JPEG, "x/1.cls": b"bird"}).classes == ("bird",)
    with pytest.raises(SourceError, match="class-depth 0"):
        of("d.tar", {"1.jpg": JPEG})
    with pytest.raises(SourceError, match="has no class folder"):
        of("e.tar", {})
    shutil.copytree(raw_tree, tmp_path / "tree")
    make_tar(tmp_path / "tree/x.tar", files_of(raw_tree))
    assert len(scan_of(tmp_path / "tree").samples) == 70, "beside class folders it is none of them"


def test_labels_are_indices_names_or_numbers(tmp_path: Path) -> None:
    for one, other, options, target, classes in (
        ("3\n", "1", {}, "class", ("0", "1", "2", "3")),
        ("dog", "cat", {}, "class", ("cat", "dog")),
        ("3", "1", {"target": "class"}, "class", ("1", "3")),
        ("0.5", "1.5", {}, "number", ()),
        ("3", "1", {"target": "none"}, "none", ()),
        ("a b", "a", {"separator": " "}, "classes", ("a", "b")),
    ):
        files = {"0.jpg": JPEG, "0.cls": one.encode(), "1.jpg": JPEG, "1.cls": other.encode()}
        scan = scan_of(make_tar(tmp_path / "x.tar", files), **options)
        assert (scan.target, scan.classes) == (target, classes)
        if target == "class":
            assert [classes[ref.label] for ref in scan.samples] == [one.strip(), other]


HELD = {"width": 1, "some": 1, "mixed": 1}
BAD: list[tuple[dict[str, bytes], dict[str, Any], list[str]]] = [
    ({"cls": b"cat"}, {}, ["sample 'b'", "'cat'", "the index"]),
    ({"cls": b"100000"}, {}, ["sample 'b'", "'100000'", "the index of a class, 0 to"]),
    ({"cls": b"-1"}, {}, ["sample 'b'"]),
    ({"cls": b""}, {}, ["sample 'b'"]),
    ({}, {}, ["sample 'b': missing .cls"]),
    ({"cls": b"\xff"}, {}, ["sample 'b'.cls is not UTF-8"]),
    ({"cls": b"1", "json": b"{"}, {}, ["sample 'b'.json is not JSON"]),
    ({"cls": b"1", "json": b"[" * 9999}, {}, ["sample 'b'.json is not JSON"]),
    ({"cls": b"1", "json": b"[]"}, {}, ["sample 'b'.json is not a JSON object"]),
    ({"cls": b"1", "json": b" " * (1 << 20) + b"{}"}, {}, ["'b.json' has 1,048,578 bytes"]),
    ({"cls": b"1", "png": JPEG}, {}, ["'b.png' is the second picture", "--image png"]),
    ({"cls": b"1", "json": b'{"width": 2}'}, {"fields": ("some",)}, ["sample 'b' has no 'some'", "'width'"]),
    ({"cls": b"1", "json": b'{"mixed": "x"}'}, {"fields": ("mixed",)}, ["sample 'a': 'mixed': 1 is int"]),
    ({"cls": b"1", "json": b"{}"}, {"label": "kind"}, ["'kind'", "--label"]),
]


def test_what_is_wrong_with_a_sample_is_named(tmp_path: Path) -> None:
    for second, options, mentions in BAD:
        files = {"a.jpg": JPEG, "a.cls": b"0", "a.json": json.dumps(HELD).encode(), "b.jpg": JPEG}
        files |= {f"b.{extension}": content for extension, content in second.items()}
        with pytest.raises(SourceError, match=r"x\.tar: ") as caught:
            scan_of(make_tar(tmp_path / "x.tar", files), **options)
        assert [mention for mention in mentions if mention not in str(caught.value)] == []


def test_fields_are_what_all_samples_have_of_one_kind(tmp_path: Path) -> None:
    rows = (
        {"width": 3, "some": 1, "mixed": 1, "no": None},
        {"width": 4, "mixed": "1", "no": None, "more": 2},
    )
    files = {}
    for key, row in zip("ab", rows, strict=True):
        said = json.dumps(row).encode()
        files |= {f"{key}.jpg": JPEG, f"{key}.txt": b"", f"{key}.xml": b"", f"{key}.json": said}
    scan = scan_of(make_tar(tmp_path / "x.tar", files))
    assert scan.samples.fields.keys() == {"width", "txt"}
    for mention in ("'some', 'more'", "'mixed': 1 is int", "'no': is empty"):
        assert mention in " ".join(scan.warnings)
    assert [ignored.path for ignored in scan.ignored] == ["a.xml", "b.xml"]


def test_parts_of_a_sample_need_not_lie_together(tmp_path: Path) -> None:
    files = {"b.cls": b"0", "a.cls": b"1", "b.jpg": b"b", "d/a.b.jpg": b"ab", "d/a.cls": b"2", "a.JPG": b"a"}
    scan = scan_of(make_tar(tmp_path / "x.tar", files))
    read = [(ref.path, ref.label, scan.source.read(ref, 9)) for ref in scan.samples]
    assert read == [("b.jpg", 0, b"b"), ("a.JPG", 1, b"a"), ("d/a.b.jpg", 2, b"ab")]
    path = make_tar(tmp_path / "x.tar", {"a.jpg": b"picture", "a.seg.png": b"mask", "a.cls": b"0"})
    for chosen in ("jpg", "seg.png"):
        assert [ref.path for ref in scan_of(path, image=chosen).samples] == [f"a.{chosen}"]


def test_keys_that_are_in_several_tars_are_several_samples_and_one_without_a_picture_a_reject(
    tmp_path: Path,
) -> None:
    for name in ("1.tar", "2.tar"):
        make_tar(tmp_path / name, {"a.jpg": name.encode(), "a.cls": b"0", "lone.cls": b"0"})
    scan = scan_of(tmp_path)
    refs = list(scan.samples)
    assert [ref.path for ref in refs] == ["1.tar/a.jpg", "1.tar/lone", "2.tar/a.jpg", "2.tar/lone"]
    assert [scan.source.read(ref, 9) for ref in refs[::2]] == [b"1.tar", b"2.tar"]
    assert scan.source.where(refs[2]) == str(tmp_path / "2.tar/a.jpg")
    with pytest.raises(ImageError, match=r"2\.tar/lone: has no picture"):
        scan.source.read(refs[3], 100)
    make_tar(tmp_path / "1.tar", {"lone.cls": b"0"})
    make_tar(tmp_path / "2.tar", {})
    with pytest.raises(SourceError, match=r"has no pictures; expected samples as 0001\.jpg"):
        scan_of(tmp_path)


def test_what_has_no_key_is_ignored_and_a_second_one_counts(tmp_path: Path) -> None:
    class Twice(Files):
        def items(self) -> Any:
            return [*super().items(), ("a.jpg", b"2"), ("README.txt", b"about")]

    files = {"README": b"", ".hidden.jpg": b"", "a.jpg": b"1", "../b.jpg": b"", "a.cls": b"0"}
    make_tar(tmp_path / "x.tar", Twice(files))
    scan = scan_of(tmp_path)
    assert [scan.source.read(ref, 9) for ref in scan.samples] == [b"2"]
    ignored = [ignored.path for ignored in scan.ignored]
    assert ignored == ["README", ".hidden.jpg", "../b.jpg", "a.jpg", "README"]
    assert scan.scanned == 6
