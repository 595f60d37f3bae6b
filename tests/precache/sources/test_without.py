"""Conversions `--without` other datasets convert what these lack; test_sources.py runs over all sources."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precache import convert, open_dataset, verify_deep
from precache.errors import DatasetError, PrecacheError, SettingError
from tests.command import run_here
from tests.conftest import IMAGES, small_recipe
from tests.precache.destinations import contents
from tests.precache.sources.tars import make_tar

RECIPE = small_recipe("shards")


def pictures_of(tree: Path) -> list[Path]:
    return sorted(path for path in tree.glob("*/*") if path.is_file())


def paths_of(out: Path) -> list[str]:
    """Paths of the pictures in a dataset, in the order of their ids."""
    index = open_dataset(out).read_index()
    return [index.path(row) for row in np.argsort(index.ids).tolist()]


def convert_some(tree: Path, pictures: list[Path], out: Path, **options: Any) -> None:
    """Convert the pictures `pictures` of a tree, then put the others back."""
    kept_paths, aside = {path.relative_to(tree) for path in pictures}, out.with_name("aside")
    for path in [path for path in tree.rglob("*") if path.is_file()]:
        if path.relative_to(tree) not in kept_paths:
            (aside / path.relative_to(tree)).parent.mkdir(parents=True, exist_ok=True)
            path.rename(aside / path.relative_to(tree))
    for folder in [path for path in tree.iterdir() if not any(path.iterdir())]:
        folder.rmdir()
    convert(tree, out, RECIPE, workers=0, **options)
    shutil.copytree(aside, tree, dirs_exist_ok=True)
    shutil.rmtree(aside)


def test_what_several_datasets_lack_is_converted(tree: Path, tmp_path: Path) -> None:
    """Labels are those of all classes, and pictures that stay out lie between those that are converted."""
    pictures = pictures_of(tree)
    convert_some(tree, pictures[1::3], tmp_path / "a")
    convert_some(tree, pictures[2::3], tmp_path / "b")
    command = ("convert", "tree", "more", *RECIPE.to_flags().split(), "--workers", 0)
    for _ in range(2):
        result = run_here("precache", *command, "--without", "a", "--without", "b", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    assert "nothing to do" in result.stdout
    convert(tree, tmp_path / "again", RECIPE, workers=2, without=[tmp_path / "b", tmp_path / "a"])
    shards = {
        name: content for name, content in contents(tmp_path / "more").items() if name.startswith("train")
    }
    assert shards.items() <= contents(tmp_path / "again").items()
    manifest, index = open_dataset(tmp_path / "more").manifest, open_dataset(tmp_path / "more").read_index()
    assert paths_of(tmp_path / "more") == [str(path.relative_to(tree)) for path in pictures[::3]]
    assert sorted(index.ids.tolist()) == [*range(len(index))]
    assert manifest.scanned == len(index)
    for row in range(len(index)):
        assert index.path(row).startswith(manifest.classes[index.labels[row]])
    assert manifest.source_options == {"without": ["a", "b"]}
    assert "--without a,b" in manifest.to_flags()


def test_a_list_of_splits_may_name_what_is_left_out(tree: Path, tmp_path: Path) -> None:
    pictures = [str(path.relative_to(tree)) for path in pictures_of(tree)]
    convert_some(tree, [tree / name for name in pictures[::2]], tmp_path / "held")
    lines = [f'"{name}",{"val" if row % 4 == 1 else "train"}' for row, name in enumerate(pictures[2:])]
    (tmp_path / "list.csv").write_text("\n".join(lines))
    done = convert(
        tree,
        tmp_path / "more",
        RECIPE,
        workers=0,
        split_list=tmp_path / "list.csv",
        without=[tmp_path / "held"],
    )
    assert paths_of(tmp_path / "more") == pictures[3::2]
    assert done.manifest.split_samples["val"] == len([*range(3, len(pictures), 4)])
    assert verify_deep(tmp_path / "more", tree, workers=0) == []


def test_new_tars_with_the_keys_of_older_ones_are_refused(tree: Path, tmp_path: Path) -> None:
    """Which of the tars a key was of cannot be told, and all pictures would be converted twice."""
    pictures = [path.read_bytes() for path in pictures_of(tree)]
    (tmp_path / "tars").mkdir()
    for number in range(3):
        make_tar(tmp_path / "tars" / f"{number}.tar", {"a.jpg": pictures[number], "a.cls": b"0"})
        if number == 1:
            with pytest.raises(SettingError, match="the same keys") as raised:
                convert(tmp_path / "tars", tmp_path / "1", RECIPE, workers=0, without=[tmp_path / "0"])
            assert str(tmp_path / "0") in str(raised.value)
        options = {"without": [tmp_path / "1"]} if number == 2 else {}
        convert(tmp_path / "tars", tmp_path / str(number), RECIPE, workers=0, **options)
    assert paths_of(tmp_path / "2") == ["2.tar/a.jpg"]


def test_splits_without_a_new_picture_are_left_out(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "split").mkdir()
    for name in ("train", "val"):
        shutil.copytree(tree, tmp_path / "split" / name)
    convert(tmp_path / "split", tmp_path / "held", RECIPE, workers=0)
    picture = next((tmp_path / "split/val").rglob("*.jpg"))
    shutil.copy(picture, picture.with_name("new.jpg"))
    more = convert(tmp_path / "split", tmp_path / "more", RECIPE, workers=0, without=[tmp_path / "held"])
    assert more.manifest.split_samples == {"val": 1}


def test_pictures_rejected_before_are_tried_again(tree: Path, tmp_path: Path) -> None:
    """The share that may be rejected is one of all pictures, so that the old ones need no other share."""
    folder = min(path for path in tree.iterdir() if path.is_dir())
    for name in ("broken.jpg", "mended.jpg"):
        (folder / name).write_bytes(b"\xff\xd8\xff no JPEG")
    convert(tree, tmp_path / "held", RECIPE, workers=0, max_rejects=0.05)
    shutil.copy(next(folder.glob("*_0*.jpg")), folder / "mended.jpg")
    more = convert(
        tree, tmp_path / "more", RECIPE, workers=0, max_rejects=0.05, without=[tmp_path / "held"]
    ).manifest
    assert paths_of(tmp_path / "more") == [f"{folder.name}/mended.jpg"]
    assert [(picture.path, picture.id) for picture in more.rejected] == [(f"{folder.name}/broken.jpg", 0)]


@pytest.mark.parametrize("without", ["held", "no such folder", "tree", "out", "out/in it"])
def test_without_is_refused_where_it_makes_no_sense(without: str, tree: Path, tmp_path: Path) -> None:
    """Refuse where nothing is left, where no dataset is, and where the dataset is to be written."""
    for name in ("held", "out"):
        convert(tree, tmp_path / name, RECIPE, workers=0)
    before = contents(tmp_path)
    place = str(tmp_path / without)
    with pytest.raises((SettingError, DatasetError)) as raised:
        convert(tree, tmp_path / ("new" if without == "held" else "out"), RECIPE, workers=0, without=[place])
    assert place in str(raised.value)
    if without == "held":
        assert f"all {IMAGES} pictures of {tree}" in str(raised.value)
    assert contents(tmp_path) == before
    for value in (place, tmp_path / without):
        with pytest.raises(SettingError, match="without must be a list"):
            convert(tree, tmp_path / "new", RECIPE, workers=0, without=value)


def test_a_changed_set_of_pictures_needs_overwrite(tree: Path, tmp_path: Path) -> None:
    """It changes with the source, and with what the other dataset holds."""
    pictures = pictures_of(tree)
    convert_some(tree, pictures[::2], tmp_path / "held")
    options: dict[str, Any] = {"workers": 0, "without": [tmp_path / "held"]}
    convert(tree, tmp_path / "more", RECIPE, **options)
    convert_some(tree, pictures[::3], tmp_path / "held", overwrite=True)
    with pytest.raises(DatasetError, match="source") as raised:
        convert(tree, tmp_path / "more", RECIPE, **options)
    assert raised.value.path == tmp_path / "more"
    assert "--overwrite" in raised.value.remedy
    convert(tree, tmp_path / "more", RECIPE, overwrite=True, **options)
    first_paths = {str(path.relative_to(tree)) for path in pictures[::3]}
    assert paths_of(tmp_path / "more") == [
        name for name in (str(path.relative_to(tree)) for path in pictures) if name not in first_paths
    ]
    with pytest.raises(PrecacheError) as raised:
        convert(tree, tmp_path / "held", RECIPE, workers=0)
    assert f"--without {tmp_path / 'held'}" in str(raised.value)


def test_a_dataset_of_another_source_is_warned_of(
    tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in [path for path in tree.iterdir() if path.is_dir()]:
        path.rename(path.with_name(f"other-{path.name}"))
    convert(tree, tmp_path / "held", RECIPE, workers=0)
    for path in [path for path in tree.iterdir() if path.is_dir()]:
        path.rename(path.with_name(path.name.removeprefix("other-")))
    done = convert(tree, tmp_path / "more", RECIPE, workers=0, without=[tmp_path / "held"])
    (warning,) = caplog.messages
    assert str(tmp_path / "held") in warning
    assert done.manifest.samples == IMAGES
