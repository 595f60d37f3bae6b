"""Cached files of datasets at URLs are fetched once and whole, and files in use or of others are kept."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precache.dataset.files import FileEntry
from precache.errors import SettingError, StorageError
from precache.storage import crc32c, crc32c_file
from precache.storage.objects import ObjectStore
from precache.storage.shard_cache import Cache, CachedFiles
from precache.storage.urls import Url
from tests.cloud.storages import Storage

SHARD_BYTES = 100_000


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECACHE_STORAGE_PATIENCE_S", "1")


def put(url: Url, count: int = 6) -> list[FileEntry]:
    """Put so many files at the URL, and return their entries."""
    entries, random = [], np.random.default_rng(len(str(url)))
    for number in range(count):
        content = random.bytes(SHARD_BYTES)
        ObjectStore(url).put(f"s-{number}", content)
        entries.append(FileEntry(f"s-{number}", len(content), crc32c(content)))
    return entries


def make_cache(url: Url, folder: Path, shards: float | None = None) -> CachedFiles:
    """Make a cache for the dataset at a URL that holds so many of its files."""
    max_bytes = None if shards is None else int(shards * SHARD_BYTES)
    return CachedFiles(url, f"digest-{url.name}", Cache(folder=folder, bytes=max_bytes))


def fetch(cache: CachedFiles, *files: FileEntry) -> None:
    for number, file in enumerate(files):
        with cache.local_file(file) as path:
            assert crc32c_file(path) == file.crc32c
        os.utime(path, (number, number))  # the file system's own times may be too coarse for their order


def cached_names(cache: CachedFiles) -> list[str]:
    return sorted(path.name for path in cache.folder.iterdir() if not path.name.startswith("."))


def incomplete_files(cache: CachedFiles) -> list[Path]:
    """Files that are being fetched, or were when their process was killed."""
    return list(cache.folder.glob(".*.fetching"))


def count_gets(storage: Storage) -> Counter[str]:
    return Counter(seen.path.rpartition("/")[2] for seen in storage.seen if seen.method == "GET")


def test_cache_keeps_files_in_use_though_they_exceed_its_size(bucket: Url, tmp_path: Path) -> None:
    files = put(bucket / "a", 4)
    cache = make_cache(bucket / "a", tmp_path, shards=2)
    with ExitStack() as stack:
        paths = [stack.enter_context(cache.local_file(file)) for file in files[:3]]
        assert [crc32c_file(path) for path in paths] == [file.crc32c for file in files[:3]]
    fetch(cache, files[3])
    assert len(cached_names(cache)) == 2


@pytest.fixture
def foreign_files(tmp_path: Path) -> list[Path]:
    """Old and large files of the user's in the folder of the cache, one in that of dataset b."""
    paths = [tmp_path / "photos/a.jpg", tmp_path / "digest-b/s-0"]
    for path in paths:
        path.parent.mkdir()
        path.write_bytes(bytes(3 * SHARD_BYTES))
        os.utime(path, (0, 0))
    return paths


def test_cache_removes_only_files_of_marked_folders(
    foreign_files: list[Path], bucket: Url, tmp_path: Path
) -> None:
    files = put(bucket / "a", 4)
    cache = make_cache(bucket / "a", tmp_path, shards=2)
    fetch(cache, *files)
    assert len(cached_names(cache)) == 2
    assert all(path.stat().st_size == 3 * SHARD_BYTES for path in foreign_files)


def test_cache_refuses_a_folder_with_other_files(
    foreign_files: list[Path], bucket: Url, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match="s-0", check=lambda error: error.path == tmp_path / "digest-b"):
        make_cache(bucket / "b", tmp_path)


@pytest.mark.parametrize("claimed", [SHARD_BYTES + 1, 2 * SHARD_BYTES, 2**50, 2**62])
def test_cache_removes_nothing_for_an_object_of_another_size(
    claimed: int, bucket: Url, tmp_path: Path
) -> None:
    """Keep the files of another dataset although a forged manifest states a size that would displace them."""
    honest, forged = (make_cache(bucket / name, tmp_path, shards=2) for name in "ab")
    fetch(honest, *put(bucket / "a", 2))
    (entry,) = put(bucket / "b", 1)
    forged_entry = FileEntry(entry.name, claimed, entry.crc32c)
    with (
        pytest.raises(StorageError, match=f"{claimed:,}", check=lambda error: error.path == bucket / "b/s-0"),
        forged.local_file(forged_entry),
    ):
        pass
    assert cached_names(honest) == ["s-0", "s-1"]
    assert cached_names(forged) == [] == incomplete_files(forged)


