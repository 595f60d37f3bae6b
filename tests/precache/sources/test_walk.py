import hashlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import precache
from precache.errors import SourceError
from precache.sources import Scanning, SourceOptions, folders, open_source, walk
from precache.sources.base import Scan
from precache.sources.tree import TreeSource, scan_tree
from tests.conftest import small_recipe

JPEG = b"\xff\xd8\xff"


def put(path: Path, content: bytes = JPEG) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Class folders with all that a tree can hold."""
    root = tmp_path / "tree"
    for number in range(40):
        for name in ("b.JPG", "a.b.jpeg", "\u00fc \u540d.png", "latin\udcef.jpg", "astral\U0001f600.jpg"):
            put(root / f"{number:02d} {name[0]}/{number} {name}", JPEG * (number + 1))
    put(root / "03 x/.hidden.jpg")
    put(root / "03 x/known by its start")
    put(root / "03 x/notes.txt", b"text")
    put(root / "05 b/inner/9.jpg")
    put(root / "beside.jpg")
    put(root / ".git/x.jpg")
    (root / "07 empty").mkdir()
    (root / "08 link").symlink_to("03 x")
    (root / "09 loop").symlink_to(".")
    (root / "05 b/dangling.jpg").symlink_to("nowhere")
    (root / "05 b/link.jpg").symlink_to("inner/9.jpg")
    os.mkfifo(root / "05 b/pipe.jpg")
    return root


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are started for the first picture, and get a few folders at a time."""
    monkeypatch.setattr(walk, "_FIRST", 1)
    monkeypatch.setattr(walk, "_TASK", 3)
    # forks have what a test replaces
    monkeypatch.setattr("precache.executors.workers._may_fork", lambda: True)


def assert_same(scan: Scan, other: Scan) -> None:
    same = replace(scan, samples=other.samples, source=other.source)
    assert same == other
    for name in ("ids", "labels", "splits", "file_bytes", "modified_ns", "path_ends"):
        ours, theirs = getattr(scan.samples, name), getattr(other.samples, name)
        assert ours.dtype == theirs.dtype == np.int64
        assert np.array_equal(ours, theirs), name
    assert scan.samples.paths == other.samples.paths
    assert scan.samples.split_names == other.samples.split_names


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_scan_does_not_depend_on_workers(tree: Path, at_once: None, workers: int, depth: int) -> None:
    assert_same(scan_tree(tree, depth, Scanning(workers)), scan_tree(tree, depth))


@pytest.mark.parametrize("at_a_time", [1, 2, 3])
def test_a_folder_of_many_entries_is_turned_into_columns_a_few_at_a_time(
    tree: Path, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = scan_tree(tree)
    monkeypatch.setattr(walk, "_BLOCK", at_a_time)
    assert_same(scan_tree(tree), expected)


def test_processes_that_are_no_forks_scan_alike(
    tree: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precache.executors.workers._may_fork", lambda: False)
    assert_same(scan_tree(tree, 1, Scanning(2)), scan_tree(tree))


def test_splits_are_scanned_by_workers_alike(tree: Path, tmp_path: Path, at_once: None) -> None:
    (tree / "beside.jpg").unlink()  # pictures there, and they are no splits
    (tmp_path / "all").mkdir()
    for split in ("train", "val"):
        (tmp_path / "all" / split).symlink_to(tree)
    scan = scan_tree(tmp_path / "all", 1, Scanning(2))
    assert scan.samples.split_names == ("train", "val")
    assert_same(scan, scan_tree(tmp_path / "all"))


def test_the_digest_is_over_sorted_paths_and_sizes_as_ever(tree: Path, at_once: None) -> None:
    """Datasets that were converted before must know their sources again."""
    scan = scan_tree(tree, 1, Scanning(2))
    parts = [os.fsencode(ref.path) + b"\0%d\0" % ref.bytes for ref in scan.samples]
    assert scan.digest == hashlib.sha256(b"".join(parts)).hexdigest()
    assert scan.digest == "81141354caaf3a8c5fb2a4b5a6f806f9b5570754fa294d51e273e102c6dbfc96"


@pytest.fixture
def listers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[int]]:
    """Returns the processes that have listed folders since it was last called."""
    real, log = folders.sorted_entries, tmp_path / "log"

    def noting(folder: folders.Folder) -> list[folders.Entry]:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return real(folder)

    def found() -> set[int]:
        pids = {int(line) for line in log.read_text().splitlines()}
        log.unlink()
        return pids

    monkeypatch.setattr(folders, "sorted_entries", noting)
    return found


def test_the_folders_of_a_large_tree_are_listed_by_several_processes(
    tree: Path, at_once: None, listers: Callable[[], set[int]]
) -> None:
    scan_tree(tree)
    assert listers() == {os.getpid()}
    open_source(tree, SourceOptions(class_depth=1), Scanning(3)).scan()
    assert len(listers() - {os.getpid()}) == 3


def test_whoever_has_workers_scans_with_them(
    raw_tree: Path, tmp_path: Path, at_once: None, listers: Callable[[], set[int]]
) -> None:
    precache.convert(raw_tree, tmp_path / "out", small_recipe("shards"), workers=2)
    assert len(listers()) == 3
    precache.check(raw_tree, list_file=tmp_path / "list.csv", workers=2)
    assert len(listers()) == 3
    precache.verify_deep(tmp_path / "out", raw_tree, workers=2)
    assert len(listers()) == 3


def test_a_small_tree_is_worth_no_process(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk.executors, "run", lambda *_: pytest.fail("processes were started"))
    TreeSource(tree, how=Scanning(2)).scan()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_folder_that_cannot_be_read_is_named_whoever_read_it(
    tree: Path, at_once: None, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = folders.sorted_entries

    def fails(folder: folders.Folder) -> list[folders.Entry]:
        if os.fspath(folder).endswith(("11 b", "20 b", "30 a")):  # type: ignore[arg-type]
            error = PermissionError(13, "Permission denied")
            raise SourceError(f"{os.fspath(folder)}: cannot be read") from error  # type: ignore[arg-type]
        return real(folder)

    monkeypatch.setattr(folders, "sorted_entries", fails)
    with pytest.raises(SourceError, match="11 b: cannot be read") as caught:
        scan_tree(tree, 1, Scanning(workers))
    assert isinstance(caught.value.__cause__, PermissionError)


def test_a_process_that_is_killed_over_a_folder_changes_nothing(
    tree: Path, at_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, parent, killed = folders.sorted_entries, os.getpid(), tmp_path / "killed"

    def dies_once(folder: folders.Folder) -> list[folders.Entry]:
        if os.getpid() != parent and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(folder)

    expected = scan_tree(tree)
    monkeypatch.setattr(folders, "sorted_entries", dies_once)
    assert_same(scan_tree(tree, 1, Scanning(2)), expected)
    assert killed.exists()
