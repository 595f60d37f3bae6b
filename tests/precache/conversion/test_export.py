"""A converted dataset as a tree of pictures again: what comes back, and what is not touched."""

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
from tests.format_contract import stored
from tests.precache.sources.archives import read_shards
from tests.precache.sources.objects import Items, picture
from tests.precache.sources.tables import write_spot_table
from tests.stopping import KilledError, Stop, stopping


def files(tree: Path) -> list[str]:
    return sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())


def test_export_keeps_names_and_pixels(converted: dict[str, Path], raw_tree: Path, tmp_path: Path) -> None:
    done = export(converted["shards"], tmp_path / "tree", workers=2)
    assert (done.pictures, done.source, done.flags) == (IMAGES, tmp_path / "tree", "")
    stems = [os.path.splitext(sample.path)[0] for sample in scan_tree(raw_tree).samples]
    assert files(tmp_path / "tree") == sorted([*(f"{stem}.png" for stem in stems), "labels.csv"])
    header, first, *_ = (tmp_path / "tree/labels.csv").read_text().splitlines()
    assert (header, first) == ("image,label,split", f"{stems[0]}.png,{os.path.dirname(stems[0])},train")
    convert(tmp_path / "tree", tmp_path / "again", small_recipe("shards"), workers=0)
    assert read_shards(tmp_path / "again") == read_shards(converted["shards"])


def test_export_keeps_the_bytes_of_jpegs(converted: dict[str, Path], tmp_path: Path) -> None:
    for name in ("webdataset", "dali"):
        export(converted[name], tmp_path / name, workers=0)
        held = {sample.data for _, sample in stored(open_dataset(converted[name]))}
        assert {file.read_bytes() for file in (tmp_path / name).rglob("*.jpg")} == held


def test_export_keeps_splits_and_channels(raw_tree: Path, tmp_path: Path) -> None:
    for name, settings in {"both": {"splits": "train=0.5,val=0.5"}, "rgba": {"channels": "rgba"}}.items():
        out, tree = tmp_path / name, tmp_path / f"{name}-tree"
        one = convert(raw_tree, out, small_recipe("shards", **settings), workers=0).manifest
        export(out, tree, workers=0)
        again = small_recipe("shards", channels=one.recipe.channels)
        two = convert(tree, tmp_path / f"{name}-again", again, workers=0).manifest
        assert two.samples_per_class == one.samples_per_class
    assert read_shards(tmp_path / "rgba-again") == read_shards(tmp_path / "rgba")


def labelled(labels: list[Any], **fields: list[Any]) -> Items:
    rows = [{"image": picture(n), "label": label} for n, label in enumerate(labels)]
    for name, values in fields.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return Items(rows)


DATASETS = {
    "several classes": (labelled([["a", "b"], [], ["c"]]), {}),
    "vectors": (labelled([[0.5, 1], [1, 2], [2, 3]]), {"target": "number"}),
    "fields": (
        labelled(["x", "y", "x"], caption=["a, 'b'", "é\n", ""], box=[[[1, 2]], [], [[3, 4], [5, 6]]]),
        {"fields": ("caption", "box")},
    ),
    "names of the table's columns": (
        labelled(["x", "y"], split=["a\r", "\r\nb"], image2=[0.5, -1e300]),
        {"fields": ("split", "image2")},
    ),
    "other splits": (labelled(["x", "y", "x"], fold=["a", "b", "a"]), {"split": "fold"}),
    "a class called as the table": (labelled(["labels.csv", "Labels.csv/x", "a"]), {}),
    "unsafe classes": (labelled(["../up", "/etc", "a:b"]), {}),
}


@pytest.mark.parametrize("name", DATASETS)
def test_the_exported_table_holds_what_a_tree_cannot(name: str, tmp_path: Path) -> None:
    dataset, options = DATASETS[name]
    convert(dataset, tmp_path / "one", Recipe(format="shards", size=8), workers=0, **options)
    there_and_back(tmp_path, 8)
    one, two = open_dataset(tmp_path / "one"), open_dataset(tmp_path / "two")
    for what in ("classes", "target", "samples_per_class"):
        assert getattr(one.manifest, what) == getattr(two.manifest, what)
    before, after = one.read_index(), two.read_index()
    assert [read_shards(tmp_path / "one"), before.ids.tolist()] == [
        read_shards(tmp_path / "two"),
        after.ids.tolist(),
    ]
    pairs = [(before.targets, after.targets)]
    renamed = {"split": "field_split"}
    pairs += [(column, after.fields[renamed.get(name, name)]) for name, column in before.fields.items()]
    for mine, its in pairs:
        assert (mine is None) == (its is None)
        assert mine is None or its is None or mine.content() == its.content()


