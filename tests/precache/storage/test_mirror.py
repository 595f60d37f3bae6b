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
from precache.errors import StorageError
from precache.storage import crc32c, crc32c_file
from precache.storage.mirror import Cache, Mirror
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url
from tests.cloud.proxy import Proxy

SHARD_BYTES = 100_000


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that does not answer is given up soon."""
    monkeypatch.setenv("PRECACHE_STORAGE_PATIENCE_S", "2")


def put(url: Url, count: int = 6, file_bytes: int = SHARD_BYTES) -> list[FileEntry]:
    """So many files at the URL, as a manifest names them."""
    entries, random = [], np.random.default_rng(len(str(url)))
    for number in range(count):
        content = random.bytes(file_bytes)
        ObjectStore(url).put(f"s-{number}", content)
        entries.append(FileEntry(f"s-{number}", len(content), crc32c(content)))
    return entries


def mirror(url: Url, folder: Path, shards: float | None = None) -> Mirror:
    """One whose cache holds so many files."""
    most_bytes = None if shards is None else int(shards * SHARD_BYTES)
    return Mirror(url, f"digest-{url.name}", Cache(folder=folder, bytes=most_bytes))


def fetch(mirror: Mirror, *files: FileEntry) -> None:
    for number, file in enumerate(files):
        with mirror.held(file) as path:
            assert crc32c_file(path) == file.crc32c
        os.utime(path, (number, number))  # as old as that: the clock of a file system is no fine one


def names(mirror: Mirror) -> list[str]:
    """Of the files that it has."""
    return sorted(path.name for path in mirror.folder.iterdir() if not path.name.startswith("."))


def gets(proxy: Proxy) -> Counter[str]:
    return Counter(seen.path.rpartition("/")[2] for seen in proxy.seen if seen.method == "GET")


def test_a_file_is_fetched_once(bucket: Url, proxy: Proxy, tmp_path: Path) -> None:
    files = put(bucket / "a")
    for _ in range(2):
        fetch(mirror(bucket / "a", tmp_path), *files)
    assert set(gets(proxy).values()) == {1}


def test_what_was_used_least_recently_of_another_dataset_goes_first(bucket: Url, tmp_path: Path) -> None:
    old, new = put(bucket / "old", 3), put(bucket / "new", 3)
    before = mirror(bucket / "old", tmp_path)
    fetch(before, *old)
    after = mirror(bucket / "new", tmp_path, shards=4)
    with after.held(new[0]):
        assert names(before) == ["s-0", "s-1", "s-2"]
    with after.held(new[1]):
        assert names(before) == ["s-1", "s-2"]
    assert names(after) == ["s-0", "s-1"]


def test_each_epoch_finds_the_part_that_fits(bucket: Url, proxy: Proxy, tmp_path: Path) -> None:
    files = put(bucket / "a", 6)
    read = mirror(bucket / "a", tmp_path, shards=4)
    for _ in range(4):
        before = gets(proxy).total()
        for file in files:
            with read.held(file):
                assert sum(path.stat().st_size for path in read.folder.glob("s-*")) <= 4 * SHARD_BYTES
            time.sleep(0.01)
    assert gets(proxy).total() - before <= 3  # by age alone all 6 would come again


def test_what_is_in_use_stays_and_what_is_not_ours_too(bucket: Url, tmp_path: Path) -> None:
    files = put(bucket / "a", 4)
    read = mirror(bucket / "a", tmp_path, shards=2)
    theirs = read.folder / "s-theirs"
    theirs.write_bytes(bytes(3 * SHARD_BYTES))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.jpg").write_bytes(bytes(SHARD_BYTES))
    with ExitStack() as stack:
        paths = [stack.enter_context(read.held(file)) for file in files[:3]]  # more than fit
        assert [crc32c_file(path) for path in paths] == [file.crc32c for file in files[:3]]
    fetch(read, files[3])
    assert len(names(read)) == 3  # two that fit, and theirs
    assert theirs.stat().st_size == 3 * SHARD_BYTES
    assert (tmp_path / "photos/a.jpg").exists()


def test_what_the_storage_has_no_more_stays(bucket: Url, tmp_path: Path) -> None:
    files = put(bucket / "a", 3)
    read = mirror(bucket / "a", tmp_path, shards=1)
    fetch(read, files[0])
    ObjectStore(bucket / "a").delete(["s-0"])
    fetch(read, files[1], files[2])
    assert "s-0" in names(read)
    assert len(names(read)) == 2


def test_a_file_of_somebody_else_is_not_replaced(bucket: Url, tmp_path: Path) -> None:
    file, other = put(bucket / "a", 2)
    read = mirror(bucket / "a", tmp_path, shards=0.1)
    (read.folder / "s-0").write_bytes(b"mine")
    with pytest.raises(StorageError, match=r"s-0: lies in the cache of s3://.* and is not from there"):
        fetch(read, file)
    fetch(read, other)  # though there is no room
    assert (read.folder / "s-0").read_bytes() == b"mine"


@pytest.mark.parametrize("fault", ["flip", "short", "500", "503", "reset", "broken"])
def test_a_fault_that_passes_is_not_seen(fault: str, bucket: Url, proxy: Proxy, tmp_path: Path) -> None:
    file = put(bucket / "a", 1)[0]
    start = len(proxy.seen)
    proxy.plan = lambda seen: fault if seen.number == start else None
    fetch(mirror(bucket / "a", tmp_path), file)
    assert proxy.faults[fault] == 1


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("flip", r"its checksum is [0-9a-f]{8}, expected [0-9a-f]{8} \(fetched 3 times\)"),
        ("short", "sent 50,000 bytes instead of 100,000, .* times in"),
        ("500", "InternalError .* times in"),
        ("503", "SlowDown .* times in"),
        ("reset", "times in"),
        ("stall", "times in"),
        ("expired", "ExpiredToken .*renew the credentials"),
        ("skew", "RequestTimeTooSkewed .*set this machine's clock"),
        ("gone", "is the URL right, and was the upload finished"),
    ],
)
def test_a_fault_that_stays_is_told_in_time(
    fault: str, says: str, bucket: Url, proxy: Proxy, tmp_path: Path
) -> None:
    file = put(bucket / "a", 1)[0]
    proxy.plan = lambda seen: fault if seen.method == "GET" else None
    read, begin_s = mirror(bucket / "a", tmp_path), time.monotonic()
    with pytest.raises(StorageError, match=rf"^{bucket}/a/s-0: .*{says}"):
        fetch(read, file)
    assert time.monotonic() - begin_s < 6  # patience is 2 s, and a request that runs then is waited for
    assert names(read) == []
    assert not list(read.folder.glob("*.partial"))


def test_an_object_of_another_size_is_told_at_once(bucket: Url, tmp_path: Path) -> None:
    file = put(bucket / "a", 1)[0]
    ObjectStore(bucket / "a").put("s-0", b"something else")
    with pytest.raises(StorageError, match=r"a/s-0: expected 100,000 bytes, got 14"):
        fetch(mirror(bucket / "a", tmp_path), file)


def test_a_damaged_file_is_fetched_again_once_it_was_found(bucket: Url, tmp_path: Path) -> None:
    file = put(bucket / "a", 1)[0]
    read = mirror(bucket / "a", tmp_path)
    fetch(read, file)
    (read.folder / "s-0").write_bytes(bytes(SHARD_BYTES))
    read.forget("s-0")
    fetch(read, file)
    os.truncate(read.folder / "s-0", 5)
    fetch(read, file)


_FETCH = """
import pickle, sys
from precache.storage import crc32c_file
mirror, files = pickle.loads(bytes.fromhex(sys.argv[1]))
sys.stdin.read()  # until all are to begin
for file in files:
    with mirror.held(file) as path:
        assert crc32c_file(path) == file.crc32c
