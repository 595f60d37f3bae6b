"""Backend `shards`: what it asks of the disk."""

import time
from pathlib import Path

import pytest

from bench.machine import page_cache
from precache import convert
from precache.formats.shards import ShardFile
from tests.building import build_loader
from tests.conftest import IMAGES, small_recipe


@pytest.mark.parametrize("cached", [False, True])
def test_pictures_that_the_disk_must_fetch_are_asked_for_once(
    cached: bool, converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(ShardFile, "is_cached", lambda self, sample: cached)
    monkeypatch.setattr(ShardFile, "will_need", lambda self, sample: asked.append((self.path.name, sample)))
    with build_loader(converted["shards"], batch_size=4) as loader:
        for _ in range(2):
            assert sum(len(batch.ids) for batch in loader) == IMAGES
    assert len(asked) == len(set(asked)) == (0 if cached else IMAGES)


def test_a_picture_that_is_asked_for_comes_without_being_read(raw_tree: Path, tmp_path: Path) -> None:
    large = small_recipe("shards", size=256, shard_bytes=16 << 20)
    convert(raw_tree, tmp_path / "large", large, workers=0)
    if page_cache.drop(tmp_path / "large") > 0.05:
        pytest.skip("the file system keeps its files in memory")
    file = ShardFile(tmp_path / "large/train-00000.safetensors")
    try:
        middle = len(file.ids) // 2
        assert not file.is_cached(middle)
        file.will_need(middle)
        end_s = time.monotonic() + 20
        while not file.is_cached(middle):
            assert time.monotonic() < end_s
            time.sleep(0.01)
    finally:
        file.close()
