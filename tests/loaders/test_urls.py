"""Loaders on datasets in a bucket: what they serve is what they serve of a folder."""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import loaders
from loaders import ImageDataset, Reading
from precache import open_dataset
from precache.errors import DatasetError, PrecacheError, SettingError, StorageError
from precache.storage.urls import Url
from tests.building import build_loader
from tests.cloud.storages import Seen, Storage
from tests.cloud.uploading import upload

QUIET: dict[str, Any] = {"batch_size": 8, "seed": 3, "device": "cpu"}
Served = list[tuple[list[int], torch.Tensor, torch.Tensor]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of the test."""
    monkeypatch.setenv("PRECACHE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def served(path: Path | Url | str, **settings: object) -> Served:
    """Ids, images and labels of the batches of one epoch."""
    with build_loader(path, **{**QUIET, **settings}) as loader:
        return [(batch.ids.tolist(), batch.images.clone(), batch.labels.clone()) for batch in loader]


def assert_same(found: Served, expected: Served) -> None:
    assert [ids for ids, _, _ in found] == [ids for ids, _, _ in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours[1], theirs[1])
        assert torch.equal(ours[2], theirs[2])


def asked_of_shards(storage: Storage, since: int = 0) -> list[Seen]:
    return [seen for seen in storage.seen[since:] if "train-" in seen.path and seen.method == "GET"]


@pytest.mark.parametrize(
    ("kind", "shuffle", "same_as"),
    [
        ("shards", False, False), ("shards", True, "window"), ("shards", "full", "full"),
        ("webdataset", "window", "window"),
    ],
)  # fmt: skip
def test_a_url_serves_what_the_folder_serves(
    kind: str, shuffle: bool | str, same_as: bool | str, converted: dict[str, Path], bucket: Url
) -> None:
    url = upload(converted[kind], bucket / f"sets/{kind}")
    assert_same(served(str(url), shuffle=shuffle), served(converted[kind], shuffle=same_as))


def test_the_second_epoch_asks_the_storage_for_nothing(
    converted: dict[str, Path], bucket: Url, storage: Storage
) -> None:
    url = upload(converted["shards"], bucket / "a")
    with loaders.build(url, **QUIET) as loader:
        first = sorted(id for batch in loader for id in batch.ids.tolist())
        asked = len(storage.seen)
        assert sorted(id for batch in loader for id in batch.ids.tolist()) == first
    assert len(storage.seen) == asked
    served(url)  # another loader: the manifest alone
    assert [seen.path.rpartition("/")[2] for seen in storage.seen[asked:]] == ["dataset.json"]


def test_what_cannot_be_served_is_refused(converted: dict[str, Path], bucket: Url) -> None:
    with pytest.raises(DatasetError, match=rf"^{bucket}/nothing: .*convert {bucket}/nothing DST"):
        loaders.build(f"{bucket}/nothing")
    url = upload(converted["shards"], bucket / "a")
    with pytest.raises(SettingError, match=rf"^cache_bytes is too small: needs [0-9,]+ .*{url}"):
        loaders.build(url, reading=Reading(cache_bytes=100_000))


def test_a_damaged_manifest_is_asked_for_again(
    converted: dict[str, Path], bucket: Url, storage: Storage
) -> None:
    url = upload(converted["shards"], bucket / "a")
    first = len(storage.seen)
    storage.plan = lambda seen: "flip" if seen.number in (first, first + 1) else None
    assert open_dataset(url).digest == open_dataset(converted["shards"]).digest
    assert storage.faults == {"flip": 2}
    storage.plan = lambda seen: "flip"
    with pytest.raises(DatasetError, match=rf"^{url}/dataset.json: "):
        open_dataset(url)


def test_a_set_that_does_not_fit_is_served_and_in_part_kept(
    converted: dict[str, Path], bucket: Url, storage: Storage, cache: Path
) -> None:
    url = upload(converted["webdataset"], bucket / "a")
    shards = open_dataset(url).manifest.split_shards("train")
    sizes = [shard.files[0].bytes for shard in shards]
    reading = Reading(memory_bytes=2 * max(sizes), cache_bytes=4 * max(sizes))
    with loaders.build(url, **QUIET, reading=reading) as loader:
        for _ in range(3):
            before = len(storage.seen)
            ids = sorted(id for batch in loader for id in batch.ids.tolist())
            fetched = [seen for seen in asked_of_shards(storage, before) if seen.path.endswith(".tar")]
    assert len(set(ids)) == sum(shard.samples for shard in shards)
    assert sum(path.stat().st_size for path in cache.rglob("*.tar")) <= 4 * max(sizes)
    assert len(sizes) == 6
    assert len(fetched) <= 4


def test_image_dataset_reads_a_url_also_elsewhere(converted: dict[str, Path], bucket: Url) -> None:
    url = upload(converted["shards"], bucket / "a")
    here, there = (ImageDataset(path, decode="tensor") for path in (converted["shards"], url))
    forked = DataLoader(there, num_workers=1, batch_size=None, multiprocessing_context="fork")
    with pytest.raises(StorageError, match="multiprocessing_context='forkserver'"):
        next(iter(forked))
    for dataset in (there, pickle.loads(pickle.dumps(there))):
        assert dataset.targets == here.targets
        assert all(torch.equal(dataset[place][0], here[place][0]) for place in range(len(here)))


# A storage that is silent.


def test_closing_does_not_wait_for_a_storage_that_is_silent(
    converted: dict[str, Path], bucket: Url, storage: Storage
) -> None:
    url = upload(converted["shards"], bucket / "a")
    loader = loaders.build(url, **QUIET)
    storage.plan = lambda seen: "503"
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    begin_s = time.monotonic()
    loader.close()
    assert time.monotonic() - begin_s < 3


_ABANDON = """
import sys, threading, time, loaders
loader = loaders.build(sys.argv[1], batch_size=8)
threading.Thread(target=next, args=(iter(loader),), daemon=True).start()
time.sleep(1)
print("ending", flush=True)
sys.exit(7)
"""


def test_the_program_ends_while_a_storage_is_silent(
    converted: dict[str, Path], bucket: Url, storage: Storage
) -> None:
    url = upload(converted["shards"], bucket / "a")
    storage.plan = lambda seen: "stall" if "train-" in seen.path else None
    process = subprocess.Popen([sys.executable, "-c", _ABANDON, str(url)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ending\n"
    assert process.wait(30) == 7  # patience is 120 s


# Faults.


def plan_by_seed(seed: int) -> Callable[[Seen], str | None]:
    """A fault for every third request of a shard, one after the other, and none twice in a row."""
    random, last = np.random.default_rng(seed), [-2]

    def plan(seen: Seen) -> str | None:
        if "train-" not in seen.path or seen.number < last[0] + 2 or random.random() > 0.5:
            return None
        last[0] = seen.number
        return str(random.choice(["reset", "broken", "500", "503", "flip", "short"]))

    return plan


@pytest.mark.parametrize(
    ("kind", "faults"),
    [("shards", 8), ("webdataset", 8), pytest.param("shards", 500, marks=pytest.mark.faults)],
)
def test_faults_that_pass_change_nothing(
    kind: str,
    faults: int,
    converted: dict[str, Path],
    bucket: Url,
    storage: Storage,
    cache: Path,
    tmp_path: Path,
) -> None:
    url = upload(converted[kind], bucket / "a")
    expected, seed = served(converted[kind], shuffle="window"), 0
    while storage.faults.total() < faults:
        storage.plan = plan_by_seed(seed)
        assert_same(served(url, cache_dir=tmp_path / str(seed)), expected)
        assert list((tmp_path / str(seed)).glob("*/train-*"))
        seed += 1
    assert not cache.exists(), "another was named"


@pytest.mark.parametrize("fault", ["flip", "stall", "gone"])
def test_a_fault_that_stays_ends_the_epoch_with_the_url(
    fault: str, converted: dict[str, Path], bucket: Url, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECACHE_STORAGE_PATIENCE_S", "1")
    url = upload(converted["shards"], bucket / "a")
    with loaders.build(url, **QUIET) as loader:
        storage.plan = lambda seen: fault if "train-00002" in seen.path else None
        begin_s = time.monotonic()
        with pytest.raises(StorageError, match=rf"^{url}/train-00002.safetensors: "):
            list(loader)
    assert time.monotonic() - begin_s < 8


def test_ranks_share_what_is_fetched(converted: dict[str, Path], bucket: Url, storage: Storage) -> None:
    url = upload(converted["shards"], bucket / "a")
    with ExitStack() as stack:
        both = [loaders.Ranks(rank=rank, world_size=2) for rank in range(2)]
        ranks = [stack.enter_context(loaders.build(url, **QUIET, ranks=of_rank)) for of_rank in both]
        found = [id for batches in zip(*ranks, strict=True) for batch in batches for id in batch.ids.tolist()]
    assert sorted(found) == list(range(70))
    assert set(Counter(seen.path for seen in asked_of_shards(storage)).values()) == {1}


# Of a shard of which few samples are needed these alone are fetched.


@pytest.mark.parametrize("kind", ["shards", "webdataset"])
@pytest.mark.parametrize("asked", ["subset", "weights"])
def test_few_samples_are_fetched_by_their_ranges(
    kind: str, asked: str, converted: dict[str, Path], bucket: Url, storage: Storage, cache: Path
) -> None:
    url = upload(converted[kind], bucket / "a")
    shards = open_dataset(converted[kind]).manifest.split_shards("train")
    shard_bytes = sum(shard.files[0].bytes for shard in shards)
    ids = open_dataset(converted[kind]).read_index("train").ids
    few = ids[[1, 2, 30, 45]]
    settings = {"subset": few} if asked == "subset" else {"weights": np.isin(ids, few).astype(float)}
    expected = served(converted[kind], shuffle="window", **settings)
    assert_same(served(url, **settings), expected)
    ranges = [seen.range.removeprefix("bytes=").split("-") for seen in asked_of_shards(storage)]
    fetched = sum(int(last) - int(first) + 1 for first, last in filter(lambda ends: ends != [""], ranges))
    assert 0 < fetched < shard_bytes / 4
    assert sum(path.stat().st_blocks * 512 for path in cache.rglob("*-train-*")) < shard_bytes / 2
    before = len(storage.seen)
    assert_same(served(url, **settings), expected)
    assert [seen.path.rpartition("/")[2] for seen in storage.seen[before:]] == ["dataset.json"]
    assert_same(served(url), served(converted[kind], shuffle="window"))


@pytest.mark.parametrize(("kind", "range_of"), [("shards", ""), ("shards", "bytes=0-"), ("webdataset", "")])
def test_what_comes_wrong_of_a_sample_or_header_is_fetched_again(
    kind: str, range_of: str, converted: dict[str, Path], bucket: Url, storage: Storage, tmp_path: Path
) -> None:
    url = upload(converted[kind], bucket / "a")
    few = open_dataset(converted[kind]).read_index("train").ids[:2]

    def flip(seen: Seen) -> str | None:
        spoilt = "train-" in seen.path and ".idx" not in seen.path and seen.range.startswith(range_of)
        return "flip" if spoilt and storage.faults["flip"] < most else None

    storage.plan, most = flip, 1
    assert_same(served(url, subset=few), served(converted[kind], shuffle="window", subset=few))
    assert storage.faults["flip"] == 1
    if not range_of:
        most = 1000
        with pytest.raises(StorageError, match=rf"^{url}/train-00000.*: "):
            served(url, subset=few, cache_dir=tmp_path / "other")


# Whatever happens to a file in the cache: the next run, or the one after, serves what was written.
# The storage has it whole. What is found out before anything is served is fetched again at once.


def changed(first: Callable[[int], int], count: int, value: int) -> Callable[[Path], None]:
    """So many bytes from a place on, given the size, are this value."""

    def spoil(path: Path) -> None:
        with open(path, "r+b") as file:
            file.seek(first(path.stat().st_size))
            file.write(bytes([value]) * count)

    return spoil


def exchange(path: Path) -> None:
    """Another shard, of the same size where one is."""
    others = [other for other in sorted(path.parent.glob(f"*train-*{path.suffix}")) if other != path]
    same = [other for other in others if other.stat().st_size == path.stat().st_size]
    for other in (same or others)[:1]:
        shutil.copyfile(other, path)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "start": changed(lambda size: 0, 20, 0),
    "header": changed(lambda size: 20, 1, 0x81),
    "middle": changed(lambda size: size // 2, 1, 0xA5),
    "end": changed(lambda size: max(0, size - 400), 400, 0),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 512),
    "another shard": exchange,
}


def by_loader(path: Url | Path, **settings: Any) -> dict[int, bytes]:
    batches = served(path, **settings)
    return {id: bytes(x.numpy()) for ids, images, _ in batches for id, x in zip(ids, images, strict=True)}


def in_part(path: Url | Path) -> dict[int, bytes]:
    return by_loader(path, subset=open_dataset(path).read_index("train").ids[[1, 2, 30, 45]])


def by_dataset(path: Url | Path) -> dict[int, bytes]:
    dataset = ImageDataset(path, decode="tensor")
    return {int(id): bytes(dataset[place][0].numpy()) for place, id in enumerate(dataset.ids)}


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        ("shards", by_loader), ("shards", in_part), ("shards", by_dataset),
        ("webdataset", by_loader), ("webdataset", in_part), ("dali", by_dataset),
    ],
)  # fmt: skip
def test_what_is_damaged_in_the_cache_never_blocks_the_run_after(
    kind: str,
    read: Callable[[Url | Path], dict[int, bytes]],
    converted: dict[str, Path],
    bucket: Url,
    cache: Path,
) -> None:
    url = upload(converted[kind], bucket / "a")
    expected = read(converted[kind])
    assert read(url) == expected
    kept = [path for path in sorted(cache.glob("*/*")) if path.name[0] != "." and path.is_file()]
    for first in {path.suffix: path for path in reversed(kept)}.values():
        for name, spoil in DAMAGE.items():
            spoil(first)
            try:
                found = read(url)
            except PrecacheError as error:
                found = read(url) if "fetched" in str(error) else {}
            assert found == expected, (first, name)
