import hashlib
import os
import tempfile
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from precache.errors import SourceError
from precache.sources.base import SampleRef, Samples
from precache.sources.tree import scan_tree
from tests.command import run
from tests.precache.sources.archives import JPEG, Files
from tests.precache.sources.archives import put as put_files


def put(path: Path, content: bytes = JPEG) -> None:
    put_files(path.parent, {path.name: content})


def of(*names: str) -> Files:
    return dict.fromkeys(names, JPEG)


def test_samples_are_sorted_by_class_and_name_and_the_digest_is_over_paths_and_sizes(tmp_path: Path) -> None:
    names = ["b c.JPG", "a\nb.jpg", "\u00fc \u540d.Jpeg", "tab\t'\".jpg", "latin\udcef.jpg", "d.TIFF"]
    put_files(tmp_path, {f"{folder}/{name}": JPEG * len(name) for name in names for folder in ("z", "y 1")})
    scan = scan_tree(tmp_path)
    assert scan.classes == ("y 1", "z")
    assert [(s.id, s.path, s.label, s.bytes) for s in scan.samples] == [
        (number, f"{folder}/{name}", label, 3 * len(name))
        for number, (label, folder, name) in enumerate(
            (label, folder, name) for label, folder in enumerate(("y 1", "z")) for name in sorted(names)
        )
    ]
    assert [s.modified_ns for s in scan.samples] == [
        (tmp_path / s.path).stat().st_mtime_ns for s in scan.samples
    ]
    parts = [os.fsencode(ref.path) + b"\0%d\0" % ref.bytes for ref in scan.samples]
    assert scan.digest == hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("056.dog/greg/vision309/x.jpg", "a folder inside a class folder"),
        ("198.spider/RENAME2", "neither an image extension nor an image signature"),
        ("198.spider/._198_0001.jpg", "a hidden file"),
        ("198.spider/drawing.svg", "SVG: a drawing"),
        ("198.spider/x.psd", "an unsupported kind of picture"),
        ("notes.txt", "a file beside the class folders"),
        (".git/x.jpg", "a hidden folder"),
        ("empty/x.txt/y.jpg", "a folder without pictures"),
    ],
)
def test_what_is_not_a_picture_is_ignored_for_a_reason(name: str, reason: str, tmp_path: Path) -> None:
    """Caltech-256 holds 056.dog/greg/ and 198.spider/RENAME2, Caltech-101 a JPEG named tmp."""
    put_files(tmp_path, {**of("056.dog/056_0001.jpg", "198.spider/tmp"), name: b"#!/bin/sh\nmv a b\n"})
    scan = scan_tree(tmp_path)
    assert [s.path for s in scan.samples] == ["056.dog/056_0001.jpg", "198.spider/tmp"]
    ignored = {ignored.path: ignored.reason for ignored in scan.ignored}
    assert any(name.startswith(path) and why.startswith(reason) for path, why in ignored.items())
    assert scan.scanned == len(scan.samples) + len(scan.ignored)


def test_train_and_val_folders_are_splits_with_common_classes(tmp_path: Path) -> None:
    for name in ("train/b/1.jpg", "train/c/2.jpg", "val/a/3.jpg", "val/b/4.jpg"):
        put(tmp_path / name)
    put(tmp_path / "val/notes.txt", b"notes")
    scan = scan_tree(tmp_path)
    assert scan.classes == ("a", "b", "c")
    assert [(s.path, s.label, s.split) for s in scan.samples] == [
        ("train/b/1.jpg", 1, "train"),
        ("train/c/2.jpg", 2, "train"),
        ("val/a/3.jpg", 0, "val"),
        ("val/b/4.jpg", 1, "val"),
    ]
    assert [ignored.path for ignored in scan.ignored] == ["val/notes.txt"]
    (tmp_path / "test").symlink_to(".")  # leads in a circle
    assert scan_tree(tmp_path).samples.split_names == ("train", "val")
    put(tmp_path / "val/x.jpg")  # pictures in it: a class that happens to be called so
    assert scan_tree(tmp_path).classes == ("val",)


def test_symlinked_pictures_and_folders_count_and_dangling_ones_are_ignored(tmp_path: Path) -> None:
    put(tmp_path / "elsewhere/x.jpg", b"\xff\xd8\xff\xd9")
    put(tmp_path / "tree/a/real.jpg")
    (tmp_path / "tree/a/link.jpg").symlink_to(tmp_path / "elsewhere/x.jpg")
    (tmp_path / "tree/a/gone.jpg").symlink_to(tmp_path / "elsewhere/gone.jpg")
    (tmp_path / "tree/b").symlink_to(tmp_path / "elsewhere")
    scan = scan_tree(tmp_path / "tree")
    assert [(s.path, s.bytes) for s in scan.samples] == [("a/link.jpg", 4), ("a/real.jpg", 3), ("b/x.jpg", 4)]
    assert [i.path for i in scan.ignored] == ["a/gone.jpg"]


