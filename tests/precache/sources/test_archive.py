"""What is peculiar to archives: folders around all, links, names that lead out, and what is refused."""

import io
import os
import resource
import signal
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precache.errors import ImageError, SourceError
from tests.command import ROOT
from tests.precache.sources.archives import JPEG, Files, link, make_tar, make_zip, scan_of

MAKERS = pytest.mark.parametrize(("make", "suffix"), [(make_tar, "tar"), (make_zip, "zip")])


@MAKERS
@pytest.mark.parametrize("prefix", ["./", "a/b/"])
def test_folders_that_hold_everything_are_no_classes(
    make: Any, suffix: str, prefix: str, tmp_path: Path
) -> None:
    def of(*names: str, **options: Any) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
        archive = make(tmp_path / f"x.{suffix}", {f"{prefix}{name}": JPEG for name in names})
        scan = scan_of(archive, **options)
        return scan.classes, [(ref.path, ref.split) for ref in scan.samples]

    names = ("train/a/1.jpg", "train/b/2.jpg", "val/a/3.jpg")
    assert of(*names) == (("a", "b"), list(zip(names, ("train", "train", "val"), strict=True)))
    assert of("train/dog/1.jpg") == (("dog",), [("train/dog/1.jpg", "train")])
    assert of("dog/1.jpg") == (("dog",), [("dog/1.jpg", "")])
    deep = of("animals/dog/1.jpg", "cars/vw/3.jpg", class_depth=2)
    assert deep[0] == ("animals/dog", "cars/vw")
    assert of("1.jpg", "2.jpg", class_depth=0) == ((), [("1.jpg", ""), ("2.jpg", "")])
    beside = scan_of(
        make(tmp_path / f"y.{suffix}", {"top/dog/1.jpg": JPEG, "README": b"", "__MACOSX/x": b""})
    )
    assert [ref.path for ref in beside.samples] == ["dog/1.jpg"]
    assert {ignored.path for ignored in beside.ignored} == {"README", "__MACOSX"}


def zip_with_links(path: Path, files: Files, links: list[tarfile.TarInfo]) -> Path:
    with zipfile.ZipFile(make_zip(path, files), "a") as archive:
        for member in links:
            info = zipfile.ZipInfo(member.name)
            info.create_system, info.external_attr = 3, 0o120777 << 16
            archive.writestr(info, member.linkname)
    return path


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(("make", "suffix"), [(make_tar, "tar"), (zip_with_links, "zip")])
def test_links_are_what_they_lead_to_in_the_archive(make: Any, suffix: str, tmp_path: Path) -> None:
    wrong = [
        link("b/../b/self.jpg", "self.jpg"),  # its name leads out of the archive
        link("c/self.jpg", "self.jpg"),
        link("c/out.jpg", "../../etc/passwd"),
        link("a/abs.jpg", "/1.jpg"),
        link("b/past.jpg", "../../a/1.jpg"),
        link("c/long.jpg", "./" * 2500 + "../a/1.jpg"),
        link("d", "a"),
    ]
    right = [link("b/again.jpg", "nowhere"), link("b/again.jpg", "../a/1.jpg")]  # the last one counts
    right += [link("b/soft.jpg", "../a/1.jpg"), link("b/chain.jpg", "soft.jpg")]
    if suffix == "tar":
        wrong.append(link("c/gone.jpg", "none", tarfile.LNKTYPE))
        right.append(link("b/hard.jpg", "a/1.jpg", tarfile.LNKTYPE))
    scan = scan_of(make(tmp_path / f"x.{suffix}", {"a/1.jpg": b"picture"}, wrong + right))
    names = {"a/1.jpg", *(member.name for member in right)}
    assert {ref.path: scan.source.read(ref, 10) for ref in scan.samples} == dict.fromkeys(names, b"picture")
    assert f" and {len(wrong) - 1 - 3} more" in scan.warnings[0]
    assert scan.scanned == len(scan.samples) + len(scan.ignored)


class TwoOfOneName(Files):
    def items(self) -> Any:
        return [("a/1.jpg", b"first"), ("a/1.jpg", b"second")]


