"""`precache check`: which pictures cannot be decoded, and the list of them."""

import os
from pathlib import Path

import pytest

import precache
from precache.sources.rejected_list import default_list, read_list, rejected_rows
from precache.sources.tree import scan_tree
from tests.command import check_bad_input, run_here
from tests.conftest import IMAGES
from tests.damage import damage_tree


@pytest.fixture
def damaged(raw_tree: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """A tree with a picture of each kind of damage, and their paths."""
    tree = tmp_path / "tree"
    ids = damage_tree(raw_tree, tree)
    return tree, [scan_tree(tree).samples[i].path for i in ids]


def test_check_lists_what_the_converter_rejects(damaged: tuple[Path, list[str]]) -> None:
    tree, bad = damaged
    (tree.parent / "beside").mkdir()
    link = tree.parent / "beside" / "link"
    link.symlink_to(tree)  # has the same list
    seen: list[tuple[int, int]] = []
    report = precache.check(link, workers=2, on_progress=lambda *counts: seen.append(counts))
    assert (report.pictures, [picture.path for picture in report.rejected]) == (IMAGES, bad)
    assert seen[-1] == (IMAGES, IMAGES)
    assert report.list_file == default_list(tree) == tree.parent / "tree.rejected.csv"
    assert read_list(report.list_file) == report.rejected
    recipe = precache.Recipe(format="shards", size=8)
    converted = precache.convert(tree, tree.parent / "out", recipe, workers=0, max_rejects=1).manifest
    assert [(r.path, r.reason) for r in converted.rejected] == [(r.path, r.reason) for r in report.rejected]
    for path in bad:
        (tree / path).unlink()
    assert precache.check(tree, workers=0).rejected == ()
    assert read_list(report.list_file) == ()


def test_an_entry_holds_while_the_file_is_as_it_was(damaged: tuple[Path, list[str]]) -> None:
    tree, bad = damaged
    rejected = precache.check(tree, workers=0).rejected
    mended, touched, *others = (tree / path for path in bad)
    mended.write_bytes((tree / scan_tree(tree).samples[0].path).read_bytes())
    status = touched.stat()
    os.utime(touched, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    samples = scan_tree(tree).samples
    held = [f"{tree}/{samples[row].path}" for row in rejected_rows(samples, rejected).tolist()]
    assert held == [str(path) for path in others]


def test_a_list_that_cannot_be_written_is_named_before_a_picture_is_read(
    damaged: tuple[Path, list[str]],
) -> None:
    tree, bad = damaged
    root = tree.parent
    (root / "inner").symlink_to(tree)
    before = sorted(root.rglob("*"))
    for words, mention in (
        ([f"tree/{bad[0]}"], "is not a folder"),
        (["tree", "--list", "inner/001.anchor/x.csv"], "lies inside the tree"),
        (["tree", "--list", "gone/x.csv"], "gone/x.csv: no list can be written there"),
    ):
        check_bad_input(run_here("precache", "check", *words, cwd=root), mention)
    assert sorted(root.rglob("*")) == before
