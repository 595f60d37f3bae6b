"""Sample of a tree that predictions are made from: its sizes, its copies, and its damaged pictures."""

import os
import shutil
from pathlib import Path

import pytest

from bench.measure.sample import convert_twice, make_trees
from bench.measure.settings import Settings
from bench.report.forecast import fit_conversion
from precache.errors import SourceError
from precache.recipe import Recipe
from precache.sources.tree import scan_tree
from tests.bench.settings import quick
from tests.damage import damage_tree

RECIPE = Recipe(format="shards", size=48)


def make_settings(seconds: float) -> Settings:
    """Return settings of trials of at least so many seconds."""
    return quick(trainer="emulated", workers=2, seconds=seconds)


def test_the_sample_has_the_mean_size_of_the_tree(raw_tree: Path, tmp_path: Path) -> None:
    scan = scan_tree(raw_tree)
    trees = make_trees(scan, RECIPE, make_settings(0.1), tmp_path, 20)
    small, large = scan_tree(trees.small), scan_tree(trees.large)
    assert len(small.samples) == trees.small_images == trees.pictures == 20
    assert len(large.samples) == trees.large_images
    assert trees.large_images % 20 == 0
    assert trees.image_bytes == pytest.approx(scan.samples.file_bytes.mean(), rel=0.1)


def test_convert_twice_converts_both_trees(raw_tree: Path, tmp_path: Path) -> None:
    scan = scan_tree(raw_tree)
    trees = make_trees(scan, RECIPE, make_settings(0.1), tmp_path, 20)
    small, large, image_bytes = convert_twice(
        trees, len(scan.samples), Recipe(format="webdataset", size=48), 2, tmp_path / "tars"
    )
    assert (small[1], large[1]) == (20, trees.large_images)
    assert 0 < image_bytes < 48 * 96 * 3
    assert fit_conversion(small, large, 2)[1] > 0


def test_make_trees_makes_an_earlier_sample_again(raw_tree: Path, tmp_path: Path) -> None:
    scan = scan_tree(raw_tree)
    first = make_trees(scan, RECIPE, make_settings(0.1), tmp_path / "first", 30)
    size = (first.pictures, first.copies)
    again = make_trees(scan, RECIPE, make_settings(9.0), tmp_path / "again", 30, same_as=size)
    assert (again.pictures, again.copies, again.image_bytes) == (*size, first.image_bytes)
    names = [
        sorted(str(path.relative_to(trees.large)) for path in trees.large.glob("*/*"))
        for trees in (first, again)
    ]
    assert names[0] == names[1]


def test_make_trees_leaves_damaged_pictures_out_and_names_them(raw_tree: Path, tmp_path: Path) -> None:
    ids = damage_tree(raw_tree, tmp_path / "tree")
    scan = scan_tree(tmp_path / "tree")
    webp = scan.samples[0].path
    (tmp_path / "tree" / webp).write_bytes(b"RIFF\x1a\0\0\0WEBPVP8L" + bytes(18))
    trees = make_trees(scan, RECIPE, make_settings(0.1), tmp_path, 1000)
    assert set(trees.damaged) == {webp, *(scan.samples[row].path for row in ids)}
    assert trees.pictures == len(trees.paths) - 1 - len(ids)
    assert set(trees.undecodable) <= {webp}  # empty where this Pillow has a decoder for WebP


def test_make_trees_refuses_a_tree_without_a_sound_picture(raw_tree: Path, tmp_path: Path) -> None:
    shutil.copytree(raw_tree, tmp_path / "tree")
    scan = scan_tree(tmp_path / "tree")
    for path in (tmp_path / "tree").glob("*/*"):
        path.write_bytes(b"none")
    with pytest.raises(SourceError, match="70 pictures") as raised:
        make_trees(scan, RECIPE, make_settings(0.1), tmp_path / "sample", 1000)
    assert raised.value.path == tmp_path / "tree"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all files")
def test_make_trees_leaves_out_a_picture_without_read_permission(raw_tree: Path, tmp_path: Path) -> None:
    shutil.copytree(raw_tree, tmp_path / "tree")
    scan = scan_tree(tmp_path / "tree")
    unreadable = scan.samples[3].path
    (tmp_path / "tree" / unreadable).chmod(0)
    trees = make_trees(scan, RECIPE, make_settings(0.1), tmp_path, 1000)
    assert list(trees.damaged) == [unreadable]
    assert "Permission denied" in trees.damaged[unreadable]
