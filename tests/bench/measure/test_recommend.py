"""The sample that predictions rest on: like the tree, large enough to measure, and gone afterwards."""

from pathlib import Path

import pytest

from bench.measure.recommend import convert_twice, make_trees, serve
from bench.measure.settings import Settings
from bench.report.forecast import fit_conversion
from precache.recipe import Recipe
from precache.sources.tree import ObjectTree, scan_tree
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url
from tests.bench.settings import quick


def seconds(count: float) -> Settings:
    return quick(trainer="emulated", workers=2, seconds=count)


def test_of_a_tree_at_a_url_a_sample_is_taken_and_no_more(
    bucket: Url, raw_tree: Path, tmp_path: Path
) -> None:
    originals = {path.read_bytes() for path in raw_tree.glob("*/*")}
    for path in raw_tree.glob("*/*"):
        ObjectStore(bucket / "photos").upload(path, str(path.relative_to(raw_tree)))
    scan = ObjectTree(bucket / "photos").scan()
    trees = make_trees(scan, Recipe(format="shards", size=48), seconds(0.1), tmp_path, 20)
    assert (trees.pictures, trees.small_images) == (20, 20)
    assert {path.read_bytes() for path in trees.small.glob("*/*")} <= originals


def test_the_sample_is_like_the_tree_and_is_converted_by_all_workers(raw_tree: Path, tmp_path: Path) -> None:
    scan = scan_tree(raw_tree)
    trees = make_trees(scan, Recipe(format="shards", size=48), seconds(0.1), tmp_path, 20)
    small, large = scan_tree(trees.small), scan_tree(trees.large)
    assert len(small.samples) == trees.small_images == trees.pictures == 20
    assert len(large.samples) == trees.large_images
    assert trees.large_images % 20 == 0
    assert trees.image_bytes == pytest.approx(scan.samples.file_bytes.mean(), rel=0.1)
    first, second, image_bytes = convert_twice(
        trees, len(scan.samples), Recipe(format="webdataset", size=48), 2, tmp_path / "tars"
    )
    assert (first[1], second[1]) == (20, trees.large_images)
    assert 0 < image_bytes < 48 * 96 * 3
    assert fit_conversion(first, second, 2)[1] > 0
    loaded = serve(tmp_path / "tars", "webdataset", seconds(0.1))
    assert min(loaded.together, loaded.loader) > 0
    assert 0 < loaded.trainer <= 7158
