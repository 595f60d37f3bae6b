"""Arms: how they are written, and that all train with the same pictures."""

import shutil
from pathlib import Path

import pytest

from bench.measure.training_sources import find_pictures, parse_arm
from precache import Recipe, SourceOptions, convert
from precache.errors import DatasetError, SettingError
from tests.bench.measure.squares import TRAIN, VAL, Squares

TREE = Path("photos")


@pytest.mark.parametrize(
    ("text", "name", "backend", "path", "augment"),
    [
        ("data/shards", "shards", "auto", "data/shards", "auto"),
        ("crop=data/shards", "crop", "auto", "data/shards", "auto"),
        ("q75=webdataset:data/w", "q75", "webdataset", "data/w", "auto"),
        ("imagefolder", "imagefolder", "imagefolder", "photos", "auto"),
        ("raw=dali,augment=cpu", "raw", "dali", "photos", "cpu"),
        ("a=dali:data/dali,augment=device", "a", "dali", "data/dali", "device"),
    ],
)
def test_an_arm_is_written_in_one_word(text: str, name: str, backend: str, path: str, augment: str) -> None:
    arm = parse_arm(text, TREE)
    assert (arm.name, arm.backend, str(arm.path), arm.augment) == (name, backend, path, augment)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x=dalli:data/s", "unknown backend 'dalli'; choose from"),
        ("x=data/s,augment=gpu", "unknown augment 'gpu'; choose from: auto, cpu, device"),
        ("x=", "names no folder; write NAME=BACKEND:FOLDER"),
    ],
)
def test_a_word_that_is_no_arm_says_what_would_be(text: str, told: str) -> None:
    with pytest.raises(SettingError, match=told):
        parse_arm(text, TREE)


def test_raw_arms_train_with_the_pictures_of_the_converted_ones_and_none_that_validates(
    squares: Squares,
) -> None:
    _, pictures = squares.open("imagefolder", "ours=shards")
    assert (len(pictures.train), len(pictures.val)) == (3 * TRAIN, 3 * VAL)
    for source in squares.sources("ours=shards", "pytorch"):
        with source.open(0) as feed:
            served = {sample for batch in feed for sample in batch.ids.tolist()}
        assert served == set(pictures.tree.ids[pictures.train].tolist()), source.name


def test_arms_of_other_pictures_are_refused(squares: Squares, tmp_path: Path) -> None:
    rows = squares.listed.read_text().splitlines()
    swapped = {"train": "val", "val": "train"}
    first, kind = rows[1].split(",")
    (tmp_path / "other.csv").write_text("\n".join([rows[0], f"{first},{swapped[kind]}", *rows[2:]]))
    other = squares.convert("other", tmp_path / "other.csv")
    with pytest.raises(DatasetError, match=f"{first} is in one of them alone; convert both with the same"):
        squares.open(str(squares.shards), str(other))


def test_without_a_converted_arm_nothing_says_what_trains(squares: Squares) -> None:
    with pytest.raises(SettingError, match=r"add a folder that was converted with --splits"):
        squares.open("imagefolder", "pytorch")


def test_a_folder_without_val_is_refused(squares: Squares, tmp_path: Path) -> None:
    rows = [row for row in squares.listed.read_text().splitlines() if not row.endswith("val")]
    (tmp_path / "train.csv").write_text("\n".join(rows))
    with pytest.raises(DatasetError, match=r"no_val: .*convert with --splits FILE"):
        squares.open(str(squares.convert("no_val", tmp_path / "train.csv")))


def test_two_arms_of_one_name_are_refused(squares: Squares) -> None:
    with pytest.raises(SettingError, match="two arms are called 'shards'"):
        squares.open(str(squares.shards), f"shards={squares.tree}")


def test_pictures_of_other_classes_are_refused(squares: Squares, tmp_path: Path) -> None:
    shutil.copytree(squares.tree, tmp_path / "tree")
    (tmp_path / "tree/red").rename(tmp_path / "tree/amber")
    with pytest.raises(DatasetError, match="'amber' is of one alone; name the tree that it was converted"):
        find_pictures(tmp_path / "tree", [parse_arm(str(squares.shards), squares.tree)])


def test_a_picture_that_the_tree_lacks_is_named(squares: Squares, tmp_path: Path) -> None:
    shutil.copytree(squares.tree, tmp_path / "tree")
    (tmp_path / "tree/red/03.png").unlink()
    with pytest.raises(DatasetError, match=r"was made of red/03\.png, which .*tree lacks"):
        find_pictures(tmp_path / "tree", [parse_arm(str(squares.shards), squares.tree)])


def test_a_picture_with_another_label_than_in_the_tree_is_refused(squares: Squares, tmp_path: Path) -> None:
    rows = ["path,class", *(f"{path},{path.split('/')[0]}" for path in listed(squares))]
    rows[1] = rows[1].replace(",blue", ",green")
    (squares.tree / "labels.csv").write_text("\n".join(rows))
    try:
        recipe = Recipe(format="shards", size=24, fit="crop")
        options = SourceOptions(label="class", target="class")
        source = squares.tree / "labels.csv"
        convert(source, tmp_path / "out", recipe, workers=0, options=options, split_list=squares.listed)
    finally:
        (squares.tree / "labels.csv").unlink()
    with pytest.raises(
        DatasetError, match=r"blue/00\.png is labelled 'green', in .*'blue'; convert it again"
    ):
        squares.open(str(tmp_path / "out"))


def listed(squares: Squares) -> list[str]:
    return [row.split(",")[0] for row in squares.listed.read_text().splitlines()[1:]]
