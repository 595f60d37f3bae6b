"""Commands of bench over a URL."""

from pathlib import Path

import pytest

from precache.storage.objects import ObjectStore
from precache.storage.urls import Url
from tests.command import check_bad_input, run_here


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECACHE_CACHE_DIR", str(tmp_path / "cache"))


def put(folder: Path, url: Url) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            ObjectStore(url).upload(path, str(path.relative_to(folder)))


QUICK = ("--batch-size", 4, "--batches", 2, "--warmup", 0, "--repeats", 1, "--size", 32, "--workers", 1)


@pytest.mark.slow
def test_loaders_are_measured_over_a_url(bucket: Url, converted: dict[str, Path], tmp_path: Path) -> None:
    put(converted["shards"], bucket / "set")
    flags = (*QUICK, "--backend", "shards", "--trainer", "none", "--device", "cpu")
    done = run_here("bench", "loaders", f"{bucket}/set", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "shards" in done.stdout


def test_a_raw_tree_at_a_url_is_refused_with_the_remedy(bucket: Url, raw_tree: Path, tmp_path: Path) -> None:
    put(raw_tree, bucket / "photos")
    done = run_here("bench", "loaders", f"{bucket}/photos", *QUICK, "--device", "cpu", cwd=tmp_path)
    check_bad_input(done, f"{bucket}/photos", "precache convert")


def test_recommend_takes_a_sample_of_a_tree_at_a_url(bucket: Url, raw_tree: Path, tmp_path: Path) -> None:
    put(raw_tree, bucket / "photos")
    done = run_here("bench", "recommend", f"{bucket}/photos", "--check", cwd=tmp_path)
    check_bad_input(done, f"{bucket}/photos: --check reads the whole tree")
