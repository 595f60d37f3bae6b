"""Reading pieces of files in one system call, and what becomes of those that are not there."""

import errno
import multiprocessing
import os
import platform
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.backends import gather as gathering
from loaders.backends.cache import CachedReader
from loaders.backends.gather import can_gather, gather
from tests.building import build_loader
from tests.conftest import IMAGES, STORED_SIZE
from tests.damage import damage_tree

AVAILABLE = can_gather(1, gaps=False)
needs_aio = pytest.mark.skipif(not AVAILABLE, reason="this system does not let a process do so")

COUNT, ROWS, ROW_BYTES = 300, 50, 96  # more pieces than a call takes


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    np.random.default_rng(3).integers(0, 255, (COUNT, ROWS, ROW_BYTES), np.uint8).tofile(path)
    return path


@pytest.fixture
def descriptor(file: Path) -> Iterator[int]:
    with open(file, "rb") as opened:
        yield opened.fileno()


def pieces(file: Path) -> np.ndarray:
    return np.fromfile(file, np.uint8).reshape(-1, ROWS, ROW_BYTES)


def starts(order: np.ndarray, row: int = 0, column: int = 0) -> np.ndarray:
    return (order * ROWS + row) * ROW_BYTES + column


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in gathering._CALLS, reason="not known to have it"
)
def test_linux_lets_a_process_do_so() -> None:
    """Or, in some sandboxes, says that it does not: nothing else is wrong with the calls."""
    assert why_not() in ({None} if AVAILABLE else {errno.ENOSYS, errno.EPERM, errno.EAGAIN})


def why_not() -> int | None:
    try:
        gathering._Context()
    except OSError as error:
        return error.errno
    return None


@needs_aio
def test_pieces_are_read_in_the_order_asked(file: Path, descriptor: int) -> None:
    order = np.random.default_rng(4).permutation(COUNT)
    out = np.zeros((COUNT, ROWS, ROW_BYTES), np.uint8)
    assert gather(np.full(COUNT, descriptor), starts(order), ROW_BYTES, out)
    assert np.array_equal(out, pieces(file)[order])
    assert gather(np.empty(0, int), starts(order[:0]), ROW_BYTES, out[:0])


@needs_aio
def test_crops_are_read_without_what_lies_around_them(file: Path, descriptor: int) -> None:
    rng = np.random.default_rng(5)
    order, tops, lefts = rng.permutation(COUNT), rng.integers(0, 11, COUNT), rng.integers(0, 25, COUNT)
    out = np.zeros((COUNT, 40, 24, 3), np.uint8)
    assert gather(np.full(COUNT, descriptor), starts(order, tops, lefts), ROW_BYTES, out)
    for piece, top, left, got in zip(pieces(file)[order], tops, lefts, out, strict=True):
        assert np.array_equal(piece[top : top + 40, left : left + 72], got.reshape(40, 72))


@needs_aio
def test_gaps_limit_the_rows_of_a_piece_and_nothing_else(file: Path, descriptor: int) -> None:
    content = file.read_bytes()
    for rows, row_bytes, stride, expected in (
        (600, 96, 96, True), (512, 60, 96, True), (513, 60, 96, False),
    ):  # fmt: skip
        out = np.zeros((1, rows, row_bytes), np.uint8)
        assert gather(np.array([descriptor]), np.array([7]), stride, out) == expected
        assert can_gather(rows, gaps=stride != row_bytes) == expected
        for row in range(rows if expected else 0):
            assert out[0, row].tobytes() == content[7 + row * stride :][:row_bytes]


@needs_aio
def test_each_piece_comes_from_its_own_file(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 10)
    files = [open(path, "rb") for path in paths]  # noqa: SIM115 (closed below)
    try:
        out = np.full((3, 1, 4), 9, np.uint8)
        assert gather(np.array([file.fileno() for file in files])[[2, 0, 1]], np.array([0, 3, 6]), 4, out)
        assert out[:, 0].tolist() == [[2] * 4, [0] * 4, [1] * 4]
    finally:
        for file in files:
            file.close()


@needs_aio
def test_what_a_file_has_no_longer_is_said(file: Path, descriptor: int) -> None:
    out = np.zeros((2, ROWS, ROW_BYTES), np.uint8)
    descriptors, both = np.full(2, descriptor), starts(np.array([0, COUNT - 1]))
    assert gather(descriptors, both, ROW_BYTES, out)
    os.truncate(file, starts(np.array(COUNT - 1), row=ROWS - 1))
    assert not gather(descriptors, both, ROW_BYTES, out)
    assert not gather(descriptors, both, ROW_BYTES, out[:, :, :30].copy())
    assert gather(descriptors[:1], both[:1], ROW_BYTES, out[:1])
    assert not gather(np.array([descriptor, 10**6]), both[[0, 0]], ROW_BYTES, out), "no such file is open"
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        assert not gather(np.full(1, directory), both[:1], ROW_BYTES, out[:1]), "it cannot be read"
    finally:
        os.close(directory)


def test_memory_that_is_not_one_piece_to_write_to_is_refused(descriptor: int) -> None:
    fixed = np.zeros((1, 2, 96), np.uint8)
    fixed.flags.writeable = False
    for out in (fixed, np.zeros((2, 2, 96), np.uint8)[:, :, :50], np.zeros((1, 2, 96), np.int8)):
        with pytest.raises(ValueError, match="contiguous uint8"):
            gather(np.full(len(out), descriptor), np.zeros(len(out), int), 96, out)


