"""`cache="ram"` is one copy a host: real processes, killed as the system kills them."""

import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loaders.read import host_memory
from tests.building import build_loader
from tests.conftest import IMAGES, STORED_SIZE
from tests.loaders.sharing import Rank, checksums, memory_files, preloaded, starting

Start = Callable[..., list[Rank]]


@pytest.fixture(scope="module", autouse=True)
def _preloaded() -> Iterator[None]:
    with preloaded():
        yield


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts ranks that share with nobody but one another."""
    prefix = f"precache-{os.getpid()}-{hash(request.node.name)}-"
    monkeypatch.setattr(host_memory, "_PREFIX", prefix)
    with starting(prefix) as start:
        yield start


def ranks_of(world_size: int, **settings: Any) -> list[dict[str, Any]]:
    return [{"rank": rank, "world_size": world_size, **settings} for rank in range(world_size)]


def due(path: Path, **settings: Any) -> dict[int, int]:
    """Id -> checksum of its pixels, read without a cache."""
    with build_loader(path, workers=1, batch_size=8, **settings) as loader:
        return checksums(loader)


def memory_of(ranks: list[Rank]) -> dict[int, int]:
    """Inode -> bytes in use, of what they share; it has no name anywhere."""
    paths = {inode: path for rank in ranks for inode, path in memory_files(rank.process.pid or 0).items()}
    found = {inode: os.stat(path) for inode, path in paths.items()}
    assert all(status.st_nlink == 0 for status in found.values())
    return {inode: status.st_blocks * 512 for inode, status in found.items()}


def left_behind() -> list[str]:
    folders = ("/dev/shm", tempfile.gettempdir())
    return [name for folder in folders for name in os.listdir(folder) if name.startswith("precache")]


def test_ranks_share_one_copy_and_decode_each_picture_once(converted: dict[str, Path], start: Start) -> None:
    path = converted["webdataset"]
    before, expected = left_behind(), due(path, size=STORED_SIZE)
    ranks = start(path, ranks_of(3, size=STORED_SIZE))
    first = [rank.serve(0) for rank in ranks]
    assert {i: c for served, _ in first for i, c in served.items()} == expected
    for epoch in (3, 4):
        later = [rank.serve(epoch) for rank in ranks]
        assert {i: c for served, _ in later for i, c in served.items()} == expected
    assert sum(read for _, read in later) == 0
    (used,) = memory_of(ranks).values()
    assert 1 <= used / (IMAGES * STORED_SIZE**2 * 3) < 1.2
    # those that join now, of another job, with other crops, read nothing at all
    (other,) = start(path, [{"size": STORED_SIZE, "seed": 7}])
    served, read = other.serve(0)
    assert (served, read) == (expected, 0)
    assert len(memory_of([*ranks, other])) == 1
    for rank in (*ranks, other):
        rank.kill()
    assert not memory_of([*ranks, other])
    assert left_behind() == before


def test_what_an_epoch_reads_is_not_read_ahead_of_the_next(converted: dict[str, Path], start: Start) -> None:
    (rank,) = start(converted["webdataset"], [{"size": STORED_SIZE}])
    assert sum(rank.serve(epoch)[1] for epoch in range(3)) == IMAGES


def test_who_is_killed_takes_nothing_from_the_others(converted: dict[str, Path], start: Start) -> None:
    path = converted["shards"]
    expected = due(path, size=STORED_SIZE)
    ranks = start(path, ranks_of(2, size=STORED_SIZE))
    for rank in ranks:
        rank.serve(0)
    ranks[0].kill()  # who made the memory
    served, read = ranks[1].serve(3)
    assert all(expected[i] == checksum for i, checksum in served.items())
    assert read == 0
    (again,) = start(path, [{"size": STORED_SIZE}])
    assert again.serve(0) == (expected, 0)
    ranks[1].kill()
    assert again.serve(1) == (expected, 0)
    again.kill()  # the last
    (clean,) = start(path, [{"size": STORED_SIZE}])
    assert clean.serve(0)[0] == expected
    assert len(memory_of([clean])) == 1


@pytest.mark.parametrize("kind", ["shards", "keep-webdataset"])
def test_what_was_broken_off_midway_is_never_served(
    kind: str, converted: dict[str, Path], shaped: dict[str, Path], start: Start
) -> None:
    """A rank is killed with half a picture written, another goes on, and a third comes."""
    path = {**converted, **shaped}[kind]
    expected = due(path, size=36)
    (other,) = start(path, [{"size": 36}])
    for kill_at in (1, 9, 30):
        (killed,) = start(path, [{"size": 36, "seed": kill_at}], kill_at=kill_at)
        killed.ask(0)
        with pytest.raises(EOFError):
            killed.hear()
        killed.process.join()
        assert killed.process.exitcode == -signal.SIGKILL
    served, read = other.serve(0)
    assert served == expected
    assert IMAGES - 30 - 8 - 1 <= read < IMAGES
    (third,) = start(path, [{"size": 36}])
    assert third.serve(1) == (expected, 0)


def test_ranks_keep_the_same_share_of_what_does_not_fit(converted: dict[str, Path], start: Start) -> None:
    """The first decides; the memory that it has taken is no longer free for the second."""
    path, kept = converted["webdataset"], 30
    expected = due(path, size=STORED_SIZE)
    ranks = start(path, ranks_of(2, size=STORED_SIZE), room=kept * STORED_SIZE**2 * 3)
    for rank in ranks:
        rank.serve(0)
    later = [rank.serve(epoch) for epoch in (5, 6) for rank in ranks]
    for both in (later[:2], later[2:]):
        assert {i: c for served, _ in both for i, c in served.items()} == expected
    assert len(memory_of(ranks)) == 1
    asked = [read for _, read in later[2:]]
    assert sum(asked) <= 2 * (IMAGES - kept), "each reads ahead, of its next epoch"


@pytest.mark.slow
def test_ranks_of_a_raw_tree_share_with_their_worker_processes(raw_tree: Path, start: Start) -> None:
    expected = due(raw_tree, size=32)
    ranks = start(raw_tree, ranks_of(2, size=32))
    for rank in ranks:
        rank.serve(0)
    later = [rank.serve(3) for rank in ranks]
    assert {i: c for served, _ in later for i, c in served.items()} == expected
    assert sum(read for _, read in later) == 0
    inodes = memory_of(ranks)
    assert len(inodes) == 1
    for rank in ranks:
        rank.kill()
    deadline_s = time.monotonic() + 20  # torch's workers look every few seconds whether their parent lives
    while any(memory_files(pid).keys() & inodes.keys() for pid in filter(str.isdigit, os.listdir("/proc"))):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_kills_at_any_moment_leave_no_wrong_pixel(converted: dict[str, Path], start: Start) -> None:
    path, rng = converted["webdataset"], random.Random(0)
    expected = due(path, size=STORED_SIZE)
    seeds = itertools.count()
    living: list[Rank] = []
    for epoch in range(60):
        living += start(path, [{"size": STORED_SIZE, "seed": next(seeds)} for _ in range(3 - len(living))])
        for rank in living:
            rank.ask(epoch)
        time.sleep(rng.random() * 0.1)
        killed = rng.sample(living, rng.choice((1, 1, 2, 3)))
        for rank in killed:
            rank.kill()
        living = [rank for rank in living if rank not in killed]
        assert all(rank.hear()[0] == expected for rank in living)
        assert len(memory_of(living)) == bool(living)
