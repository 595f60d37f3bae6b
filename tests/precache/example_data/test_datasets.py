"""`fetch` against a local HTTP server, with archives built like the published ones."""

import io
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from precache.errors import DownloadError, SettingError
from precache.example_data.datasets import DATASETS, PublicDataset, fetch
from precache.sources.tree import scan_tree
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


def test_an_archive_put_there_by_hand_needs_no_network(
    dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "archive.tar").write_bytes(server.content)
    assert fetch(replace(dataset, url="http://127.0.0.1:1/files/archive.tar"), tmp_path / "raw") == 70
    assert server.requests == []


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
