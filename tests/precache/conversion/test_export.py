"""Exports of converted datasets: trees that convert to the same dataset, and do not touch other files."""

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precache import Recipe, SourceOptions, convert, export, open_dataset
from precache.errors import DatasetError, SettingError
from precache.sources import open_source
from precache.sources.tree import scan_tree
from tests.command import check_bad_input, run_here
from tests.conftest import IMAGES, small_recipe
from tests.damage import flip_a_bit
from tests.format_contract import stored_samples
from tests.precache.sources.archives import read_shards
from tests.precache.sources.objects import Items, picture
from tests.precache.sources.tables import write_spot_table
from tests.stopping import KilledError, Stop, stopping


def file_names(tree: Path) -> list[str]:
    return sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())


def test_export_keeps_names_and_pixels(converted: dict[str, Path], raw_tree: Path, tmp_path: Path) -> None:
    report = export(converted["shards"], tmp_path / "tree", workers=2)
    assert (report.pictures, report.source, report.flags) == (IMAGES, tmp_path / "tree", "")
    stems = [os.path.splitext(sample.path)[0] for sample in scan_tree(raw_tree).samples]
    assert file_names(tmp_path / "tree") == sorted([*(f"{stem}.png" for stem in stems), "labels.csv"])
    header, first, *_ = (tmp_path / "tree/labels.csv").read_text().splitlines()
    assert (header, first) == ("image,label,split", f"{stems[0]}.png,{os.path.dirname(stems[0])},train")
    convert(tmp_path / "tree", tmp_path / "again", small_recipe("shards"), workers=0)
    assert read_shards(tmp_path / "again") == read_shards(converted["shards"])


def test_export_keeps_the_bytes_of_jpegs(converted: dict[str, Path], tmp_path: Path) -> None:
    for name in ("webdataset", "dali"):
        export(converted[name], tmp_path / name, workers=0)
        jpegs = {sample.data for _, sample in stored_samples(open_dataset(converted[name]))}
        assert {file.read_bytes() for file in (tmp_path / name).rglob("*.jpg")} == jpegs


def test_export_keeps_splits_and_channels(raw_tree: Path, tmp_path: Path) -> None:
    for name, settings in {"both": {"splits": "train=0.5,val=0.5"}, "rgba": {"channels": "rgba"}}.items():
        out, tree = tmp_path / name, tmp_path / f"{name}-tree"
        first = convert(raw_tree, out, small_recipe("shards", **settings), workers=0).manifest
        export(out, tree, workers=0)
        recipe = small_recipe("shards", channels=first.recipe.channels)
        second = convert(tree, tmp_path / f"{name}-again", recipe, workers=0).manifest
        assert second.samples_per_class == first.samples_per_class
    assert read_shards(tmp_path / "rgba-again") == read_shards(tmp_path / "rgba")


def labelled_items(labels: list[Any], **fields: list[Any]) -> Items:
    """A dataset in memory with these labels and fields."""
    rows = [{"image": picture(n), "label": label} for n, label in enumerate(labels)]
    for name, values in fields.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return Items(rows)


DATASETS = {
    "several classes": (labelled_items([["a", "b"], [], ["c"]]), {}),
    "vectors": (labelled_items([[0.5, 1], [1, 2], [2, 3]]), {"target": "number"}),
    "fields": (
        labelled_items(["x", "y", "x"], caption=["a, 'b'", "é\n", ""], box=[[[1, 2]], [], [[3, 4], [5, 6]]]),
        {"fields": ("caption", "box")},
    ),
    "names of the table's columns": (
        labelled_items(["x", "y"], split=["a\r", "\r\nb"], image2=[0.5, -1e300]),
        {"fields": ("split", "image2")},
    ),
    "other splits": (labelled_items(["x", "y", "x"], fold=["a", "b", "a"]), {"split": "fold"}),
    "a class called as the table": (labelled_items(["labels.csv", "Labels.csv/x", "a"]), {}),
    "unsafe classes": (labelled_items(["../up", "/etc", "a:b"]), {}),
}


@pytest.mark.parametrize("name", DATASETS)
def test_the_exported_table_holds_what_a_tree_cannot(name: str, tmp_path: Path) -> None:
    dataset, options = DATASETS[name]
    convert(dataset, tmp_path / "before", Recipe(format="shards", size=8), workers=0, **options)
    export_and_convert(tmp_path, 8)
    before, after = open_dataset(tmp_path / "before"), open_dataset(tmp_path / "after")
    for attribute in ("classes", "target", "samples_per_class"):
        assert getattr(before.manifest, attribute) == getattr(after.manifest, attribute)
    assert read_shards(tmp_path / "before") == read_shards(tmp_path / "after")
    index, new_index = before.read_index(), after.read_index()
    assert index.ids.tolist() == new_index.ids.tolist()
    assert (index.targets is None) == (new_index.targets is None)
    if index.targets is not None and new_index.targets is not None:
        assert index.targets.content() == new_index.targets.content()
    new_names = {"split": "field_split"}
    for field, column in index.fields.items():
        assert column.content() == new_index.fields[new_names.get(field, field)].content()


