"""Commands of bench over a URL."""

from pathlib import Path

import pytest

from bench.measure.recommend import make_trees
from precache.recipe import Recipe
from precache.sources.tree import ObjectTree, scan_tree
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url
from tests.bench.settings import quick
from tests.command import check_bad_input, run_here

QUICK = ("--batch-size", 4, "--batches", 2, "--warmup", 0, "--repeats", 1, "--size", 32, "--workers", 1)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECACHE_CACHE_DIR", str(tmp_path / "cache"))


def put(folder: Path, url: Url) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            ObjectStore(url).upload(path, str(path.relative_to(folder)))


def test_of_a_raw_tree_at_a_url_a_sample_is_taken_and_no_more(
    bucket: Url, raw_tree: Path, tmp_path: Path
) -> None:
    put(raw_tree, bucket / "photos")
    remote = f"{bucket}/photos"
    done = run_here("bench", "loaders", remote, *QUICK, "--device", "cpu", cwd=tmp_path)
    check_bad_input(done, remote, "precache convert")
    done = run_here("bench", "recommend", remote, "--convert", tmp_path / "out", cwd=tmp_path)
    check_bad_input(done, f"{remote}: precache auto measures on a disk", "'bench recommend URL' advises")
    scan = ObjectTree(bucket / "photos").scan()
    trees = make_trees(scan, Recipe(format="shards", size=48), quick(), tmp_path, 20)
    assert (trees.pictures, trees.small_images) == (20, 20)
    originals = {(raw_tree / ref.path).read_bytes() for ref in scan_tree(raw_tree).samples}
    assert {path.read_bytes() for path in trees.small.glob("*/*")} <= originals
