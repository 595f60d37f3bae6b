"""Archives as sources: outermost folders, links, member names, and archives that are refused."""

import os
import signal
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest

from precache.errors import ImageError, SourceError
from precache.sources.archive import INVALID_NAME
from tests.command import ROOT
from tests.precache.sources.archives import JPEG, Files, link, make_tar, make_zip, scan_of

MAKERS = pytest.mark.parametrize(("make", "suffix"), [(make_tar, "tar"), (make_zip, "zip")])


@MAKERS
def test_folders_around_everything_are_no_classes(make: Any, suffix: str, tmp_path: Path) -> None:
    for names, depth, expected in (
        ("train/a/1 train/b/2 val/a/3", 1, "train/a/1:a:train train/b/2:b:train val/a/3:a:val"),
        ("dog/1", 1, "dog/1:dog:"),
        ("animals/dog/1 cars/vw/3", 2, "animals/dog/1:animals/dog: cars/vw/3:cars/vw:"),
        ("1 2", 0, "1:: 2::"),
    ):
        files = {f"a/b/{name}.jpg": JPEG for name in names.split()} | {"README": b"", "__MACOSX/x": b""}
        scan = scan_of(make(tmp_path / f"x.{suffix}", files), class_depth=depth)
        classes = (*scan.classes, "")  # the label -1 has no class
        samples = [f"{s.path.removesuffix('.jpg')}:{classes[s.label]}:{s.split}" for s in scan.samples]
        assert " ".join(samples) == expected
        assert {ignored.path for ignored in scan.ignored} == {"README", "__MACOSX"}


@MAKERS
def test_an_outermost_folder_that_is_a_class_or_a_split_is_kept(
    make: Any, suffix: str, tmp_path: Path
) -> None:
    for names, classes, split in (
        ("cat/1 cat/2 cat/2023/3", ("cat",), ""),
        ("set/cover set/cat/1 set/dog/2", ("cat", "dog"), ""),
        ("pets/cover pets/back pets/cat/1 pets/dog/2", ("cat", "dog"), ""),
        ("n014/images/1", ("images",), ""),  # like the tree n014
        ("Training/cat/1 Training/dog/2", ("cat", "dog"), "train"),
        ("@eaDir/x set/train/cat/1 set/valid/cat/2", ("cat",), "train val"),
    ):
        scan = scan_of(make(tmp_path / f"x.{suffix}", {f"{name}.jpg": JPEG for name in names.split()}))
        assert scan.classes == classes
        assert " ".join(scan.samples.split_names) == split


def zip_with_links(path: Path, files: Files, links: list[tarfile.TarInfo]) -> Path:
    with zipfile.ZipFile(make_zip(path, files), "a") as archive:
        for member in links:
            info = zipfile.ZipInfo(member.name)
            info.create_system, info.external_attr = 3, 0o120777 << 16
            archive.writestr(info, member.linkname)
    return path


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(("make", "suffix"), [(make_tar, "tar"), (zip_with_links, "zip")])
def test_links_have_the_content_of_their_targets(make: Any, suffix: str, tmp_path: Path) -> None:
    wrong = [
        link("b/../b/name.jpg", "../a/1.jpg"),  # its name leads out of the archive
        link("c/out.jpg", "../../etc/passwd"),
        link("a/abs.jpg", "/1.jpg"),
        link("b/past.jpg", "../../a/1.jpg"),
        link("c/long.jpg", "./" * 2500 + "../a/1.jpg"),
        link("d", "a"),
    ]
    devices: list[tarfile.TarInfo] = []
    right = [link("b/again.jpg", "nowhere"), link("b/again.jpg", "../a/1.jpg")]  # the last one is used
    right += [link("b/soft.jpg", "../a/1.jpg"), link("./b//dots.jpg", "./../b/../a/1.jpg")]
    if suffix == "tar":
        kinds = (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"V")
        devices = [link(f"a/{kind!r}.jpg", "", kind) for kind in kinds]
        wrong.append(link("c/gone.jpg", "none", tarfile.LNKTYPE))
        right += [link(f"b/{name}.jpg", "a/1.jpg", tarfile.LNKTYPE) for name in ("hard", "again")]
        right.append(link("b/hard2.jpg", "b/hard.jpg", tarfile.LNKTYPE))
    scan = scan_of(make(tmp_path / f"x.{suffix}", {"a/1.jpg": b"picture"}, wrong + right + devices))
    names = {"a/1.jpg", *(os.path.normpath(member.name) for member in right)}
    assert {ref.path: scan.source.read(ref, 10) for ref in scan.samples} == dict.fromkeys(names, b"picture")
    assert f" and {len(wrong) - 1 - 3} more" in scan.warnings[0]
    assert scan.scanned == len(scan.samples) + len(scan.ignored)


