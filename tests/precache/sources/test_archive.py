import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from precache import convert, verify_deep
from precache.errors import SettingError, SourceError
from precache.sources.tree import scan_tree
from tests.command import check_bad_input, run
from tests.conftest import small_recipe
from tests.precache.sources.archives import JPEG, Parts, add, files_of, link, make_tar, make_zip, scan_of

TREES: dict[str, Callable[[Path, Parts], Path]] = {
    "photos.tar": make_tar,
    "photos.zip": make_zip,
    "stored.zip": lambda path, files: make_zip(path, files, zipfile.ZIP_STORED),
    "photos.tar.gz": lambda path, files: make_tar(path, files, mode="w:gz"),
    "photos.TGZ": lambda path, files: make_tar(path, files, mode="w:gz"),
    "photos.tar.bz2": lambda path, files: make_tar(path, files, mode="w:bz2"),
    "photos.tar.xz": lambda path, files: make_tar(path, files, mode="w:xz"),
}


PREFIXES = ("./", "101_ObjectCategories/", "a/b/")


def put(root: Path, files: Parts) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


@pytest.mark.parametrize(
    ("name", "prefix"),
    [*((name, "") for name in TREES), *(("photos.tar", p) for p in PREFIXES), ("photos.zip", "a/b/")],
)
def test_an_archive_gives_what_its_tree_gives(name: str, prefix: str, raw_tree: Path, tmp_path: Path) -> None:
    archive = TREES[name](tmp_path / name, files_of(raw_tree, prefix))
    ours, tree = scan_of(archive), scan_tree(raw_tree)
    assert ours.digest == tree.digest
    assert ours.classes == tree.classes
    assert (ours.scanned, ours.ignored) == (tree.scanned, tree.ignored)
    for one, other in zip(ours.samples, tree.samples, strict=True):
        assert (one.id, one.path, one.label, one.bytes) == (other.id, other.path, other.label, other.bytes)
        assert ours.source.read(one, 10**6) == tree.source.read(other, 10**6)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["photos.tar", "photos.zip", "photos.tar.gz"])
