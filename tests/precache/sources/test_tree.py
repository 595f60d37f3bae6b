"""What is peculiar to trees of class folders: what is a sample, its order, depths, splits, links, rights."""

import os
import tempfile
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


NO_PICTURES = {
    "056.dog/greg/vision309/x.jpg": "a folder inside a class folder",
    "198.spider/RENAME2": "neither an image extension nor an image signature",
    "198.spider/._198_0001.jpg": "a hidden file",
    "198.spider/drawing.svg": "SVG: a drawing",
    "notes.txt": "a file beside the class folders",
    ".git/x.jpg": "a hidden folder",
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
    ("1 train/2", 0, "1::"),
    ("a/b/2 a/b/1 d/e/1 a/stray above d/e/f/1 a/.b/1", 2, "a/b/1:a/b: a/b/2:a/b: d/e/1:d/e:"),
]


@pytest.mark.parametrize(("names", "depth", "found"), TREES)
def test_folders_are_classes_as_deep_as_is_said_and_splits_above_them(
    names: str, depth: int, found: str, tmp_path: Path
) -> None:
    """Path, class and split of each picture."""
    lay(tmp_path, *(f"{name}.jpg" for name in names.split()))
    (tmp_path / "test").exists() or (tmp_path / "test").symlink_to(".")  # leads in a circle
    scan = scan_tree(tmp_path, depth)
    classes = (*scan.classes, "")  # the last one of what has none
    said = [f"{s.path.removesuffix('.jpg')}:{classes[s.label]}:{s.split}" for s in scan.samples]
    assert " ".join(said) == found


def test_a_link_to_a_folder_that_it_lies_in_is_not_followed(tmp_path: Path) -> None:
    """Other links count, but those that lead nowhere."""
    tree = tmp_path / "above/tree"
    lay(tmp_path, "above/tree/b/1.jpg", "above/x.jpg", "y.jpg", "far/z.jpg")
    links = {"a": ".", "c": "..", "d": "../..", "b/inner": "..", "self": "self", "b/gone.jpg": "gone.jpg"}
    followed = {"b/link.jpg": "../../x.jpg", "e": "../../far", "f": "e"}
    for name, target in {**links, **followed}.items():
        (tree / name).symlink_to(target)
    scan = scan_tree(tree)
    assert [s.path for s in scan.samples] == ["b/1.jpg", "b/link.jpg", "e/z.jpg", "f/z.jpg"]
    assert {i.path for i in scan.ignored} == links.keys()
    said = "\n".join(scan.warnings)
    assert "'f' is 'e'" in said, "one folder under two names"
    assert f"{tree}: links " in said
    assert "'a', 'c', 'd'" in said


def test_classes_without_pictures_and_kinds_that_are_not_read_are_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lay(tmp_path, *(f"a/{number}.jpg" for number in range(100)), "beside.jpg", "a/.hidden.jpg")
    put(tmp_path, {"a/y.jxl": b"\xff\x0a", "b/x.jxl": b"\xff\x0a"})
    for number in range(10):
        (tmp_path / f"c{number}\x1b").mkdir()
    empty, missed = scan_tree(tmp_path).warnings
    assert empty.startswith(f"{tmp_path}: class folders without a picture: 'b', 'c0\\x1b', 'c1\\x1b' and 8 ")
    assert missed.startswith(f"{tmp_path}: 3 files ")
    assert "'a/y.jxl', 'b/x.jxl', 'beside.jpg'" in missed
    for command in ("check .", f"convert . {tmp_path}.out --format shards --size 8 --max-rejects 1"):
        caplog.clear()
        run_here("precache", *command.split(), "--workers", 0, cwd=tmp_path)
        assert [line.replace(".: ", f"{tmp_path}: ", 1) for line in caplog.messages][:2] == [empty, missed]


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


@pytest.mark.parametrize(("closed", "named"), [("tree/a", "tree/a"), ("linked", "tree/a/2.jpg")])
def test_what_may_not_be_read_is_named_and_not_ignored(unprivileged: Path, closed: str, named: str) -> None:
    put(unprivileged, {"tree/a/1.jpg": JPEG, "linked/x.jpg": JPEG})
    (unprivileged / "tree/a/2.jpg").symlink_to(unprivileged / "linked/x.jpg")
    (unprivileged / closed).chmod(0)
    try:
        with pytest.raises(SourceError, match=f"^{unprivileged / named}: .*Permission denied"):
            scan_tree(unprivileged / "tree")
    finally:
        (unprivileged / closed).chmod(0o700)
