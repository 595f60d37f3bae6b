"""Fetching public datasets from a local HTTP server that breaks connections or refuses."""

import tarfile
from pathlib import Path
from typing import Any

import pytest

from precache.errors import DownloadError, SettingError
from precache.example_data.datasets import PublicDataset, fetch
from tests.precache.example_data.publishing import ArchiveServer, make_tar_archive, publish
from tests.precache.sources.archives import files_of, link, make_tar, make_zip


def test_fetch_unpacks_the_tree(dataset: PublicDataset, raw_tree: Path, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    fetch(dataset, tmp_path / "raw", on_progress=lambda *p: progress.append(p))
    assert progress[-1][0] == progress[-1][1] > 0
    assert files_of(tmp_path / "raw") == files_of(raw_tree)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive.tar", "raw"]


def test_fetch_uses_an_archive_that_is_there_without_network(
    dataset: PublicDataset, server: ArchiveServer, raw_tree: Path, tmp_path: Path
) -> None:
    (tmp_path / "archive.tar").write_bytes(server.content)
    fetch(dataset, tmp_path / "raw")
    assert files_of(tmp_path / "raw") == files_of(raw_tree)
    assert server.requests == []


def test_fetch_refuses_a_folder_that_is_not_empty(dataset: PublicDataset, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "thesis.txt").write_bytes(b"mine")
    with pytest.raises(SettingError, match=str(tmp_path / "raw")):
        fetch(dataset, tmp_path / "raw")
    assert files_of(tmp_path / "raw") == {"thesis.txt": b"mine"}


def test_an_archive_inside_a_zip_is_unpacked(server: ArchiveServer, raw_tree: Path, tmp_path: Path) -> None:
    """Caltech-101 is published so: a zip with a tar.gz, annotations and leftovers of macOS."""
    inner = make_tar(tmp_path / "inner", files_of(raw_tree, "101_Objects/"), mode="w:gz").read_bytes()
    name = "caltech-101/101_Objects.tar.gz"
    files = {name: inner, "caltech-101/Annotations.tar": b"", f"__MACOSX/{name}": b""}
    changes = {"inner": name, "folder": "101_Objects"}
    content = make_zip(tmp_path / "outer", files).read_bytes()
    fetch(publish(server, content, **changes), tmp_path / "raw")
    assert files_of(tmp_path / "raw") == files_of(raw_tree)


def test_fetch_leaves_out_files_outside_the_tree(
    server: ArchiveServer, raw_tree: Path, tmp_path: Path
) -> None:
    extra = [tarfile.TarInfo(name) for name in ("", ".", "./", "/evil.jpg", "other/evil.jpg")]
    for number, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE)):
        extra.append(link(f"256_Objects/001.anchor/evil{number}.jpg", "/etc/passwd", kind))
    content = make_tar_archive(raw_tree, "256_Objects", *extra)
    fetch(publish(server, content), tmp_path / "raw")
    assert files_of(tmp_path / "raw") == files_of(raw_tree)
    assert not any("evil" in path.name for path in tmp_path.rglob("*"))


WRONG_ARCHIVES: dict[str, tuple[dict[str, Any], bytes | None]] = {
    "checksum": ({"md5": "0000"}, None),
    "no tar": ({}, b"no tar at all"),
    "zip without the tar": ({"inner": "inner.tar.gz"}, b"PK\5\6" + bytes(18)),
    "path outside": ({}, None),
}
"""Changes of the dataset, and the archive; None: the tar of the tree."""


@pytest.mark.parametrize("fault", WRONG_ARCHIVES)
def test_fetch_leaves_no_tree_of_a_wrong_archive(
    fault: str, server: ArchiveServer, raw_tree: Path, tmp_path: Path
) -> None:
    changes, content = WRONG_ARCHIVES[fault]
    if content is None:
        members = [tarfile.TarInfo("256_Objects/../../evil.jpg")] if fault == "path outside" else []
        content = make_tar_archive(raw_tree, "256_Objects", *members)
    with pytest.raises(DownloadError) as raised:
        fetch(publish(server, content, **changes), tmp_path / "deep" / "raw")
    assert raised.value.path == tmp_path / "deep/archive.tar"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["archive.tar"]
    assert not (tmp_path / "evil.jpg").exists()


DOWNLOADS: list[tuple[dict[str, Any], int, list[str]]] = [
    ({"breaks": 3}, 0, ["", "bytes=10000-", "bytes=20000-", "bytes=30000-"]),
    ({}, 12_345, ["bytes=12345-"]),
    ({}, -1, ["bytes=WHOLE-"]),
    ({"ranges": False}, 12_345, ["bytes=12345-"]),
]
"""Settings of the server, bytes that are there already (-1: all), and ranges that are requested."""


@pytest.mark.parametrize(("settings", "partial", "ranges"), DOWNLOADS, ids=str)
def test_fetch_requests_what_a_server_has_not_sent(
    settings: dict[str, Any],
    partial: int,
    ranges: list[str],
    dataset: PublicDataset,
    server: ArchiveServer,
    tmp_path: Path,
) -> None:
    for name, value in settings.items():
        setattr(server, name, value)
    whole = server.content
    if partial:
        content = whole if partial < 0 else whole[:partial]
        if "ranges" in settings:  # the server sends the archive from its start: other bytes are replaced
            content = bytes(partial)
        (tmp_path / "archive.tar.partial").write_bytes(content)
    fetch(dataset, tmp_path / "raw")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive.tar", "raw"]
    assert server.requests == [text.replace("WHOLE", str(len(whole))) or None for text in ranges]


FAILURES: list[tuple[dict[str, Any], list[str], str]] = [
    ({"breaks": 10**6, "break_bytes": 1}, ["", *(f"bytes={n}-" for n in range(1, 8))], "8 of"),
    ({"error_status": 404}, [""], "Not Found"),
    ({"error_status": 503}, [""] * 8, "Service Unavailable"),  # tried again: it may be available later
]
"""Settings of the server, ranges that are requested, and a detail of the error."""


@pytest.mark.parametrize(("settings", "ranges", "detail"), FAILURES, ids=str)
def test_a_failed_download_names_the_url_and_where_to_put_the_archive(
    settings: dict[str, Any],
    ranges: list[str],
    detail: str,
    dataset: PublicDataset,
    server: ArchiveServer,
    tmp_path: Path,
) -> None:
    for name, value in settings.items():
        setattr(server, name, value)
    with pytest.raises(DownloadError, match=detail) as raised:
        fetch(dataset, tmp_path / "raw")
    assert raised.value.path == server.url
    assert str(tmp_path / "archive.tar") in raised.value.remedy
    assert [path.name for path in tmp_path.iterdir()] == (["archive.tar.partial"] if server.breaks else [])
    assert server.requests == [text or None for text in ranges]


@pytest.mark.parametrize("put", [Path.symlink_to, Path.hardlink_to, lambda path, victim: path.mkdir()])
def test_a_download_is_never_written_through_a_link(
    put: Any, dataset: PublicDataset, server: ArchiveServer, tmp_path: Path
) -> None:
    victim = tmp_path / "thesis.txt"
    victim.write_bytes(b"mine")
    put(tmp_path / "archive.tar.partial", victim)
    with pytest.raises(DownloadError) as raised:
        fetch(dataset, tmp_path / "raw")
    assert raised.value.path == tmp_path / "archive.tar.partial"
    assert server.requests == []
    assert victim.read_bytes() == b"mine"
