"""Warm and cold files, as the kernel counts them."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from bench.machine import page_cache

SHARED_MEMORY = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no posix_fadvise")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files, of which one is empty, and what is no file; just written, so in memory."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/one").write_bytes(os.urandom(3 * 2**20 + 5))
    (tmp_path / "two").write_bytes(os.urandom(9000))
    (tmp_path / "empty").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def on_a_disk(path: Path) -> bool:
    """Whether files there can leave memory at all; asked of the system, not of the code under test."""
    kinds = {line.split()[1]: line.split()[2] for line in Path("/proc/self/mounts").read_text().splitlines()}
    mounts = [mount for mount in kinds if path.is_relative_to(mount)]
    return kinds[max(mounts, key=len)] not in ("tmpfs", "ramfs")


def test_what_was_just_written_or_read_is_resident(folder: Path) -> None:
    assert page_cache.resident_share(folder) == 1
    assert page_cache.resident_share(folder / "two") == 1
    assert page_cache.resident_share(folder / "empty") == 0


def test_dropped_pages_leave_and_reading_brings_them_back(folder: Path) -> None:
    if not on_a_disk(folder):
        pytest.skip("the folder for temporary files is in memory")
    before = [(file, file.read_bytes()) for file in (folder / "a/one", folder / "two")]
    assert page_cache.drop(folder) == 0
    assert page_cache.resident_share(folder) == 0
    assert page_cache.warm(folder)
    assert page_cache.resident_share(folder) == 1
    assert page_cache.drop(folder / "two") == 0
    # the other file's pages stay: 769 of 772
    assert page_cache.resident_share(folder) == pytest.approx(769 / 772)
    assert all(file.read_bytes() == content for file, content in before)


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no tmpfs at /dev/shm")
def test_a_file_system_in_memory_is_found_out() -> None:
    folder = Path(tempfile.mkdtemp(dir=SHARED_MEMORY))
    try:
        (folder / "file").write_bytes(bytes(2**20))
        assert page_cache.drop(folder) == 1
    finally:
        shutil.rmtree(folder)
