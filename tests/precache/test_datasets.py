"""`fetch` against a local HTTP server, with archives built like the published ones."""

import contextlib
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from precache import download
from precache.datasets import DATASETS, PublicDataset, fetch
from precache.errors import DownloadError, SettingError
from precache.sources.tree import scan_tree
from tests.command import ROOT


class Server(ThreadingHTTPServer):
    """Serves `content`; breaks off each of the first `breaks` answers after `break_bytes`.

    `lie` is added to what it says of lengths, `shift` to where a part begins.
    """

    content = b""
    breaks = 0
    break_bytes = 10_000
    ranges = True
    missing = False
    status = 404
    lie = 0
    shift = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/files/archive.tar"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.requests.append(wanted)
        if self.server.missing:
            self.send_error(self.server.status)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.server.ranges else 0
        if start and start >= len(self.server.content):
            self.send_error(416)
            return
        body = self.server.content[start:]
        self.send_response(206 if start else 200)
        if start and self.server.shift:
            start += self.server.shift
            body = self.server.content[start:]
            self.send_header("Content-Range", f"bytes {start}-{len(self.server.content) - 1}/*")
        self.send_header("Content-Length", str(len(body) + self.server.lie))
        self.end_headers()
        if self.server.breaks:
            self.server.breaks -= 1
            body = body[: self.server.break_bytes]
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(download, "_FIRST_WAIT_S", 0.01)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def tar_of(raw_tree: Path, folder: str, extra: tarfile.TarInfo | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(raw_tree, folder)
        if extra is not None:
            tar.addfile(extra, io.BytesIO(bytes(extra.size)))
    return buffer.getvalue()


def published(server: Server, content: bytes, **changes: object) -> PublicDataset:
    server.content = content
    dataset = PublicDataset(
        url=server.url, md5=hashlib.md5(content).hexdigest(), inner=None, folder="256_Objects", images=70
    )
    return replace(dataset, **changes)


@pytest.fixture
def dataset(server: Server, raw_tree: Path) -> PublicDataset:
    return published(server, tar_of(raw_tree, "256_Objects"))


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


def test_an_archive_inside_a_zip_is_unpacked(server: Server, raw_tree: Path, tmp_path: Path) -> None:
    """As Caltech-101 is published: a zip with a tar.gz, annotations and Finder leftovers."""
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as tar:
        tar.add(raw_tree, "101_Objects")
    outer = io.BytesIO()
    with zipfile.ZipFile(outer, "w") as archive:
        archive.writestr("caltech-101/101_Objects.tar.gz", inner.getvalue())
        archive.writestr("caltech-101/Annotations.tar", b"")
        archive.writestr("__MACOSX/caltech-101/._101_Objects.tar.gz", b"")
        archive.writestr("__MACOSX/caltech-101/101_Objects.tar.gz", b"")
    changes = {"inner": "101_Objects.tar.gz", "folder": "101_Objects"}
    assert fetch(published(server, outer.getvalue(), **changes), tmp_path / "raw") == 70


def test_a_broken_download_goes_on_where_it_broke(
    dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    server.breaks = 3
    assert fetch(dataset, tmp_path / "raw") == 70
    assert server.requests == [None, "bytes=10000-", "bytes=20000-", "bytes=30000-"]


def test_the_part_of_an_earlier_run_is_continued(
    dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "archive.tar.partial").write_bytes(server.content[:12_345])
    assert fetch(dataset, tmp_path / "raw") == 70
    assert server.requests == ["bytes=12345-"]


def test_a_complete_part_is_not_downloaded_again(
    dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "archive.tar.partial").write_bytes(server.content)
    assert fetch(dataset, tmp_path / "raw") == 70
    assert len(server.requests) == 1


def test_a_server_without_ranges_starts_again(dataset: PublicDataset, server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "archive.tar.partial").write_bytes(b"x" * 12_345)
    assert fetch(dataset, tmp_path / "raw") == 70


def test_an_archive_put_there_by_hand_needs_no_network(
    dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "archive.tar").write_bytes(server.content)
    assert fetch(replace(dataset, url="http://127.0.0.1:1/files/archive.tar"), tmp_path / "raw") == 70
    assert server.requests == []


def test_a_connection_that_breaks_again_and_again_is_given_up_and_waited_for(
    dataset: PublicDataset, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.breaks, server.break_bytes = 10**6, 1
    waits: list[float] = []
    monkeypatch.setattr(download.time, "sleep", waits.append)
    with pytest.raises(
        DownloadError, match=r"the connection broke at 8 of [\d,]+ bytes.*continues at byte 8"
    ):
        fetch(dataset, tmp_path / "raw")
    assert len(server.requests) == 8
    assert len(waits) == 7
    assert waits[-1] > 8 * waits[0], "they double"
    assert (tmp_path / "archive.tar.partial").stat().st_size == 8


def test_headway_is_not_given_up(
    dataset: PublicDataset, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_HEADWAY_BYTES", 10_000)
    server.breaks, server.break_bytes = 20, 10_000
    assert fetch(dataset, tmp_path / "raw") == 70
    assert len(server.requests) == 21


def test_a_server_that_is_busy_is_asked_again(dataset: PublicDataset, server: Server, tmp_path: Path) -> None:
    server.missing, server.status = True, 503
    with pytest.raises(DownloadError, match="Service Unavailable"):
        fetch(dataset, tmp_path / "raw")
    assert len(server.requests) == 8


@pytest.mark.parametrize("lie", [1_000, -(10**9), 10**15])
def test_a_length_that_is_not_true_does_no_harm(
    lie: int, dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    server.lie = lie
    assert fetch(dataset, tmp_path / "raw") == 70
    assert len(server.requests) <= 2


def test_a_length_that_is_too_small_is_found_by_the_checksum(
    dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    server.lie = -1_000
    with pytest.raises(DownloadError, match="expected MD5"):
        fetch(dataset, tmp_path / "raw")


def test_a_part_that_begins_elsewhere_is_not_appended(
    dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    server.breaks, server.shift = 1, 7
    assert fetch(dataset, tmp_path / "raw") == 70
    assert server.requests == [None, "bytes=10000-", None]


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
    with pytest.raises(
        DownloadError, match=r"archive.tar.partial: is not a partial download.*move it elsewhere"
    ):
        fetch(dataset, tmp_path / "raw")
    assert server.requests == []
    assert victim.read_bytes() == b"mine" if victim.exists() else kind == "link to nowhere"


def test_an_error_of_on_progress_reaches_the_caller(dataset: PublicDataset, tmp_path: Path) -> None:
    mine = BrokenPipeError("mine")

    def fail(done: int, total: int) -> None:
        raise mine

    with pytest.raises(BrokenPipeError) as caught:
        fetch(dataset, tmp_path / "raw", on_progress=fail)
    assert caught.value is mine


FULL_DISK = """
set -e
mount -t tmpfs -o size={kib}k none "$1"
cp "$2" "$1/archive.tar.given"
[ {unpack} = no ] || mv "$1/archive.tar.given" "$1/archive.tar"
exec "$3" -c '
import sys
from precache.datasets import PublicDataset, fetch
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
    assert "DownloadError" in message
    assert "the disk is full" in message
    assert "make room" in message
    assert str(disk) in message
    assert "check the network" not in message


def test_without_a_network_the_error_says_what_to_put_where(dataset: PublicDataset, tmp_path: Path) -> None:
    unreachable = "http://127.0.0.1:1/files/archive.tar"
    with pytest.raises(DownloadError) as caught:
        fetch(replace(dataset, url=unreachable), tmp_path / "raw")
    message = str(caught.value)
    assert unreachable in message
    assert f"put it at {tmp_path / 'archive.tar'}" in message
    assert "\n" not in message


def test_a_missing_page_is_an_error(dataset: PublicDataset, server: Server, tmp_path: Path) -> None:
    server.missing = True
    with pytest.raises(DownloadError, match="Not Found"):
        fetch(dataset, tmp_path / "raw")


def test_a_wrong_checksum_is_refused(dataset: PublicDataset, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="expected MD5 0000, got"):
        fetch(replace(dataset, md5="0000"), tmp_path / "raw")
    assert not (tmp_path / "raw").exists()


def test_a_wrong_count_is_refused(dataset: PublicDataset, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="expected 71 pictures in it, got 70"):
        fetch(replace(dataset, images=71), tmp_path / "raw")
    assert not (tmp_path / "raw").exists()


@pytest.mark.parametrize("kind", ["parent", "absolute", "symlink", "hardlink"])
def test_no_member_may_leave_the_destination(
    server: Server, raw_tree: Path, tmp_path: Path, kind: str
) -> None:
    member = tarfile.TarInfo(
        {
            "parent": "256_Objects/../../evil.jpg",
            "absolute": str(tmp_path / "evil.jpg"),
            "symlink": "256_Objects/001.anchor/link.jpg",
            "hardlink": "256_Objects/001.anchor/link.jpg",
        }[kind]
    )
    if kind.endswith("link"):
        member.type = tarfile.SYMTYPE if kind == "symlink" else tarfile.LNKTYPE
        member.linkname = "/etc/passwd"
    else:
        member.size = 10
    content = tar_of(raw_tree, "256_Objects", member)
    with pytest.raises(DownloadError, match="points outside"):
        fetch(published(server, content), tmp_path / "deep" / "raw")
    assert not (tmp_path / "evil.jpg").exists()
    assert not (tmp_path / "deep" / "raw").exists()


@pytest.mark.parametrize("name", ["", ".", "./"])
def test_a_member_without_a_name_is_left_out(
    server: Server, raw_tree: Path, tmp_path: Path, name: str
) -> None:
    member = tarfile.TarInfo(name)
    member.size = 10
    assert fetch(published(server, tar_of(raw_tree, "256_Objects", member)), tmp_path / "raw") == 70


def test_a_zip_with_empty_names_is_no_crash(server: Server, raw_tree: Path, tmp_path: Path) -> None:
    outer = io.BytesIO()
    with zipfile.ZipFile(outer, "w") as archive:
        archive.writestr(zipfile.ZipInfo(""), b"nothing")
    dataset = published(server, outer.getvalue(), inner="101_Objects.tar.gz", folder="101_Objects")
    with pytest.raises(DownloadError, match=r"101_Objects\.tar\.gz is 0 times in it"):
        fetch(dataset, tmp_path / "raw")


def test_an_existing_tree_is_not_touched(dataset: PublicDataset, server: Server, raw_tree: Path) -> None:
    with pytest.raises(SettingError, match="exists and is not empty"):
        fetch(dataset, raw_tree)
    assert server.requests == []


def test_the_published_datasets_are_named_with_their_counts() -> None:
    assert DATASETS["caltech256"].images == 30_607
    assert DATASETS["caltech101"].images == 9_145
    assert all(d.url.startswith("https://data.caltech.edu/records/") for d in DATASETS.values())
