"""Window mode reads shards one after the other, within memory_bytes."""

import mmap
import multiprocessing
from ctypes import CDLL, c_size_t, c_ubyte, c_void_p
from pathlib import Path

import numpy as np
import pytest

from bench.machine import page_cache
from loaders.dataset import open_split
from precache import convert
from precache.errors import SettingError
from tests.building import build_loader
from tests.conftest import IMAGES, small_recipe

SIZE, ROWS = 128, 5


@pytest.fixture(scope="module")
def shards(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """14 shards of 5 pictures, 246 kB each: large enough to count their cached pages."""
    path = tmp_path_factory.mktemp("window") / "shards"
    convert(raw_tree, path, small_recipe("shards", size=SIZE, shard_bytes=ROWS * SIZE**2 * 3), workers=0)
    return path


def cached_bytes(files: tuple[str, ...]) -> int:
    """Return how many bytes of the files are in the system's cache."""
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


def test_worker_processes_keep_within_no_bound(shards: Path) -> None:
    with pytest.raises(SettingError, match="memory_bytes 9,999,999 with engine 'processes'"):
        build_loader(shards, memory_bytes=9_999_999, engine="processes")
    settings = {"augment": "torchvision", "shuffle": "window", "batch_size": 5}
    with build_loader(shards, memory_bytes=9_999_999, **settings) as loader:  # read by threads
        next(iter(loader))
        assert not multiprocessing.active_children()


def test_page_cache_stays_within_memory_bytes(shards: Path, dropped: tuple[str, ...]) -> None:
    data = open_split(shards, "train")
    memory_bytes = 4 * int(max(data.shard_bytes))
    assert sum(data.shard_bytes) > 2 * memory_bytes
    with build_loader(shards, shuffle="window", memory_bytes=memory_bytes, batch_size=5) as loader:
        cached = [cached_bytes(dropped) for _ in range(2) for _ in loader]
    assert memory_bytes / 4 < max(cached) <= memory_bytes + 8 * mmap.PAGESIZE
    with build_loader(shards, shuffle="window", batch_size=5) as loader:
        assert len(list(loader)) == IMAGES // 5
    assert cached_bytes(dropped) > 0.9 * sum(data.shard_bytes), "without a bound it stays cached"