def export_and_convert(folder: Path, size: int) -> None:
    """Export the dataset `before` in the folder, and convert it into `after` with the flags of the report."""
    report = export(folder / "before", folder / "tree", workers=0)
    command = ["convert", report.source, "after", "--format", "shards", "--size", size, "--workers", 0]
    result = run_here("precache", *command, *shlex.split(report.flags), cwd=folder)
    assert result.returncode == 0, result.stderr


def test_exported_boxes_and_masks_fit_the_stored_pictures(tmp_path: Path) -> None:
    """The boxes are in pixels of the pictures that are written, not of the originals."""
    options = {"root": str(tmp_path / "pictures"), "fields": ("box",), "boxes": "box"}
    table, mask = write_spot_table(tmp_path), str(tmp_path / "masks")
    convert(table, tmp_path / "before", Recipe(format="dali", size=40), workers=0, mask=mask, **options)
    export_and_convert(tmp_path, 40)
    # ImageFolder, which reads tree/train, would take a folder of masks in it for a class
    assert sorted(path.name for path in (tmp_path / "tree").iterdir()) == [".masks", "labels.csv", "train"]
    before, after = (open_dataset(tmp_path / folder) for folder in ("before", "after"))
    assert before.read_index().mask_checksums is not None
    assert np.array_equal(before.read_index().mask_checksums, after.read_index().mask_checksums)
    assert after.manifest.source_options["boxes"] == "box"
    (left, top, right, bottom), *_ = after.read_index().fields["box"].row_array(0).tolist()
    (_, sample), *_ = stored_samples(after)
    bright = sample.pixels("")[..., 0] > 127
    assert bright[round(top) : round(bottom), round(left) : round(right)].all()
    assert bright.sum() == round((right - left) * (bottom - top))


def test_exported_names_stay_in_the_tree_and_are_unique(tmp_path: Path) -> None:
    """The paths and classes here try to leave their folder, or to equal one another."""
    names = "1.jpg", "1.png", "\u00e9.jpg", "e\u0301.jpg", "..%2f.jpg", "y" * 240 + ".jpg", "\udcfe.jpg"
    for folder in ("a\\b", "con\nsole", "A", "a", " ..", "x" * 250, "\udcff"):
        (tmp_path / "hostile" / folder).mkdir(parents=True)
        for name in names:
            picture(len(folder)).save(tmp_path / "hostile" / folder / name, "PNG")
    convert(tmp_path / "hostile", tmp_path / "dataset", Recipe(format="shards", size=8), workers=0)
    before = {path.name for path in tmp_path.iterdir()}
    report = export(tmp_path / "dataset", tmp_path / "deep" / "tree", workers=0)
    assert {path.name for path in tmp_path.iterdir()} == before | {"deep"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["tree"]
    pictures = [name for name in file_names(tmp_path / "deep" / "tree") if name.endswith(".png")]
    assert len(pictures) == len({name.casefold() for name in pictures}) == 42
    parts = [part for name in pictures for part in name.split("/")]
    assert all(part.isprintable() and len(part.encode()) < 240 for part in parts)
    scan = open_source(report.source, SourceOptions(label="label")).scan()
    assert (len(scan.samples), len(scan.classes)) == (42, 7)


def test_export_refuses_a_folder_that_is_not_empty(converted: dict[str, Path], tmp_path: Path) -> None:
    source = converted["dali"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    check_bad_input(run_here("precache", "export", source, "full", cwd=tmp_path), "full: ", "is not empty")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    assert file_names(tmp_path / "full") == ["thesis.txt"]


def test_export_refuses_a_tree_inside_the_dataset(converted: dict[str, Path]) -> None:
    source = converted["dali"]
    with pytest.raises(SettingError) as raised:
        export(source, source / "tree", workers=0)
    assert raised.value.path == source / "tree"
    assert not (source / "tree").exists()


def test_export_of_a_damaged_sample_leaves_no_tree(converted: dict[str, Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(converted["webdataset"], tmp_path / "source"))
    shard, _ = flip_a_bit(source)
    with pytest.raises(DatasetError, match=shard.name):
        export(source, tmp_path / "tree", workers=0)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_killed_export_leaves_no_tree(converted: dict[str, Path], tmp_path: Path) -> None:
    """The tree is missing or complete; an empty folder in its place does not hinder the next export."""
    with stopping(tmp_path, Stop()) as run:
        export(converted["shards"], tmp_path / "whole", workers=0)
    for moment in (2, run.count // 2, run.count - 1, run.count):
        with stopping(tmp_path, Stop(moment)), pytest.raises(KilledError):
            export(converted["shards"], tmp_path / "tree", workers=0)
        is_missing = not (tmp_path / "tree").exists()
        assert is_missing or file_names(tmp_path / "tree") == file_names(tmp_path / "whole")
        shutil.rmtree(tmp_path / "tree", ignore_errors=True)
    (tmp_path / "tree").mkdir()
    export(converted["shards"], tmp_path / "tree", workers=0)
    assert file_names(tmp_path / "tree") == file_names(tmp_path / "whole")
