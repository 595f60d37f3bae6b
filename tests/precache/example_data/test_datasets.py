"""`fetch` against a local HTTP server that breaks, lies or refuses, with archives like the published ones."""

import io
import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from precache.errors import DownloadError, SettingError
from precache.example_data import datasets
from precache.example_data.datasets import PublicDataset, fetch
from precache.sources.tree import scan_tree
from tests.command import ROOT
from tests.precache.example_data.publishing import Server, published, tar_of


def test_fetch_gives_the_tree(dataset: PublicDataset, raw_tree: Path, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    assert fetch(dataset, tmp_path / "raw", on_progress=lambda *p: progress.append(p)) == 70
    ours, theirs = scan_tree(tmp_path / "raw"), scan_tree(raw_tree)
    assert list(ours.samples) == list(theirs.samples)
    assert all(
        (tmp_path / "raw" / s.path).read_bytes() == (raw_tree / s.path).read_bytes() for s in ours.samples
    )
    assert progress[-1][0] == progress[-1][1] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive.tar", "raw"]


def zip_of(*members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


def test_an_archive_inside_a_zip_is_unpacked(server: Server, raw_tree: Path, tmp_path: Path) -> None:
    """As Caltech-101 is published: a zip with a tar.gz, annotations and Finder leftovers."""
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as tar:
        tar.add(raw_tree, "101_Objects")
    content = zip_of(
        ("caltech-101/101_Objects.tar.gz", inner.getvalue()),
        ("caltech-101/Annotations.tar", b""),
        ("__MACOSX/caltech-101/101_Objects.tar.gz", b""),
    )
    changes = {"inner": "101_Objects.tar.gz", "folder": "101_Objects"}
    assert fetch(published(server, content, **changes), tmp_path / "raw") == 70


def test_an_archive_put_there_by_hand_needs_no_network_and_an_existing_tree_stays(
    dataset: PublicDataset, server: Server, raw_tree: Path, tmp_path: Path
) -> None:
    (tmp_path / "archive.tar").write_bytes(server.content)
    assert fetch(replace(dataset, url="http://127.0.0.1:1/files/archive.tar"), tmp_path / "raw") == 70
    with pytest.raises(SettingError, match="exists and is not empty"):
        fetch(dataset, raw_tree)
    assert server.requests == []


def member(name: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd" if kind != tarfile.REGTYPE else ""
    info.size = 10 if kind == tarfile.REGTYPE else 0
    return info


EXTRA = "256_Objects/001.anchor/link.jpg"
LEFT_OUT = [(name, tarfile.REGTYPE) for name in ("", ".", "./", "/evil.jpg", "other/evil.jpg")]


@pytest.mark.parametrize(("name", "kind"), [*LEFT_OUT, (EXTRA, tarfile.SYMTYPE), (EXTRA, tarfile.LNKTYPE)])
def test_what_is_no_file_of_the_tree_is_left_out(
    name: str, kind: bytes, server: Server, raw_tree: Path, tmp_path: Path
) -> None:
    content = tar_of(raw_tree, "256_Objects", member(name, kind))
    assert fetch(published(server, content), tmp_path / "raw") == 70
    assert not any(path.is_symlink() or path.stat().st_nlink > 1 for path in tmp_path.rglob("*.jpg"))
    assert not any("evil" in path.name for path in tmp_path.rglob("*"))


NO_TAR = zip_of(("", b"nothing"))


@pytest.mark.parametrize(
    ("changes", "content", "said"),
    [
        ({"md5": "0000"}, None, "expected MD5 0000, got"),
        ({"images": 71}, None, "expected 71 pictures in it, got 70"),
        ({}, b"no tar at all", "cannot be unpacked"),
        ({"inner": "101_Objects.tar.gz"}, NO_TAR, r"101_Objects\.tar\.gz is 0 times in it"),
        ({}, member("256_Objects/../../evil.jpg"), "points outside; do not use this archive"),
    ],
)
def test_an_archive_that_is_not_the_published_one_leaves_nothing(
    changes: dict[str, object], content: bytes | tarfile.TarInfo | None, said: str,
    server: Server, raw_tree: Path, tmp_path: Path,
) -> None:  # fmt: skip
    extra = content if isinstance(content, tarfile.TarInfo) else None
    data = content if isinstance(content, bytes) else tar_of(raw_tree, "256_Objects", extra)
    with pytest.raises(DownloadError, match=said) as caught:
        fetch(published(server, data, **changes), tmp_path / "deep" / "raw")
    assert str(tmp_path / "deep/archive.tar") in str(caught.value)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["archive.tar"]
    assert not (tmp_path / "evil.jpg").exists()


PART = 12_345


@pytest.mark.parametrize(
    ("how", "partial", "requests"),
    [
        ({}, b"", [None]),
        ({"breaks": 3}, b"", [None, "bytes=10000-", "bytes=20000-", "bytes=30000-"]),
        ({}, "part", [f"bytes={PART}-"]),
        ({}, "whole", ["bytes=WHOLE-"]),
        ({"ranges": False}, b"x" * PART, [f"bytes={PART}-"]),
        # it sends another part than was asked for
        ({"breaks": 1, "shift": 7}, b"", [None, "bytes=10000-", None]),
        # lengths that it gets wrong
        ({"lie": 1_000}, b"", [None, "bytes=WHOLE-"]),
        ({"lie": -(10**9)}, b"", [None]),
        ({"lie": 10**15}, b"", [None, "bytes=WHOLE-"]),
    ],
    ids=str,
)
def test_what_a_server_does_not_send_is_asked_for_again(
    how: dict[str, Any], partial: str | bytes, requests: list[str | None],
    dataset: PublicDataset, server: Server, tmp_path: Path,
) -> None:  # fmt: skip
    for name, value in how.items():
        setattr(server, name, value)
    content = {"part": server.content[:PART], "whole": server.content}.get(str(partial), partial)
    if content:
        (tmp_path / "archive.tar.partial").write_bytes(content)  # type: ignore[arg-type]
    assert fetch(dataset, tmp_path / "raw") == 70
    assert server.requests == [r and r.replace("WHOLE", str(len(server.content))) for r in requests]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive.tar", "raw"]


def test_a_connection_that_breaks_is_given_up_after_some_waits_without_headway(
    dataset: PublicDataset, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.breaks, server.break_bytes = 10**6, 1
    waits: list[float] = []
    monkeypatch.setattr(datasets.time, "sleep", waits.append)
    with pytest.raises(DownloadError, match=r"broke at 8 of [\d,]+ bytes.*continues at byte 8"):
        fetch(dataset, tmp_path / "raw")
    assert (len(server.requests), len(waits)) == (8, 7)
    assert waits[-1] > 8 * waits[0], "they double"
    assert (tmp_path / "archive.tar.partial").stat().st_size == 8
    monkeypatch.setattr(datasets, "_HEADWAY_BYTES", 10_000)
    server.breaks, server.break_bytes = 20, 10_000
    assert fetch(dataset, tmp_path / "raw") == 70


@pytest.mark.parametrize(
    ("how", "tries", "said"),
    [
        ({"missing": True, "status": 503}, 8, "Service Unavailable"),
        ({"missing": True, "status": 404}, 1, "Not Found"),
        ({"lie": -1_000}, 1, "expected MD5"),  # it says that the whole is smaller than it is
    ],
)
def test_a_server_that_does_not_have_it_is_asked_again_only_if_it_may_have_it_later(
    how: dict[str, Any], tries: int, said: str, dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    for name, value in how.items():
        setattr(server, name, value)
    with pytest.raises(DownloadError, match=said):
        fetch(dataset, tmp_path / "raw")
    assert len(server.requests) == tries


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/files/archive.tar", "http://127.0.0.1:x/archive.tar"])
def test_without_a_network_the_error_says_what_to_put_where(
    url: str, dataset: PublicDataset, tmp_path: Path
) -> None:
    with pytest.raises(DownloadError) as caught:
        fetch(replace(dataset, url=url), tmp_path / "raw")
    assert str(caught.value).startswith(f"{url}: cannot be downloaded (")
    assert f"put it at {tmp_path / 'archive.tar'}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["link", "link to nowhere", "second name", "folder"])
def test_a_download_is_never_written_through_a_link(
    kind: str, dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    victim, partial = tmp_path / "thesis.txt", tmp_path / "archive.tar.partial"
    if kind != "link to nowhere":
        victim.write_bytes(b"mine")
    if kind == "second name":
        os.link(victim, partial)
    elif kind == "folder":
        partial.mkdir()
    else:
        partial.symlink_to(victim)
    with pytest.raises(DownloadError, match=r"archive.tar.partial: is not a partial download"):
        fetch(dataset, tmp_path / "raw")
    assert server.requests == []
    assert victim.read_bytes() == b"mine" if victim.exists() else kind == "link to nowhere"


FULL_DISK = """
set -e
mount -t tmpfs -o size={kib}k none "$1"
cp "$2" "$1/archive.tar.given"
[ {unpack} = no ] || mv "$1/archive.tar.given" "$1/archive.tar"
exec "$3" -c '
import sys
from precache.example_data.datasets import PublicDataset, fetch
folder, md5, url = sys.argv[1:]
print("mounted", flush=True)
fetch(PublicDataset(url=url, md5=md5, inner=None, folder="256_Objects", images=70), folder + "/raw")
' "$1" "$4" "$5"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a small disk is made by Linux namespaces")
@pytest.mark.parametrize("when", ["download", "unpack"])
def test_a_full_disk_is_called_that(
    when: str, dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    disk, given = tmp_path / "disk", tmp_path / "given"
    disk.mkdir()
    given.write_bytes(server.content if when == "unpack" else b"")
    kib = len(server.content) // 1024
    script = FULL_DISK.format(
        kib=kib * 3 // 2 if when == "unpack" else kib // 2, unpack="yes" if when == "unpack" else "no"
    )
    arguments = [disk, given, sys.executable, dataset.md5, dataset.url]
    result = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script, "sh", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    if "mounted" not in result.stdout:
        pytest.skip("no small disk can be mounted here")
    message = result.stderr.splitlines()[-1]
    for words in ("DownloadError", "the disk is full", "make room", str(disk)):
        assert words in message
    assert "check the network" not in message
