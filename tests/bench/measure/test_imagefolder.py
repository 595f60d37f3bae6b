"""ImageFolder on damaged trees: a picture that it cannot open is left out of a trial, and is named."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from bench.measure.candidates import Candidate, class_root, open_candidates, same_pictures
from bench.measure.imagefolder import ImageFolderLoader, find_faults
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


def write_half(path: Path) -> None:
    path.write_bytes((path.parent / "0.jpg").read_bytes()[:300])


def write_bomb(path: Path) -> None:
    Image.new("1", (20_000, 20_000)).save(path, "PNG")


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "half.jpg": write_half,
    "empty.jpg": lambda path: path.write_bytes(b""),
    "html.jpg": lambda path: path.write_bytes(b"<!DOCTYPE html>404"),
    "webp.webp": lambda path: path.write_bytes(b"RIFF\x1a\0\0\0WEBPVP8L" + bytes(18)),
    "large.png": write_bomb,
    "._hidden.jpg": lambda path: path.write_bytes(b"\0\5\x16\7"),
    "nowhere.jpg": lambda path: path.symlink_to("nowhere at all"),
    "circle.jpg": lambda path: path.symlink_to("circle.jpg"),
    "pipe.jpg": os.mkfifo,
}
"""Functions that make a file which ImageFolder cannot open, by its name."""


def serve(tree: Path) -> list[int]:
    """Return the indices of the pictures that one epoch serves."""
    with ImageFolderLoader(
        tree, batch_size=3, size=16, workers=0, device=torch.device("cpu"), augment="eval", shuffle=False,
    ) as loader:  # fmt: skip
        return [index for batch in loader for index in batch.ids.tolist()]


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_picture_is_named_and_left_out_of_a_trial(tree: Path, name: str) -> None:
    UNREADABLE[name](tree / "ant" / name)
    scan = scan_tree(tree)
    faults = find_faults(scan, [scan.samples[row].path for row in range(len(scan.samples))])
    assert list(faults.files) == [f"ant/{name}"]
    assert faults.tried == 13
    (sentence,) = faults.sentences()
    assert "1 of 13" in sentence
    assert name in sentence
    assert len(serve(tree)) == 12


def test_class_folders_without_a_listed_picture_are_named(tree: Path) -> None:
    (tree / "nothing").mkdir()
    shutil.copy(tree / "ant/0.jpg", tree / "nothing/picture")  # a name without an ending
    (tree / "cow").mkdir()
    (tree / "ant/notes.txt").write_text("ants")
    faults = find_faults(scan_tree(tree), ["ant/0.jpg"])
    assert faults.empty_classes == ("cow", "nothing")
    assert "2 class folders (cow, nothing)" in faults.sentences()[0]
    assert len(serve(tree)) == 12


def test_a_sound_tree_has_no_faults(raw_tree: Path) -> None:
    scan = scan_tree(raw_tree)
    assert find_faults(scan, [scan.samples[row].path for row in range(20)]).sentences() == []


def test_a_tree_of_unreadable_pictures_raises_and_does_not_hang(tree: Path) -> None:
    for path in tree.glob("*/*.jpg"):
        path.write_bytes(b"none")
    with pytest.raises(DatasetError, match="11 pictures") as raised:
        serve(tree)
    assert raised.value.path == str(tree / "ant/0.jpg")


def test_only_the_training_split_of_a_tree_is_read(tree: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    shutil.copytree(tree, photos / "Train")
    shutil.copytree(tree, photos / "val")
    draw(photos / "Train/ant/deeper/still/0.jpg")
    (photos / "Train/bee/half.jpg").write_bytes(b"none")
    data = open_split(photos, "train")
    assert class_root(data) == photos / "Train"
    assert Candidate("imagefolder", photos, data).loader_path == photos / "Train"
    assert list(find_faults(scan_tree(photos), ["Train/bee/half.jpg"]).files) == ["Train/bee/half.jpg"]


def test_links_to_deeper_pictures_keep_their_class_folder(tree: Path, tmp_path: Path) -> None:
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
