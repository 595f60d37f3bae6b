"""What is peculiar to trees of class folders: what is a sample, its order, depths, splits, links, rights."""

import hashlib
import os
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from precache.errors import SourceError
from precache.sources.tree import scan_tree
from tests.command import run_here
from tests.precache.sources.archives import JPEG, put


def lay(root: Path, *names: str) -> Path:
    """Files that a scan takes for pictures where their names say so."""
    return put(root, dict.fromkeys(names, JPEG))


def test_samples_are_sorted_by_class_and_name_and_the_digest_is_over_paths_and_sizes(tmp_path: Path) -> None:
    names = ["b c.JPG", "a\nb.jpg", "\u00fc \u540d.Jpeg", "tab\t'\".jpg", "latin\udcef.jpg", "d.TIFF"]
    put(tmp_path, {f"{folder}/{name}": JPEG * len(name) for name in names for folder in ("z", "y 1")})
    scan = scan_tree(tmp_path)
    assert scan.classes == ("y 1", "z")
    assert [(s.path, s.label, s.bytes) for s in scan.samples] == [
        (f"{folder}/{name}", label, 3 * len(name))
        for label, folder in enumerate(("y 1", "z"))
        for name in sorted(names)
    ]
    assert [s.modified_ns for s in scan.samples] == [
        (tmp_path / s.path).stat().st_mtime_ns for s in scan.samples
    ]
    parts = [os.fsencode(ref.path) + b"\0%d\0" % ref.bytes for ref in scan.samples]
    assert scan.digest == hashlib.sha256(b"".join(parts)).hexdigest()


NO_PICTURES = {
    "056.dog/greg/vision309/x.jpg": "a folder inside a class folder",
    "198.spider/RENAME2": "neither an image extension nor an image signature",
    "198.spider/._198_0001.jpg": "a hidden file",
    "198.spider/drawing.svg": "SVG: a drawing",
    "198.spider/page.pdf": "PDF: a drawing",
    "198.spider/logo.svgz": "SVG: a drawing",
    "198.spider/x.psd": "an unsupported kind of picture",
    "notes.txt": "a file beside the class folders",
    ".git/x.jpg": "a hidden folder",
    "empty/x.txt/y.jpg": "a folder without pictures",
}


def test_what_is_not_a_picture_is_ignored_for_a_reason(tmp_path: Path) -> None:
    """Caltech-256 holds 056.dog/greg/ and 198.spider/RENAME2, Caltech-101 a JPEG named tmp."""
    lay(tmp_path, "056.dog/056_0001.jpg", "198.spider/tmp")
    put(tmp_path, dict.fromkeys(NO_PICTURES, b"#!/bin/sh\nmv a b\n"))
    scan = scan_tree(tmp_path)
    assert [s.path for s in scan.samples] == ["056.dog/056_0001.jpg", "198.spider/tmp"]
    assert scan.scanned == len(scan.samples) + len(scan.ignored)
    for name, reason in NO_PICTURES.items():
        found = [ignored.reason for ignored in scan.ignored if name.startswith(ignored.path)]
        assert [why for why in found if why.startswith(reason)], name


TREES: list[tuple[str, int, str]] = [
    ("train/b/1 train/c/2 val/a/3", 1, "train/b/1:b:train train/c/2:c:train val/a/3:a:val"),
    ("train/b/1 val/a/3 val/x", 1, "val/x:val:"),  # a class that happens to be called so
    ("test/1 train/2 val/3", 0, "test/1::test train/2::train val/3::val"),
    ("train/a/b/c/1 val/a/b/c/2", 3, "train/a/b/c/1:a/b/c:train val/a/b/c/2:a/b/c:val"),
    ("1 train/2", 0, "1::"),
    (
        "a/b/2 a/b/1 a/c/1 d/e/1 a/stray above d/e/f/1 a/.b/1",
        2,
        "a/b/1:a/b: a/b/2:a/b: a/c/1:a/c: d/e/1:d/e:",
    ),
    ("1", 1, "pass --class-depth 0"),
    ("a/b/1", 1, "pass --class-depth 2"),
    ("a/1", 0, "leave out --class-depth 0"),
    ("a/1", 2, "FOLDER/CLASS/picture.jpg"),
    ("", 0, "has no pictures"),
]


@pytest.mark.parametrize(("names", "depth", "found"), TREES)
def test_folders_are_classes_as_deep_as_is_said_and_splits_above_them(
    names: str, depth: int, found: str, tmp_path: Path
) -> None:
    """Path, class and split of each picture; or what the error says to pass."""
    lay(tmp_path, *(f"{name}.jpg" for name in names.split()))
    if ":" not in found:
        with pytest.raises(SourceError, match=found):
            scan_tree(tmp_path, depth)
        return
    (tmp_path / "test").exists() or (tmp_path / "test").symlink_to(".")  # leads in a circle
    scan = scan_tree(tmp_path, depth)
    classes = (*scan.classes, "")  # the last one of what has none
    said = [f"{s.path.removesuffix('.jpg')}:{classes[s.label]}:{s.split}" for s in scan.samples]
    assert " ".join(said) == found


