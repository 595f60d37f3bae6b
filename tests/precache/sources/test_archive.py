import io
import os
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

from precache import convert, open_dataset
from precache.errors import ImageError, SourceError
from tests.command import ROOT
from tests.conftest import small_recipe
from tests.precache.sources.archives import JPEG, Files, files_of, link, make_tar, make_zip, scan_of

MAKERS = pytest.mark.parametrize(("make", "suffix"), [(make_tar, "tar"), (make_zip, "zip")])


@MAKERS
@pytest.mark.parametrize("prefix", ["./", "101_ObjectCategories/", "a/b/"])
def test_folders_that_hold_everything_are_no_classes(
    make: Any, suffix: str, prefix: str, tmp_path: Path
) -> None:
    def of(number: int, *names: str, **options: Any) -> Any:
        archive = make(tmp_path / f"{number}.{suffix}", {f"{prefix}{name}": JPEG for name in names})
        return scan_of(archive, **options)

    split = of(1, "train/a/1.jpg", "train/b/2.jpg", "val/a/3.jpg")
    assert [(ref.path, ref.split) for ref in split.samples] == [
        ("train/a/1.jpg", "train"), ("train/b/2.jpg", "train"), ("val/a/3.jpg", "val")
    ]  # fmt: skip
    deep = of(2, "animals/dog/1.jpg", "animals/cat/2.jpg", "cars/vw/3.jpg", class_depth=2)
    assert deep.classes == ("animals/cat", "animals/dog", "cars/vw")
    assert [ref.path for ref in of(3, "1.jpg", "2.jpg", class_depth=0).samples] == ["1.jpg", "2.jpg"]
    assert of(4, "dog/1.jpg").classes == ("dog",)
    assert [ref.split for ref in of(5, "train/dog/1.jpg").samples] == ["train"]
    beside = scan_of(
        make(tmp_path / f"7.{suffix}", {"top/dog/1.jpg": JPEG, "README": b"", "__MACOSX/x": b""})
    )
    assert [ref.path for ref in beside.samples] == ["dog/1.jpg"]
    assert {ignored.path for ignored in beside.ignored} == {"README", "__MACOSX"}
    assert beside.scanned == 3


@MAKERS
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_of_members_with_one_name_the_last_one_counts(make: Any, suffix: str, tmp_path: Path) -> None:
    class Twice(Files):
        def items(self) -> Any:
            return [("a/1.jpg", b"first"), ("a/1.jpg", b"second")]

    scan = scan_of(make(tmp_path / f"x.{suffix}", Twice()))
    assert [scan.source.read(ref, 10) for ref in scan.samples] == [b"second"]
    assert [(i.path, "the last one is used" in i.reason) for i in scan.ignored] == [("a/1.jpg", True)]


