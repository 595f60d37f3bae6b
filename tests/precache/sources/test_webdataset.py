import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from precache import convert, open_dataset
from precache.errors import ImageError, SettingError, SourceError
from tests.conftest import small_recipe
from tests.precache.sources.archives import (
    JPEG,
    add,
    files_of,
    make_tar,
    make_webdataset,
    scan_of,
)


def test_what_this_project_writes_it_reads(converted: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tars").mkdir()
    for path in converted["webdataset"].glob("*.tar"):
        shutil.copy(path, tmp_path / "tars")
    scan = scan_of(tmp_path / "tars")
    dataset = open_dataset(converted["webdataset"])
    index = dataset.read_index("train")
    assert scan.samples.labels.tolist() == index.labels.tolist()
    stems = [f"{number:08d}.jpg" for number in index.ids]
    assert [ref.path for ref in scan.samples] == stems
    assert set(scan.samples.fields) == {"height", "path", "width"}


def test_splits_are_in_the_names_of_tars(tmp_path: Path) -> None:
    for name in ("train-00000", "train-00001", "val-00000"):
        make_tar(tmp_path / f"{name}.tar", {f"{name}.jpg": JPEG, f"{name}.cls": b"1"})
    assert [(ref.id, ref.path, ref.split) for ref in scan_of(tmp_path).samples] == [
        (0, "train-00000.jpg", "train"), (1, "train-00001.jpg", "train"), (2, "val-00000.jpg", "val")
    ]  # fmt: skip
    os.rename(tmp_path / "val-00000.tar", tmp_path / "other-00000.tar")
    assert {ref.split for ref in scan_of(tmp_path).samples} == {""}


def test_one_tar_of_samples_is_told_from_class_folders(tmp_path: Path) -> None:
    flat = make_tar(tmp_path / "a.tar", {"1.jpg": JPEG, "1.json": b"{}"})
    assert scan_of(flat).target == "none"
    classes = make_tar(tmp_path / "b.tar", {"x/1.jpg": JPEG, "x/1.json": b"{}", "x/1.txt": b""})
    assert scan_of(classes).classes == ("x",)
    keyed = make_tar(tmp_path / "c.tar", {"x/1.jpg": JPEG, "x/1.cls": b"bird"})
    assert scan_of(keyed).classes == ("bird",)
    with pytest.raises(SourceError, match="class-depth 0"):
        scan_of(make_tar(tmp_path / "d.tar", {"1.jpg": JPEG}))


def test_labels_are_indices_names_or_numbers(tmp_path: Path) -> None:
    def labelled(*labels: str, **options: object) -> tuple[str, tuple[str, ...], list[int]]:
        files = {}
        for number, label in enumerate(labels):
            files |= {f"{number}.jpg": JPEG, f"{number}.cls": label.encode(), f"{number}.json": b'{"k": [1]}'}
        scan = scan_of(make_tar(tmp_path / "x.tar", files), **options)
        return scan.target, scan.classes, scan.samples.labels.tolist()

    assert labelled("3\n", "1") == ("class", ("0", "1", "2", "3"), [3, 1])
    assert labelled("dog", "cat") == ("class", ("cat", "dog"), [1, 0])
    assert labelled("3", "1", target="class") == ("class", ("1", "3"), [1, 0])
    assert labelled("0.5", "1.5")[0] == "number"
    assert labelled("3", "1", target="number")[0] == "number"
    assert labelled("3", "1", target="none") == ("none", (), [-1, -1])
    assert labelled("a b", "a", separator=" ")[:2] == ("classes", ("a", "b"))
    assert labelled("3", "1", label="k")[0] == "classes"


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"cls": b"cat"}, r"x\.tar: sample 'b': its label is 'cat'; expected the index"),
        (
            {"cls": b"100000"},
            r"sample 'b': its label is '100000'; expected the index of a class, 0 to",
        ),
        ({"cls": b"-1"}, r"sample 'b'"),
        ({}, r"sample 'b': missing \.cls; other samples have one"),
        ({"cls": b""}, r"sample 'b'"),
        ({"cls": b"\xff"}, r"sample 'b'\.cls is not UTF-8"),
        ({"cls": b"1", "json": b"{"}, r"sample 'b'\.json is not JSON"),
        ({"cls": b"1", "json": b"[" * 9999}, r"sample 'b'\.json is not JSON"),
        ({"cls": b"1", "json": b"[]"}, r"sample 'b'\.json is not a JSON object"),
        ({"cls": b"1", "json": b" " * (1 << 20) + b"{}"}, r"'b\.json' has 1,048,578 bytes, expected text"),
        ({"cls": b"1", "png": JPEG}, r"'b\.png' is the second picture.*--image png"),
    ],
)
def test_what_is_wrong_with_a_sample_is_named(second: dict[str, bytes], message: str, tmp_path: Path) -> None:
    files = {"a.jpg": JPEG, "a.cls": b"0", "b.jpg": JPEG}
    files |= {f"b.{extension}": content for extension, content in second.items()}
    with pytest.raises(SourceError, match=message):
        scan_of(make_tar(tmp_path / "x.tar", files))


