"""The sample that predictions rest on: like the tree, large enough to measure, and gone afterwards."""

from pathlib import Path
from typing import Any

import pytest

from bench.measure.sample import Sampling, make_trees, run_format
from bench.measure.settings import Settings
from precache.errors import SourceError
from precache.sources.tree import scan_tree
from tests.bench.settings import quick


def sampling(scratch: Path, **given: Any) -> Sampling:
    return Sampling(**{"stored_size": 48, "quality": 95, "scratch": scratch, **given})


def seconds(count: float) -> Settings:
    return quick(trainer="emulated", workers=2, seconds=count)


def test_the_sample_is_like_the_tree_and_fills_all_workers(raw_tree: Path, tmp_path: Path) -> None:
    scan = scan_tree(raw_tree)
    asked = sampling(tmp_path, pictures=20)
    trees = make_trees(scan, asked, seconds(0.1), tmp_path)
    small, large = scan_tree(trees.small), scan_tree(trees.large)
    assert len(small.samples) == trees.small_images == trees.pictures == 20
    assert len(large.samples) == trees.large_images
    assert trees.large_images % 20 == 0
    assert -(-trees.large_images // trees.shard_images) == 4, "two workers, two rounds"
    assert asked.recipe("dali", trees.shard_images).samples_per_shard == trees.shard_images
    assert set(large.classes) <= set(scan.classes)
    assert trees.image_bytes == pytest.approx(scan.samples.file_bytes.mean(), rel=0.1)
    assert trees.image_bytes == pytest.approx(large.samples.file_bytes.mean())
    originals = {(raw_tree / ref.path).read_bytes() for ref in scan.samples}
    assert {(trees.large / ref.path).read_bytes() for ref in large.samples} <= originals


def test_damaged_pictures_are_no_part_of_the_sample(tmp_path: Path) -> None:
    (tmp_path / "tree/class").mkdir(parents=True)
    (tmp_path / "tree/class/bad.jpg").write_bytes(b"<html>")
    with pytest.raises(SourceError, match="none of 1 pictures taken from it can be decoded"):
        make_trees(scan_tree(tmp_path / "tree"), sampling(tmp_path), seconds(0.01), tmp_path / "out")


@pytest.mark.parametrize("name", ["raw tree", "webdataset"])
def test_a_format_is_converted_and_loaded_for_real_and_leaves_nothing(
    raw_tree: Path, tmp_path: Path, name: str
) -> None:
    asked, settings = sampling(tmp_path, pictures=20), seconds(0.1)
    trees = make_trees(scan_tree(raw_tree), asked, settings, tmp_path)
    converted, loaded = run_format(trees, name, asked, settings, tmp_path, None)
    assert (converted is None) == (name == "raw tree")
    if converted is not None:
        assert converted.seconds > 0
        assert 0 < converted.bytes < trees.large_images * 48 * 96 * 3
    assert loaded.together > 0
    assert 0 < loaded.trainer <= 7158
    assert loaded.loader > 0
    assert loaded.serial_s >= 0
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"small", "large"}
