"""Whatever happens to a file in the cache of a URL: the next run, or the one after, serves what was written.

The storage has it whole. What is found out before anything is served is fetched again at once.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loaders import ImageDataset
from precache import open_dataset
from precache.errors import PrecacheError
from precache.storage.urls import Url
from tests.building import build_loader
from tests.cloud.uploading import upload
from tests.loaders.test_urls import QUIET, cache

__all__ = ["cache"]


def flip(where: float) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[min(int(where * len(content)) if where < 1 else int(where), len(content) - 1)] ^= 16
        path.write_bytes(content)

    return spoil


def fill(path: Path, first: int, count: int) -> None:
    content = bytearray(path.read_bytes())
    content = content[:first] + bytes(min(count, len(content) - first)) + content[first + count :]
    path.write_bytes(content)


def exchange(path: Path) -> None:
    """Another shard, of the same size where one is."""
    others = [
        other for other in sorted(path.parent.glob(f"*train-*{path.suffix}")) if other.name != path.name
    ]
    same = [other for other in others if other.stat().st_size == path.stat().st_size]
    shutil.copyfile((same or others or [path])[0], path)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "byte 0": flip(0),
    "byte 20": flip(20),
    "middle": flip(0.5),
    "tail": flip(0.98),
    "end zero": lambda path: fill(path, path.stat().st_size - 400, 400),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 512),
    "another shard": exchange,
}


def by_loader(**settings: Any) -> Callable[[Url | Path], dict[int, bytes]]:
    def read(path: Url | Path) -> dict[int, bytes]:
        with build_loader(path, **{**QUIET, **settings}) as loader:
            batches = [(batch.ids.tolist(), batch.images.clone()) for batch in loader]
        return {
            id: bytes(image.numpy()) for ids, images in batches for id, image in zip(ids, images, strict=True)
        }

    return read


def by_dataset(path: Url | Path) -> dict[int, bytes]:
    dataset = ImageDataset(path, decode="tensor")
    return {int(id): bytes(dataset[place][0].numpy()) for place, id in enumerate(dataset.ids)}


def in_part(path: Url | Path) -> dict[int, bytes]:
    ids = open_dataset(path).read_index("train").ids
    return by_loader(subset=ids[[1, 2, 30, 45]])(path)


WAYS: dict[str, tuple[str, Callable[[Url | Path], dict[int, bytes]]]] = {
    "shards window": ("shards", by_loader(shuffle="window")),
    "shards full": ("shards", by_loader(shuffle="full")),
    "shards in part": ("shards", in_part),
    "shards dataset": ("shards", by_dataset),
    "webdataset window": ("webdataset", by_loader(shuffle="window")),
    "webdataset in part": ("webdataset", in_part),
    "webdataset dataset": ("webdataset", by_dataset),
    "dali dataset": ("dali", by_dataset),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_damaged_in_the_cache_never_blocks_the_run_after(
    way: str, converted: dict[str, Path], bucket: Url, cache: Path
) -> None:
    kind, read = WAYS[way]
    url = upload(converted[kind], bucket / "a")
    expected = read(converted[kind])
    assert read(url) == expected
    blocked, misled = [], []
    for suffix in sorted({path.suffix for path in cache.glob("*/*train-*") if not path.name.startswith(".")}):
        for name, spoil in DAMAGE.items():
            spoil(sorted(path for path in cache.glob(f"*/*train-*{suffix}") if path.name[0] != ".")[0])
            try:
                assert read(url) == expected, (suffix, name)
            except PrecacheError as error:
                if "fetched" not in str(error):
                    misled.append((suffix, name, str(error)))
                try:
                    assert read(url) == expected, (suffix, name)
                except PrecacheError as again:
                    blocked.append((suffix, name, str(again)))
                    shutil.rmtree(cache)
                    read(url)
    assert not blocked
    assert not misled
