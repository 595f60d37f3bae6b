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


def test_an_archive_put_there_by_hand_needs_no_network(
    dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "archive.tar").write_bytes(server.content)
    assert fetch(replace(dataset, url="http://127.0.0.1:1/files/archive.tar"), tmp_path / "raw") == 70
    assert server.requests == []


def member(name: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd" if kind != tarfile.REGTYPE else ""
    info.size = 10 if kind == tarfile.REGTYPE else 0
    return info


@pytest.mark.parametrize(
    "extra",
    [
        member(""), member("."), member("./"), member("/evil.jpg"), member("other/evil.jpg"),
        member("256_Objects/001.anchor/link.jpg", tarfile.SYMTYPE),
        member("256_Objects/001.anchor/link.jpg", tarfile.LNKTYPE),
    ],
    ids=lambda info: f"{info.name} {info.type!r}",
)  # fmt: skip
def test_what_is_no_file_of_the_tree_is_left_out(
    extra: tarfile.TarInfo, server: Server, raw_tree: Path, tmp_path: Path
) -> None:
    content = tar_of(raw_tree, "256_Objects", extra)
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


def test_an_existing_tree_is_not_touched(dataset: PublicDataset, server: Server, raw_tree: Path) -> None:
    with pytest.raises(SettingError, match="exists and is not empty"):
        fetch(dataset, raw_tree)
    assert server.requests == []


def test_the_published_datasets_are_named_with_their_counts() -> None:
    assert {name: dataset.images for name, dataset in DATASETS.items()} == {
        "caltech256": 30_607, "caltech101": 9_145
    }  # fmt: skip
    assert all(d.url.startswith("https://data.caltech.edu/records/") for d in DATASETS.values())
