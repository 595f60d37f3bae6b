"""Raw trees have the classes that ImageFolder finds, and the splits that `precache convert` makes."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.datasets import ImageFolder

import loaders
import precache
from loaders.dataset import open_split
from precache import Recipe, SettingError
from tests.building import build_loader
from tests.conftest import small_recipe
from tests.loader_contract import ids_of, pairs_of
from tests.precache.sources.tars import JPEG, files_of, put, scan_of

PARTS = ("a", "a-b", "a.b", "a b", "A", "b", "\u00fc", "u\u0308", "1", "10", "x.png")
"""Names of folders; some sort before the slash, so that files of a folder do not sort side by side."""
FOLDERS = st.tuples(st.sampled_from(PARTS), st.lists(st.sampled_from((*PARTS, "train", "val")), max_size=3))
NAMES = st.sampled_from(("1.jpg", "10.JPG", "2.jpeg", "a.png", "Z.webp", "a-b.jpg", "notes.txt"))
MORE_NAMES = st.sampled_from(("1.gif", "a.AVIF", "tmp", "2.nef", "2.jpg_large"))
"""Names of files that ImageFolder does not list; some are samples of `loaders.build`."""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(FOLDERS, NAMES | MORE_NAMES), max_size=25))
def test_a_tree_has_the_samples_and_order_of_image_folder(paths: list[tuple[Any, str]]) -> None:
    """Labels and classes are the same, too."""
    names = ["first/in/1.jpg", "last/1.jpg", *("/".join((top, *inner, name)) for (top, inner), name in paths)]
    files = {name: b"text" if name.endswith(".txt") else JPEG for name in names}
    with tempfile.TemporaryDirectory() as folder:
        root = put(Path(folder) / "tree", files)
        image_folder = ImageFolder(root, allow_empty=True)
        expected = [(path, image_folder.classes[label]) for path, label in image_folder.samples]
        filled = {name for _, name in expected}
        for keep_empty in (False, True):
            empty_classes: Any = "keep" if keep_empty else "leave-out"
            data = open_split(root, "train", empty_classes=empty_classes, image_folder_only=True)
            labels = [data.classes[label] for label in data.labels[:].tolist()]
            assert list(zip(data.files, labels, strict=True)) == expected
            if keep_empty:
                assert list(data.classes) == image_folder.classes
            else:
                assert filled <= {*data.classes} <= {*image_folder.classes}
        if len(filled) < len(image_folder.classes):
            with pytest.raises(FileNotFoundError):
                open_split(root, "train", empty_classes="refuse", image_folder_only=True)


def served(path: Path, **settings: Any) -> list[tuple[int, int]]:
    """Return (id, label) of each sample, and check that a loader and an ImageDataset serve the same."""
    with build_loader(path, batch_size=16, size=32, workers=0, **settings) as loader:
        pairs = sorted(pairs_of(loader))
    dataset = loaders.ImageDataset(path, **settings)
    assert sorted(zip(dataset.ids.tolist(), dataset.targets, strict=True)) == pairs
    return pairs


@pytest.mark.parametrize("seed", [0, 7])
def test_splits_of_a_tree_are_those_of_its_conversion(seed: int, raw_tree: Path, tmp_path: Path) -> None:
    """Splits by shares depend on the recipe's seed and not on the loader's; splits may be listed, too."""
    # with seed 7 the source is a tree that has a folder for one split alone
    source = shutil.copytree(raw_tree, tmp_path / "one/train").parent if seed else raw_tree
    recipe = small_recipe("shards", splits="train=0.6,val=0.3,test=0.1", seed=seed)
    precache.convert(source, tmp_path / "shares", recipe, workers=0)
    settings: dict[str, Any] = {"splits": recipe.splits, **({"recipe": recipe} if seed else {})}
    split_by_path = {ref.path: ("train", "val")[ref.id % 2] for ref in scan_of(source).samples if ref.id % 5}
    split_list = tmp_path / "list.csv"
    split_list.write_text("".join(f"{path},{split}\n" for path, split in split_by_path.items()))
    precache.convert(source, tmp_path / "listed", small_recipe("shards"), split_list=split_list, workers=0)
    for split in ("train", "val", "test"):
        pairs = served(source, split=split, **settings)
        assert pairs == served(tmp_path / "shares", split=split)
        with build_loader(source, split=split, **settings, seed=9, size=32) as loader:
            assert sorted(ids_of(loader)) == [sample_id for sample_id, _ in pairs]
    for split in ("train", "val"):
        assert served(source, split=split, splits=split_list) == served(tmp_path / "listed", split=split)


def test_folders_of_splits_in_another_language_are_listed(raw_tree: Path, tmp_path: Path) -> None:
    tree = put(
        tmp_path / "tree", {f"entrenamiento/{name}": file for name, file in files_of(raw_tree).items()}
    )
    shutil.copytree(raw_tree, tree / "prueba")
    with pytest.raises(SettingError, check=lambda error: "'FOLDER,train'" in error.remedy):
        loaders.build(tree, split="prueba")
    split_list = tmp_path / "list.csv"
    split_list.write_text("entrenamiento,train\nprueba,test\n")
    precache.convert(tree, tmp_path / "listed", small_recipe("shards"), split_list=split_list, workers=0)
    for split, folder in (("train", "entrenamiento"), ("test", "prueba")):
        pairs = served(tree, split=split, splits=split_list)
        assert pairs == served(tmp_path / "listed", split=split)
        assert [label for _, label in pairs] == ImageFolder(tree / folder).targets


def test_wrong_splits_of_a_tree_are_refused(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    folders = put(
        tmp_path / "tree", {f"{split}/{name}/1.jpg": JPEG for split in ("Train", "dev") for name in "ab"}
    )
    shares = "train=0.9,val=0.1"
    wrong: list[tuple[Path, dict[str, Any], str]] = [
        (folders, {"splits": shares}, "test|val, train|train, val"),
        (folders, {"split": "test"}, "train, val"),
        (raw_tree, {"splits": shares, "split": "test"}, "train, val"),
        (raw_tree, {"splits": "train=0.9"}, "train=0.9"),
        (raw_tree, {"splits": 0.9}, "0.9"),
        (raw_tree, {"splits": "no list"}, "no list"),
        (raw_tree, {"splits": shares, "recipe": Recipe(format="shards", splits="train=0.5,val=0.5")}, shares),
        (converted["shards"], {"splits": shares}, shares),
        (converted["shards"], {"class_depth": 1}, "class_depth"),
    ]
    for path, wrong_settings, value in wrong:
        for build in (loaders.build, loaders.ImageDataset):
            with pytest.raises(SettingError, match=value):
                build(path, **wrong_settings)


def test_training_on_a_tree_stats_no_picture(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state belongs to the pictures' names: it fits if one is rewritten, but not if one is renamed."""
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    stat, stat_paths = os.stat, []

    def record_stat(path: Any, **options: Any) -> os.stat_result:
        stat_paths.append(str(path) if isinstance(path, int) else os.fspath(path))
        return stat(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", record_stat)
        with build_loader(tree, batch_size=8, shuffle=False) as loader:
            next(iter(loader))
            state = loader.state_dict()
    assert str(tree) in stat_paths
    assert not [path for path in stat_paths if path.endswith((".jpg", ".png"))]
    picture = next(tree.glob("*/*.jpg"))
    Image.new("RGB", (40, 40)).save(picture)
    with build_loader(tree, batch_size=8, shuffle=False) as loader:
        loader.load_state_dict(state)
        assert next(iter(loader)).ids.tolist() == list(range(8, 16))
    picture.rename(picture.with_name("renamed.jpg"))
    other = build_loader(tree, batch_size=8, shuffle=False)
    with other, pytest.raises(SettingError, match="state"):
        other.load_state_dict(state)


def test_class_depth_says_where_class_folders_are(raw_tree: Path, tmp_path: Path) -> None:
    files = {f"animals/{name}": content for name, content in files_of(raw_tree).items()}
    tree = put(tmp_path / "tree", files)
    plain = loaders.ImageDataset(raw_tree)
    for depth, classes in ((0, []), (1, ["animals"]), (2, [f"animals/{name}" for name in plain.classes])):
        labels = [number for _, number in served(tree, class_depth=depth)]
        assert labels == (plain.targets if depth == 2 else [depth - 1] * len(plain))
        assert loaders.ImageDataset(tree, class_depth=depth).classes == classes
