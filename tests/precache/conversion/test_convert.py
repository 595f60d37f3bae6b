"""Rejects of a conversion and of `precache check`, and the memory that a conversion takes."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from precache import check, convert, open_dataset, verify
from precache.cli.commandline import parse_bytes, parse_share
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError, SettingError
from precache.sources.rejected_list import default_list_path, read_list, rejected_rows
from precache.sources.tree import list_tree, scan_tree
from tests.command import ROOT
from tests.conftest import IMAGES, small_recipe
from tests.damage import damage_tree
from tests.precache.destinations import contents
from tests.precache.pictures.drawing import encode_image, noise


@pytest.mark.parametrize(("name", "shard_bytes"), [("shards", 12 * 48 * 48 * 3), ("webdataset", 1)])
def test_corrupt_pictures_are_named_counted_and_left_out(
    name: str, shard_bytes: int, tree: Path, tmp_path: Path
) -> None:
    """Shards that lose all their pictures are covered, too: in `webdataset` here, each has one."""
    paths = sorted(path for path in tree.glob("*/*.jpg"))
    paths[3].write_bytes(b"<html>404 not found</html>")
    paths[10].write_bytes(paths[10].read_bytes()[: paths[10].stat().st_size // 2])
    (tree / "notes.txt").write_text("notes")
    out, recipe = tmp_path / "out", small_recipe(name, shard_bytes=shard_bytes)
    manifest = convert(tree, out, recipe, workers=0, max_rejects=0.03).manifest
    damaged = [str(path.relative_to(tree)) for path in (paths[3], paths[10])]
    assert [rejected.path for rejected in manifest.rejected] == damaged
    for rejected, reason in zip(manifest.rejected, ("not a known image format", "truncated"), strict=True):
        assert reason in rejected.reason
    counts = json.loads((out / MANIFEST_NAME).read_text())["counts"]
    shards = len(manifest.shards)
    assert counts == {"converted": IMAGES - 2, "rejected": 2, "ignored": 1, "shards": shards}
    assert verify(out) == []
    header, *lines = (out / "rejected.csv").read_text().splitlines()
    assert header == "id,path,reason"
    assert [line.split(",")[1] for line in lines] == damaged
    ids = open_dataset(out).read_index("train").ids
    assert set(ids.tolist()) == set(range(IMAGES)) - {rejected.id for rejected in manifest.rejected}
    files = {file.name for file in manifest.files} | {MANIFEST_NAME, "rejected.csv"}
    assert files == set(contents(out))


def test_a_source_without_a_picture_that_opens_leaves_nothing(tmp_path: Path) -> None:
    """The repaired source is then not refused as another one, and with --overwrite no folder stays beside."""
    tree, out = tmp_path / "tree", tmp_path / "out"
    (tree / "ant").mkdir(parents=True)
    (tree / "ant/1.jpg").write_bytes(b"\xff\xd8\xff no JPEG")
    with pytest.raises(DatasetError, match=r"none of its 1 pictures .*ant/1.jpg"):
        convert(tree, out, small_recipe("shards"), workers=0, max_rejects=1)
    assert contents(out) == {}
    (tree / "ant/1.jpg").write_bytes(encode_image(noise(40, 50), "JPEG"))
    assert len(convert(tree, out, small_recipe("shards"), workers=0).manifest.shards) == 1
    before = contents(out)
    (tree / "ant/1.jpg").write_bytes(b"\xff\xd8\xff no JPEG")
    with pytest.raises(DatasetError, match="none of its 1 pictures"):
        convert(tree, out, small_recipe("shards"), workers=0, max_rejects=1, overwrite=True)
    assert contents(out) == before
    assert {path.name for path in tmp_path.iterdir()} <= {"tree", "out", ".out.precache-lock"}


def test_too_many_rejects_publish_nothing_and_can_be_allowed(tree: Path, tmp_path: Path) -> None:
    """1% of 70 pictures is one; the share is rounded up to whole pictures."""
    for path in sorted(tree.glob("*/*.jpg"))[:2]:
        path.write_bytes(b"<html>")
    out, recipe = tmp_path / "out", small_recipe("shards")
    for share, limit in ((0.01, 1), (0, 0)):
        with pytest.raises(DatasetError, match=rf"at most {limit} may") as raised:
            convert(tree, out, recipe, workers=0, max_rejects=share)
        assert raised.value.path == out
        assert not (out / MANIFEST_NAME).exists()
    assert len(convert(tree, out, recipe, workers=0, max_rejects=0.02).manifest.rejected) == 2


@pytest.mark.parametrize("share", [0.28, np.float32(0.28), "28%"])
def test_share_of_rejects_is_the_decimal_that_was_typed(share: Any, tmp_path: Path) -> None:
    """28% of 25 pictures is 7; as floats, slightly more."""
    for number in range(25):
        path = tmp_path / f"tree/a/{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"<html>" if number < 8 else encode_image(noise(8, 8, 3)))
    value = parse_share("max_rejects", share) if isinstance(share, str) else share
    with pytest.raises(DatasetError, match=r"at most 7 may"):
        convert(
            tmp_path / "tree", tmp_path / "out", small_recipe("shards"),
            workers=0, max_rejects=value, class_depth=np.int64(1),
        )  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [("2.01kB", 2010), ("8.03kB", 8030), ("1.1KiB", 1126)])
def test_bytes_are_the_decimal_that_was_typed(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected
    assert parse_share("max_rejects", "0.07%") == 0.0007


def test_a_finished_dataset_with_too_many_rejects_is_refused(tree: Path, tmp_path: Path) -> None:
    min(tree.glob("*/*.jpg")).write_bytes(b"<html>")
    out, recipe = tmp_path / "out", small_recipe("shards")
    convert(tree, out, recipe, workers=0)
    with pytest.raises(DatasetError, match=r"1 picture is rejected and at most 0 may") as raised:
        convert(tree, out, recipe, workers=0, max_rejects=0)
    assert raised.value.path == out


@pytest.mark.parametrize("share", [-0.1, 1.1, True])
def test_convert_refuses_a_share_of_rejects_outside_0_to_1(
    share: float, raw_tree: Path, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=rf"^max_rejects .*{share}"):
        convert(raw_tree, tmp_path / "out", small_recipe("shards"), workers=0, max_rejects=share)


# `precache check`: the pictures that cannot be decoded, and the list of them.


@pytest.fixture
def damaged_tree(raw_tree: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """A tree, and the paths in it of the pictures that cannot be decoded."""
    tree = tmp_path / "tree"
    return tree, [scan_tree(raw_tree).samples[row].path for row in damage_tree(raw_tree, tree)]


def test_check_lists_the_pictures_that_convert_rejects(
    damaged_tree: tuple[Path, list[str]], tmp_path: Path
) -> None:
    tree, damaged = damaged_tree
    report = check(tree, workers=2)
    assert (report.pictures, [picture.path for picture in report.rejected]) == (IMAGES, damaged)
    assert report.list_file == default_list_path(tree) == tmp_path / "tree.rejected.csv"
    assert read_list(report.list_file) == report.rejected
    converted = convert(tree, tmp_path / "out", small_recipe("shards"), workers=0, max_rejects=1).manifest
    assert [(r.path, r.reason) for r in converted.rejected] == [(r.path, r.reason) for r in report.rejected]


def test_a_listed_picture_counts_as_damaged_until_its_file_changes(
    damaged_tree: tuple[Path, list[str]],
) -> None:
    tree, damaged = damaged_tree
    report = check(tree, workers=0)
    repaired, touched, *unchanged = (tree / path for path in damaged)
    repaired.write_bytes((tree / scan_tree(tree).samples[0].path).read_bytes())
    os.utime(touched, ns=(0, touched.stat().st_mtime_ns + 1))
    scan = list_tree(tree)
    rejected = [tree / scan.samples[row].path for row in rejected_rows(scan, report.rejected).tolist()]
    assert rejected == unchanged


def test_check_replaces_the_list_of_an_earlier_run(damaged_tree: tuple[Path, list[str]]) -> None:
    tree, damaged = damaged_tree
    report = check(tree, workers=0)
    for path in damaged:
        (tree / path).unlink()
    assert check(tree, workers=0).rejected == read_list(report.list_file) == ()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["shards", "webdataset"])
def test_memory_does_not_grow_with_the_dataset(name: str, tmp_path: Path) -> None:
    """Memory of all processes grows by under 250 bytes for each picture from 10,000 to 300,000."""
    peaks = []
    for count in (10_000, 300_000):
        tree = tmp_path / f"{count}"
        for number in range(count):
            folder = tree / f"{number // 1000:03d}"
            if number % 1000 == 0:  # a file system limits the number of links to a file
                folder.mkdir(parents=True)
                Image.new("RGB", (16, 16)).save(picture := tmp_path / f"{count}-{number}.jpg")
            os.link(picture, folder / f"{number:06d}.jpg")
        settings = f"--format {name} --size 16 --shard-bytes 256KiB --workers 2"
        command = [sys.executable, "-m", "precache", "convert", f"{tree}", f"{tree}.out", *settings.split()]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
            peaks.append(peak_memory(process))
        assert process.returncode == 0
    assert peaks[1] - peaks[0] < 250 * 290_000
    assert max(peaks) < 300 * 2**20


def peak_memory(process: "subprocess.Popen[bytes]") -> int:
    """Return the most bytes that `process` and its workers had at a time, shared memory counted once."""
    parent, peak = psutil.Process(process.pid), 0
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            processes = (parent, *parent.children(recursive=True))
            peak = max(peak, sum(member.memory_full_info().pss for member in processes))
        time.sleep(0.02)
    return peak