def test_fields_are_what_all_samples_have_of_one_kind(tmp_path: Path) -> None:
    rows = (
        {"width": 3, "score": 0.5, "box": [[1, 2, 3, 4]], "name": "x", "some": 1, "mixed": 1, "url": None},
        {"width": 4, "score": 1, "box": [], "name": "y", "mixed": "1", "url": None, "more": 2},
    )
    files = {}
    for key, row in zip("ab", rows, strict=True):
        files |= {f"{key}.jpg": JPEG, f"{key}.cls": b"0", f"{key}.txt": key.encode(), f"{key}.xml": b"",
                  f"{key}.json": json.dumps(row).encode()}  # fmt: skip
    path = make_tar(tmp_path / "x.tar", files)
    scan = scan_of(path)
    kinds = {name: column.kind for name, column in scan.samples.fields.items()}
    assert kinds == {"width": "int", "score": "float", "box": "ragged", "name": "text", "txt": "text"}
    assert "'some', 'more'" in " ".join(scan.warnings)
    assert "a field is left out, " in scan.warnings[1]
    assert ["'mixed': 1 is int" in scan.warnings[1], "'url': is empty" in scan.warnings[2]] == [True] * 2
    assert [ignored.path for ignored in scan.ignored] == ["a.xml", "b.xml"]
    assert list(scan_of(path, fields=("width",)).samples.fields) == ["width"]
    with pytest.raises(SourceError, match=r"sample 'b' has no 'some' for --field; it has 'box', 'mixed'"):
        scan_of(path, fields=("some",))
    with pytest.raises(SourceError, match=r"sample 'a': 'mixed': 1 is int"):
        scan_of(path, fields=("mixed",))
    with pytest.raises(SourceError, match=r"has no 'kind' in its \.json for --label"):
        scan_of(path, label="kind")
    with pytest.raises(SettingError, match="class-depth is not for"):
        scan_of(tmp_path, class_depth=1)


def test_parts_of_a_sample_need_not_lie_together(tmp_path: Path) -> None:
    files = {"b.cls": b"0", "a.cls": b"1", "b.jpg": b"b", "d/a.b.jpg": b"ab", "d/a.cls": b"2", "a.JPG": b"a"}
    scan = scan_of(make_tar(tmp_path / "x.tar", files))
    read = [(ref.path, ref.label, scan.source.read(ref, 9)) for ref in scan.samples]
    assert read == [("b.jpg", 0, b"b"), ("a.JPG", 1, b"a"), ("d/a.b.jpg", 2, b"ab")]


def test_one_of_two_pictures_is_chosen_by_its_extension(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar", {"a.jpg": b"picture", "a.seg.png": b"mask", "a.cls": b"0"})
    assert [ref.path for ref in scan_of(path, image="jpg").samples] == ["a.jpg"]
    assert [ref.path for ref in scan_of(path, image="seg.png").samples] == ["a.seg.png"]


def test_keys_that_are_in_several_tars_are_several_samples(tmp_path: Path) -> None:
    for name in ("1.tar", "2.tar"):
        make_tar(tmp_path / name, {"a.jpg": name.encode(), "a.cls": b"0"})
    scan = scan_of(tmp_path)
    assert [(ref.path, scan.source.read(ref, 9)) for ref in scan.samples] == [
        ("1.tar/a.jpg", b"1.tar"), ("2.tar/a.jpg", b"2.tar")
    ]  # fmt: skip
    assert scan.source.where(scan.samples[1]) == str(tmp_path / "2.tar/a.jpg")


def test_a_sample_without_a_picture_is_rejected_by_name(raw_tree: Path, tmp_path: Path) -> None:
    folder = make_webdataset(tmp_path / "tars", raw_tree)
    make_tar(folder / "zz.tar", {"lone.cls": b"0", "lone.json": b'{"caption": "", "rank": 0}'})
    scan = scan_of(folder)
    with pytest.raises(ImageError, match=r"zz\.tar/lone: has no picture"):
        scan.source.read(scan.samples[70], 100)
    convert(folder, tmp_path / "out", small_recipe("shards"), workers=0, max_rejects=0.1)
    (rejected,) = open_dataset(tmp_path / "out").manifest.rejected
    assert (rejected.id, rejected.path) == (70, "lone")


def test_what_has_no_key_is_ignored_and_a_second_one_counts(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, content in (("README", b""), (".hidden.jpg", b""), ("a.jpg", b"1"), ("../b.jpg", b""),
                              ("a.cls", b"0"), ("a.jpg", b"2"), ("README.txt", b"about")):  # fmt: skip
            add(tar, name, content)
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    scan = scan_of(tmp_path)
    assert [scan.source.read(ref, 9) for ref in scan.samples] == [b"2"]
    assert [ignored.path for ignored in scan.ignored] == [
        "README",
        ".hidden.jpg",
        "../b.jpg",
        "a.jpg",
        "README",
    ]
    assert scan.scanned == 6


def test_tars_beside_class_folders_are_a_tree(raw_tree: Path, tmp_path: Path) -> None:
    shutil.copytree(raw_tree, tmp_path / "tree")
    make_tar(tmp_path / "tree/x.tar", files_of(raw_tree))
    assert len(scan_of(tmp_path / "tree").samples) == 70
    make_tar(tmp_path / "empty.tar", {})
    with pytest.raises(SourceError, match="has no class folder"):
        scan_of(tmp_path / "empty.tar")
    (tmp_path / "tars").mkdir()
    make_tar(tmp_path / "tars/empty.tar", {})
    with pytest.raises(SourceError, match=r"tars: has no pictures; expected samples as 0001\.jpg"):
        scan_of(tmp_path / "tars")
