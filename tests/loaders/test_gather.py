"""Copying pieces of memory in one system call, and what becomes of those that are not there."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

import loaders
from loaders import filler
from loaders.gather import gather, is_available
from tests.conftest import IMAGES

pytestmark = pytest.mark.skipif(not is_available(), reason="this system does not let a process do so")

COUNT, LENGTH = 1500, 5000  # more pieces than a call takes, and none on a page's boundary


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    np.random.default_rng(3).integers(0, 255, (COUNT, LENGTH), np.uint8).tofile(path)
    return path


def test_pieces_are_copied_one_after_the_other(file: Path) -> None:
    order = np.random.default_rng(4).permutation(COUNT)
    rows = np.fromfile(file, np.uint8).reshape(COUNT, LENGTH)
    out = np.zeros_like(rows)
    assert gather((rows.ctypes.data + order * LENGTH).astype(np.uint64), out)
    assert np.array_equal(out, rows[order])
    assert gather(np.empty(0, np.uint64), out[:0])


def test_what_a_file_has_no_longer_is_not_copied_and_does_no_harm(file: Path) -> None:
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        start = np.frombuffer(mapped, np.uint8).ctypes.data
        addresses = np.array([start, start + (COUNT - 1) * LENGTH], np.uint64)
        out = np.zeros((2, LENGTH), np.uint8)
        assert gather(addresses, out)
        os.truncate(file, 2 * LENGTH)
        assert not gather(addresses, out)
        assert gather(addresses[:1], out[:1])
    assert not gather(addresses, out), "the file is unmapped"


def test_shards_and_a_cache_in_memory_are_gathered(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[int] = []

    def counted(addresses: np.ndarray, out: np.ndarray) -> bool:
        done = gather(addresses, out)
        gathered.append(done * len(out))
        return done

    monkeypatch.setattr(filler, "gather", counted)
    for backend, settings, epochs in (
        ("shards", {"shuffle": "full"}, 2),  # the first maps the files
        ("shards", {"shuffle": "window"}, 1),
        ("webdataset", {"cache": "ram"}, 2),  # the first fills the cache
    ):
        gathered.clear()
        for file in converted[backend].iterdir():
            file.read_bytes()  # what is not in the system's cache is not gathered
        with loaders.build(converted[backend], batch_size=8, last="drop", **settings) as loader:
            for _ in range(epochs):
                assert len(list(loader)) == IMAGES // 8
        assert sum(gathered) >= IMAGES // 8 * 8, (backend, settings)


def test_without_the_call_the_same_is_served(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []
    for available in (True, False):
        monkeypatch.setattr("loaders.shards.is_available", lambda available=available: available)
        with loaders.build(converted["shards"], batch_size=8) as loader:
            served.append(np.concatenate([batch.images.numpy() for batch in loader]))
    assert np.array_equal(served[0], served[1])