@MAKERS
def test_member_names_never_lead_out_of_the_archive(make: Any, suffix: str, tmp_path: Path) -> None:
    names = ("/etc/abs.jpg", "../up.jpg", "../../up.jpg", "a/../../up.jpg", "./a//1.jpg", "a/./2.jpg")
    archive = make(tmp_path / f"x.{suffix}", dict.fromkeys((*names, "/".join(["x"] * 400)), JPEG))
    scan = scan_of(archive)
    assert [ref.path for ref in scan.samples] == ["a/1.jpg", "a/2.jpg", "etc/abs.jpg"]
    assert [ignored.reason for ignored in scan.ignored] == [INVALID_NAME] * 4
    assert os.listdir(tmp_path) == [archive.name]


@MAKERS
def test_a_member_that_is_file_and_folder_is_ignored(make: Any, suffix: str, tmp_path: Path) -> None:
    for names in (("a", "a/1.jpg", "b/2.jpg"), ("a/1.jpg", "a", "b/2.jpg")):
        scan = scan_of(make(tmp_path / f"x.{suffix}", dict.fromkeys(names, JPEG)))
        assert scan.scanned == len(scan.samples) + len(scan.ignored) == 3
        assert scan.samples[-1].path == "b/2.jpg"


PICTURES = {"a/1.jpg": JPEG, "b/2.jpg": JPEG}
LINKS_TO_LINKS = {
    "a link to a link": [link("b/1st.jpg", "2nd.jpg"), link("b/2nd.jpg", "2.jpg")],
    "a circle of two": [link("b/1st.jpg", "../a/3.jpg"), link("a/3.jpg", "../b/1st.jpg")],
    "itself": [link("b/1st.jpg", "./1st.jpg")],
    "a link out of the archive": [link("b/1st.jpg", "2nd"), link("b/2nd", "/etc/passwd")],
}


@pytest.mark.parametrize("links", LINKS_TO_LINKS.values(), ids=LINKS_TO_LINKS)
@pytest.mark.parametrize(("make", "suffix"), [(make_tar, "tar"), (zip_with_links, "zip")])
def test_a_link_to_a_link_is_refused_by_name(
    make: Any, suffix: str, links: list[tarfile.TarInfo], tmp_path: Path
) -> None:
    path = make(tmp_path / f"x.{suffix}", PICTURES, links)
    with pytest.raises(SourceError, match=r"'b/1st\.jpg'") as raised:
        scan_of(path)
    assert raised.value.path == str(path)
    assert "tar -h" in raised.value.remedy


