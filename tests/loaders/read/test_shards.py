"""Backend `shards`: what it asks of the disk."""

import time
from pathlib import Path

import pytest

from bench.machine import page_cache
from precache import Recipe, convert
from precache.formats.shards import ShardFile
from tests.building import build_loader


def test_pictures_that_the_disk_must_fetch_are_asked_for_once(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(ShardFile, "is_cached", lambda self, sample: False)
    monkeypatch.setattr(ShardFile, "will_need", lambda self, sample: asked.append((self.path.name, sample)))
    with build_loader(converted["shards"], batch_size=4) as loader:
        samples = len(loader.dataset)
        for _ in range(2):
            assert sum(len(batch.ids) for batch in loader) == samples
    assert len(asked) == len(set(asked)) == samples


def test_what_is_cached_is_not_asked_for(converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardFile, "is_cached", lambda self, sample: True)
    monkeypatch.setattr(ShardFile, "will_need", lambda self, sample: pytest.fail("asked for"))
    with build_loader(converted["shards"], batch_size=4) as loader:
        assert sum(len(batch.ids) for batch in loader) == len(loader.dataset)


def test_a_picture_that_is_asked_for_comes_without_being_read(raw_tree: Path, tmp_path: Path) -> None:
    convert(
        raw_tree,
        tmp_path / "large",
        Recipe(format="shards", size=256, fit="crop", splits="train=1"),
        workers=0,
    )
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