@MAKERS
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_names_lead_nowhere_and_of_two_the_last_one_counts(make: Any, suffix: str, tmp_path: Path) -> None:
    names = ("/etc/abs.jpg", "../up.jpg", "../../up.jpg", "a/../../up.jpg", "./a//1.jpg", "a/./2.jpg")
    archive = make(tmp_path / f"x.{suffix}", dict.fromkeys((*names, "/".join(["x"] * 400)), JPEG))
    scan = scan_of(archive)
    assert [ref.path for ref in scan.samples] == ["a/1.jpg", "a/2.jpg", "etc/abs.jpg"]
    assert ["leads out of the archive" in ignored.reason for ignored in scan.ignored] == [True] * 4
    for both in (("a", "a/1.jpg", "b/2.jpg"), ("a/1.jpg", "a", "b/2.jpg")):
        scan = scan_of(make(archive, dict.fromkeys(both, JPEG)))
        assert scan.scanned == len(scan.samples) + len(scan.ignored) == 3
        assert scan.samples[-1].path == "b/2.jpg"
    assert os.listdir(tmp_path) == [archive.name]
    scan = scan_of(make(archive, TwoOfOneName()))
    assert [scan.source.read(ref, 10) for ref in scan.samples] == [b"second"]
    assert ["the last one is used" in ignored.reason for ignored in scan.ignored] == [True]


def test_names_of_zips_without_utf8_are_those_that_unzip_writes(tmp_path: Path) -> None:
    for system, stored, name in (
        (3, b"a/\xc3\xa9.jpg", "a/\u00e9.jpg"),
        (3, b"a/\xe9.jpg", "a/\udce9.jpg"),
        (0, b"a/\x82.jpg", "a/\u00e9.jpg"),
        (0, b"a\\x1.jpg", "a/x1.jpg"),
    ):
        member = zipfile.ZipInfo("a/" + "x" * (len(stored) - 2))
        member.create_system = system
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
            archive.writestr(member, JPEG)
        whole = (tmp_path / "x.zip").read_bytes()
        (tmp_path / "x.zip").write_bytes(whole.replace(member.filename.encode(), stored))
        assert [ref.path for ref in scan_of(tmp_path / "x.zip").samples] == [name]


def test_devices_and_pipes_are_ignored(tmp_path: Path) -> None:
    kinds = (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"V")
    members = [link(f"a/{kind!r}.jpg", "", kind) for kind in kinds]
    scan = scan_of(make_tar(tmp_path / "x.tar", {"a/x.jpg": JPEG}, members))
    assert [ref.path for ref in scan.samples] == ["a/x.jpg"]
    assert [ignored.reason for ignored in scan.ignored] == ["not a regular file"] * len(kinds)


def lying(**fields: Any) -> Callable[[Path], bytes]:
    """A tar whose second member's header has other values; its sum is right."""

    def make(path: Path) -> bytes:
        member = tarfile.TarInfo("a/2.jpg")
        data = bytearray(make_tar(path, {"a/1.jpg": JPEG}, [member], form=tarfile.GNU_FORMAT).read_bytes())
        for name, value in fields.items():
            start = {"size": 1024 + 124, "kind": 1024 + 156}[name]
            data[start : start + len(value)] = value
        data[1024 + 148 : 1024 + 156] = b" " * 8
        data[1024 + 148 : 1024 + 156] = b"%06o\0 " % sum(data[1024:1536])
        return bytes(data)

    return make


def patched_zip(mark: bytes, offset: int, value: bytes) -> Callable[[Path], bytes]:
    def make(path: Path) -> bytes:
        data = bytearray(make_zip(path, {"a/1.jpg": JPEG * 9}).read_bytes())
        at = data.index(mark) + offset
        data[at : at + len(value)] = value
        return bytes(data)

    return make


def sparse_in_pax(path: Path) -> bytes:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("a/p.jpg")
        member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}
        member.size = 512
        tar.addfile(member, io.BytesIO(b"1\n0\n0\n".ljust(512, b"\0")))
    return path.read_bytes()


def many_headers(path: Path) -> bytes:
    """Headers about a header that is never there, behind a member."""
    whole = make_tar(path, {"a/1.jpg": JPEG}).read_bytes()[:1024]
    return whole + tarfile.TarInfo("a" * 200).tobuf(tarfile.GNU_FORMAT)[:1024] * 5000


def bzipped(path: Path) -> bytes:
    return make_zip(path, {"a/1.jpg": JPEG}, zipfile.ZIP_BZIP2).read_bytes()


def odd_member(kind: bytes) -> Callable[[Path], bytes]:
    member = tarfile.TarInfo("a/s.jpg")
    member.type = kind
    return lambda path: make_tar(path, {}, [member], form=tarfile.GNU_FORMAT).read_bytes()


