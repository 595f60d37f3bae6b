"""Loaders on datasets in a bucket: what they serve is what they serve of a folder."""

import os
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

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import loaders
from loaders import ImageDataset, Reading
from precache import open_dataset
from precache.errors import DatasetError, SampleError, SettingError, StorageError
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url
from tests.building import build_loader
from tests.cloud.proxy import Proxy, Seen
from tests.cloud.uploading import upload
from tests.damage import lead_away

QUIET = {"batch_size": 8, "seed": 3, "device": "cpu"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of the test."""
    monkeypatch.setenv("PRECACHE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def served(path: Path | Url | str, **settings: object) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """Ids, images and labels of the batches of one epoch."""
    with build_loader(path, **{**QUIET, **settings}) as loader:
        return [(batch.ids.tolist(), batch.images.clone(), batch.labels.clone()) for batch in loader]


def assert_same(found: list, expected: list) -> None:
    assert [ids for ids, _, _ in found] == [ids for ids, _, _ in expected]
    for (_, images, labels), (_, wanted_images, wanted_labels) in zip(found, expected, strict=True):
        assert torch.equal(images, wanted_images)
        assert torch.equal(labels, wanted_labels)


@pytest.mark.parametrize(
    ("kind", "shuffle"),
    [("shards", False), ("shards", "window"), ("shards", "full"), ("webdataset", "window")],
)
def test_a_url_serves_what_the_folder_serves(
    kind: str, shuffle: bool | str, converted: dict[str, Path], bucket: Url
) -> None:
    url = upload(converted[kind], bucket / f"sets/{kind}")
    assert_same(served(str(url), shuffle=shuffle), served(converted[kind], shuffle=shuffle))


def test_true_is_the_window_at_a_url(converted: dict[str, Path], bucket: Url) -> None:
    url = upload(converted["shards"], bucket / "a")
    found = [ids for ids, _, _ in served(url)]
    assert found == [ids for ids, _, _ in served(converted["shards"], shuffle="window")]


def test_the_second_epoch_asks_the_storage_for_nothing(
    converted: dict[str, Path], bucket: Url, proxy: Proxy
) -> None:
    url = upload(converted["shards"], bucket / "a")
    with loaders.build(url, **QUIET) as loader:
        first = sorted(id for batch in loader for id in batch.ids.tolist())
        asked = len(proxy.seen)
        assert sorted(id for batch in loader for id in batch.ids.tolist()) == first
    assert len(proxy.seen) == asked
    served(url)  # another loader: the manifest alone
    assert [seen.path.rpartition("/")[2] for seen in proxy.seen[asked:]] == ["dataset.json"]


def test_the_dataset_of_a_url_is_the_one_of_the_folder(converted: dict[str, Path], bucket: Url) -> None:
    url = upload(converted["shards"], bucket / "a")
    here, there = open_dataset(converted["shards"]), open_dataset(str(url))
    assert (there.digest, there.manifest, there.place) == (here.digest, here.manifest, url)
    assert there.read_index().ids.tolist() == here.read_index().ids.tolist()
    shard = there.manifest.shards[0]
    assert there.shard_path(shard).read_bytes() == here.shard_path(shard).read_bytes()


def test_a_url_without_a_manifest_is_no_dataset(bucket: Url) -> None:
    says = rf"^{bucket}/nothing: not a converted dataset \(no dataset.json.*convert {bucket}/nothing DST"
    with pytest.raises(DatasetError, match=says):
        loaders.build(f"{bucket}/nothing")


def test_reading_says_where_shards_are_kept(converted: dict[str, Path], bucket: Url, tmp_path: Path) -> None:
    url = upload(converted["shards"], bucket / "a")
    served(url, reading=Reading(cache_dir=tmp_path / "elsewhere"))
    assert list((tmp_path / "elsewhere").glob("*/train-*.safetensors"))
    assert not (tmp_path / "cache").exists()


def test_what_is_damaged_in_the_cache_is_found_and_fetched_again(
    converted: dict[str, Path], bucket: Url, cache: Path
) -> None:
    url = upload(converted["shards"], bucket / "a")
    expected = served(url)
    index, *_ = cache.glob("*/dataset.index")
    index.write_bytes(bytes(index.stat().st_size))
    header, *_ = cache.glob("*/train-00000.safetensors")
    with open(header, "r+b") as file:
        file.write(bytes(20))
    assert_same(served(url), expected)
    with open(header, "r+b") as file:
        file.seek(-5000, os.SEEK_END)
        file.write(bytes(100))
    with pytest.raises(SampleError, match=rf"train-00000.safetensors: sample .*fetched from {url}"):
        served(url)
    assert_same(served(url), expected)


def test_a_damaged_manifest_is_asked_for_again(converted: dict[str, Path], bucket: Url, proxy: Proxy) -> None:
    url = upload(converted["shards"], bucket / "a")
    first = len(proxy.seen)
    proxy.plan = lambda seen: "flip" if seen.number in (first, first + 1) else None
    assert open_dataset(url).digest == open_dataset(converted["shards"]).digest
    assert proxy.faults == {"flip": 2}
    proxy.plan = lambda seen: "flip"
    with pytest.raises(DatasetError, match=rf"^{url}/dataset.json: "):
        open_dataset(url)


def test_a_set_that_does_not_fit_is_served_and_in_part_kept(
    converted: dict[str, Path], bucket: Url, proxy: Proxy, cache: Path
) -> None:
    url = upload(converted["webdataset"], bucket / "a")
    shards = open_dataset(url).manifest.split_shards("train")
    sizes = [shard.files[0].bytes for shard in shards]
    reading = Reading(memory_bytes=2 * max(sizes), cache_bytes=4 * max(sizes))
    with loaders.build(url, **QUIET, reading=reading) as loader:
        for _ in range(3):
            before = len(proxy.seen)
            ids = sorted(id for batch in loader for id in batch.ids.tolist())
            fetched = [seen for seen in proxy.seen[before:] if seen.path.endswith(".tar")]
    assert len(set(ids)) == sum(shard.samples for shard in shards)
    assert sum(path.stat().st_size for path in cache.rglob("*.tar")) <= 4 * max(sizes)
    assert len(sizes) == 6
    assert len([seen for seen in fetched if seen.method == "GET"]) <= 4


def test_a_cache_without_room_for_two_windows_is_refused(converted: dict[str, Path], bucket: Url) -> None:
    url = upload(converted["shards"], bucket / "a")
    with pytest.raises(
        SettingError, match=rf"^cache_bytes is too small: needs [0-9,]+ for two windows of shards of {url}"
    ):
        loaders.build(url, reading=Reading(cache_bytes=100_000))


def test_image_dataset_reads_a_url_also_in_workers(
    converted: dict[str, Path], bucket: Url, raw_tree: Path
) -> None:
    url = upload(converted["shards"], bucket / "a")
    here = ImageDataset(converted["shards"], decode="tensor")
    there = ImageDataset(url, decode="tensor")
    forked = DataLoader(there, num_workers=1, batch_size=None, multiprocessing_context="fork")
    with pytest.raises(StorageError, match="multiprocessing_context='forkserver'"):
        next(iter(forked))
    # spawn: a fork server that an earlier test started has that test's credentials
    workers = DataLoader(there, num_workers=1, batch_size=None, multiprocessing_context="spawn")
    found = [(picture.clone(), label) for picture, label in workers]
    assert [label for _, label in found] == here.targets
    assert all(torch.equal(picture, here[place][0]) for place, (picture, _) in enumerate(found))


def test_closing_does_not_wait_for_a_storage_that_is_silent(
    converted: dict[str, Path], bucket: Url, proxy: Proxy
) -> None:
    url = upload(converted["shards"], bucket / "a")
    loader = loaders.build(url, **QUIET)
    proxy.plan = lambda seen: "503"
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    begin_s = time.monotonic()
    loader.close()
    assert time.monotonic() - begin_s < 3


def plan_by_seed(seed: int) -> Callable[[Seen], str | None]:
    """A fault for every third request of a shard, one after the other, and none twice in a row."""
    random, last = np.random.default_rng(seed), [-2]

    def plan(seen: Seen) -> str | None:
        if "train-" not in seen.path or seen.number < last[0] + 2 or random.random() > 0.5:
            return None
        last[0] = seen.number
        return str(random.choice(["reset", "broken", "500", "503", "flip", "short"]))

    return plan


def check_faults(url: Url, proxy: Proxy, expected: list, tmp_path: Path, seeds: range) -> int:
    """Serve an epoch for each seed; how many requests failed."""
    for seed in seeds:
        proxy.plan = plan_by_seed(seed)
        assert_same(served(url, reading=Reading(cache_dir=tmp_path / str(seed))), expected)
    return proxy.faults.total()


@pytest.mark.parametrize("kind", ["shards", "webdataset"])
def test_faults_that_pass_change_nothing(
    kind: str, converted: dict[str, Path], bucket: Url, proxy: Proxy, tmp_path: Path
) -> None:
    url = upload(converted[kind], bucket / "a")
    expected = served(converted[kind], shuffle="window")
    assert check_faults(url, proxy, expected, tmp_path, range(5)) >= 10


@pytest.mark.faults
def test_500_faults_change_nothing(
    converted: dict[str, Path], bucket: Url, proxy: Proxy, tmp_path: Path
) -> None:
    url = upload(converted["shards"], bucket / "a")
    expected = served(converted["shards"], shuffle="window")
    seed = 0
    while check_faults(url, proxy, expected, tmp_path, range(seed, seed + 10)) < 500:
        seed += 10


@pytest.mark.parametrize("fault", ["flip", "short", "500", "stall", "expired", "skew", "gone"])
def test_a_fault_that_stays_ends_the_epoch_with_the_url(
    fault: str,
    converted: dict[str, Path],
    bucket: Url,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRECACHE_STORAGE_PATIENCE_S", "1")
    url = upload(converted["shards"], bucket / "a")
    with loaders.build(url, **QUIET) as loader:
        proxy.plan = lambda seen: fault if "train-00002" in seen.path else None
        begin_s = time.monotonic()
        with pytest.raises(StorageError, match=rf"^{url}/train-00002.safetensors: "):
            for _ in loader:
                pass
    assert time.monotonic() - begin_s < 8


def test_ranks_share_what_is_fetched(
    converted: dict[str, Path], bucket: Url, proxy: Proxy, cache: Path
) -> None:
    url = upload(converted["shards"], bucket / "a")
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(loaders.build(url, **QUIET, ranks=loaders.Ranks(rank=rank, world_size=2)))
            for rank in range(2)
        ]
        found = [id for batches in zip(*ranks, strict=True) for batch in batches for id in batch.ids.tolist()]
    assert sorted(found) == sorted(ids for batch, _, _ in served(converted["shards"]) for ids in batch)
    gets = Counter(seen.path for seen in proxy.seen if "train-" in seen.path and seen.method == "GET")
    assert set(gets.values()) == {1}


def test_the_program_ends_while_a_storage_is_silent(
    converted: dict[str, Path], bucket: Url, proxy: Proxy, cache: Path
) -> None:
    url = upload(converted["shards"], bucket / "a")
    proxy.plan = lambda seen: "stall" if "train-" in seen.path else None
    process = subprocess.Popen([sys.executable, "-c", _ABANDON, str(url)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ending\n"
    assert process.wait(30) == 7  # patience is 120 s


_ABANDON = """
import sys, threading, time, loaders
loader = loaders.build(sys.argv[1], batch_size=8)
threading.Thread(target=next, args=(iter(loader),), daemon=True).start()
time.sleep(1)
print("ending", flush=True)
sys.exit(7)
"""


@pytest.mark.parametrize("shuffle", [False, "full"])
def test_nothing_is_written_outside_the_cache(
    shuffle: bool | str, converted: dict[str, Path], bucket: Url, cache: Path, tmp_path: Path
) -> None:
    """By a manifest whose shards have names that lead away from its folder."""
    path = Path(shutil.copytree(converted["shards"], tmp_path / "set"))
    lead_away(path, f"{tmp_path}/user/train")
    (tmp_path / "user").mkdir()
    store = ObjectStore(bucket / "set")
    for file in path.iterdir():
        name = f"{tmp_path}/user/{file.name}" if file.name.startswith("train") else file.name
        store.upload(file, name)
    with pytest.raises(DatasetError, match="splits"):
        served(str(bucket / "set"), shuffle=shuffle)
    assert list((tmp_path / "user").iterdir()) == []
