"""Files written once: their bytes, their checksum, and that nothing half-written is left."""

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from precache.storage import (
    atomic_write,
    crc32c_file,
    open_append,
    open_new,
    output,
    read_regular_part,
    temporary_path,
)
from precache.storage.output import OutputFile, publish


def test_crc32c_is_castagnolis(tmp_path: Path) -> None:
    """The check value of the catalogue of CRC algorithms, for CRC-32/ISCSI."""
    (tmp_path / "file").write_bytes(b"123456789")
    assert crc32c_file(tmp_path / "file") == "e3069283"


@pytest.mark.parametrize("where", ["direct", "through the cache", "where direct I/O answers EINVAL"])
def test_a_file_holds_what_was_written(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_BUFFER_BYTES", 2 * 4096)  # several buffers
    if where == "through the cache":
        monkeypatch.setattr(output, "_DIRECT", 0)
    elif where != "direct":  # an offset that is not a multiple of the block
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
            before = (tmp_path / "file").exists()
        publish([file])
        assert not before
        content = (tmp_path / "file").read_bytes()
        assert content == b"".join(parts)
        assert (file.bytes, file.crc32c) == (len(content), crc32c_file(tmp_path / "file"))
        assert os.listdir(tmp_path) == ["file"]
        (tmp_path / "file").unlink()


def test_what_is_given_up_or_fails_in_the_background_leaves_nothing(tmp_path: Path) -> None:
    def give_up() -> None:
        with OutputFile(tmp_path / "file") as file:
            for _ in range(8):
                file.write(bytes(4 << 20))
            raise OSError("enough")

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for max_bytes, says in ((limits[0], "enough"), (1 << 20, "File too large")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, limits[1]))
        try:
            with pytest.raises(OSError, match=says):
                give_up()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert os.listdir(tmp_path) == []


def test_no_name_is_written_through_or_over(tmp_path: Path) -> None:
    """Of what is written beside, nobody can know the name; and what has it is not written to."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for make in (os.symlink, os.link):
        make(victim, tmp_path / "name")
        with pytest.raises(FileExistsError):
            open_new(tmp_path / "name")
        with pytest.raises(OSError, match=r"symbolic links|not a regular file with one name"):
            open_append(tmp_path / "name")
        with atomic_write(tmp_path / "name") as file:  # takes the place of the link, not of its target
            file.write(b"new")
        assert (tmp_path / "name").read_bytes() == b"new"
        assert not (tmp_path / "name").is_symlink()
        assert victim.read_text() == "mine"
        (tmp_path / "name").unlink()
    assert temporary_path(victim) != temporary_path(victim)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"No such device|not a regular file"):
        open_append(tmp_path / "pipe")


@pytest.mark.parametrize("count", [0, 3, 2**40, 2**62])
@pytest.mark.parametrize("start", [0, 2, 9, 2**40])
def test_a_part_takes_no_more_memory_than_there_is_to_read(start: int, count: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert read_regular_part(tmp_path / "file", start, count) == b"content"[start : start + count]