@pytest.mark.parametrize("claimed", [SHARD_BYTES + 1, 2 * SHARD_BYTES, 2**50, 2**62])
def test_download_raises_for_an_object_of_another_size(claimed: int, bucket: Url, tmp_path: Path) -> None:
    (entry,) = put(bucket, 1)
    with (
        open(tmp_path / "file", "wb") as file,
        pytest.raises(StorageError, match=f"{claimed:,}", check=lambda error: error.path == bucket / "s-0"),
    ):
        ObjectStore(bucket).download(entry.name, file.fileno(), claimed)


FETCH = """
import pickle, sys
from precache.storage import crc32c_file
cache, files = pickle.loads(bytes.fromhex(sys.argv[1]))
for file in files:
    with cache.local_file(file) as path:
        assert crc32c_file(path) == file.crc32c
"""


def start_fetching_process(cache: CachedFiles, files: list[FileEntry]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", FETCH, pickle.dumps((cache, files)).hex()])


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.faults)])
def test_processes_fetch_each_file_once_though_one_is_killed(
    kills: int, bucket: Url, storage: Storage, tmp_path: Path
) -> None:
    """Fetch again only the file that the killed process was fetching."""
    files = put(bucket / "a", 8)
    cache = make_cache(bucket / "a", tmp_path)
    storage.latency_s = 0.02
    for delay_s in np.random.default_rng(7).uniform(0, 0.2, kills).tolist():
        for path in cache.folder.glob("*s-*"):
            path.unlink()
        storage.seen.clear()
        orders = [files[first:] + files[:first] for first in (0, 1, 4)]
        processes = [start_fetching_process(cache, order) for order in orders]
        wait_until(lambda: list(cache.folder.glob("*s-*")))
        time.sleep(delay_s)
        processes[0].kill()
        assert [process.wait(60) for process in processes[1:]] == [0] * 2
        processes[0].wait()
        fetch(cache, *files)
        assert not incomplete_files(cache)
        assert count_gets(storage).total() <= len(files) + 1


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@contextmanager
def fetching_process(cache: CachedFiles, file: FileEntry) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that is fetching the file, and kill it at the end."""
    process = start_fetching_process(cache, [file])
    try:
        wait_until(lambda: incomplete_files(cache))
        yield process
    finally:
        process.kill()
        process.wait()


def stall_s_0(seen: Any) -> str | None:
    """Plan of a storage that stalls requests for the file s-0."""
    return "stall" if seen.path.endswith("s-0") else None


def test_fetch_continues_when_the_process_that_it_waits_for_is_killed(
    bucket: Url, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECACHE_STORAGE_PATIENCE_S", "30")
    (file,) = put(bucket / "a", 1)
    cache = make_cache(bucket / "a", tmp_path)
    storage.plan = stall_s_0
    with fetching_process(cache, file) as process:
        waiting = threading.Thread(target=fetch, args=(cache, file))
        waiting.start()
        time.sleep(0.1)
        assert waiting.is_alive()
        assert len(incomplete_files(cache)) == 1
        storage.plan = lambda seen: None
        process.kill()
        waiting.join(30)
    assert not waiting.is_alive()
    assert (cached_names(cache), incomplete_files(cache)) == (["s-0"], [])


def test_fetch_raises_when_the_process_that_it_waits_for_is_stopped(
    bucket: Url, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remove what the stopped process has left once it is killed and its room is needed."""
    monkeypatch.setenv("PRECACHE_STORAGE_PATIENCE_S", "30")
    file, other = put(bucket / "a", 2)
    cache = make_cache(bucket / "a", tmp_path, shards=1)
    storage.plan = stall_s_0
    with fetching_process(cache, file) as process:
        wait_until(lambda: storage.faults["stall"] > 0)  # so that it has locked the new file
        process.send_signal(signal.SIGSTOP)
        monkeypatch.setenv("PRECACHE_STORAGE_PATIENCE_S", "0.3")
        with pytest.raises(StorageError, check=lambda error: error.path == incomplete_files(cache)[0]):
            fetch(make_cache(bucket / "a", tmp_path), file)
    assert incomplete_files(cache)
    fetch(cache, other)
    assert not incomplete_files(cache)