def test_symlinked_pictures_and_folders_count_and_dangling_ones_are_ignored(tmp_path: Path) -> None:
    lay(tmp_path, "elsewhere/x.jpg", "tree/a/real.jpg")
    (tmp_path / "tree/a/link.jpg").symlink_to(tmp_path / "elsewhere/x.jpg")
    (tmp_path / "tree/a/gone.jpg").symlink_to(tmp_path / "elsewhere/gone.jpg")
    (tmp_path / "tree/b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "tree/c").symlink_to("b")
    scan = scan_tree(tmp_path / "tree")
    assert [s.path for s in scan.samples] == ["a/link.jpg", "a/real.jpg", "b/x.jpg", "c/x.jpg"]
    assert [i.path for i in scan.ignored] == ["a/gone.jpg"]
    assert "'c' is 'b'" in " ".join(scan.warnings), "one folder under two names"


def test_a_link_to_a_folder_that_it_lies_in_is_not_followed(tmp_path: Path) -> None:
    tree = tmp_path / "above/tree"
    lay(tmp_path, "above/tree/b/1.jpg", "above/x.jpg", "y.jpg")
    for name, target in (("a", "."), ("c", ".."), ("d", "../.."), ("b/inner", ".."), ("self", "self")):
        (tree / name).symlink_to(target)
    scan = scan_tree(tree)
    assert [s.path for s in scan.samples] == ["b/1.jpg"]
    assert {i.path for i in scan.ignored} == {"a", "c", "d", "b/inner", "self"}
    (warning,) = scan.warnings
    assert warning.startswith(f"{tree}: links ")
    assert "'a', 'c', 'd'" in warning


def test_classes_without_pictures_and_kinds_that_are_not_read_are_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lay(tmp_path, *(f"a/{number}.jpg" for number in range(100)))
    put(tmp_path, {"b/x.jxl": b"\xff\x0a"})
    (empty,) = scan_tree(tmp_path).warnings
    assert empty.startswith(f"{tmp_path}: class folders without a picture: 'b'")
    put(tmp_path, {"a/y.jxl": b"\xff\x0a", "beside.jpg": JPEG, "a/.hidden.jpg": JPEG})
    for number in range(10):
        (tmp_path / f"c{number}\x1b").mkdir()
    empty, missed = scan_tree(tmp_path).warnings
    assert "'b', 'c0\\x1b', 'c1\\x1b' and 8 more" in empty
    assert missed.startswith(f"{tmp_path}: 3 files ")
    assert "'a/y.jxl', 'b/x.jxl', 'beside.jpg'" in missed
    run_here("precache", "check", ".", "--workers", 0, cwd=tmp_path)
    assert [line.replace(".: ", f"{tmp_path}: ", 1) for line in caplog.messages] == [empty, missed]


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


@pytest.mark.parametrize(
    ("closed", "named"),
    [("tree", "tree"), ("tree/a", "tree/a"), ("tree/a/notes", "tree/a/notes"), ("linked", "tree/a/2.jpg")],
)
def test_what_may_not_be_read_is_named_and_not_ignored(unprivileged: Path, closed: str, named: str) -> None:
    put(unprivileged, {"tree/a/1.jpg": JPEG, "tree/a/notes": b"text", "linked/x.jpg": JPEG})
    (unprivileged / "tree/a/2.jpg").symlink_to(unprivileged / "linked/x.jpg")
    (unprivileged / closed).chmod(0)
    try:
        with pytest.raises(SourceError, match="Permission denied") as caught:
            scan_tree(unprivileged / "tree")
    finally:
        (unprivileged / closed).chmod(0o700)
    assert str(caught.value).startswith(f"{unprivileged / named}: ")
    assert isinstance(caught.value.__cause__, OSError)


def test_many_names_take_little_memory(tmp_path: Path) -> None:
    """So that a million take some 150 MB at most."""
    lay(tmp_path, "0.jpg")
    for folder in range(20):
        (tmp_path / f"tree/{folder:03d}").mkdir(parents=True)
        for number in range(250):
            os.link(tmp_path / "0.jpg", tmp_path / f"tree/{folder:03d}/{folder:03d}_{number:06d}.jpg")
    tracemalloc.start()
    try:
        samples = scan_tree(tmp_path / "tree").samples
        assert tracemalloc.get_traced_memory()[1] < 150 * len(samples)
    finally:
        tracemalloc.stop()
    assert len(samples) == 5_000
