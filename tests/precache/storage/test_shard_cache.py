"""Files of datasets at URLs, kept on this machine: fetched once, whole, and never in the way of anybody."""

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
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that does not answer is given up soon."""
    monkeypatch.setenv("PRECACHE_STORAGE_PATIENCE_S", "1")


def put(url: Url, count: int = 6) -> list[FileEntry]:
    """So many files at the URL, as a manifest names them."""
    entries, random = [], np.random.default_rng(len(str(url)))
    for number in range(count):
        content = random.bytes(SHARD_BYTES)
        ObjectStore(url).put(f"s-{number}", content)
        entries.append(FileEntry(f"s-{number}", len(content), crc32c(content)))
    return entries


def cached(url: Url, folder: Path, shards: float | None = None) -> CachedFiles:
    """One whose cache holds so many files."""
    max_bytes = None if shards is None else int(shards * SHARD_BYTES)
    return CachedFiles(url, f"digest-{url.name}", Cache(folder=folder, bytes=max_bytes))


def fetch(read: CachedFiles, *files: FileEntry) -> None:
    for number, file in enumerate(files):
        with read.local_file(file) as path:
            assert crc32c_file(path) == file.crc32c
        os.utime(path, (number, number))  # as old as that: the clock of a file system is not a fine one


def names(read: CachedFiles) -> list[str]:
    """Of the files that it has."""
    return sorted(path.name for path in read.folder.iterdir() if not path.name.startswith("."))


def in_work(read: CachedFiles) -> list[Path]:
    """Files that are being fetched, or were when their process was killed."""
    return list(read.folder.glob(".*.fetching"))


def gets(storage: Storage) -> Counter[str]:
    return Counter(seen.path.rpartition("/")[2] for seen in storage.seen if seen.method == "GET")


def test_what_is_in_use_stays_and_what_is_not_ours_too(bucket: Url, tmp_path: Path) -> None:
    files = put(bucket / "a", 4)
    read = cached(bucket / "a", tmp_path, shards=2)
    theirs = [tmp_path / "photos/a.jpg", tmp_path / "digest-b/s-0"]
    for path in theirs:
        path.parent.mkdir()
        path.write_bytes(bytes(3 * SHARD_BYTES))
        os.utime(path, (0, 0))
    with ExitStack() as stack:
        paths = [stack.enter_context(read.local_file(file)) for file in files[:3]]  # more than fit
        assert [crc32c_file(path) for path in paths] == [file.crc32c for file in files[:3]]
    fetch(read, files[3])
    assert len(names(read)) == 2
    assert all(path.stat().st_size == 3 * SHARD_BYTES for path in theirs)
    with pytest.raises(SettingError, match=r"digest-b: holds s-0, which was not fetched"):
        cached(bucket / "b", tmp_path)


@pytest.mark.parametrize("claimed", [SHARD_BYTES + 1, 2 * SHARD_BYTES, 2**50, 2**62])
def test_cache_removes_nothing_for_an_object_of_another_size(
    claimed: int, bucket: Url, tmp_path: Path
) -> None:
    """A manifest may be a stranger's; what is kept of other datasets stays."""
    honest, forged = (cached(bucket / name, tmp_path, shards=2) for name in "ab")
    fetch(honest, *put(bucket / "a", 2))
    (entry,) = put(bucket / "b", 1)
    lie = FileEntry(entry.name, claimed, entry.crc32c)
    with (
        pytest.raises(StorageError, match=f"{bucket / 'b'}/s-0: expected {claimed:,} bytes"),
        forged.local_file(lie),
    ):
        pass
    with (
        open(tmp_path / "file", "wb") as file,
        pytest.raises(StorageError, match=f"s-0: expected {claimed:,} "),
    ):
        ObjectStore(bucket / "b").download(lie.name, file.fileno(), lie.bytes)
    assert names(honest) == ["s-0", "s-1"]
    assert names(forged) == [] == in_work(forged)


# Several processes.

FETCH = """
import pickle, sys
from precache.storage import crc32c_file
read, files = pickle.loads(bytes.fromhex(sys.argv[1]))
for file in files:
    with read.local_file(file) as path:
        assert crc32c_file(path) == file.crc32c
"""


def fetching_process(read: CachedFiles, files: list[FileEntry]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", FETCH, pickle.dumps((read, files)).hex()])


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.faults)])
def test_processes_fetch_each_file_once_and_whole_also_where_one_is_killed(
    kills: int, bucket: Url, storage: Storage, tmp_path: Path
) -> None:
    """At any moment; what it was fetching is fetched again."""
    files = put(bucket / "a", 8)
    read = cached(bucket / "a", tmp_path)
    storage.latency_s = 0.02
    for delay_s in np.random.default_rng(7).uniform(0, 0.2, kills).tolist():
        for path in read.folder.glob("*s-*"):
            path.unlink()
        storage.seen.clear()
        processes = [fetching_process(read, files[order:] + files[:order]) for order in (0, 1, 4)]
        until(lambda: list(read.folder.glob("*s-*")))
        time.sleep(delay_s)
        processes[0].kill()
        assert [process.wait(60) for process in processes[1:]] == [0] * 2
        processes[0].wait()
        fetch(read, *files)
        assert not in_work(read)
        assert gets(storage).total() <= len(files) + 1


def until(happened: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@contextmanager
def fetching(read: CachedFiles, file: FileEntry) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is in the midst of fetching the file."""
    process = fetching_process(read, [file])
    try:
        until(lambda: in_work(read))
        yield process
    finally:
        process.kill()
        process.wait()


def test_who_waits_for_a_killed_process_goes_on_but_not_for_ever_for_a_stopped_one(
    bucket: Url, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a killed one was fetching makes room."""
    monkeypatch.setenv("PRECACHE_STORAGE_PATIENCE_S", "30")
    file, other = put(bucket / "a", 2)
    read = cached(bucket / "a", tmp_path, shards=1)
    storage.plan = lambda seen: "stall" if seen.path.endswith("s-0") else None
    with fetching(read, file) as process:
        waiting = threading.Thread(target=fetch, args=(read, file))
        waiting.start()
        time.sleep(0.1)
        assert waiting.is_alive()
        assert len(in_work(read)) == 1
        storage.plan = lambda seen: None
        process.kill()
        waiting.join(30)
    assert not waiting.is_alive()
    assert (names(read), in_work(read)) == (["s-0"], [])
    read.forget("s-0")
    storage.plan = lambda seen: "stall" if seen.path.endswith("s-0") else None
    storage.faults.clear()
    with fetching(read, file) as process:
        until(lambda: storage.faults["stall"] > 0)  # it has asked: not between a new file and its lock
        process.send_signal(signal.SIGSTOP)
        monkeypatch.setenv("PRECACHE_STORAGE_PATIENCE_S", "0.3")
        with pytest.raises(StorageError, match=r"s-0.fetching: another download has been stuck for"):
            fetch(cached(bucket / "a", tmp_path), file)
    assert in_work(read)
    fetch(read, other)
    assert not in_work(read)
