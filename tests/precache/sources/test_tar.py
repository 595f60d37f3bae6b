"""Tars that are read in place: their members, damage, and archives that are refused with a command."""

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from precache.errors import SourceError
from tests.precache.sources.tars import JPEG, files_of, link, make_tar, make_zip, scan_of

SAMPLE = {"1.jpg": JPEG, "1.cls": b"0"}


def test_member_names_never_lead_out_of_the_tar(tmp_path: Path) -> None:
    names = ("/etc/abs", "../up", "../../up", "a/../../up", "./a//1", "a/./2", "/".join(["x"] * 400))
    files = {f"{name}.jpg": JPEG for name in ("1", *names)}
    tar = make_tar(tmp_path / "x.tar", {"1.txt": b"", **files})
    scan = scan_of(tar)
    assert [ref.path for ref in scan.samples] == ["1.jpg", "etc/abs.jpg", "a/1.jpg", "a/2.jpg"]
    assert len({ignored.reason for ignored in scan.ignored}) == 1
    assert scan.scanned == len(scan.samples) + 4
    assert os.listdir(tmp_path) == [tar.name]


def test_links_and_devices_in_a_tar_are_ignored(tmp_path: Path) -> None:
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"V")
    others = [link(f"a/{kind!r}.jpg", "1.jpg", kind) for kind in kinds]
    folder = link("a", "", tarfile.DIRTYPE)
    scan = scan_of(make_tar(tmp_path / "x.tar", SAMPLE, [folder, *others]))
    assert [ref.path for ref in scan.samples] == ["1.jpg"]
    assert [ignored.path for ignored in scan.ignored] == [member.name for member in others]


def nested_headers(path: Path) -> bytes:
    """Make a tar with 5,000 headers that each announce a long name for the next header."""
    whole = make_tar(path, {"1.jpg": JPEG}).read_bytes()[:1024]
    return whole + tarfile.TarInfo("a" * 200).tobuf(tarfile.GNU_FORMAT)[:1024] * 5000


def header_with_negative_size(path: Path) -> bytes:
    """Make a tar whose second member has a negative size, and a global header with another size."""
    whole = make_tar(path, {"1.jpg": JPEG}).read_bytes()[:1024]
    global_header = tarfile.TarInfo.create_pax_global_header({"size": "3"})
    member = bytearray(tarfile.TarInfo("2.jpg").tobuf())
    member[124:136] = (-1536).to_bytes(12, "big", signed=True)
    member[148:156] = b" " * 8
    member[148:156] = b"%06o\0 " % sum(member)
    return whole + global_header + bytes(member) + bytes(10240)


def test_a_tar_that_cannot_be_read_in_place_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    sparse, continued = link("s.jpg", "", tarfile.GNUTYPE_SPARSE), link("m.jpg", "", b"M")
    for content, detail in (
        (make_tar(path, {}, [sparse]).read_bytes(), "'s.jpg'"),
        (make_tar(path, {}, [continued]).read_bytes(), "'m.jpg'"),
        (make_tar(path, {"1.jpg": JPEG}).read_bytes() * 2, "into a folder"),
        (nested_headers(path), "at byte 1,024"),
        (header_with_negative_size(path), "at byte 1,024"),
    ):
        path.write_bytes(content)
        for source in (path, tmp_path):
            with pytest.raises(SourceError, match=detail) as raised:
                scan_of(source)
            assert raised.value.path == str(path)


def test_a_truncated_tar_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    files = {f"{number}.{part}": os.urandom(900) for number in range(3) for part in ("jpg", "txt")}
    whole = make_tar(path, files).read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512  # the two empty blocks, then padding, follow
    for cut in (*range(0, end, 256), end):
        path.write_bytes(whole[:cut])
        with pytest.raises(SourceError, check=lambda error: "copy it again" in error.remedy):
            scan_of(tmp_path)


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_a_compressed_tar_is_refused_with_a_command(mode: str, tmp_path: Path) -> None:
    tar = make_tar(tmp_path / f"0.tar.{mode[2:]}", SAMPLE, mode=mode)
    with pytest.raises(SourceError) as raised:
        scan_of(tmp_path)
    assert raised.value.path == str(tar)
    subprocess.run(raised.value.remedy.split("'")[1], shell=True, check=True)
    assert len(scan_of(tmp_path).samples) == 1


@pytest.mark.parametrize("name", ["x.tar", "x.tgz", "x.TBZ2", "x.zip", "with space.zip"])
def test_an_archive_of_class_folders_is_refused_with_a_command(
    name: str, raw_tree: Path, tmp_path: Path
) -> None:
    path, files = tmp_path / name, files_of(raw_tree, "photos/")
    if name.endswith("zip"):
        make_zip(path, files)
        folder = path.with_suffix("") / "photos"
    else:
        make_tar(path, files, mode={"x.tgz": "w:gz", "x.TBZ2": "w:bz2"}.get(name, "w"))
        folder = tmp_path / "photos"
    with pytest.raises(SourceError) as raised:
        scan_of(path)
    assert str(raised.value.path) == str(path)
    command = raised.value.remedy.split("'")
    unpack = "'".join(command[1:-1]) if "zip" in name else command[1]
    subprocess.run(unpack, shell=True, check=True, cwd=tmp_path, stdout=subprocess.DEVNULL)
    assert files_of(folder) == files_of(raw_tree)
