"""Loaders serve datasets in a bucket exactly as they serve them from a folder."""

import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import loaders
from loaders import ImageDataset, Reading
from loaders.dataset import READS
from precache import convert, open_dataset
from precache.errors import DatasetError, PrecacheError, SettingError, StorageError
from precache.formats import FORMATS, Format
from precache.storage.urls import Url
from tests.building import build_loader
from tests.cloud.storages import Storage, StorageRequest
from tests.cloud.uploading import upload
from tests.conftest import OTHER_IMAGES, small_recipe
from tests.faults.mutations import spoil

QUIET: dict[str, Any] = {"batch_size": 8, "seed": 3, "device": "cpu"}
FAULTS = ["flip", "broken", "reset", "500", "503", "short"]
Served = list[tuple[list[int], torch.Tensor, torch.Tensor]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cache folder of the test, set by the environment."""
    monkeypatch.setenv("PRECACHE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def served(path: Any, **settings: object) -> Served:
    """Serve one epoch, and return ids, images and labels of its batches."""
    with build_loader(path, **{**QUIET, **settings}) as loader:
        return [(batch.ids.tolist(), batch.images.clone(), batch.labels.clone()) for batch in loader]


def assert_same(batches: Served, expected: Served) -> None:
    assert [ids for ids, _, _ in batches] == [ids for ids, _, _ in expected]
    for (_, images, labels), (_, expected_images, expected_labels) in zip(batches, expected, strict=True):
        assert torch.equal(images, expected_images)
        assert torch.equal(labels, expected_labels)


def shard_requests(storage: Storage, start: int = 0) -> list[StorageRequest]:
    return [seen for seen in storage.seen[start:] if "train-" in seen.path and seen.method == "GET"]


FOUR = [1, 2, 30, 45]  # positions of samples of different shards


@pytest.mark.parametrize("faults", [["flip"], pytest.param(FAULTS, marks=pytest.mark.faults)], ids=len)
@pytest.mark.parametrize(
    ("kind", "shuffle", "in_part"),
    [
        ("shards", False, False),
        ("shards", "full", False),
        ("webdataset", "window", False),
        ("shards", "window", True),
        ("webdataset", "window", True),
    ],
)
def test_a_url_serves_the_folders_batches_if_any_request_fails_once(
    kind: str,
    shuffle: str | bool,
    in_part: bool,
    faults: list[str],
    converted: dict[str, Path],
    bucket: Url,
    storage: Storage,
    cache: Path,
    tmp_path: Path,
) -> None:
    url = upload(converted[kind], bucket / f"sets/{kind}")
    settings = {"shuffle": shuffle, "subset": FOUR if in_part else None}
    expected, first = served(converted[kind], **settings), len(storage.seen)
    assert_same(served(str(url), **settings, cache_dir=tmp_path / "whole"), expected)
    assert list((tmp_path / "whole").glob("*/*train-*"))
    for number, fault in product(range(len(storage.seen) - first), faults):
        failing = len(storage.seen) + number
        storage.plan = lambda seen, failing=failing, fault=fault: fault if seen.number == failing else None
        assert_same(served(url, **settings, cache_dir=tmp_path / f"{number}-{fault}"), expected)
    assert storage.faults == dict.fromkeys(faults, number + 1)
    assert not cache.exists(), "another folder was given"


@pytest.mark.parametrize("kind", ["shards", "webdataset"])
def test_operations_at_a_url_are_those_of_the_folder(
    kind: str, converted: dict[str, Path], bucket: Url
) -> None:
    """A folder is read by worker processes here, and a URL by threads, because a forked process cannot."""
    url = upload(converted[kind], bucket / kind)
    settings = {"shuffle": "window", "workers": 2, "augment": "torchvision"}
    assert_same(served(url, **settings), served(converted[kind], engine="processes", **settings))
    with pytest.raises(SettingError, check=lambda error: "'local'" in error.remedy):
        served(url, engine="processes")


def test_a_format_without_byte_ranges_is_fetched_and_read_whole(
    raw_tree: Path, bucket: Url, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A new format is its `Format`, and a line in FORMATS: this one is of tars that nobody looks into."""
    facts = {field.name: getattr(FORMATS["webdataset"], field.name) for field in fields(Format)}
    del facts["read_sample"]
    monkeypatch.setitem(FORMATS, "whole", Format(**facts))
    monkeypatch.setitem(READS, "webdataset", ("webdataset", "whole"))
    folders = {name: tmp_path / name for name in ("webdataset", "whole")}
    for name, folder in folders.items():
        convert(raw_tree, folder, small_recipe(name), workers=0)
    url = upload(folders["whole"], bucket / "whole")
    for settings in ({}, {"subset": FOUR, "shuffle": "window"}):
        expected = served(folders["webdataset"], **settings)
        assert_same(served(folders["whole"], **settings), expected)
        assert_same(served(url, **settings), expected)
    for path in (folders["whole"], url):
        with pytest.raises(DatasetError, match=r"byte ranges.*loaders\.build"):
            ImageDataset(path)[0]
    with pytest.raises(DatasetError, match="byte ranges"):
        convert(folders["whole"], tmp_path / "again", small_recipe("shards"), workers=0)


@pytest.mark.parametrize(
    ("fault", "name", "in_part"),
    [
        ("flip", "dataset.json", False),
        ("flip", "train-00002.safetensors", False),
        ("flip", "train-00002.safetensors", True),
        ("gone", "train-00002.safetensors", False),
    ],
)
def test_a_lasting_fault_ends_the_epoch_and_names_the_url(
    fault: str,
    name: str,
    in_part: bool,
    converted: dict[str, Path],
    bucket: Url,
    storage: Storage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRECACHE_STORAGE_PATIENCE_S", "1")
    url = upload(converted["shards"], bucket / "a")
    subset = [2 * 12 + 3, 2 * 12 + 4] if in_part else None  # of shard 2
    storage.plan = lambda seen: fault if seen.path.endswith(name) else None
    begin_s = time.monotonic()
    with pytest.raises((StorageError, DatasetError), match=rf"^{url}/{name}: "):
        served(url, subset=subset)
    assert time.monotonic() - begin_s < 8


def test_a_dataset_larger_than_the_cache_is_kept_in_part(
    converted: dict[str, Path], bucket: Url, storage: Storage, cache: Path
) -> None:
    url = upload(converted["webdataset"], bucket / "a")
    shards = open_dataset(url).manifest.split_shards("train")
    sizes = [shard.files[0].bytes for shard in shards]
    reading = Reading(memory_bytes=2 * max(sizes), cache_bytes=4 * max(sizes))
    with loaders.build(url, **QUIET, reading=reading) as loader:
        for _ in range(3):
            before = len(storage.seen)
            assert sorted(id for batch in loader for id in batch.ids.tolist()) == list(range(70))
    assert sum(path.stat().st_size for path in cache.rglob("*.tar")) <= 4 * max(sizes)
    assert len([seen for seen in shard_requests(storage, before) if seen.path.endswith(".tar")]) <= 4


def test_image_dataset_reads_a_url_in_other_processes(converted: dict[str, Path], bucket: Url) -> None:
    url = upload(converted["shards"], bucket / "a")
    local, remote = (ImageDataset(path, decode="tensor") for path in (converted["shards"], url))
    forked = DataLoader(remote, num_workers=1, batch_size=None, multiprocessing_context="fork")
    with pytest.raises(StorageError, match="multiprocessing_context='forkserver'"):
        next(iter(forked))
    for dataset in (remote, pickle.loads(pickle.dumps(remote))):
        assert dataset.targets == local.targets
        assert all(torch.equal(dataset[place][0], local[place][0]) for place in range(len(local)))


def test_ranks_fetch_each_shard_once(converted: dict[str, Path], bucket: Url, storage: Storage) -> None:
    url = upload(converted["shards"], bucket / "a")
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            loader = loaders.build(url, **QUIET, ranks=loaders.Ranks(rank=rank, world_size=2))
            ranks.append(stack.enter_context(loader))
        ids = [id for batches in zip(*ranks, strict=True) for batch in batches for id in batch.ids.tolist()]
    assert sorted(ids) == list(range(70))
    assert set(Counter(seen.path for seen in shard_requests(storage)).values()) == {1}


@pytest.mark.parametrize("kind", ["shards", "webdataset"])
def test_few_samples_are_fetched_by_their_ranges(
    kind: str, converted: dict[str, Path], bucket: Url, storage: Storage, cache: Path
) -> None:
    """Samples that are chosen, or may be drawn, are fetched alone if a shard has few of them."""
    url = upload(converted[kind], bucket / "a")
    shards = open_dataset(converted[kind]).manifest.split_shards("train")
    shard_bytes = sum(shard.files[0].bytes for shard in shards)
    samples = len(open_dataset(converted[kind]).read_index("train"))
    for settings in ({"weights": np.isin(np.arange(samples), FOUR)}, {"subset": FOUR}):
        expected = served(converted[kind], shuffle="window", **settings)
        assert_same(served(url, **settings), expected)
        ranges = [seen.range.removeprefix("bytes=").split("-") for seen in shard_requests(storage)]
        fetched = sum(int(ends[1]) - int(ends[0]) + 1 for ends in ranges if ends != [""])
        assert 0 < fetched < shard_bytes / 4
        assert sum(path.stat().st_blocks * 512 for path in cache.rglob("*-train-*")) < shard_bytes / 2
        before = len(storage.seen)
        assert_same(served(url, **settings), expected)
        assert [seen.path.rpartition("/")[2] for seen in storage.seen[before:]] == ["dataset.json"]
    assert_same(served(url), served(converted[kind], shuffle="window"))


@pytest.mark.parametrize("kind", ["shards", "webdataset"])
@pytest.mark.parametrize("are_urls", [(True, True), (True, False), (False, True)])
def test_a_list_with_urls_serves_the_batches_of_the_folders(
    kind: str,
    are_urls: tuple[bool, bool],
    converted: dict[str, Path],
    other: dict[str, Path],
    bucket: Url,
    storage: Storage,
) -> None:
    folders = [converted[kind], other[kind]]
    urls = [upload(folder, bucket / name) for folder, name in zip(folders, "ab", strict=True)]
    paths = [url if is_url else folder for url, folder, is_url in zip(urls, folders, are_urls, strict=True)]
    first = len(open_dataset(folders[0]).read_index("train"))
    few = [*FOUR, first, first + 1]
    for settings in ({}, {"subset": few}):
        expected = served(folders, **settings, shuffle="window")
        assert_same(served(paths, **settings), expected)
        before = len(storage.seen)
        assert_same(served(paths, **settings), expected)
        assert not shard_requests(storage, before)


def test_parts_of_a_shard_are_those_of_its_own_samples(
    converted: dict[str, Path], other: dict[str, Path], bucket: Url
) -> None:
    """An id is another sample of the same shard if more datasets come before it in the list."""
    url = upload(converted["shards"], bucket / "a")
    index = open_dataset(url).read_index("train")
    shards = [{*index.ids[start : start + 12].tolist()} for start in range(0, 60, 12)]
    shared = [i for ids in shards for i in ids if i - OTHER_IMAGES in ids]
    assert shared
    for first in ([other["shards"]], [other["shards"]] * 2):
        with build_loader([*first, converted["shards"]]) as loader:
            subset = np.flatnonzero(loader.dataset.ids == shared[0] + OTHER_IMAGES)
        settings = {"subset": subset, "shuffle": "window"}
        assert_same(served([*first, url], **settings), served([*first, converted["shards"]], **settings))


def test_closing_does_not_wait_for_a_silent_storage(
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


# Whatever happens to a file in the cache, the next run, or the one after it, serves what was written. If a
# damage is found before anything is served, the file is fetched again at once.


def by_loader(path: Url | Path, **settings: Any) -> dict[int, bytes]:
    batches = served(path, **settings)
    return {id: bytes(x.numpy()) for ids, images, _ in batches for id, x in zip(ids, images, strict=True)}


def in_part(path: Url | Path) -> dict[int, bytes]:
    return by_loader(path, subset=FOUR)


def by_dataset(path: Url | Path) -> dict[int, bytes]:
    dataset = ImageDataset(path, decode="tensor")
    return {int(id): bytes(dataset[place][0].numpy()) for place, id in enumerate(dataset.ids)}


@pytest.mark.parametrize(
    ("kind", "read"),
    [("shards", by_loader), ("webdataset", by_loader), ("webdataset", in_part), ("dali", by_dataset)],
)
def test_a_damaged_cache_is_repaired_by_the_next_run(
    kind: str,
    read: Callable[[Url | Path], dict[int, bytes]],
    converted: dict[str, Path],
    bucket: Url,
    cache: Path,
) -> None:
    url = upload(converted[kind], bucket / "a")
    expected = read(converted[kind])
    assert read(url) == expected
    files = [path for path in sorted(cache.glob("*/*")) if path.name[0] != "." and path.is_file()]
    contents = {path: path.read_bytes() for path in files}  # a later run may not need every index file
    for first in {path.suffix: path for path in reversed(contents)}.values():
        other = [content for path, content in contents.items() if path.suffix == first.suffix][-1]
        for seed in range(10):
            first.write_bytes(other if seed == 0 else spoil(contents[first], random.Random(seed), other))
            try:
                pictures = read(url)
            except PrecacheError as error:
                pictures = read(url) if "fetched" in str(error) else {}
            assert pictures == expected, (first, seed)


def test_the_second_epoch_sends_no_request(converted: dict[str, Path], bucket: Url, storage: Storage) -> None:
    url = upload(converted["shards"], bucket / "a")
    with loaders.build(url, **QUIET) as loader:
        first = sorted(id for batch in loader for id in batch.ids.tolist())
        requests = len(storage.seen)
        assert sorted(id for batch in loader for id in batch.ids.tolist()) == first
    assert len(storage.seen) == requests
    served(url)  # another loader requests the manifest alone
    assert [seen.path.rpartition("/")[2] for seen in storage.seen[requests:]] == ["dataset.json"]
