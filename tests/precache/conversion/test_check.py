"""`precache check`: which pictures cannot be decoded, and the list of them."""

import os
from pathlib import Path

import pytest

import precache
from precache.sources.rejected_list import default_list, read_list, rejected_rows
from precache.sources.tree import scan_tree
from tests.command import check_bad_input, run_here
from tests.conftest import IMAGES
from tests.damage import DAMAGE, damage_tree


@pytest.fixture
def damaged(raw_tree: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """A tree with a picture of each kind of damage, and their paths."""
    tree = tmp_path / "tree"
    ids = damage_tree(raw_tree, tree)
    return tree, [scan_tree(tree).samples[i].path for i in ids]


@pytest.mark.parametrize("workers", [0, 2])
def test_check_lists_what_the_converter_rejects(damaged: tuple[Path, list[str]], workers: int) -> None:
    tree, bad = damaged
    seen: list[tuple[int, int]] = []
    report = precache.check(tree, workers=workers, on_progress=lambda *counts: seen.append(counts))
    assert (report.pictures, [picture.path for picture in report.rejected]) == (IMAGES, bad)
    assert seen[-1] == (IMAGES, IMAGES)
    assert report.list_file == tree.parent / "tree.rejected.csv"
    assert read_list(report.list_file) == report.rejected
    recipe = precache.Recipe(format="shards", size=8)
    converted = precache.convert(tree, tree.parent / "out", recipe, workers=0, max_rejects=1).manifest
    assert [(r.path, r.reason) for r in converted.rejected] == [(r.path, r.reason) for r in report.rejected]
    for picture in report.rejected:
        status = (tree / picture.path).stat()
        assert (picture.bytes, picture.modified_ns) == (status.st_size, status.st_mtime_ns)


def test_the_list_is_replaced_at_each_run(damaged: tuple[Path, list[str]]) -> None:
    tree, bad = damaged
    precache.check(tree, workers=0)
    for path in bad:
        (tree / path).unlink()
    assert precache.check(tree, workers=0).rejected == ()
    assert default_list(tree).read_text().splitlines() == ["path,reason,bytes,modified_ns"]
    assert sorted(entry.name for entry in tree.parent.iterdir()) == ["tree", "tree.rejected.csv"]


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


def test_names_of_any_bytes_survive_the_list(tmp_path: Path) -> None:
    name = os.fsdecode(b'c, "l"/a\nb\r\xff,.jpg')
    folder = tmp_path / "tree" / 'c, "l"'
    folder.mkdir(parents=True)
    (tmp_path / "tree" / name).write_bytes(b"")
    report = precache.check(tmp_path / "tree", workers=0)
    assert [picture.path for picture in report.rejected] == [name]
    assert read_list(report.list_file) == report.rejected
    assert rejected_rows(scan_tree(tmp_path / "tree").samples, report.rejected).tolist() == [0]
    result = run_here("precache", "check", "tree", "--workers", 0, cwd=tmp_path)
    assert 'tree/c, "l"/a\\nb\\r\\udcff,.jpg: cannot be decoded (the file is empty)' in result.stderr


def test_a_link_to_the_tree_has_the_same_list(damaged: tuple[Path, list[str]], tmp_path: Path) -> None:
    tree, _ = damaged
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere/link"
    link.symlink_to(tree)
    assert precache.check(link, workers=0).list_file == default_list(tree)
    assert list(link.parent.iterdir()) == [link]


def test_the_command_names_each_bad_picture_and_exits_with_1(
    raw_tree: Path, damaged: tuple[Path, list[str]]
) -> None:
    tree, bad = damaged
    (tree.parent / "good").symlink_to(raw_tree)
    well = run_here("precache", "check", "good", "--list", "good.csv", "--workers", 0, cwd=tree.parent)
    assert (well.returncode, well.stdout) == (0, "good: all 70 pictures can be decoded\n")
    assert well.stderr == "", "a log gets no line of a short run"
    assert read_list(tree.parent / "good.csv") == ()
    result = run_here("precache", "check", "tree", "--workers", 0, cwd=tree.parent)
    assert result.returncode == 1
    *lines, summary = [line for line in result.stderr.splitlines() if line.startswith("tree")]
    assert [line.split(": ")[0] for line in lines] == [f"tree/{path}" for path in bad]
    assert "not a known image format" in lines[0]
    assert f"tree: {len(DAMAGE)} of 70 pictures cannot be decoded; they are listed in" in summary
    assert str(default_list(tree)) in summary


def test_bad_input_is_one_line(damaged: tuple[Path, list[str]], converted: dict[str, Path]) -> None:
    tree, bad = damaged
    root = tree.parent
    (root / "dangling").symlink_to(root / "nowhere")
    (root / "inner").symlink_to(tree)
    (root / "notes.csv").write_text("mine")
    before = sorted(root.rglob("*"))
    for arguments, mentions in (
        (["nowhere"], ["nowhere: does not exist", "precache sample"]),
        (["dangling"], ["dangling: does not exist"]),
        ([f"tree/{bad[0]}"], ["is not a folder"]),
        ([converted["shards"]], ["is a converted dataset", "precache verify"]),
        (["tree", "--list", "tree/x.csv"], ["tree/x.csv: lies inside the tree", "--list"]),
        (["tree", "--list", "inner/001.anchor/x.csv"], ["lies inside the tree"]),
        (["tree", "--list", "gone/x.csv"], ["gone/x.csv: no list can be written there", "--list"]),
        (["tree", "--list", "."], ["is a folder", "--list"]),
        (["tree", "--list", "notes.csv"], ["notes.csv: not a list of rejected pictures", "remove it"]),
        (["tree", "--workers", "-1"], ["workers", "got -1"]),
    ):
        check_bad_input(run_here("precache", "check", *arguments, cwd=root), *mentions)
    assert sorted(root.rglob("*")) == before
    assert (root / "notes.csv").read_text() == "mine"
