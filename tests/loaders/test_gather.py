"""Reading pieces of files in one system call, and what becomes of those that are not there."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import loaders
from loaders import gather as gathering
from loaders.gather import gather, is_available
from tests.conftest import IMAGES, STORED_SIZE

pytestmark = pytest.mark.skipif(not is_available(), reason="this system does not let a process do so")

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


def test_pieces_are_read_in_the_order_asked(file: Path, descriptor: int) -> None:
    order = np.random.default_rng(4).permutation(COUNT)
    out = np.zeros((COUNT, ROWS, ROW_BYTES), np.uint8)
    assert gather(np.full(COUNT, descriptor), starts(order), ROW_BYTES, out)
    assert np.array_equal(out, pieces(file)[order])
    assert gather(np.empty(0, int), starts(order[:0]), ROW_BYTES, out[:0])


def test_crops_are_read_without_what_lies_around_them(file: Path, descriptor: int) -> None:
    rng = np.random.default_rng(5)
    order, tops, lefts = rng.permutation(COUNT), rng.integers(0, 11, COUNT), rng.integers(0, 25, COUNT)
    out = np.zeros((COUNT, 40, 24, 3), np.uint8)
    assert gather(np.full(COUNT, descriptor), starts(order, tops, lefts), ROW_BYTES, out)
    for piece, top, left, got in zip(pieces(file)[order], tops, lefts, out, strict=True):
        assert np.array_equal(piece[top : top + 40, left : left + 72], got.reshape(40, 72))


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


def test_what_the_system_keeps_goes_with_the_thread(file: Path, descriptor: int) -> None:
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
    assert min(held) == max(held) > before
    assert contexts() == before


def contexts() -> int:
    """How many of this process there are: each has a mapping."""
    return Path("/proc/self/maps").read_text().count("/[aio]")


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
def test_a_forked_process_reads_too_and_leaves_its_parents_alone(file: Path, descriptor: int) -> None:
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
    ("settings", "gathered"),
    [
        ({"shuffle": "full"}, True),
        ({"shuffle": "window"}, True),
        ({"size": 40}, True),
        ({"size": 40, "augment": "crop"}, True),
        ({"size": 40, "augment": "train"}, False),  # resized
    ],
    ids=str,
)
def test_shards_are_gathered_and_what_is_served_is_the_same_without(
    converted: dict[str, Path], settings: dict[str, object], gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []

    def counted(*arguments: object) -> bool:
        done.append(gather(*arguments) * len(arguments[3]))
        return done[-1] > 0

    def served() -> np.ndarray:
        with loaders.build(converted["shards"], batch_size=8, **settings) as loader:
            return np.concatenate([batch.images.numpy() for batch in loader])

    monkeypatch.setattr("loaders.shards.gather", counted)
    images = served()
    assert images.shape == (IMAGES, 3, *[settings.get("size", STORED_SIZE)] * 2)
    assert (sum(done) >= IMAGES) == gathered
    monkeypatch.setattr("loaders.shards.gather", lambda *arguments: False)
    assert np.array_equal(images, served())


def test_a_system_without_the_calls_reads_nothing(
    file: Path, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "_SYSTEM_CALLS", {})
    found = []
    out = np.zeros((1, ROWS, ROW_BYTES), np.uint8)
    thread = threading.Thread(
        target=lambda: found.append(gather(np.array([descriptor]), np.array([0]), ROW_BYTES, out))
    )
    thread.start()
    thread.join()
    assert found == [False]