"""


def fetching_process(read: Mirror, files: list[FileEntry]) -> subprocess.Popen[bytes]:
    """One that fetches the files when its input ends."""
    sent = pickle.dumps((read, files)).hex()
    return subprocess.Popen([sys.executable, "-c", _FETCH, sent], stdin=subprocess.PIPE)


def test_eight_processes_fetch_each_file_once(bucket: Url, proxy: Proxy, tmp_path: Path) -> None:
    files = put(bucket / "a", 8)
    proxy.latency_s = 0.05
    read = mirror(bucket / "a", tmp_path)
    orders = [np.random.default_rng(order).permutation(8).tolist() for order in range(8)]
    processes = [fetching_process(read, [files[number] for number in order]) for order in orders]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait(60) for process in processes] == [0] * 8
    assert gets(proxy) == {file.name: 1 for file in files}


@contextmanager
def fetching(read: Mirror, file: FileEntry) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is in the midst of fetching the file."""
    process = fetching_process(read, [file])
    assert process.stdin is not None
    process.stdin.close()
    try:
        until(lambda: list(read.folder.glob("*.partial")))
        yield process
    finally:
        process.kill()
        process.wait()


def until(happened: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_who_waits_for_a_killed_process_goes_on(bucket: Url, proxy: Proxy, tmp_path: Path) -> None:
    file = put(bucket / "a", 1)[0]
    read = mirror(bucket / "a", tmp_path)
    proxy.plan = lambda seen: "stall" if seen.method == "GET" else None
    with fetching(read, file) as process:
        waiting = threading.Thread(target=fetch, args=(read, file))
        waiting.start()
        time.sleep(0.1)
        assert waiting.is_alive()
        assert len(list(read.folder.glob("*.partial"))) == 1
        proxy.plan = lambda seen: None
        process.send_signal(signal.SIGKILL)
        waiting.join(10)
    assert not waiting.is_alive()
    assert names(read) == ["s-0"]
    assert not list(read.folder.glob("*.partial"))


def test_what_a_killed_process_left_makes_room(bucket: Url, proxy: Proxy, tmp_path: Path) -> None:
    left, other = put(bucket / "a", 2)
    read = mirror(bucket / "a", tmp_path, shards=1)
    proxy.plan = lambda seen: "stall" if seen.path.endswith("s-0") else None
    with fetching(read, left) as process:
        process.kill()
    assert list(read.folder.glob("*.partial"))
    fetch(read, other)
    assert not list(read.folder.glob("*.partial"))


def test_a_stopped_process_is_not_waited_for_for_ever(
    bucket: Url, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = put(bucket / "a", 1)[0]
    proxy.plan = lambda seen: "stall" if seen.method == "GET" else None
    with fetching(mirror(bucket / "a", tmp_path), file) as process:
        process.send_signal(signal.SIGSTOP)
        monkeypatch.setenv("PRECACHE_STORAGE_PATIENCE_S", "0.3")
        with pytest.raises(StorageError, match=r"s-0: another process fetches it, and has got nothing for"):
            fetch(mirror(bucket / "a", tmp_path), file)
        process.send_signal(signal.SIGCONT)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1000k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_told_before_anything_is_fetched(bucket: Url, proxy: Proxy, small_disk: Path) -> None:
    files = put(bucket / "a", 1)
    (small_disk / "theirs").write_bytes(bytes(950_000))
    read = mirror(bucket / "a", small_disk)
    with pytest.raises(StorageError, match=r"a/s-0: 100,000 bytes cannot be kept in .*disk/.*No space left"):
        fetch(read, files[0])
    assert not gets(proxy)
    assert names(read) == []


def test_by_default_the_disk_does_not_fill_up(bucket: Url, small_disk: Path) -> None:
    (small_disk / "theirs").write_bytes(bytes(30_000))  # with nine files no twentieth would be left
    read = mirror(bucket / "a", small_disk)
    fetch(read, *put(bucket / "a", 12))
    free = os.statvfs(small_disk)
    assert 50_000 <= free.f_bavail * free.f_frsize < 160_000
    assert len(names(read)) == 8


def killed_at(delays_s: list[float], url: Url, proxy: Proxy, folder: Path) -> None:
    """Kill one of two processes on one cache at each moment; what lies there then is whole."""
    files = put(url, 8)
    read = mirror(url, folder, shards=6)
    proxy.latency_s = 0.01
    for delay_s in delays_s:
        for path in read.folder.iterdir():
            path.unlink()
        first, second = fetching_process(read, files), fetching_process(read, files[::-1])
        for process in (first, second):
            assert process.stdin is not None
            process.stdin.close()
        until(lambda: list(read.folder.glob("*s-*")))
        time.sleep(delay_s)
        first.kill()
        assert second.wait(30) == 0
        first.wait()
        by_name = {file.name: file.crc32c for file in files}
        assert all(crc32c_file(path) == by_name[path.name] for path in read.folder.glob("s-*"))
    fetch(read, *files)
    assert not list(read.folder.glob("*.partial"))


def test_a_kill_leaves_no_file_that_is_not_whole(bucket: Url, proxy: Proxy, tmp_path: Path) -> None:
    killed_at([0.0, 0.03], bucket / "a", proxy, tmp_path)


@pytest.mark.faults
def test_20_kills_leave_no_file_that_is_not_whole(bucket: Url, proxy: Proxy, tmp_path: Path) -> None:
    killed_at(np.random.default_rng(7).uniform(0, 0.3, 20).tolist(), bucket / "a", proxy, tmp_path)