def test_an_archive_gives_the_shards_of_its_tree(
    name: str, workers: int, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    archive = TREES[name](tmp_path / name, files_of(raw_tree, "top/"))
    convert(archive, tmp_path / "out", small_recipe("shards"), workers=workers)
    shards = sorted(path.name for path in converted["shards"].glob("*-0*.safetensors"))
    assert len(shards) > 1
    for shard in (*shards, "index.safetensors"):
        assert (tmp_path / "out" / shard).read_bytes() == (converted["shards"] / shard).read_bytes(), shard
    assert not verify_deep(tmp_path / "out", archive, workers=workers).problems
    assert not verify_deep(converted["shards"], archive, workers=workers).problems  # of the tree


@pytest.mark.parametrize("make", [make_tar, make_zip])
def test_what_a_tree_keeps_and_ignores_an_archive_does(
    make: Callable[[Path, Parts], Path], tmp_path: Path
) -> None:
    files = {
        "056.dog/056_0001.jpg": JPEG, "056.dog/greg/x.jpg": JPEG, "198.spider/RENAME2": b"#!/bin/sh\n",
        "198.spider/tmp": JPEG, "198.spider/._a.jpg": JPEG, "notes.txt": b"notes", ".git/x.jpg": JPEG,
        "198.spider/scan.psd": b"8BPS", "__MACOSX/056.dog/._056_0001.jpg": b"x", "\u00e9t/\u00fc.png": b"",
    }  # fmt: skip
    ours, tree = (
        scan_of(make(tmp_path / f"x.{make.__name__[5:]}", files)),
        scan_tree(put(tmp_path / "x", files)),
    )
    assert [ref.path for ref in ours.samples] == [ref.path for ref in tree.samples]
    assert (ours.digest, ours.classes, ours.ignored) == (tree.digest, tree.classes, tree.ignored)
    assert ours.scanned == tree.scanned
    assert len(ours.warnings) == len(tree.warnings)


@pytest.mark.parametrize("make", [make_tar, make_zip])
@pytest.mark.parametrize("prefix", ["", "top/"])
def test_split_folders_and_class_depth_are_those_of_the_tree(
    make: Callable[[Path, Parts], Path], prefix: str, tmp_path: Path
) -> None:
    names = ("train/a/1.jpg", "train/b/2.jpg", "val/a/3.jpg", "val/b/4.jpg")
    split = scan_of(
        make(tmp_path / f"x.{make.__name__[5:]}", dict.fromkeys((prefix + n for n in names), JPEG))
    )
    assert [(ref.path, ref.split) for ref in split.samples] == [(name, name.split("/")[0]) for name in names]
    deep = dict.fromkeys(
        (prefix + n for n in ("animals/dog/1.jpg", "animals/cat/2.jpg", "cars/vw/3.jpg")), JPEG
    )
    archive = make(tmp_path / f"y.{make.__name__[5:]}", deep)
    assert scan_of(archive, class_depth=2).classes == ("animals/cat", "animals/dog", "cars/vw")
    flat = make(
        tmp_path / f"z.{make.__name__[5:]}", dict.fromkeys((f"{prefix}1.jpg", f"{prefix}2.jpg"), JPEG)
    )
    assert [ref.path for ref in scan_of(flat, class_depth=0).samples] == ["1.jpg", "2.jpg"]


def test_one_class_or_one_split_is_no_outer_folder(tmp_path: Path) -> None:
    assert scan_of(make_tar(tmp_path / "a.tar", {"dog/1.jpg": JPEG})).classes == ("dog",)
    train = scan_of(make_tar(tmp_path / "b.tar", {"train/dog/1.jpg": JPEG}))
    assert [(ref.path, ref.split) for ref in train.samples] == [("train/dog/1.jpg", "train")]
    beside = scan_of(make_tar(tmp_path / "c.tar", {"top/dog/1.jpg": JPEG, "README": b"", "__MACOSX/x": b""}))
    assert [ref.path for ref in beside.samples] == ["dog/1.jpg"]
    assert {ignored.path for ignored in beside.ignored} == {"README", "__MACOSX"}
    assert beside.scanned == 3


@pytest.mark.parametrize("suffix", ["tar", "zip"])
def test_of_members_with_one_name_the_last_one_counts(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{suffix}"
    with tarfile.open(path, "w") if suffix == "tar" else zipfile.ZipFile(path, "w") as archive:
        for content in (b"first", b"second"):
            if isinstance(archive, tarfile.TarFile):
                add(archive, "a/1.jpg", content)
            elif content == b"first":
                archive.writestr("a/1.jpg", content)
            else:
                with pytest.warns(UserWarning, match="Duplicate"):
                    archive.writestr("a/1.jpg", content)
    scan = scan_of(path)
    assert [scan.source.read(ref, 10) for ref in scan.samples] == [b"second"]
    assert [(i.path, "last one counts" in i.reason) for i in scan.ignored] == [("a/1.jpg", True)]
    assert scan.scanned == 2


def test_links_are_what_they_lead_to_in_the_archive(tmp_path: Path) -> None:
    links = [
        link("b/hard.jpg", "a/1.jpg", tarfile.LNKTYPE),
        link("b/soft.jpg", "../a/1.jpg"),
        link("b/chain.jpg", "soft.jpg"),
        link("b/../b/self.jpg", "self.jpg"),
        link("c/self.jpg", "self.jpg"),
        link("c/out.jpg", "../../etc/passwd"),
        link("a/abs.jpg", "/1.jpg"),
        link("a/empty.jpg", ""),
        link("b/past.jpg", "../none/../a/1.jpg"),
        link("c/gone.jpg", "nowhere.jpg", tarfile.LNKTYPE),
        link("d", "a"),
    ]
    scan = scan_of(make_tar(tmp_path / "x.tar", {"a/1.jpg": b"picture"}, links))
    paths = {ref.path: scan.source.read(ref, 10) for ref in scan.samples}
    assert paths == dict.fromkeys(("a/1.jpg", "b/hard.jpg", "b/soft.jpg", "b/chain.jpg"), b"picture")
    assert "'c/gone.jpg', 'c/self.jpg', 'c/out.jpg' and 4 more" in scan.warnings[0]
    assert scan.scanned == len(scan.samples) + len(scan.ignored)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_of_every_kind_of_tar_are_those_of_the_tree(form: int, tmp_path: Path) -> None:
    names = [f"{'c' * 90}/{'n' * 90}.jpg", "a/\u00fc \n.jpg", "a/\udce9.jpg"]
    if form != tarfile.USTAR_FORMAT:
        names.append(f"{'d' * 120}/{'m' * 240}.jpg")
    with tarfile.open(tmp_path / "x.tar", "w", format=form, pax_headers={"comment": "x"}) as tar:
        for name in names:
            add(tar, name, JPEG)
    tree = put(tmp_path / "tree", dict.fromkeys(names, JPEG))
    assert scan_of(tmp_path / "x.tar").digest == scan_tree(tree).digest


def test_names_lead_nowhere(tmp_path: Path) -> None:
    names = (
        "/etc/abs.jpg",
        "../up.jpg",
        "../../up.jpg",
        "a/../../up.jpg",
        "./a//1.jpg",
        "a/./2.jpg",
        "/".join(["x"] * 400),
    )
    scan = scan_of(make_tar(tmp_path / "x.tar", dict.fromkeys(names, JPEG)))
    assert [ref.path for ref in scan.samples] == ["a/1.jpg", "a/2.jpg", "etc/abs.jpg"]
    reasons = [ignored.reason.split(",")[0] for ignored in scan.ignored]
    assert reasons == ["has a name that leads out of the archive"] * 4
    assert os.listdir(tmp_path) == ["x.tar"]


def test_a_file_and_a_folder_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for names in (("a", "a/1.jpg", "b/2.jpg"), ("a/1.jpg", "a", "b/2.jpg")):
        scan = scan_of(make_tar(tmp_path / "x.tar", dict.fromkeys(names, JPEG)))
        assert scan.scanned == len(scan.samples) + len(scan.ignored)
        assert scan.samples[-1].path == "b/2.jpg"


def test_devices_and_pipes_are_ignored(tmp_path: Path) -> None:
    devices = []
    for kind in (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE):
        devices.append(tarfile.TarInfo(f"a/{kind.decode()}.jpg"))
        devices[-1].type = kind
    scan = scan_of(make_tar(tmp_path / "x.tar", {"a/x.jpg": JPEG}, devices))
    assert [ref.path for ref in scan.samples] == ["a/x.jpg"]
    assert {ignored.reason for ignored in scan.ignored} == {"not a regular file"}


def test_sparse_files_and_parts_of_tars_are_refused_by_name(tmp_path: Path) -> None:
    for kind, what in ((tarfile.GNUTYPE_SPARSE, "sparse"), (b"M", "another archive")):
        member = tarfile.TarInfo("a/s.jpg")
        member.type = kind
        with pytest.raises(SourceError, match=rf"x\.tar: 'a/s\.jpg' .*{what}.*unpack"):
            scan_of(make_tar(tmp_path / "x.tar", {"a/x.jpg": JPEG}, [member]))
    with tarfile.open(tmp_path / "y.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("a/p.jpg")
        member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        tar.addfile(member)
    with pytest.raises(SourceError, match="sparse"):
        scan_of(tmp_path / "y.tar")


def test_a_tar_that_breaks_off_anywhere_is_refused(tmp_path: Path) -> None:
    files = {f"{c}/{n}.jpg": JPEG * 300 for c in "ab" for n in range(3)}
    whole = make_tar(tmp_path / "x.tar", files).read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512  # the two empty blocks, then padding, follow
    for cut in (*range(0, end, 256), end):
        (tmp_path / "x.tar").write_bytes(whole[:cut])
        with pytest.raises(SourceError, match=r"x\.tar: (breaks off|is no tar).*; download or copy it again"):
            scan_of(tmp_path / "x.tar")


def test_tars_joined_with_cat_are_refused(tmp_path: Path) -> None:
    one = make_tar(tmp_path / "x.tar", {"a/1.jpg": JPEG}).read_bytes()
    (tmp_path / "x.tar").write_bytes(one + one)
    with pytest.raises(SourceError, match="tar -A"):
        scan_of(tmp_path / "x.tar")


@pytest.mark.parametrize("suffix", ["tar", "zip"])
def test_an_archive_that_changes_is_not_read_on(suffix: str, tmp_path: Path) -> None:
    make = make_tar if suffix == "tar" else make_zip
    path = make(tmp_path / f"x.{suffix}", {"a/1.jpg": JPEG})
    scan = scan_of(path)
    os.utime(path, (1, 1))
    with pytest.raises(SourceError, match=rf"x\.{suffix}: changed while it was converted"):
        scan.source.read(scan.samples[0], 100)
    path.unlink()
    with pytest.raises(SourceError, match="disappeared"):
        scan.source.read(scan.samples[0], 100)


def test_options_of_other_sources_are_refused(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar", {"a/1.jpg": JPEG})
    for options in ({"root": "x"}, {"where": "id in x"}, {"label": "x"}):
        with pytest.raises(SettingError, match="not for"):
            scan_of(path, **options)


def test_the_command_converts_an_archive_and_names_one_that_is_none(raw_tree: Path, tmp_path: Path) -> None:
    make_tar(tmp_path / "photos.tar", files_of(raw_tree, "top/"))
    command = ("convert", "photos.tar", "out", "--format", "webdataset", "--size", 32, "--workers", 0)
    assert run("precache", *command, cwd=tmp_path).returncode == 0
    assert run("precache", "verify", "out", "photos.tar", "--deep", cwd=tmp_path).returncode == 0
    (tmp_path / "photos.tar").write_bytes(b"x" * 2000)
    check_bad_input(run("precache", *command, "--overwrite", cwd=tmp_path), "photos.tar", "is no tar")
    for name, mention in (
        ("none.zip", "does not exist"),
        ("photos.rar", "unpack"),
        ("photos.tar.zst", "unpack"),
    ):
        if name != "none.zip":
            shutil.copy(tmp_path / "photos.tar", tmp_path / name)
        answer = run("precache", "convert", name, "new", "--format", "shards", cwd=tmp_path)
        check_bad_input(answer, name, mention)
    assert not (tmp_path / "new").exists()