@needs_aio
@pytest.mark.parametrize(
    ("code", "expected"), [(errno.EAGAIN, [False, False, True]), (errno.EPERM, [False, False, False])]
)
def test_reads_that_cannot_be_waited_for_are_ended_and_not_taken_for_later_ones(
    code: int, expected: list[bool], file: Path, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = np.zeros((1, ROWS, ROW_BYTES), np.uint8)
    good, bad = np.array([0]), starts(np.array([COUNT]))
    found: list[bool] = []

    def fails(context: object, running: int) -> int:
        raise OSError(code, "io_getevents")

    def read() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(gathering._Context, "_wait", fails)
            found.append(gather(np.array([descriptor]), good, ROW_BYTES, out))
        found.extend(gather(np.array([descriptor]), where, ROW_BYTES, out) for where in (bad, good))

    before = contexts()
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert found == expected
    assert contexts() == before + expected[-1], "one that was waited for in vain is not used again"


@needs_aio
def test_what_the_system_keeps_of_a_thread_the_next_one_uses(file: Path, descriptor: int) -> None:
    before = contexts()
    held = []

    def read() -> None:
        out = np.zeros((1, ROWS, ROW_BYTES), np.uint8)
        assert gather(np.array([descriptor]), np.array([0]), ROW_BYTES, out)
        held.append(contexts())

    for _ in range(3):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert set(held) == {before + 1}
    assert contexts() == before + 1


@needs_aio
def test_no_two_threads_use_the_same_at_a_time(file: Path, descriptor: int) -> None:
    before = contexts()
    held, all_read = set(), threading.Barrier(3)

    def read() -> None:
        out = np.zeros((1, ROWS, ROW_BYTES), np.uint8)
        assert gather(np.array([descriptor]), np.array([0]), ROW_BYTES, out)
        held.add(gathering._local.context)
        all_read.wait()

    for _ in range(2):
        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(held) == 3
    assert set(gathering._free) == held
    assert contexts() == before + 3


def contexts() -> int:
    """How many of this process there are: each has a mapping."""
    return Path("/proc/self/maps").read_text().count("/[aio]")


@pytest.fixture(autouse=True)
def none_free() -> None:
    """Those of threads that other tests have ended are gone."""
    gathering._free.clear()


@needs_aio
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
def test_a_forked_process_reads_too(file: Path, descriptor: int) -> None:
    out = np.zeros((1, ROWS, ROW_BYTES), np.uint8)
    asked = np.array([descriptor]), np.array([0]), ROW_BYTES
    assert gather(*asked, out)
    child = os.fork()
    if child == 0:
        out[:] = 0
        os._exit(0 if gather(*asked, out) and np.array_equal(out[0], pieces(file)[0]) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert gather(*asked, out)


@pytest.mark.parametrize(
    "settings",
    [
        {"shuffle": "full"},
        {"shuffle": "window"},
        {"size": 42, "crop_ratio": 0.875},
        {"size": 40, "augment": "crop"},
    ],
    ids=str,
)
def test_shards_are_gathered_and_what_is_served_is_the_same_without(
    converted: dict[str, Path], settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[bool] = []

    def watched(*arguments: object) -> bool:
        done.append(gather(*arguments))
        return done[-1]

    def served() -> np.ndarray:
        with build_loader(converted["shards"], batch_size=8, check="never", **settings) as loader:
            return np.concatenate([batch.images.numpy() for batch in loader])

    monkeypatch.setattr("loaders.backends.shards.gather", watched)
    images = served()
    assert images.shape == (IMAGES, 3, *[settings.get("size", STORED_SIZE)] * 2)
    assert all(done)
    assert bool(done) == AVAILABLE
    for patched, says in (("gather", lambda *_: False), ("can_gather", lambda *_, **__: False)):
        monkeypatch.setattr(f"loaders.backends.shards.{patched}", says)
        assert np.array_equal(images, served())


def test_crops_that_are_resized_are_read_one_by_one(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*arguments: object) -> bool:
        raise AssertionError("the rows around a crop are needed, too")

    monkeypatch.setattr("loaders.backends.shards.gather", refuses)
    with build_loader(converted["shards"], size=40, augment="train") as loader:
        assert sum(len(batch.ids) for batch in loader) == IMAGES


def test_a_cache_in_memory_takes_whole_pictures_at_once_but_for_what_is_missing(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = damage_tree(raw_tree, tmp_path / "tree")
    taken: list[int] = []
    take = CachedReader._take

    def watched(reader: CachedReader, positions: np.ndarray, kept: object, *rest: Any) -> bool:
        whole = take(reader, positions, kept, *rest)  # type: ignore[arg-type]
        taken.append(len(positions[rest[0]]) if whole else 0)
        return whole

    monkeypatch.setattr(CachedReader, "_take", watched)
    settings = {"batch_size": 10, "cache": "ram", "on_error": "skip", "size": 32, "workers": 0}
    with build_loader(tmp_path / "tree", **settings) as loader:
        for _ in range(2):
            assert sum(len(batch.ids) for batch in loader) == IMAGES - len(bad)
    assert all(taken)
    assert sum(taken) >= IMAGES - 10 * len(bad), "of the second epoch all batches without a bad picture"


def test_a_system_without_the_calls_reads_nothing(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_CALLS", {})
    found = []
    out = np.zeros((1, ROWS, ROW_BYTES), np.uint8)

    def read() -> None:
        found.append(gather(np.array([descriptor]), np.array([0]), ROW_BYTES, out))
        found.append(can_gather(1, gaps=False))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert found == [False, False]