def test_a_link_to_a_folder_that_it_lies_in_is_not_followed(tmp_path: Path) -> None:
    tree = tmp_path / "above/tree"
    put(tree / "b/1.jpg")
    for name, target in (("a", "."), ("c", ".."), ("d", "../.."), ("b/inner", ".."), ("self", "self")):
        (tree / name).symlink_to(target)
    put(tmp_path / "above/x.jpg")
    put(tmp_path / "y.jpg")
    scan = scan_tree(tree)
    assert [s.path for s in scan.samples] == ["b/1.jpg"]
    why = {i.path: i.reason for i in scan.ignored}
    assert {why[name] for name in "acd"} == {"a link to a folder that it lies in"}
    assert why.keys() == {"a", "c", "d", "b/inner", "self"}
    assert scan.scanned == 6
    (warning,) = scan.warnings
    assert warning.startswith(f"{tree}: links ")
    assert "'a', 'c', 'd'" in warning


def test_one_folder_under_two_names_is_a_warning(tmp_path: Path) -> None:
    put(tmp_path / "a/1.jpg")
    (tmp_path / "b").symlink_to("a")
    scan = scan_tree(tmp_path)
    assert len(scan.samples) == 2
    (warning,) = scan.warnings
    assert warning.startswith(f"{tmp_path}: ")
    assert "'b' is 'a'" in warning


def test_classes_without_pictures_and_kinds_that_are_not_read_are_warnings(tmp_path: Path) -> None:
    for number in range(100):
        put(tmp_path / f"a/{number}.jpg")
    put(tmp_path / "b/x.jxl", b"\xff\x0a")
    (empty,) = scan_tree(tmp_path).warnings
    assert empty.startswith(f"{tmp_path}: class folders without a picture: 'b'")
    put(tmp_path / "a/y.jxl", b"\xff\x0a")
    put(tmp_path / "beside.jpg")
    put(tmp_path / "a/.hidden.jpg")
    put(tmp_path / "a/esc\x1b[31m.txt", b"text")
    _, missed = scan_tree(tmp_path).warnings
    assert missed.startswith(f"{tmp_path}: 3 files ")
    assert "'a/y.jxl', 'b/x.jxl', 'beside.jpg'" in missed
    for number in range(10):
        (tmp_path / f"c{number}\x1b").mkdir()
    assert "'b', 'c0\\x1b', 'c1\\x1b' and 8 more" in scan_tree(tmp_path).warnings[0]
    recipe = ("--format", "shards", "--size", 8, "--max-rejects", 1, "--workers", 0)
    Image.new("RGB", (9, 9)).save(tmp_path / "a/0.jpg")
    (tmp_path / "out").mkdir()
    for command in (
        ("check", ".", "--workers", 0),
        ("convert", ".", tmp_path.parent / f"{tmp_path.name}-out", *recipe),
    ):
        result = run("precache", *command, cwd=tmp_path)
        assert "WARNING: .: class folders without a picture: 'b', 'c0\\x1b'" in result.stderr
        assert "WARNING: .: 3 files that look like pictures are left out" in result.stderr
        assert "\x1b" not in result.stderr.replace("\x1b[A", "")


@pytest.fixture
def unprivileged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that a user without root's rights can reach; for the test, this process is one."""
    if os.geteuid() != 0:
        yield tmp_path_factory.mktemp("tree")
        return
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(0)


@pytest.mark.parametrize("closed", ["tree", "tree/a", "tree/a/notes", "."])
def test_what_may_not_be_read_is_named_and_not_ignored(unprivileged: Path, closed: str) -> None:
    put(unprivileged / "tree/a/1.jpg")
    put(unprivileged / "tree/a/notes", b"text")
    (unprivileged / closed).chmod(0)
    try:
        with pytest.raises(SourceError, match=r"Permission denied.*permissions") as caught:
            scan_tree(unprivileged / "tree")
    finally:
        (unprivileged / closed).chmod(0o700)
    assert str(caught.value).startswith(f"{unprivileged / ('tree' if closed == '.' else closed)}: ")
    assert isinstance(caught.value.__cause__, OSError)


def test_links_that_may_not_be_followed_are_named(unprivileged: Path) -> None:
    put(unprivileged / "tree/a/1.jpg")
    put(unprivileged / "closed/x.jpg")
    (unprivileged / "tree/a/2.jpg").symlink_to(unprivileged / "closed/x.jpg")
    (unprivileged / "closed").chmod(0)
    try:
        with pytest.raises(SourceError, match=r"tree/a/2\.jpg: .*Permission denied"):
            scan_tree(unprivileged / "tree")
    finally:
        (unprivileged / "closed").chmod(0o700)


def test_columns_hold_what_refs_hold() -> None:
    refs = [SampleRef(3, "a/b.jpg", 0, 5, "val"), SampleRef(7, "\u00e9/\udcef", 2, 2**40, "train")]
    samples = Samples.of(refs)
    assert list(samples) == refs
    assert samples[-1] == refs[-1]
    swapped = samples.select(np.array([1, 0]), np.array([0, 0]), ["test"])
    assert list(swapped) == [replace(refs[1], split="test"), replace(refs[0], split="test")]


def test_many_names_take_little_memory(tmp_path: Path) -> None:
    """So that a million take some 150 MB at most."""
    put(tmp_path / "0.jpg")
    for folder in range(20):
        (tmp_path / f"tree/{folder:03d}").mkdir(parents=True)
        for number in range(1_000):
            os.link(tmp_path / "0.jpg", tmp_path / f"tree/{folder:03d}/{folder:03d}_{number:06d}.jpg")
    tracemalloc.start()
    try:
        samples = scan_tree(tmp_path / "tree").samples
        assert tracemalloc.get_traced_memory()[1] < 150 * len(samples)
    finally:
        tracemalloc.stop()
    assert len(samples) == 20_000