def zip_with_links(path: Path, files: Files, links: list[tarfile.TarInfo]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        for member in links:
            info = zipfile.ZipInfo(member.name)
            info.create_system, info.external_attr = 3, 0o120777 << 16
            archive.writestr(info, member.linkname)
    return path


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(("make", "suffix"), [(make_tar, "tar"), (zip_with_links, "zip")])
def test_links_are_what_they_lead_to_in_the_archive(make: Any, suffix: str, tmp_path: Path) -> None:
    wrong = [
        link("b/../b/self.jpg", "self.jpg"),
        link("c/self.jpg", "self.jpg"),
        link("c/out.jpg", "../../etc/passwd"),
        link("a/abs.jpg", "/1.jpg"),
        link("b/past.jpg", "../none/../a/1.jpg"),
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
    assert "links to files that are not in the archive are left out: " in scan.warnings[0]
    # the name of one leads out of the archive
    assert f" and {len(wrong) - 1 - 3} more" in scan.warnings[0]
    assert scan.scanned == len(scan.samples) + len(scan.ignored)


@MAKERS
def test_names_lead_nowhere(make: Any, suffix: str, tmp_path: Path) -> None:
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


def test_long_and_strange_names_of_a_ustar_are_read(tmp_path: Path) -> None:
    names = [f"{'c' * 90}/{'n' * 90}.jpg", "a/\udce9.jpg", "a/\u00fc \n.jpg"]
    path = make_tar(tmp_path / "x.tar", dict.fromkeys(names, JPEG), form=tarfile.USTAR_FORMAT)
    assert [ref.path for ref in scan_of(path).samples] == [names[2], names[1], names[0]]


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


def of_kind(kind: bytes, name: str = "a/s.jpg") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    return member


def test_devices_and_pipes_are_ignored(tmp_path: Path) -> None:
    kinds = (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"V")
    scan = scan_of(
        make_tar(tmp_path / "x.tar", {"a/x.jpg": JPEG}, [of_kind(k, f"a/{k!r}.jpg") for k in kinds])
    )
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


REFUSED: dict[str, tuple[str, Callable[[Path], bytes]]] = {
    "x.tar: is not a tar": ("tar", lambda path: b"x" * 2000),
    "x.tar: is not a tar (empty": ("tar", lambda path: b""),
    "x.tar: 'a/s.jpg' is stored as a sparse file; unpack": (
        "tar", lambda path: make_tar(path, {}, [of_kind(tarfile.GNUTYPE_SPARSE)], form=1).read_bytes()
    ),
    "x.tar: 'a/p.jpg' is stored as a sparse file; unpack": ("tar", sparse_in_pax),
    "x.tar: 'a/s.jpg' continues in another archive; unpack": (
        "tar", lambda path: make_tar(path, {}, [of_kind(b"M")], form=1).read_bytes()
    ),
    "join them with 'tar -A'": ("tar", lambda path: make_tar(path, {"a/1.jpg": JPEG}).read_bytes() * 2),
    "x.tar: breaks off: 'a/2.jpg' should end at byte": ("tar", lying(size=b"77777777777\0")),
    "has an impossible size": ("tar", lying(size=b"\xff" * 12)),
    "is damaged, or breaks off, at byte 1,024 (a header of": ("tar", lying(size=b"77777777777\0", kind=b"L")),
    "is damaged, or breaks off, at byte 1,024 (maximum recursion": ("tar", many_headers),
    "x.zip: is not a zip": ("zip", lambda path: b"x" * 2000),
    "its member 'a/1.jpg' cannot be as large": ("zip", patched_zip(b"PK\1\2", 20, b"\xff\xff\xff\x7f")),
    "its member 'a/1.jpg' is encrypted; unpack": ("zip", patched_zip(b"PK\1\2", 8, b"\1")),
    "'a/1.jpg' is packed by the method bzip2, not by deflate; unpack": (
        "zip", lambda path: make_zip(path, {"a/1.jpg": JPEG}, zipfile.ZIP_BZIP2).read_bytes()
    ),
    "join the parts of a zip of several files": ("zip", patched_zip(b"PK\5\6", 12, b"\xff\xff")),
}  # fmt: skip


@pytest.mark.parametrize("phrase", REFUSED)
def test_what_cannot_be_read_in_place_is_refused_by_name(phrase: str, tmp_path: Path) -> None:
    suffix, make = REFUSED[phrase]
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(make(path))
    with pytest.raises(SourceError) as caught:
        scan_of(path)
    assert phrase in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


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
        with pytest.raises(
            SourceError, match=r"(breaks off|is not a tar|is not a zip|cannot be unpacked).*; download"
        ):
            scan_of(path)


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


def test_zips_whose_numbers_take_64_bits_are_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        for number in range(65_540):
            archive.writestr(f"a/{number:05d}.jpg", b"")
    assert len(scan_of(tmp_path / "many.zip").samples) == 65_540
    path = make_zip(tmp_path / "x.zip", {"a/1.jpg": b"picture"}, zipfile.ZIP_STORED)
    whole = bytearray(path.read_bytes())
    entry, end = whole.index(b"PK\1\2"), whole.index(b"PK\5\6")
    record = struct.pack("<2H2Q", 1, 16, 7, 7)
    struct.pack_into("<2L", whole, entry + 20, 0xFFFFFFFF, 0xFFFFFFFF)
    struct.pack_into("<H", whole, entry + 30, len(record))
    struct.pack_into("<L", whole, end + 12, end - entry + len(record))
    path.write_bytes(whole[:end] + record + whole[end:])
    scan = scan_of(path)
    assert [(ref.bytes, scan.source.read(ref, 10)) for ref in scan.samples] == [(7, b"picture")]


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


def test_a_compressed_tar_leaves_nothing_behind_when_it_is_killed(raw_tree: Path, tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar.gz", files_of(raw_tree), mode="w:gz")
    (tmp_path / "spool").mkdir()
    code = (
        "import sys, time; from precache import open_source\n"
        "scan = open_source(sys.argv[1]).scan()\n"
        "print(scan.source.archive.spool.path, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "spool")}
    process = subprocess.Popen([sys.executable, "-c", code, path], env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    spool = process.stdout.readline().decode().strip()
    assert os.path.getsize(spool) > 0
    assert os.readlink(spool).startswith(f"{tmp_path}/spool/")
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert os.listdir(tmp_path / "spool") == []


def test_a_compressed_tar_is_held_as_long_as_its_source(raw_tree: Path, tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar.gz", files_of(raw_tree), mode="w:gz")
    before = len(os.listdir("/proc/self/fd"))
    scan = scan_of(path)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del scan
    assert len(os.listdir("/proc/self/fd")) == before


def test_where_there_is_no_room_to_unpack_it_says_so(raw_tree: Path, tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar.gz", files_of(raw_tree), mode="w:gz")
    code = (
        "import resource, sys; from precache import open_source\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "open_source(sys.argv[1]).scan()"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, path], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "does not fit into" in answer.stderr
    assert "set TMPDIR" in answer.stderr