def there_and_back(folder: Path, size: int) -> None:
    """Export the dataset `one` in the folder, and convert that into `two` by the command that was said."""
    done = export(folder / "one", folder / "tree", workers=0)
    command = ["convert", done.source, "two", "--format", "shards", "--size", size, "--workers", 0]
    answer = run_here("precache", *command, *shlex.split(done.flags), cwd=folder)
    assert answer.returncode == 0, answer.stderr


def test_exported_boxes_and_masks_fit_the_stored_pictures(tmp_path: Path) -> None:
    """The boxes are those of the pictures that are written, not of the originals."""
    named = {"root": str(tmp_path / "pictures"), "fields": ("box",), "boxes": "box"}
    table, mask = write_spot_table(tmp_path), str(tmp_path / "masks")
    convert(table, tmp_path / "one", Recipe(format="dali", size=40), workers=0, mask=mask, **named)
    there_and_back(tmp_path, 40)
    # ImageFolder, which reads tree/train, would take a folder of masks in it for a class
    assert sorted(path.name for path in (tmp_path / "tree").iterdir()) == [".masks", "labels.csv", "train"]
    one, two = (open_dataset(tmp_path / folder) for folder in ("one", "two"))
    assert one.read_index().mask_checksums is not None
    assert np.array_equal(one.read_index().mask_checksums, two.read_index().mask_checksums)
    assert two.manifest.source_options["boxes"] == "box"
    (left, top, right, bottom), *_ = two.read_index().fields["box"].array(0).tolist()
    (_, sample), *_ = stored(two)
    bright = sample.pixels("")[..., 0] > 127
    assert bright[round(top) : round(bottom), round(left) : round(right)].all()
    assert bright.sum() == round((right - left) * (bottom - top))


def test_exported_names_stay_in_the_tree_and_are_unique(tmp_path: Path) -> None:
    """Paths and classes are made to leave a folder, or to be alike."""
    names = "1.jpg", "1.png", "\u00e9.jpg", "e\u0301.jpg", "..%2f.jpg", "y" * 240 + ".jpg", "\udcfe.jpg"
    for folder in ("a\\b", "con\nsole", "A", "a", " ..", "x" * 250, "\udcff"):
        (tmp_path / "hostile" / folder).mkdir(parents=True)
        for name in names:
            picture(len(folder)).save(tmp_path / "hostile" / folder / name, "PNG")
    convert(tmp_path / "hostile", tmp_path / "one", Recipe(format="shards", size=8), workers=0)
    beside = {path.name for path in tmp_path.iterdir()}
    done = export(tmp_path / "one", tmp_path / "deep" / "tree", workers=0)
    assert {path.name for path in tmp_path.iterdir()} == beside | {"deep"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["tree"]
    written = [name for name in files(tmp_path / "deep" / "tree") if name.endswith(".png")]
    assert len(written) == len({name.casefold() for name in written}) == 42
    parts = [part for name in written for part in name.split("/")]
    assert all(part.isprintable() and len(part.encode()) < 240 for part in parts)
    again = open_source(done.source, SourceOptions(label="label")).scan()
    assert (len(again.samples), len(again.classes)) == (42, 7)


def test_export_refuses_a_folder_that_is_not_empty(converted: dict[str, Path], tmp_path: Path) -> None:
    source = converted["dali"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    check_bad_input(run_here("precache", "export", source, "full", cwd=tmp_path), "full: ", "is not empty")
    with pytest.raises(SettingError, match="overlaps with"):
        export(source, source / "tree", workers=0)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    assert files(tmp_path / "full") == ["thesis.txt"]


def test_a_killed_export_leaves_no_tree(converted: dict[str, Path], tmp_path: Path) -> None:
    """Because a sample is damaged, or it is killed."""
    source = Path(shutil.copytree(converted["webdataset"], tmp_path / "source"))
    shard, _ = flip_a_bit(source)
    with pytest.raises(DatasetError, match=shard.name):
        export(source, tmp_path / "tree", workers=0)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    with stopping(tmp_path, Stop()) as run:
        export(converted["shards"], tmp_path / "whole", workers=0)
    for moment in (2, run.count // 2, run.count - 1, run.count):
        with stopping(tmp_path, Stop(moment)), pytest.raises(KilledError):
            export(converted["shards"], tmp_path / "tree", workers=0)
        assert not (tmp_path / "tree").exists() or files(tmp_path / "tree") == files(tmp_path / "whole")
        shutil.rmtree(tmp_path / "tree", ignore_errors=True)
    (tmp_path / "tree").mkdir()
    export(converted["shards"], tmp_path / "tree", workers=0)
    assert files(tmp_path / "tree") == files(tmp_path / "whole")
