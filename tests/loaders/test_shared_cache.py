"""`cache="ram"` is one copy per host, perhaps of a part; tested with real processes, some of them killed.

Ranks are processes forked from one that has imported torch, so that they start quickly.
"""

import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from loaders import Loader
from loaders.augment import Crops
from loaders.batch import Request
from loaders.dataset import open_split
from loaders.read import cache, host_memory, shards
from precache import convert
from tests.building import build_loader
from tests.conftest import IMAGES, STORED_SIZE, small_recipe

ANSWER_S = 60


class Rank:
    """Process with a loader that has a cache.

    Args:
        prefix: prefix of the names of shared memory, which keeps ranks of other tests apart.
        kill_at: number of the picture during whose copy into the cache the process is killed; 0: never.
        scratch: folder for temporary files, to which no other test writes.
    """

    def __init__(
        self, path: Path, settings: dict[str, Any], prefix: str, kill_at: int, scratch: Path
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        self._connection, child_connection = context.Pipe()
        self.process = context.Process(
            target=_run, args=(child_connection, str(path), settings, prefix, kill_at, str(scratch))
        )
        self.process.start()
        child_connection.close()

    def receive(self) -> Any:
        """Return the next message of the process; raise EOFError if it has ended."""
        assert self._connection.poll(ANSWER_S), "no message"
        return self._connection.recv()

    def start_epoch(self, epoch: int) -> None:
        """Tell the process to serve an epoch; `receive` returns the result."""
        self._connection.send(epoch)

    def serve(self, epoch: int) -> tuple[dict[int, int], int]:
        """Serve an epoch, and return checksums of the pixels by id, and how many samples were read for it."""
        self.start_epoch(epoch)
        result: tuple[dict[int, int], int] = self.receive()
        return result

    def kill(self) -> None:
        """Kill the process by SIGKILL, and wait until it has ended."""
        self.process.kill()
        self.process.join()


def _run(
    connection: Connection, path: str, settings: dict[str, Any], prefix: str, kill_at: int, scratch: str
) -> None:
    torch.set_num_threads(1)
    tempfile.tempdir = scratch
    host_memory._PREFIX = prefix
    read_samples = copied_pictures = 0
    store_and_serve, write = cache.CachedReader._store_and_serve, host_memory.HostMemory.write

    def count_and_serve(self: Any, request: Any, slots: Any, batch: Any) -> Any:
        nonlocal read_samples
        read_samples += len(slots)
        return store_and_serve(self, request, slots, batch)

    def write_or_die(self: Any, start: int, pixels: Any) -> None:
        nonlocal copied_pictures
        copied_pictures += 1
        if copied_pictures == kill_at:
            write(self, start, pixels[: len(pixels) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, start, pixels)

    cache.CachedReader._store_and_serve = count_and_serve  # type: ignore[method-assign]
    host_memory.HostMemory.write = write_or_die  # type: ignore[method-assign]
    with build_loader(path, **{"cache": "ram", "workers": 1, "batch_size": 8, **settings}) as loader:
        connection.send("ready")
        with suppress(EOFError):
            while True:
                loader.set_epoch(connection.recv())
                before = read_samples
                connection.send((checksums(loader), read_samples - before))


def checksums(batches: Any) -> dict[int, int]:
    """Return the checksums of the pixels by id."""
    return {
        i: xxhash.xxh3_64_intdigest(image)
        for batch in batches
        for i, image in zip(
            batch.ids.tolist(), batch.images.permute(0, 2, 3, 1).contiguous().numpy(), strict=True
        )
    }


def memory_files(pid: int | str = "self") -> dict[int, str]:
    """Return paths of the memory in which a process caches pictures, by inode."""
    paths = {}
    with suppress(OSError):  # the process has ended, or is another user's
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            with suppress(OSError):  # the file has been closed
                if os.readlink(path).startswith("/memfd:precache-"):
                    paths[os.stat(path).st_ino] = path
    return paths


Start = Callable[..., list[Rank]]


@pytest.fixture(scope="module")
def _preloaded() -> Iterator[None]:
    multiprocessing.set_forkserver_preload([__name__])
    forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture
def start(
    _preloaded: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Start]:
    """Function that starts ranks at a time, each with its settings, which share with one another alone."""
    prefix = f"precache-{os.getpid()}-{hash(request.node.name)}-"
    monkeypatch.setattr(host_memory, "_PREFIX", prefix)
    ranks: list[Rank] = []

    def start(path: Path, *settings: dict[str, Any], kill_at: int = 0) -> list[Rank]:
        started = [Rank(path, rank_settings, prefix, kill_at, tmp_path) for rank_settings in settings]
        ranks.extend(started)
        assert [rank.receive() for rank in started] == ["ready"] * len(started)
        return started

    yield start
    for rank in ranks:
        rank.kill()


def ranks_of(world_size: int, **settings: Any) -> list[dict[str, Any]]:
    return [{"rank": rank, "world_size": world_size, **settings} for rank in range(world_size)]


def uncached_checksums(path: Path, **settings: Any) -> dict[int, int]:
    """Return the checksums of the pixels by id, read without a cache."""
    with build_loader(path, workers=1, batch_size=8, **settings) as loader:
        return checksums(loader)


def leftover_files(scratch: Path) -> list[str]:
    """Return the files that ranks left in their own folder, and in /dev/shm with their prefix."""
    in_memory = [name for name in os.listdir("/dev/shm") if name.startswith(host_memory._PREFIX)]
    return in_memory + os.listdir(scratch)


@pytest.mark.parametrize("kind", ["webdataset", pytest.param("raw", marks=pytest.mark.slow)])
def test_ranks_share_one_copy_and_decode_each_picture_once(
    kind: str, raw_tree: Path, converted: dict[str, Path], start: Start, tmp_path: Path
) -> None:
    """A rank may join after the one that made the memory was killed; the memory is freed with the last."""
    path = {"raw": raw_tree, **converted}[kind]
    expected = uncached_checksums(path, size=STORED_SIZE)
    ranks = start(path, *ranks_of(3, size=STORED_SIZE))
    first = [rank.serve(0) for rank in ranks]
    assert {i: c for served, _ in first for i, c in served.items()} == expected
    later = [rank.serve(3) for rank in ranks]
    assert {i: c for served, _ in later for i, c in served.items()} == expected
    assert sum(read for _, read in later) == 0
    ranks.pop(0).kill()
    ranks += start(path, {"size": STORED_SIZE, "seed": 7})
    assert ranks[-1].serve(0) == (expected, 0)
    memory = {i: file for rank in ranks for i, file in memory_files(rank.process.pid or 0).items()}
    (status,) = map(os.stat, memory.values())
    assert status.st_nlink == 0
    assert 1 <= status.st_blocks * 512 / (IMAGES * STORED_SIZE**2 * 3) < 1.2
    for rank in ranks:
        rank.kill()
    end_s = time.monotonic() + 20  # torch's workers check every few seconds whether their parent is alive
    while any(memory_files(pid).keys() & memory.keys() for pid in filter(str.isdigit, os.listdir("/proc"))):
        assert time.monotonic() < end_s
        time.sleep(0.1)
    assert leftover_files(tmp_path) == []


@pytest.mark.parametrize("kind", ["webdataset", "keep-webdataset"])
def test_a_half_written_picture_is_never_served(
    kind: str, converted: dict[str, Path], shaped: dict[str, Path], start: Start
) -> None:
    """A rank is killed with half a picture written, another goes on, and a third one joins."""
    path = {**converted, **shaped}[kind]
    expected = uncached_checksums(path, size=36)
    (other,) = start(path, {"size": 36})
    for kill_at in (1, 9, 30):
        (killed,) = start(path, {"size": 36, "seed": kill_at}, kill_at=kill_at)
        killed.start_epoch(0)
        with pytest.raises(EOFError):
            killed.receive()
    served, read = other.serve(0)
    assert served == expected
    assert IMAGES - 30 - 8 - 1 <= read < IMAGES
    (third,) = start(path, {"size": 36})
    assert third.serve(1) == (expected, 0)


# The tests below run in one process.


def check_equal(loader: Loader, expected: Loader) -> None:
    """Compare three epochs."""
    for _ in range(3):
        for batch, expected_batch in zip(loader, expected, strict=True):
            assert torch.equal(batch.ids, expected_batch.ids)
            assert torch.equal(batch.labels, expected_batch.labels)
            assert torch.equal(batch.images, expected_batch.images)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("shards", {"shuffle": "window"}),
        ("webdataset", {"shuffle": False, "size": 32}),
        ("webdataset", {"weights": np.arange(IMAGES) % 3, "views": 2, "augment": "train"}),
        ("keep-shards", {"shuffle": "window", "augment": "crop", "size": 32}),
        ("raw", {"augment": "train", "size": 32}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_cache_of_a_part_serves_the_same_pixels(
    kind: str,
    settings: dict[str, Any],
    raw_tree: Path,
    converted: dict[str, Path],
    shaped: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The free memory is simulated, since a test cannot use it up."""
    path = {"raw": raw_tree, **converted, **shaped}[kind]
    pictures = 2000 if kind == "raw" else 30  # those of the tree are larger
    monkeypatch.setattr(host_memory, "free_memory", lambda: (STORED_SIZE**2 * 3 * pictures, 0))
    settings = {"workers": 2, "batch_size": 8, "size": 36, **settings}
    with build_loader(path, **settings) as plain, build_loader(path, cache="ram", **settings) as cached:
        (samples,) = re.findall(rf"keeps (\d+) of {IMAGES} samples", caplog.text)
        assert 8 <= int(samples) < IMAGES
        check_equal(cached, plain)


def test_auto_cache_takes_half_of_the_free_memory_once(
    raw_tree: Path,
    converted: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Memory that one cache has reserved is not free for another, even before anything is written to it."""

    def cached_samples(pictures: int, *paths: Path, **settings: Any) -> list[str]:
        monkeypatch.setattr(host_memory, "free_memory", lambda: (pictures * STORED_SIZE**2 * 3, 0))
        caplog.clear()
        opened = [build_loader(path, workers=0, size=STORED_SIZE, **settings) for path in paths]
        for loader in opened:
            loader.close()
        return re.findall(rf"keeps (\d+ of {IMAGES}|nothing)", caplog.text)

    for pictures, samples in ((2 * IMAGES, []), (60, ["30 of 70"]), (14, ["7 of 70"]), (13, ["nothing"])):
        assert cached_samples(pictures, converted["shards"], cache="auto") == samples
    (second,) = cached_samples(100, converted["webdataset"], raw_tree, cache="ram")
    assert 25 <= int(second.split()[0]) <= 30


def test_a_nearly_full_cache_does_not_read_epochs_ahead(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of shards are read ahead although hardly any of their samples is needed."""
    monkeypatch.setattr(host_memory, "free_memory", lambda: (STORED_SIZE**2 * 3 * (IMAGES - 1), 0))
    settings: dict[str, Any] = {"shuffle": "window", "workers": 1, "size": STORED_SIZE, "cache": "ram"}
    with build_loader(converted["shards"], **settings) as loader:
        spec = loader.spec
    data, crops = open_split(converted["shards"], "train"), Crops(STORED_SIZE, STORED_SIZE)
    requested = 0

    def requests() -> Iterator[Request]:
        nonlocal requested
        for requested in range(20 * IMAGES):
            yield Request(requested // IMAGES, np.array([requested % IMAGES]))

    open_shards = partial(shards.ShardsReader, spec, data)
    with closing(cache.open_cached(open_shards, "shards", spec, data, crops)) as reader:
        for number, batch in enumerate(reader.read(requests())):
            assert len(batch.images) == 1
            assert requested - number < 600
    assert number + 1 == 20 * IMAGES


def test_another_picture_of_the_same_name_is_not_served_from_memory(raw_tree: Path, tmp_path: Path) -> None:
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    settings = {"workers": 0, "batch_size": 16, "size": 32}
    with build_loader(tree, cache="ram", **settings) as first:
        list(first)
        picture = sorted(tree.glob("*/*.jpg"))[40]
        other = next(p for p in sorted(tree.glob("*/*.jpg")) if p.stat().st_size < picture.stat().st_size)
        size = picture.stat().st_size
        picture.write_bytes(other.read_bytes().ljust(size, b"\0"))  # the tree's digest is of names and sizes
        with build_loader(tree, cache="ram", **settings) as second, build_loader(tree, **settings) as plain:
            check_equal(second, plain)


@pytest.mark.parametrize("other", [{"size": 32}, {"split": "val"}, {"check": "never"}], ids=str)
def test_other_pixels_are_not_shared_and_closing_frees_memory(
    other: dict[str, Any], raw_tree: Path, tmp_path: Path
) -> None:
    path = tmp_path / "out"
    convert(raw_tree, path, small_recipe("webdataset", splits="train=0.5,val=0.5"), workers=0)
    settings: dict[str, Any] = {"cache": "ram", "workers": 1, "size": STORED_SIZE, "split": "train"}
    with build_loader(path, **settings), build_loader(path, **{**settings, **other}):
        assert len(memory_files()) == 2
    assert not memory_files()


def test_shared_memory_is_sealed_and_private() -> None:
    memory = host_memory.share_memory("sealed", lambda promised: 10_000)
    (path,) = memory_files().values()
    assert os.stat(path).st_mode & 0o777 == 0o600
    with open(path, "r+b") as file:
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(file.fileno(), size)
    del memory


def test_concurrent_openers_get_the_same_memory() -> None:
    def size_of(promised: int) -> int:
        time.sleep(0.02)  # meanwhile the other threads look for the memory
        return 100

    with ThreadPoolExecutor(8) as threads:
        memories = [*threads.map(lambda _: host_memory.share_memory("race", size_of), range(8))]
    assert len(memory_files()) == 1
    del memories


def test_free_memory_respects_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training in a container would be killed otherwise; versions 1 and 2 of control groups differ."""

    def write(folder: str, **files: object) -> None:
        (tmp_path / folder).mkdir(parents=True)
        for name, content in files.items():
            (tmp_path / folder / name.replace("memory_", "memory.")).write_text(f"{content}\n")

    write("job", memory_max=3 << 20, memory_current=2 << 20, memory_stat="anon 5\ninactive_file 4096")
    write("job/step", memory_max="max", memory_current=1 << 20)
    write("memory/api", memory_limit_in_bytes=500_000, memory_usage_in_bytes=400_000)
    read = host_memory._read
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    for own, free, limit in (
        ("0::/job/step\n", (1 << 20) + 4096, 3 << 20),
        ("9:cpu:/x\n4:memory:/api\n0::/\n", 100_000, 500_000),
    ):

        def read_simulated(path: Any, own: str = own) -> Any:
            return own if str(path) == "/proc/self/cgroup" else read(path)

        monkeypatch.setattr(host_memory, "_read", read_simulated)
        assert host_memory.free_memory() == (free, limit)
