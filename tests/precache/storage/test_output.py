"""Files have the bytes and checksums that were written, and incomplete files are removed."""

import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from precache.storage import (
    atomic_write,
    crc32c_file,
    open_new,
    open_single,
    output,
    read_regular_part,
    temporary_path,
)
from precache.storage.output import OutputFile, publish


def test_crc32c_file_gives_the_check_value_of_castagnolis_crc(tmp_path: Path) -> None:
    """Compare with the catalogue of CRC algorithms, CRC-32/ISCSI."""
    (tmp_path / "file").write_bytes(b"123456789")
    assert crc32c_file(tmp_path / "file") == "e3069283"


@pytest.mark.parametrize("way", ["direct", "through the cache", "direct I/O that raises EINVAL"])
def test_output_file_holds_what_was_written(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_BUFFER_BYTES", 2 * 4096)  # so that several buffers are written
    if way == "through the cache":
        monkeypatch.setattr(output, "_DIRECT", 0)
    elif way != "direct":  # so that an offset is not a multiple of the disk's blocks
        monkeypatch.setattr(output, "_BLOCK_BYTES", 1)
    lengths = [0, 1, 4095, 4096, 4097, 3 * 4096]
    for pieces in (*([n] for n in lengths), lengths, [1] * 9, [100_001] * 3):
        parts = [np.random.default_rng(count).bytes(count) for count in pieces]
        with OutputFile(tmp_path / "file") as file:
            for part in parts:
                file.write(np.frombuffer(part, np.uint8).data)
            if sum(pieces) > 4:
                whole = b"".join(parts)
                parts = [b"1234", whole[4:]]
                file.replace_start(whole[:4], parts[0])
            assert not (tmp_path / "file").exists()
        publish([file])
        content = (tmp_path / "file").read_bytes()
        assert content == b"".join(parts)
        assert (file.bytes, file.crc32c) == (len(content), crc32c_file(tmp_path / "file"))
        assert os.listdir(tmp_path) == ["file"]
        (tmp_path / "file").unlink()


def test_output_file_is_removed_if_its_block_raises(tmp_path: Path) -> None:
    def write_and_raise() -> None:
        with OutputFile(tmp_path / "file") as file:
            for _ in range(8):
                file.write(bytes(4 << 20))
            raise KeyError

    with pytest.raises(KeyError):
        write_and_raise()
    assert os.listdir(tmp_path) == []


def test_output_file_is_removed_if_its_thread_cannot_write(tmp_path: Path) -> None:
    def write() -> None:
        with OutputFile(tmp_path / "file") as file:
            for _ in range(8):
                file.write(bytes(4 << 20))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, check=lambda error: error.errno == errno.EFBIG):
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []


@pytest.fixture(params=[os.symlink, os.link], ids=["symbolic link", "hard link"])
def link(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Link to the file `target`."""
    (tmp_path / "target").write_text("mine")
    request.param(tmp_path / "target", tmp_path / "link")
    return tmp_path / "link"


def test_open_new_refuses_a_link(link: Path) -> None:
    with pytest.raises(FileExistsError):
        open_new(link)


def test_open_single_refuses_a_link(link: Path) -> None:
    with pytest.raises(OSError, check=lambda error: error.errno in (errno.ELOOP, errno.EINVAL)):
        open_single(link)


def test_open_single_refuses_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, check=lambda error: error.errno in (errno.ENXIO, errno.EINVAL)):
        open_single(tmp_path / "pipe")


def test_atomic_write_replaces_a_link_not_its_target(link: Path) -> None:
    with atomic_write(link) as file:
        file.write(b"new")
    assert link.read_bytes() == b"new"
    assert not link.is_symlink()
    assert link.with_name("target").read_text() == "mine"


def test_temporary_path_differs_at_each_call(tmp_path: Path) -> None:
    assert temporary_path(tmp_path / "file") != temporary_path(tmp_path / "file")


@pytest.mark.parametrize("count", [0, 3, 2**40, 2**62])
@pytest.mark.parametrize("start", [0, 2, 9, 2**40])
def test_read_regular_part_allocates_no_more_than_the_file_has(
    start: int, count: int, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert read_regular_part(tmp_path / "file", start, count) == b"content"[start : start + count]