@MAKERS
def test_an_archive_in_an_archive_is_refused_by_name(make: Any, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{suffix}"
    for name in ("train.zip", "a/more.TAR", "a/b/c.tar.gz"):
        for pictures in ({}, PICTURES):
            with pytest.raises(SourceError, match=f"'{name}'") as raised:
                scan_of(make(path, {**pictures, name: b""}))
            assert raised.value.path == str(path)
            assert "unpack" in raised.value.remedy


@MAKERS
def test_inner_archives_in_skipped_folders_and_samples_are_allowed(
    make: Any, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"x.{suffix}"
    skipped = {"@Recycle/x.zip": b"", "__MACOSX/._y.zip": b"", ".cache/z.tar": b"", "a/x.zip/3.jpg": JPEG}
    assert len(scan_of(make(path, {**PICTURES, **skipped})).samples) == 3
    webdataset_sample = {"1.jpg": JPEG, "1.cls": b"0", "1.depth.zip": b""}
    assert len(scan_of(make(path, webdataset_sample)).samples) == 1


@pytest.mark.parametrize(("offset", "value", "problem"), [(8, 1, "encrypted"), (10, 9, "method 9")])
@pytest.mark.parametrize("name", ["b/2.jpg", "b/2", "notes.txt"])
def test_zip_members_that_cannot_be_unpacked_are_refused_by_name(
    name: str, offset: int, value: int, problem: str, tmp_path: Path
) -> None:
    path = make_zip(tmp_path / "x.zip", {"a/1.jpg": JPEG, name: JPEG})
    whole = bytearray(path.read_bytes())
    entry = whole.rindex(b"PK\1\2")
    struct.pack_into("<H", whole, entry + offset, value)
    path.write_bytes(whole)
    with pytest.raises(SourceError, match=f"'{name}'.* {problem}") as raised:
        scan_of(path)
    assert raised.value.path == str(path)


def nested_headers(path: Path) -> bytes:
    """Make a tar with 5,000 headers that each announce a long name for the next header."""
    whole = make_tar(path, {"a/1.jpg": JPEG}).read_bytes()[:1024]
    return whole + tarfile.TarInfo("a" * 200).tobuf(tarfile.GNU_FORMAT)[:1024] * 5000


def header_with_negative_size(path: Path) -> bytes:
    """Make a tar whose second member has a negative size, and a global header with another size."""
    whole = make_tar(path, {"a/1.jpg": JPEG}).read_bytes()[:1024]
    global_header = tarfile.TarInfo.create_pax_global_header({"size": "3"})
    member = bytearray(tarfile.TarInfo("a/2.jpg").tobuf())
    member[124:136] = (-1536).to_bytes(12, "big", signed=True)
    member[148:156] = b" " * 8
    member[148:156] = b"%06o\0 " % sum(member)
    return whole + global_header + bytes(member) + bytes(10240)


def test_a_tar_that_cannot_be_read_in_place_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    sparse, continued = link("a/s.jpg", "", tarfile.GNUTYPE_SPARSE), link("a/m.jpg", "", b"M")
    for content, detail in (
        (make_tar(path, {}, [sparse]).read_bytes(), "'a/s.jpg'"),
        (make_tar(path, {}, [continued]).read_bytes(), "'a/m.jpg'"),
        (make_tar(path, {"a/1.jpg": JPEG}).read_bytes() * 2, "'tar -A'"),
        (nested_headers(path), "at byte 1,024"),
        (header_with_negative_size(path), "at byte 1,024"),
    ):
        path.write_bytes(content)
        with pytest.raises(SourceError, match=detail) as raised:
            scan_of(path)
        assert raised.value.path == str(path)


@pytest.mark.parametrize("suffix", ["tar", "zip", "tar.gz", "tar.bz2", "tar.xz"])
def test_a_truncated_archive_is_refused(suffix: str, tmp_path: Path) -> None:
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
        with pytest.raises(SourceError, check=lambda error: "copy it again" in error.remedy):
            scan_of(path)


def test_a_zip_bomb_is_rejected_without_unpacking_it(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "x.zip", {"a/1.jpg": bytes(80 << 20), "a/2.jpg": bytes(80 << 20)})
    whole = bytearray(path.read_bytes())
    entry = whole.index(b"PK\1\2", whole.index(b"PK\1\2") + 4)
    struct.pack_into("<L", whole, entry + 24, 100)  # the second member claims to be small
    path.write_bytes(whole)
    scan = scan_of(path)
    tracemalloc.start()
    try:
        for ref in scan.samples:
            with pytest.raises(ImageError, check=lambda error, ref=ref: error.path == f"{path}/{ref.path}"):
                scan.source.read(ref, 100)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_files_of_a_killed_process_are_removed_by_the_next(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar.gz", {"a/1.jpg": os.urandom(20_000)}, mode="w:gz")
    (tmp_path / "tmp").mkdir()
    code = (
        "import os, sys; from precache import open_source\n"
        "both = [open_source(sys.argv[1]).scan() for _ in range(2)]\n"
        "os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code, path], env=environment, check=False)
        assert done.returncode == -signal.SIGKILL
        assert len(os.listdir(tmp_path / "tmp")) == 1  # of this process, which has decompressed once
