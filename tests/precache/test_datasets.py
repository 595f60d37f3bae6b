"""`fetch` against a local HTTP server, with archives built like the published ones."""

import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from precache.datasets import DATASETS, PublicDataset, fetch
from precache.errors import DownloadError, SettingError
from precache.source import scan_tree


class Server(ThreadingHTTPServer):
    """Serves `content`; breaks off each of the first `breaks` answers after `break_bytes`."""

    content = b""
    breaks = 0
    break_bytes = 10_000
    ranges = True
    missing = False

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
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.server.ranges else 0
        if start and start >= len(self.server.content):
            self.send_error(416)
            return
        body = self.server.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.breaks:
            self.server.breaks -= 1
            body = body[: self.server.break_bytes]
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
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


def test_an_existing_tree_is_not_touched(dataset: PublicDataset, server: Server, raw_tree: Path) -> None:
    with pytest.raises(SettingError, match="exists and is not empty"):
        fetch(dataset, raw_tree)
    assert server.requests == []


def test_the_published_datasets_are_named_with_their_counts() -> None:
    assert DATASETS["caltech256"].images == 30_607
    assert DATASETS["caltech101"].images == 9_145
    assert all(d.url.startswith("https://data.caltech.edu/records/") for d in DATASETS.values())
