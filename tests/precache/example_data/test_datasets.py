"""`fetch` against a local HTTP server that breaks, lies or refuses, with archives like the published ones."""

import tarfile
from pathlib import Path
from typing import Any

import pytest

from precache.errors import DownloadError, SettingError
from precache.example_data.datasets import PublicDataset, fetch
from tests.precache.example_data.publishing import Server, published, tar_of
from tests.precache.sources.archives import files_of, link, make_tar, make_zip


def test_fetch_unpacks_the_tree(
    dataset: PublicDataset, server: Server, raw_tree: Path, tmp_path: Path
) -> None:
    """An archive that is there, be it put there by hand, needs no network; a tree that exists stays."""
    progress: list[tuple[int, int]] = []
    fetch(dataset, tmp_path / "raw", on_progress=lambda *p: progress.append(p))
    assert progress[-1][0] == progress[-1][1] > 0
    asked = len(server.requests)
    fetch(dataset, tmp_path / "again")
    for root in (tmp_path / "raw", tmp_path / "again"):
        assert files_of(root) == files_of(raw_tree)
        with pytest.raises(SettingError, match="exists and is not empty"):
            fetch(dataset, root)
    assert len(server.requests) == asked
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "archive.tar", "raw"]


def test_an_archive_inside_a_zip_is_unpacked(server: Server, raw_tree: Path, tmp_path: Path) -> None:
    """As Caltech-101 is published: a zip with a tar.gz, annotations and Finder leftovers."""
    inner = make_tar(tmp_path / "inner", files_of(raw_tree, "101_Objects/"), mode="w:gz").read_bytes()
    name = "caltech-101/101_Objects.tar.gz"
    files = {name: inner, "caltech-101/Annotations.tar": b"", f"__MACOSX/{name}": b""}
    changes = {"inner": name, "folder": "101_Objects"}
    content = make_zip(tmp_path / "outer", files).read_bytes()
    fetch(published(server, content, **changes), tmp_path / "raw")
    assert files_of(tmp_path / "raw") == files_of(raw_tree)


def test_fetch_leaves_out_files_outside_the_tree(server: Server, raw_tree: Path, tmp_path: Path) -> None:
    extra = [tarfile.TarInfo(name) for name in ("", ".", "./", "/evil.jpg", "other/evil.jpg")]
    for number, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE)):
        extra.append(link(f"256_Objects/001.anchor/evil{number}.jpg", "/etc/passwd", kind))
    content = tar_of(raw_tree, "256_Objects", *extra)
    fetch(published(server, content), tmp_path / "raw")
    assert files_of(tmp_path / "raw") == files_of(raw_tree)
    assert not any("evil" in path.name for path in tmp_path.rglob("*"))


OTHERS: list[tuple[dict[str, Any], bytes | None, str]] = [
    ({"md5": "0000"}, None, "expected MD5 0000, got"),
    ({}, b"no tar at all", "cannot be unpacked"),
    ({"inner": "inner.tar.gz"}, b"PK\5\6" + bytes(18), r"no item named 'inner\.tar\.gz'"),
    ({}, None, "outside the destination"),
]


@pytest.mark.parametrize(("changes", "content", "said"), OTHERS)
def test_fetch_leaves_no_tree_of_a_wrong_archive(
    changes: dict[str, Any], content: bytes | None, said: str, server: Server, raw_tree: Path, tmp_path: Path
) -> None:
    outside = [tarfile.TarInfo("256_Objects/../../evil.jpg")] if "outside" in said else []
    data = tar_of(raw_tree, "256_Objects", *outside) if content is None else content
    with pytest.raises(DownloadError, match=said) as caught:
        fetch(published(server, data, **changes), tmp_path / "deep" / "raw")
    assert str(tmp_path / "deep/archive.tar") in str(caught.value)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["archive.tar"]
    assert not (tmp_path / "evil.jpg").exists()


SERVERS: list[tuple[dict[str, Any], int, list[str | None], str]] = [
    ({"breaks": 3}, 0, [None, "bytes=10000-", "bytes=20000-", "bytes=30000-"], ""),
    ({}, 12_345, ["bytes=12345-"], ""),
    ({}, -1, ["bytes=WHOLE-"], ""),
    ({"ranges": False}, 12_345, ["bytes=12345-"], ""),
    ({"breaks": 10**6, "break_bytes": 1}, 0, [None, *(f"bytes={n}-" for n in range(1, 8))], "broke at 8 of"),
    ({"missing": 404}, 0, [None], "Not Found"),
    ({"missing": 503}, 0, [None] * 8, "Service Unavailable"),  # it may have it later
]


@pytest.mark.parametrize(("how", "partial", "requests", "said"), SERVERS, ids=str)
def test_fetch_requests_what_a_server_has_not_sent(
    how: dict[str, Any], partial: int, requests: list[str | None], said: str,
    dataset: PublicDataset, server: Server, tmp_path: Path,
) -> None:  # fmt: skip
    """`partial` bytes are there already; -1: all of them."""
    for name, value in how.items():
        setattr(server, name, value)
    whole = server.content
    if partial:
        content = bytes(partial) if "ranges" in how else whole[: len(whole) if partial < 0 else partial]
        (tmp_path / "archive.tar.partial").write_bytes(content)
    if said:
        with pytest.raises(DownloadError, match=said) as caught:
            fetch(dataset, tmp_path / "raw")
        assert f"put it at {tmp_path / 'archive.tar'}" in str(caught.value)
        came = how.get("break_bytes", 0)
        assert [path.name for path in tmp_path.iterdir()] == ["archive.tar.partial"] * came
    else:
        fetch(dataset, tmp_path / "raw")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["archive.tar", "raw"]
    assert server.requests == [r and r.replace("WHOLE", str(len(whole))) for r in requests]


@pytest.mark.parametrize("put", [Path.symlink_to, Path.hardlink_to, lambda path, victim: path.mkdir()])
def test_a_download_is_never_written_through_a_link(
    put: Any, dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    victim = tmp_path / "thesis.txt"
    victim.write_bytes(b"mine")
    put(tmp_path / "archive.tar.partial", victim)
    with pytest.raises(DownloadError, match=r"archive.tar.partial: cannot be continued"):
        fetch(dataset, tmp_path / "raw")
    assert server.requests == []
    assert victim.read_bytes() == b"mine"
