"""Window mode: shards read one after the other, within memory_bytes."""

import mmap
import os
from contextlib import ExitStack
from ctypes import CDLL, c_size_t, c_ubyte, c_void_p
from pathlib import Path

import numpy as np
import pytest

from bench.machine import page_cache
from loaders.dataset import open_split
from loaders.order import Epochs, Order, Windows
from loaders.read.sequential import look_ahead
from precache import convert
from precache.errors import SettingError
from precache.formats import shards as format_shards
from precache.formats.shards import ShardFile
from tests.building import build_loader
from tests.conftest import IMAGES, small_recipe

SIZE, ROWS = 128, 5


@pytest.fixture(scope="module")
def shards(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """14 shards of 5 pictures, 246 kB each: many pages, so that what is cached can be counted."""
    path = tmp_path_factory.mktemp("window") / "shards"
    convert(raw_tree, path, small_recipe("shards", size=SIZE, shard_bytes=ROWS * SIZE**2 * 3), workers=0)
    return path


def cached_bytes(files: tuple[str, ...]) -> int:
    """How much of the files is in the system's cache."""
    libc = CDLL(None, use_errno=True)
    total = 0
    for name in files:
        with open(name, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            pages = (c_ubyte * -(-len(view) // mmap.PAGESIZE))()
            assert libc.mincore(c_void_p(view.ctypes.data), c_size_t(len(view)), pages) == 0
            total += sum(page & 1 for page in pages) * mmap.PAGESIZE
            del view
    return total


@pytest.fixture
def dropped(shards: Path) -> tuple[str, ...]:
    page_cache.drop(shards)
    files = open_split(shards, "train").files
    if cached_bytes(files):
        pytest.skip("this file system keeps its files in memory")
    return files


def test_the_window_is_as_many_shards_as_fit_twice(shards: Path) -> None:
    data = open_split(shards, "train")
    largest = int(max(data.shard_bytes))
    for memory_bytes, window in ((None, 8), (2 * largest, 1), (7 * largest, 3), (100 * largest, 50)):
        with build_loader(shards, shuffle="window", memory_bytes=memory_bytes, batch_size=7) as loader:
            served = np.concatenate([batch.ids.numpy() for batch in loader])
        order = Windows(data.shard_starts, 0, 0, window, (0, len(data))).at(np.arange(len(data)))
        assert np.array_equal(served, data.ids[order])
    with pytest.raises(SettingError, match=rf"needs {2 * largest:,} for two shards of {shards}.*give"):
        build_loader(shards, shuffle="window", memory_bytes=2 * largest - 1)


def test_the_cache_of_the_files_stays_within_memory_bytes(shards: Path, dropped: tuple[str, ...]) -> None:
    data = open_split(shards, "train")
    memory_bytes = 4 * int(max(data.shard_bytes))
    assert sum(data.shard_bytes) > 2 * memory_bytes
    with build_loader(shards, shuffle="window", memory_bytes=memory_bytes, batch_size=5) as loader:
        seen = [cached_bytes(dropped) for _ in range(2) for _ in loader]
    assert memory_bytes / 4 < max(seen) <= memory_bytes + 8 * mmap.PAGESIZE
    with build_loader(shards, shuffle="window", batch_size=5) as loader:
        assert len(list(loader)) == IMAGES // 5
    assert cached_bytes(dropped) > 0.9 * sum(data.shard_bytes), "without a bound it stays cached"


def test_reading_ahead_brings_a_whole_shard_into_the_cache(
    dropped: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real one makes a fast disk read some pages around the place that it asks for, and then says yes.
    monkeypatch.setattr(format_shards, "is_cached", lambda descriptor, start: False)
    with ShardFile(Path(dropped[3])) as shard:
        shard.read_ahead()
        assert cached_bytes(dropped[3:4]) >= os.path.getsize(dropped[3])
        shard.close(drop_cached=True)
    assert cached_bytes(dropped[3:4]) == 0


@pytest.mark.parametrize(("ranks", "every"), [(1, 1), (2, 1), (5, 1), (1, 3)])
def test_a_rank_has_no_more_than_two_windows_open(shards: Path, ranks: int, every: int) -> None:
    """Also one that shares them, or serves a part of each shard.

    Those of a request stay open until the second one after it: threads may still read them.
    """
    whole = open_split(shards, "train")
    data = whole.select(np.arange(0, len(whole), every))
    opened: list[int] = []
    before: set[int] = set()
    most = 0
    order = Order(
        epochs=Epochs(shard_starts=data.shard_starts, kind="window", seed=0, window_shards=2),
        batch_size=2,
        last="partial",
        rank=ranks - 1,
        world_size=ranks,
    )
    asked = iter(order.batches(0))
    with ExitStack() as at_end:
        for request, files in look_ahead(
            data, asked, 2, lambda n: opened.append(n) or n, opened.remove, at_end
        ):
            needed = set(data.locate(request.positions)[0].tolist())
            assert set(files) == needed
            assert set(opened) >= needed | before
            before, most = needed, max(most, len(opened))
        assert set(opened) >= before, "the last request may still be read"
    assert not opened
    assert 2 < most <= 2 * 2 + 2, "and those of a batch"
