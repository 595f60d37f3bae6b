"""Of a shard at a URL of which few samples are needed these alone are fetched."""

from pathlib import Path

import numpy as np
import pytest

import loaders
from loaders import Reading
from precache import open_dataset
from precache.errors import StorageError
from precache.storage.urls import Url
from tests.cloud.proxy import Proxy, Seen
from tests.cloud.uploading import upload
from tests.loaders.test_urls import QUIET, assert_same, cache, served

__all__ = ["cache"]
KINDS = ("shards", "webdataset")


def shard_bytes(folder: Path) -> int:
    shards = open_dataset(folder).manifest.split_shards("train")
    return sum(shard.files[0].bytes for shard in shards)


def fetched_bytes(proxy: Proxy) -> int:
    """Of shards, by the ranges that were asked for."""
    ranges = [seen.range.removeprefix("bytes=").split("-") for seen in proxy.seen if "train-" in seen.path]
    return sum(int(last) - int(first) + 1 for first, last in filter(lambda r: r != [""], ranges))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", ["subset", "weights"])
def test_few_samples_are_fetched_by_their_ranges(
    kind: str, asked: str, converted: dict[str, Path], bucket: Url, proxy: Proxy, cache: Path
) -> None:
    url = upload(converted[kind], bucket / "a")
    ids = open_dataset(converted[kind]).read_index("train").ids
    few = ids[[1, 2, 30, 45]]
    settings = {"subset": few} if asked == "subset" else {"weights": np.isin(ids, few).astype(float)}
    expected = served(converted[kind], shuffle="window", **settings)
    assert_same(served(url, **settings), expected)
    assert 0 < fetched_bytes(proxy) < shard_bytes(converted[kind]) / 4
    kept = sum(path.stat().st_blocks * 512 for path in cache.rglob("*-train-*"))
    assert kept < shard_bytes(converted[kind]) / 2
    before = len(proxy.seen)
    assert_same(served(url, **settings), expected)
    assert [seen.path.rpartition("/")[2] for seen in proxy.seen[before:]] == ["dataset.json"]
    assert_same(served(url), served(converted[kind], shuffle="window"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_that_comes_wrong_is_fetched_again(
    kind: str, converted: dict[str, Path], bucket: Url, proxy: Proxy, tmp_path: Path
) -> None:
    url = upload(converted[kind], bucket / "a")
    few = open_dataset(converted[kind]).read_index("train").ids[:2]
    proxy.plan = lambda seen: "flip" if "train-" in seen.path and proxy.faults["flip"] < 2 else None
    expected = served(converted[kind], shuffle="window", subset=few)
    assert_same(served(url, subset=few), expected)
    assert proxy.faults["flip"] == 2
    proxy.plan = lambda seen: "flip" if ".idx" not in seen.path and "train-" in seen.path else None
    reading = Reading(cache_dir=tmp_path / "other")
    with (
        pytest.raises(StorageError, match=rf"^{url}/train-00000.*: .* bytes from .* fetched 3 times"),
        loaders.build(url, **QUIET, sampling=loaders.Sampling(subset=few), reading=reading) as loader,
    ):
        list(loader)


def test_a_header_that_comes_wrong_is_fetched_again(
    converted: dict[str, Path], bucket: Url, proxy: Proxy
) -> None:
    url = upload(converted["shards"], bucket / "a")
    few = open_dataset(converted["shards"]).read_index("train").ids[:2]

    def flip(seen: Seen) -> str | None:
        is_header = "train-" in seen.path and seen.range.startswith("bytes=0-")
        return "flip" if is_header and not proxy.faults["flip"] else None

    proxy.plan = flip
    assert_same(served(url, subset=few), served(converted["shards"], shuffle="window", subset=few))
    assert proxy.faults["flip"] == 1
