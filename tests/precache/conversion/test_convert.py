"""What a conversion makes of its source: what is kept, left out, counted and predicted."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

from bench.measure.fresh import run_watched
from precache import convert, open_dataset, verify, verify_deep
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError, SettingError
from precache.formats import FORMATS
from precache.sources.tree import scan_tree
from tests.building import build_loader
from tests.command import ROOT, check_bad_input, run_here
from tests.conftest import IMAGES, small_recipe
from tests.precache.destinations import contents


def test_the_manifest_describes_the_dataset(converted: dict[str, Path]) -> None:
    manifest = open_dataset(converted["webdataset"]).manifest
    assert manifest.samples == IMAGES
    assert sum(manifest.samples_per_class["train"]) == IMAGES
    assert manifest.classes[0] == "001.anchor"
    assert {file.name for file in manifest.files} | {MANIFEST_NAME} == set(contents(converted["webdataset"]))
    assert all((converted["webdataset"] / file.name).stat().st_size == file.bytes for file in manifest.files)
    assert set(manifest.made_by) >= {"pillow", "pillow_flavour", "simplejpeg"}


def test_corrupt_pictures_are_named_counted_and_left_out(tree: Path, tmp_path: Path) -> None:
    paths = sorted(path for path in tree.glob("*/*.jpg"))
    paths[3].write_bytes(b"<html>404 not found</html>")
    paths[10].write_bytes(paths[10].read_bytes()[: paths[10].stat().st_size // 2])
    (tree / "notes.txt").write_text("notes")
    for name in ("shards", "webdataset", "dali"):
        manifest = convert(tree, tmp_path / name, small_recipe(name), workers=0, max_rejects=0.03).manifest
        assert [(r.path, r.reason) for r in manifest.rejected] == [
            (str(paths[3].relative_to(tree)), "cannot be decoded (not a known image format)"),
            (str(paths[10].relative_to(tree)), manifest.rejected[1].reason),
        ]
        assert "truncated" in manifest.rejected[1].reason
        counts = json.loads((tmp_path / name / MANIFEST_NAME).read_text())["counts"]
        assert counts == {"scanned": IMAGES + 1, "converted": IMAGES - 2, "rejected": 2, "ignored": 1}
        assert verify(tmp_path / name) == []
        listed = (tmp_path / name / "rejected.csv").read_text().splitlines()
        assert listed[0] == "id,path,reason"
        assert [line.split(",")[1] for line in listed[1:]] == [r.path for r in manifest.rejected]
        ids = open_dataset(tmp_path / name).read_index("train").ids
        assert set(ids.tolist()) == set(range(IMAGES)) - {r.id for r in manifest.rejected}


def test_a_shard_whose_pictures_are_all_corrupt_is_left_out(tree: Path, tmp_path: Path) -> None:
    recipe = small_recipe("webdataset", shard_bytes=1)  # one picture per shard
    bad = sorted(tree.glob("*/*.jpg"))[5]
    bad.write_bytes(b"")
    manifest = convert(tree, tmp_path / "out", recipe, workers=0).manifest
    assert len(manifest.shards) == IMAGES - 1
    assert [r.reason for r in manifest.rejected] == ["cannot be decoded (the file is empty)"]
    files = {file.name for file in manifest.files} | {MANIFEST_NAME, "rejected.csv"}
    assert files == set(contents(tmp_path / "out"))


def test_too_many_rejects_publish_nothing_and_can_be_allowed(tree: Path, tmp_path: Path) -> None:
    """1% of 70 pictures is one; the share is rounded up to whole pictures."""
    for path in sorted(tree.glob("*/*.jpg"))[:2]:
        path.write_bytes(b"<html>")
    out = tmp_path / "out"
    for share, allowed in ((0.01, 1), (0, 0)):
        with pytest.raises(
            DatasetError, match=rf"stopped, . pictures? (is|are) rejected and at most {allowed} may"
        ):
            convert(tree, out, small_recipe("shards"), workers=0, max_rejects=share)
        assert not (out / MANIFEST_NAME).exists()
    assert len(convert(tree, out, small_recipe("shards"), workers=0, max_rejects=0.02).manifest.rejected) == 2
    for share in (-0.1, 1.1, True):
        with pytest.raises(SettingError, match="max_rejects must be a share from 0 to 1"):
            convert(tree, out, small_recipe("shards"), workers=0, max_rejects=share)


def test_a_refused_conversion_that_is_allowed_afterwards_says_what_it_leaves_out(
    tree: Path, tmp_path: Path
) -> None:
    """All shards are there already: what is left is to publish them."""
    sorted(tree.glob("*/*.jpg"))[0].write_bytes(b"<html>")
    arguments = ("convert", tree, "out", "--format", "shards", "--size", 16, "--workers", 0)
    refused = run_here("precache", *arguments, "--strict", cwd=tmp_path)
    assert refused.returncode == 2
    assert "stopped, 1 picture is rejected and at most 0 may be" in refused.stderr.splitlines()[-1]
    allowed = run_here("precache", *arguments, cwd=tmp_path)
    assert "69 images, 1 rejected" in allowed.stdout
    assert "WARNING: 1 picture is left out; " in allowed.stderr
    assert "nothing to do" in run_here("precache", *arguments, cwd=tmp_path).stdout
    again = run_here("precache", *arguments, "--strict", cwd=tmp_path)
    check_bad_input(again, "out: is finished, but 1 picture is rejected and at most 0 may be")


@pytest.mark.parametrize("name", ["shards", "webdataset", "dali"])
def test_the_size_is_predicted_and_checked_against_the_disk(
    name: str, raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    settings = {"recipe": small_recipe(name, size=128, shard_bytes=2**20), "workers": 0}
    manifest = convert(raw_tree, tmp_path / "out", on_start=lambda *s: seen.append(s), **settings).manifest
    ((predicted, free),) = seen
    assert abs(predicted / manifest.stored_bytes - 1) < 0.15
    assert free > 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(DatasetError, match=r"needs about [\d,]+ bytes, and 1,000 are free"):
        convert(raw_tree, tmp_path / "other", **settings)


def test_a_tree_with_splits_keeps_them(raw_tree: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(raw_tree, tree / "train", ignore=shutil.ignore_patterns("*_000[1-4].*"))
    for path in raw_tree.glob("*/*_000[1-4].*"):
        (tree / "val" / path.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tree / "val" / path.parent.name)
    counts = {split: len(list((tree / split).glob("*/*.*"))) for split in ("train", "val")}
    convert(tree, tmp_path / "out", small_recipe("shards"), workers=0)
    for path in (tree, tmp_path / "out"):
        for split, count in counts.items():
            with build_loader(path, split=split, size=32, workers=0) as loader:
                assert loader.samples == count
                assert len({int(i) for batch in loader for i in batch.ids}) == count
        with pytest.raises(SettingError, match="unknown split 'test'; choose from: train, val"):
            build_loader(path, split="test")
    with pytest.raises(SettingError, match="the source has its own: train, val"):
        convert(tree, tmp_path / "other", small_recipe("shards", splits="a=0.5,b=0.5"), workers=0)


def test_settings_that_change_pixels_change_them(tree: Path, tmp_path: Path) -> None:
    clear = tree / "001.anchor" / "clear.png"
    Image.new("RGBA", (60, 60), (0, 0, 0, 0)).save(clear)
    broken = sorted(tree.glob("*/*.jpg"))[0]
    broken.write_bytes(broken.read_bytes()[:-400])
    recipe = small_recipe("shards", background="#0000ff", allow_truncated=True, decode="scaled", size=16)
    manifest = convert(tree, tmp_path / "out", recipe, workers=0).manifest
    assert manifest.rejected == ()
    ids = {sample.path: sample.id for sample in scan_tree(tree).samples}
    for shard in manifest.shards:
        for sample in FORMATS["shards"].read_shard(tmp_path / "out" / shard.file_name):
            if sample.id == ids["001.anchor/clear.png"]:
                assert (sample.data == (0, 0, 255)).all()
    assert verify_deep(tmp_path / "out", tree, workers=0).problems == ()
    flags = manifest.recipe.to_flags()
    assert "--background '#0000ff' --decode scaled --allow-truncated" in flags


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["shards", "webdataset"])
def test_memory_does_not_grow_with_the_dataset(name: str, tmp_path: Path) -> None:
    """10,000 against 300,000 pictures: under 0.15 KiB for each one more, for its name and its labels."""
    picture = tmp_path / "0.jpg"
    peaks = []
    for count in (10_000, 300_000):
        for number in range(count):
            folder = tmp_path / f"{count}" / f"{number // 1000:03d}"
            if number % 1000 == 0:
                folder.mkdir(parents=True)
                Image.new("RGB", (16, 16)).save(picture := tmp_path / f"{count}-{number}.jpg")
            os.link(picture, folder / f"{number:06d}.jpg")
        arguments = ("convert", tmp_path / f"{count}", tmp_path / f"{count}.out", "--format", name)
        settings = ("--size", 16, "--shard-bytes", "256KiB", "--workers", 2)
        command = [sys.executable, "-m", "precache", *map(str, (*arguments, *settings))]
        peaks.append(run_watched(command, {**os.environ, "PYTHONPATH": str(ROOT)}, memory=True).peak_bytes)
    assert peaks[1] - peaks[0] < 150 * 290_000
    assert max(peaks) < 300 * 2**20
