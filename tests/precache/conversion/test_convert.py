"""What a conversion makes of its source: what is left out, counted and predicted."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from PIL import Image

from precache import check, convert, open_dataset, verify
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError, SettingError
from precache.sources.rejected_list import default_list_path, read_list, rejected_rows
from precache.sources.tree import list_tree, scan_tree
from tests.command import ROOT
from tests.conftest import IMAGES, small_recipe
from tests.damage import damage_tree
from tests.precache.destinations import contents


@pytest.mark.parametrize(("name", "shard_bytes"), [("shards", 12 * 48 * 48 * 3), ("webdataset", 1)])
def test_corrupt_pictures_are_named_counted_and_left_out(
    name: str, shard_bytes: int, tree: Path, tmp_path: Path
) -> None:
    """Also where a shard has no other picture."""
    paths = sorted(path for path in tree.glob("*/*.jpg"))
    paths[3].write_bytes(b"<html>404 not found</html>")
    paths[10].write_bytes(paths[10].read_bytes()[: paths[10].stat().st_size // 2])
    (tree / "notes.txt").write_text("notes")
    out, recipe = tmp_path / "out", small_recipe(name, shard_bytes=shard_bytes)
    manifest = convert(tree, out, recipe, workers=0, max_rejects=0.03).manifest
    bad = [str(path.relative_to(tree)) for path in (paths[3], paths[10])]
    assert [rejected.path for rejected in manifest.rejected] == bad
    for rejected, reason in zip(manifest.rejected, ("not a known image format", "truncated"), strict=True):
        assert reason in rejected.reason
    counts = json.loads((out / MANIFEST_NAME).read_text())["counts"]
    assert counts == {"scanned": IMAGES + 1, "converted": IMAGES - 2, "rejected": 2, "ignored": 1}
    assert verify(out) == []
    listed = (out / "rejected.csv").read_text().splitlines()
    assert listed[0] == "id,path,reason"
    assert [line.split(",")[1] for line in listed[1:]] == bad
    ids = open_dataset(out).read_index("train").ids
    assert set(ids.tolist()) == set(range(IMAGES)) - {rejected.id for rejected in manifest.rejected}
    files = {file.name for file in manifest.files} | {MANIFEST_NAME, "rejected.csv"}
    assert files == set(contents(out))


def test_too_many_rejects_publish_nothing_and_can_be_allowed(tree: Path, tmp_path: Path) -> None:
    """1% of 70 pictures is one; the share is rounded up to whole pictures."""
    for path in sorted(tree.glob("*/*.jpg"))[:2]:
        path.write_bytes(b"<html>")
    out, recipe = tmp_path / "out", small_recipe("shards")
    for share, allowed in ((0.01, 1), (0, 0)):
        with pytest.raises(DatasetError, match=f"at most {allowed} may"):
            convert(tree, out, recipe, workers=0, max_rejects=share)
        assert not (out / MANIFEST_NAME).exists()
    assert len(convert(tree, out, recipe, workers=0, max_rejects=0.02).manifest.rejected) == 2
    with pytest.raises(DatasetError, match=f"{out}: is finished, but 2 pictures are rejected"):
        convert(tree, out, recipe, workers=0, max_rejects=0)
    for share in (-0.1, 1.1, True):
        with pytest.raises(SettingError, match="max_rejects must be a share from 0 to 1"):
            convert(tree, out, recipe, workers=0, max_rejects=share)


# `precache check`: which pictures cannot be decoded, and the list of them.


def test_check_lists_the_pictures_that_convert_rejects(raw_tree: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    bad = [scan_tree(raw_tree).samples[row].path for row in damage_tree(raw_tree, tree)]
    report = check(tree, workers=2)
    assert (report.pictures, [picture.path for picture in report.rejected]) == (IMAGES, bad)
    assert report.list_file == default_list_path(tree) == tmp_path / "tree.rejected.csv"
    assert read_list(report.list_file) == report.rejected
    converted = convert(tree, tmp_path / "out", small_recipe("shards"), workers=0, max_rejects=1).manifest
    assert [(r.path, r.reason) for r in converted.rejected] == [(r.path, r.reason) for r in report.rejected]
    mended, touched, *others = (tree / path for path in bad)
    mended.write_bytes((tree / scan_tree(tree).samples[0].path).read_bytes())
    os.utime(touched, ns=(0, touched.stat().st_mtime_ns + 1))
    scan = list_tree(tree)
    held = [tree / scan.samples[row].path for row in rejected_rows(scan, report.rejected).tolist()]
    assert held == others
    for path in bad:
        (tree / path).unlink()
    assert check(tree, workers=0).rejected == read_list(report.list_file) == ()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["shards", "webdataset"])
def test_memory_does_not_grow_with_the_dataset(name: str, tmp_path: Path) -> None:
    """10,000 against 300,000 pictures: under 250 bytes for each one more, of all processes together."""
    peaks = []
    for count in (10_000, 300_000):
        tree = tmp_path / f"{count}"
        for number in range(count):
            folder = tree / f"{number // 1000:03d}"
            if number % 1000 == 0:  # a file has so many names at most
                folder.mkdir(parents=True)
                Image.new("RGB", (16, 16)).save(picture := tmp_path / f"{count}-{number}.jpg")
            os.link(picture, folder / f"{number:06d}.jpg")
        settings = f"--format {name} --size 16 --shard-bytes 256KiB --workers 2"
        command = [sys.executable, "-m", "precache", "convert", f"{tree}", f"{tree}.out", *settings.split()]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
            peaks.append(most_memory(process))
        assert process.returncode == 0
    assert peaks[1] - peaks[0] < 250 * 290_000
    assert max(peaks) < 300 * 2**20


def most_memory(process: "subprocess.Popen[bytes]") -> int:
    """Bytes that it and its workers had at a time; what several share is counted once."""
    parent, most = psutil.Process(process.pid), 0
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            every = (parent, *parent.children(recursive=True))
            most = max(most, sum(one.memory_full_info().pss for one in every))
        time.sleep(0.02)
    return most
