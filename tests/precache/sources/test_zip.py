import io
import struct
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from precache import convert, open_dataset
from precache.errors import ImageError, SourceError
from tests.conftest import small_recipe
from tests.precache.sources.archives import JPEG, files_of, make_tar, make_zip, scan_of


def test_links_of_a_zip_are_followed_too(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a/1.jpg", b"picture")
        member = zipfile.ZipInfo("b/2.jpg")
        member.create_system, member.external_attr = 3, 0o120777 << 16
        archive.writestr(member, "../a/1.jpg")
    scan = scan_of(tmp_path / "x.zip")
    assert [(ref.path, scan.source.read(ref, 10)) for ref in scan.samples] == [
        ("a/1.jpg", b"picture"), ("b/2.jpg", b"picture")
    ]  # fmt: skip


def test_a_zip_that_breaks_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole = make_zip(tmp_path / "x.zip", {"a/1.jpg": JPEG * 9, "b/2.jpg": JPEG * 9}).read_bytes()
    for cut in range(len(whole)):
        (tmp_path / "x.zip").write_bytes(whole[:cut])
        with pytest.raises(SourceError, match=r"x\.zip: is no zip, or breaks off"):
            scan_of(tmp_path / "x.zip")


class _Pipe(io.RawIOBase):
    """What cannot be sought in: zips written to it have sizes behind the members."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self.file = file

    def writable(self) -> bool:
        return True

    def write(self, content: bytes) -> int:  # type: ignore[override]
        return self.file.write(content)


def test_zips_written_to_a_pipe_or_behind_a_program_are_read(tmp_path: Path) -> None:
    with (
        open(tmp_path / "x.zip", "wb") as file,
        zipfile.ZipFile(_Pipe(file), "w", zipfile.ZIP_DEFLATED) as to,
    ):
        to.writestr(f"a/{'n' * 400}.jpg", b"picture" * 9)
    (tmp_path / "y.zip").write_bytes(b"#!/bin/sh\nunzip $0\n" + (tmp_path / "x.zip").read_bytes())
    for name in ("x.zip", "y.zip"):
        scan = scan_of(tmp_path / name)
        assert [scan.source.read(ref, 10) for ref in scan.samples] == [b"picture" * 9]


def test_a_zip_of_more_members_than_16_bits_count_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for number in range(65_540):
            archive.writestr(f"a/{number:05d}.jpg", b"")
    scan = scan_of(tmp_path / "x.zip")
    assert len(scan.samples) == 65_540
    whole = (tmp_path / "x.zip").read_bytes()
    (tmp_path / "x.zip").write_bytes(whole.replace(b"PK\6\6", b"PK\6\5"))
    with pytest.raises(SourceError, match="64-bit directory is missing"):
        scan_of(tmp_path / "x.zip")


def test_sizes_of_64_bits_in_a_zip_are_read(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "x.zip", {"a/1.jpg": b"picture"}, zipfile.ZIP_STORED)
    whole = bytearray(path.read_bytes())
    entry = whole.index(b"PK\1\2")
    record = struct.pack("<2H2Q", 1, 16, 7, 7)
    struct.pack_into("<2L", whole, entry + 20, 0xFFFFFFFF, 0xFFFFFFFF)
    struct.pack_into("<H", whole, entry + 30, len(record))
    end = whole.index(b"PK\5\6")
    struct.pack_into("<L", whole, end + 12, end - entry + len(record))
    path.write_bytes(whole[:end] + record + whole[end:])
    scan = scan_of(path)
    assert [(ref.bytes, scan.source.read(ref, 10)) for ref in scan.samples] == [(7, b"picture")]


def test_zips_that_cannot_be_unpacked_are_refused_by_name(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "x.zip", {"a/1.jpg": JPEG * 9}, zipfile.ZIP_BZIP2)
    with pytest.raises(
        SourceError, match=r"'a/1\.jpg' is packed by the method bzip2.*unpack it, and convert"
    ):
        scan_of(path)
    whole = bytearray(make_zip(path, {"a/1.jpg": JPEG}).read_bytes())
    whole[whole.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(whole)
    with pytest.raises(SourceError, match=r"'a/1\.jpg' is encrypted"):
        scan_of(path)


def test_names_of_zips_without_utf8_are_those_that_unzip_writes(tmp_path: Path) -> None:
    cases = (
        (3, b"a/\xc3\xa9.jpg", "a/\u00e9.jpg"),
        (3, b"a/\xe9.jpg", "a/\udce9.jpg"),
        (0, b"a/\x82.jpg", "a/\u00e9.jpg"),
        (0, b"a\\x1.jpg", "a/x1.jpg"),
    )
    for system, stored, name in cases:
        member = zipfile.ZipInfo("a/" + "x" * (len(stored) - 2))
        member.create_system = system
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
            archive.writestr(member, JPEG)
        whole = (tmp_path / "x.zip").read_bytes()
        (tmp_path / "x.zip").write_bytes(whole.replace(member.filename.encode(), stored))
        assert [ref.path for ref in scan_of(tmp_path / "x.zip").samples] == [name]


def test_a_picture_that_is_not_what_its_crc_says_is_rejected_by_name(raw_tree: Path, tmp_path: Path) -> None:
    path = make_zip(tmp_path / "x.zip", files_of(raw_tree), zipfile.ZIP_STORED)
    victim = scan_of(path).samples[9]
    content = (raw_tree / victim.path).read_bytes()
    whole = bytearray(path.read_bytes())
    whole[whole.index(content) + len(content) // 2] ^= 1  # in the picture's data: it decodes
    path.write_bytes(whole)
    convert(path, tmp_path / "out", small_recipe("shards"), workers=0, max_rejects=0.1)
    (rejected,) = open_dataset(tmp_path / "out").manifest.rejected
    assert (rejected.id, rejected.path) == (9, victim.path)
    assert "CRC-32" in rejected.reason


def test_a_bomb_is_stopped_by_what_a_picture_can_be(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "x.zip", {"a/1.jpg": bytes(80 << 20), "a/2.jpg": bytes(80 << 20)})
    whole = bytearray(path.read_bytes())
    entry = whole.index(b"PK\1\2", whole.index(b"PK\1\2") + 4)
    struct.pack_into("<L", whole, entry + 24, 100)  # says that it is small
    path.write_bytes(whole)
    scan = scan_of(path)
    with pytest.raises(ImageError, match="too large"):
        scan.source.read(scan.samples[0], 100)
    tracemalloc.start()
    try:
        with pytest.raises(ImageError, match="CRC-32"):
            scan.source.read(scan.samples[1], 100)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    tar = make_tar(tmp_path / "x.tar", {"a/1.jpg": bytes(80 << 20)})
    with pytest.raises(ImageError, match=r"x\.tar/a/1\.jpg: is too large"):
        scan_of(tar).source.read(scan_of(tar).samples[0], 100)
