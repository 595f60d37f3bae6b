from pathlib import Path

import pytest

from precache import SourceError, SourceOptions, convert, open_dataset, verify_deep
from precache.formats import FORMATS
from precache.sources.tree import scan_tree
from tests.command import run_here as run
from tests.conftest import small_recipe


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"\xff\xd8\xff")


def test_classes_lie_as_deep_as_is_said_and_are_called_by_their_path(tmp_path: Path) -> None:
    put(tmp_path, "birds/heron/2.jpg", "birds/heron/1.jpg", "birds/owl/1.jpg", "cats/lynx/1.jpg")
    put(tmp_path, "birds/stray.jpg", "above.jpg", "cats/lynx/deeper/1.jpg", "birds/.hidden/1.jpg")
    scan = scan_tree(tmp_path, 2)
    assert [(s.id, s.path, scan.classes[s.label]) for s in scan.samples] == [
        (0, "birds/heron/1.jpg", "birds/heron"),
        (1, "birds/heron/2.jpg", "birds/heron"),
        (2, "birds/owl/1.jpg", "birds/owl"),
        (3, "cats/lynx/1.jpg", "cats/lynx"),
    ]
    left_out = {"birds/stray.jpg", "above.jpg", "cats/lynx/deeper", "birds/.hidden"}
    assert {ignored.path for ignored in scan.ignored} == left_out
    assert scan.scanned == 8
    assert "2 files that look like pictures are left out" in scan.warnings[0]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_splits_have_folders_of_their_own_at_any_depth(depth: int, tmp_path: Path) -> None:
    inner = "/".join("abc"[:depth])
    names = [str(Path(split, inner, "1.jpg")) for split in ("test", "train", "val")]
    put(tmp_path, *names)
    scan = scan_tree(tmp_path, depth)
    assert [(s.path, s.split) for s in scan.samples] == list(
        zip(names, ("test", "train", "val"), strict=True)
    )
    assert scan.classes == ((inner,) if depth else ())


def test_pictures_beside_a_folder_called_train_are_all_that_a_flat_folder_holds(tmp_path: Path) -> None:
    put(tmp_path, "1.jpg", "train/2.jpg")
    scan = scan_tree(tmp_path, 0)
    assert [(s.path, s.split, s.label) for s in scan.samples] == [("1.jpg", "", -1)]
    assert [ignored.path for ignored in scan.ignored] == ["train"]


def test_the_digest_tells_apart_what_the_same_files_are_at_another_depth(tmp_path: Path) -> None:
    put(tmp_path, "train/1.jpg", "test/2.jpg")
    classes, splits = scan_tree(tmp_path), scan_tree(tmp_path, 0)
    assert [s.path for s in classes.samples] == [s.path for s in splits.samples]
    assert (classes.classes, splits.classes) == (("test", "train"), ())
    assert splits.samples.split_names == ("test", "train")
    assert classes.digest != splits.digest
    assert scan_tree(tmp_path, 1).digest == classes.digest


@pytest.mark.parametrize(
    ("names", "depth", "mentions"),
    [
        (["1.jpg"], 1, "pass --class-depth 0"),
        (["a/b/1.jpg"], 1, "pass --class-depth 2"),
        (["a/1.jpg"], 0, "leave out --class-depth 0"),
        (["a/1.jpg"], 2, "FOLDER/CLASS/picture.jpg"),
        ([], 0, "has no pictures"),
    ],
)
def test_pictures_at_another_depth_are_an_error_that_says_what_to_pass(
    names: list[str], depth: int, mentions: str, tmp_path: Path
) -> None:
    put(tmp_path, *names)
    with pytest.raises(SourceError, match=mentions):
        scan_tree(tmp_path, depth)


@pytest.mark.parametrize("format_name", ["shards", "dali"])
def test_a_flat_folder_is_converted_without_labels_and_verified(
    format_name: str, raw_tree: Path, tmp_path: Path
) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for sample in scan_tree(raw_tree).samples:
        (flat / sample.path.replace("/", "_")).symlink_to(raw_tree / sample.path)
    recipe = small_recipe(format_name, splits="train=0.9,val=0.1")
    convert(flat, tmp_path / "out", recipe, workers=0, options=SourceOptions(class_depth=0))
    manifest = open_dataset(tmp_path / "out").manifest
    assert (manifest.target, manifest.classes) == ("none", ())
    assert manifest.split_samples == {"train": 63, "val": 7}
    assert "--class-depth 0" in manifest.to_flags()
    assert verify_deep(tmp_path / "out", flat, workers=0).problems == ()
    shards = sorted(
        path for path in (tmp_path / "out").glob(f"*{FORMATS[format_name].suffix}") if "-" in path.name
    )
    assert {sample.label for path in shards for sample in FORMATS[format_name].read_shard(path)} == {-1}
    assert "70, without labels (train 63, val 7)" in run("precache", "inspect", "out", cwd=tmp_path).stdout
