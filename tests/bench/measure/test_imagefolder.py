"""ImageFolder on folders that people have: what it cannot open is left out of a trial, and is said."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from bench.measure.candidates import Candidate, class_root, open_candidates, same_pictures
from bench.measure.imagefolder import EXTENSIONS, ImageFolderLoader, find_faults
from loaders.dataset import open_split
from precache import Recipe, convert
from precache.errors import DatasetError
from precache.sources.tree import scan_tree


def draw(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 30), "teal").save(path)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("ant", "bee"):
        for number in range(6):
            draw(tmp_path / "tree" / name / f"{number}.jpg")
    return tmp_path / "tree"


def half(path: Path) -> None:
    path.write_bytes((path.parent / "0.jpg").read_bytes()[:300])


def bomb(path: Path) -> None:
    Image.new("1", (20_000, 20_000)).save(path, "PNG")


KINDS: dict[str, Callable[[Path], object]] = {
    "half.jpg": half,
    "empty.jpg": lambda path: path.write_bytes(b""),
    "html.jpg": lambda path: path.write_bytes(b"<!DOCTYPE html>404"),
    "webp.webp": lambda path: path.write_bytes(b"RIFF\x1a\0\0\0WEBPVP8L" + bytes(18)),
    "large.png": bomb,
    "._hidden.jpg": lambda path: path.write_bytes(b"\0\5\x16\7"),
    "nowhere.jpg": lambda path: path.symlink_to("nowhere at all"),
    "circle.jpg": lambda path: path.symlink_to("circle.jpg"),
    "pipe.jpg": os.mkfifo,
}


def serve(tree: Path, *, skip_unreadable: bool = True) -> list[int]:
    """Places of the pictures of one epoch."""
    with ImageFolderLoader(
        tree, batch_size=3, size=16, workers=0, device=torch.device("cpu"), augment="eval", shuffle=False,
        skip_unreadable=skip_unreadable,
    ) as loader:  # fmt: skip
        return [place for batch in loader for place in batch.ids.tolist()]


@pytest.mark.parametrize("name", KINDS)
def test_a_picture_that_pillow_cannot_open_is_left_out_and_named(tree: Path, name: str) -> None:
    KINDS[name](tree / "ant" / name)
    scan = scan_tree(tree)
    refused = find_faults(scan, [scan.samples[row].path for row in range(len(scan.samples))])
    assert list(refused.files) == [f"ant/{name}"]
    assert refused.tried == 13
    (sentence,) = refused.sentences()
    assert "1 of 13" in sentence
    assert name in sentence
    assert len(serve(tree)) == 12
    if name != "pipe.jpg":  # torch would wait for ever
        with pytest.raises(DatasetError, match=name):
            serve(tree, skip_unreadable=False)


def test_class_folders_without_a_picture_that_it_knows_are_named(tree: Path) -> None:
    (tree / "nothing").mkdir()
    shutil.copy(tree / "ant/0.jpg", tree / "nothing/picture")  # no ending
    (tree / "cow").mkdir()
    (tree / "ant/notes.txt").write_text("ants")
    refused = find_faults(scan_tree(tree), ["ant/0.jpg"])
    assert refused.empty_classes == ("cow", "nothing")
    assert "2 class folders (cow, nothing)" in refused.sentences()[0]
    assert len(serve(tree)) == 12
    with pytest.raises(DatasetError, match="cow"):
        serve(tree, skip_unreadable=False)


def test_a_sound_tree_has_nothing_to_say(raw_tree: Path) -> None:
    scan = scan_tree(raw_tree)
    assert find_faults(scan, [scan.samples[row].path for row in range(20)]).sentences() == []


def test_a_tree_of_broken_pictures_is_an_error_and_ends(tree: Path) -> None:
    for path in tree.glob("*/*.jpg"):
        path.write_bytes(b"none")
    with pytest.raises(DatasetError, match=r"ant/0\.jpg.*11 pictures that follow"):
        serve(tree)


def test_of_a_tree_with_splits_that_of_training_is_read(tree: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    shutil.copytree(tree, photos / "Train")
    shutil.copytree(tree, photos / "val")
    draw(photos / "Train/ant/deeper/still/0.jpg")
    (photos / "Train/bee/half.jpg").write_bytes(b"none")
    data = open_split(photos, "train")
    assert class_root(data) == photos / "Train"
    assert Candidate("imagefolder", photos, data).loader_path == photos / "Train"
    assert list(find_faults(scan_tree(photos), ["Train/bee/half.jpg"]).files) == ["Train/bee/half.jpg"]


def test_deeper_pictures_keep_their_class_beside_a_converted_part(tree: Path, tmp_path: Path) -> None:
    draw(tree / "ant/aaa/0.jpg")
    draw(tree / "ant/bbb/0.jpg")
    (tree / "bee/broken.jpg").write_bytes(b"none")
    convert(tree, tmp_path / "out", Recipe(format="shards", size=16), workers=0, max_rejects=0.5)
    opened, _ = open_candidates([Candidate("imagefolder", tree), Candidate("shards", tmp_path / "out")])
    with same_pictures(opened) as (served, notes):
        root = served[0].loader_path
        assert isinstance(root, Path)
        names = sorted(str(path.relative_to(root)) for path in root.rglob("*.jpg"))
        assert len(names) == 14
        assert {"ant/aaa/0.jpg", "ant/bbb/0.jpg"} <= set(names)
    assert len(notes) == 1


def test_extensions_are_those_of_torchvision() -> None:
    assert EXTENSIONS == IMG_EXTENSIONS