REFUSED: list[tuple[str, Callable[[Path], bytes], list[str]]] = [
    ("tar", lambda path: b"x" * 2000, ["is not a tar"]),
    ("tar", lambda path: b"", ["is not a tar"]),
    ("tar", odd_member(tarfile.GNUTYPE_SPARSE), ["'a/s.jpg'", "sparse", "unpack"]),
    ("tar", sparse_in_pax, ["'a/p.jpg'", "sparse", "unpack"]),
    ("tar", odd_member(b"M"), ["'a/s.jpg'", "continues in another", "unpack"]),
    ("tar", lambda path: make_tar(path, {"a/1.jpg": JPEG}).read_bytes() * 2, ["'tar -A'"]),
    ("tar", lying(size=b"77777777777\0"), ["breaks off", "'a/2.jpg'", "download"]),
    ("tar", lying(size=b"\xff" * 12), ["impossible size", "download"]),
    ("tar", lying(size=b"77777777777\0", kind=b"L"), ["at byte 1,024", "a header of", "download"]),
    ("tar", many_headers, ["at byte 1,024", "recursion", "download"]),
    ("zip", lambda path: b"x" * 2000, ["is not a zip"]),
    ("zip", patched_zip(b"PK\1\2", 20, b"\xff\xff\xff\x7f"), ["'a/1.jpg'", "large", "download"]),
    ("zip", patched_zip(b"PK\1\2", 8, b"\1"), ["'a/1.jpg'", "encrypted", "unpack"]),
    ("zip", bzipped, ["'a/1.jpg'", "bzip2", "unpack"]),
    ("zip", patched_zip(b"PK\5\6", 12, b"\xff\xff"), ["join the parts"]),
]


@pytest.mark.parametrize(("suffix", "make", "mentions"), REFUSED)
def test_what_cannot_be_read_in_place_is_refused_by_name(
    suffix: str, make: Callable[[Path], bytes], mentions: list[str], tmp_path: Path
) -> None:
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(make(path))
    with pytest.raises(SourceError, match=f"^{path}: ") as caught:
        scan_of(path)
    assert [mention for mention in mentions if mention not in str(caught.value)] == []


@pytest.mark.parametrize("suffix", ["tar", "zip", "tar.gz", "tar.bz2", "tar.xz"])
def test_an_archive_that_breaks_off_anywhere_is_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{suffix}"
    if suffix == "zip":
        whole = make_zip(path, {"a/1.jpg": JPEG * 9, "b/2.jpg": JPEG * 9}).read_bytes()
        cuts = [*range(len(whole))]
    else:
        files = {f"{c}/{n}.jpg": os.urandom(900) for c in "ab" for n in range(3)}
        whole = make_tar(path, files, mode=f"w:{suffix[4:]}").read_bytes()
        end = len(whole.rstrip(b"\0")) // 512 * 512 + 512  # the two empty blocks, then padding, follow
        cuts = [*range(0, end, 256), end] if suffix == "tar" else [*range(0, len(whole), 211), len(whole) - 1]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(SourceError, match="; download or copy it again"):
            scan_of(path)


class _Pipe:
    """What cannot be sought in: zips written to it have sizes behind the members."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self.write, self.flush = file.write, file.flush


def test_zips_written_to_a_pipe_or_behind_a_program_are_read(tmp_path: Path) -> None:
    with open(tmp_path / "x.zip", "wb") as file, zipfile.ZipFile(_Pipe(file), "w") as to:  # type: ignore
        to.writestr(f"a/{'n' * 400}.jpg", b"picture" * 9, zipfile.ZIP_DEFLATED)
    (tmp_path / "y.zip").write_bytes(b"#!/bin/sh\nunzip $0\n" + (tmp_path / "x.zip").read_bytes())
    for name in ("x.zip", "y.zip"):
        scan = scan_of(tmp_path / name)
        assert [scan.source.read(ref, 10) for ref in scan.samples] == [b"picture" * 9]


def test_a_picture_that_is_not_what_its_crc_says_is_rejected(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "x.zip", {"a/1.jpg": b"picture"}, zipfile.ZIP_STORED)
    path.write_bytes(path.read_bytes().replace(b"picture", b"pictura"))
    scan = scan_of(path)
    with pytest.raises(ImageError, match="CRC-32"):
        scan.source.read(scan.samples[0], 100)


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


def test_what_a_killed_process_unpacked_is_removed_by_the_next(tmp_path: Path) -> None:
    files = {"a/1.jpg": os.urandom(20_000)}
    path = make_tar(tmp_path / "x.tar.gz", files, mode="w:gz")
    (tmp_path / "tmp").mkdir()
    unpacked = make_tar(tmp_path / "x.tar", files).stat().st_size
    code = (
        "import os, sys; from precache import open_source\n"
        "paths = {open_source(sys.argv[1]).scan().source.archive.path for _ in range(2)}\n"
        "print(*map(os.path.getsize, paths), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-c", code, str(path)]
    for _ in range(2):
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert answer.returncode == -signal.SIGKILL
        assert answer.stdout.split() == [str(unpacked)], "once"
        assert len(os.listdir(tmp_path / "tmp")) == 1


def test_where_there_is_no_room_to_unpack_it_says_so(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar.gz", {"a/1.jpg": os.urandom(200_000)}, mode="w:gz")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(SourceError, match=r"does not fit .* set TMPDIR"):
            scan_of(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
