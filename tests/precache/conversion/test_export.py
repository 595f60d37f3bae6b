import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from precache import Recipe, SourceOptions, convert, export, open_dataset
from precache.dataset.columns import Column
from precache.errors import DatasetError, SettingError
from precache.formats import FORMATS
from precache.sources import open_source
from precache.sources.tree import scan_tree
from tests.command import ROOT, check_bad_input, run_here
from tests.conftest import IMAGES, small_recipe
from tests.format_contract import stored
from tests.precache.sources.objects import Items
from tests.precache.sources.test_converted_shapes import spotted
from tests.precache.sources.test_dataset import picture, shards


def files(tree: Path) -> list[str]:
    return sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())


def test_what_comes_back_has_the_names_and_the_pixels(
    converted: dict[str, Path], raw_tree: Path, tmp_path: Path
) -> None:
    done = export(converted["shards"], tmp_path / "tree", workers=2)
    assert (done.pictures, done.source, done.flags) == (IMAGES, tmp_path / "tree", "")
    stems = [os.path.splitext(sample.path)[0] for sample in scan_tree(raw_tree).samples]
    assert files(tmp_path / "tree") == sorted(f"{stem}.png" for stem in stems)
    convert(tmp_path / "tree", tmp_path / "again", small_recipe("shards"), workers=0)
    assert shards(tmp_path / "again") == shards(converted["shards"])


@pytest.mark.parametrize("name", ["webdataset", "dali"])
def test_jpegs_keep_their_bytes(converted: dict[str, Path], tmp_path: Path, name: str) -> None:
    export(converted[name], tmp_path / "tree", workers=0)
    dataset = open_dataset(converted[name])
    held = {sample.data for _, sample in stored(dataset)}
    assert {(tmp_path / "tree" / file).read_bytes() for file in files(tmp_path / "tree")} == held


@pytest.mark.parametrize("name", FORMATS)
def test_any_format_becomes_jpeg_or_png(converted: dict[str, Path], tmp_path: Path, name: str) -> None:
    for file_format, kind in (("png", "PNG"), ("jpeg", "JPEG")):
        export(converted[name], tmp_path / kind, file_format=file_format, quality=70, workers=0)
        with Image.open(next((tmp_path / kind).rglob("*_0003.*"))) as image:
            assert image.format == kind


def test_splits_come_back_as_folders(raw_tree: Path, tmp_path: Path) -> None:
    recipe = small_recipe("shards", splits="train=0.5,val=0.5")
    convert(raw_tree, tmp_path / "one", recipe, workers=0)
    export(tmp_path / "one", tmp_path / "tree", workers=0)
    assert {path.name for path in (tmp_path / "tree").iterdir()} == {"train", "val"}
    manifest = convert(tmp_path / "tree", tmp_path / "two", small_recipe("shards"), workers=0).manifest
    assert manifest.samples_per_class == open_dataset(tmp_path / "one").manifest.samples_per_class


def labelled(labels: list[Any], **fields: list[Any]) -> Items:
    rows = [{"image": picture(n), "label": label} for n, label in enumerate(labels)]
    for name, values in fields.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return Items(rows)


DATASETS = {
    "several classes": (labelled([["a", "b"], [], ["c"]]), {}),
    "numbers": (labelled([0.5, 1.0, -2.0]), {}),
    "vectors": (labelled([[0.5, 1], [1, 2], [2, 3]]), {"target": "number"}),
    "whole numbers": (labelled([3, 1, 2]), {"target": "number"}),
    "fields": (
        labelled(["x", "y", "x"], caption=["a, 'b'", "é\n", ""], box=[[[1, 2]], [], [[3, 4], [5, 6]]]),
        {"fields": ("caption", "box")},
    ),
    "other splits": (labelled(["x", "y", "x"], fold=["a", "b", "a"]), {"split": "fold"}),
    "a field named as a column": (labelled(["x", "y", "x"], split=["1", "2", "3"]), {"fields": ("split",)}),
    "a field named as the column of another": (
        labelled(["x", "y", "x"], field_label=["a", "b", "c"]),
        {"fields": ("field_label",)},
    ),
    "a class called as the table": (labelled(["labels.jsonl", "Labels.jsonl/x", "a"]), {}),
    "numbers as classes": (labelled([10, 2, 1]), {}),
    "fractions as classes": (labelled([10.5, 2.5, 1.5]), {"target": "class"}),
    "numbers as text": (labelled(["10", "2", "1"], n=[1, 2, 3]), {"fields": ("n",)}),
    "lists of numbers": (labelled([[10, 2], [1], []]), {"target": "classes"}),
    "classes below train": (labelled(["train/a", "val/b", "train/c"]), {}),
    "no labels": (Items([picture(n) for n in range(3)]), {}),
    "a caption alone": (Items([{"image": picture(n), "text": "t"} for n in range(3)]), {"fields": ("text",)}),
    "unsafe classes": (labelled(["../up", "/etc", "a:b"]), {}),
}


@pytest.mark.parametrize("name", DATASETS)
def test_what_a_tree_cannot_hold_comes_back_by_its_table(name: str, tmp_path: Path) -> None:
    dataset, options = DATASETS[name]
    convert(dataset, tmp_path / "one", Recipe(format="shards", size=8), workers=0, **options)
    done = export(tmp_path / "one", tmp_path / "tree", workers=0)
    command = ["convert", done.source, "two", "--format", "shards", "--size", 8, "--workers", 0]
    answer = run_here("precache", *command, *shlex.split(done.flags), cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    one, two = open_dataset(tmp_path / "one"), open_dataset(tmp_path / "two")
    for what in ("classes", "target", "samples_per_class"):
        assert getattr(one.manifest, what) == getattr(two.manifest, what)
    before, after = one.read_index(), two.read_index()
    assert [shards(tmp_path / "one"), before.ids.tolist()] == [shards(tmp_path / "two"), after.ids.tolist()]
    pairs = [(before.targets, after.targets)]
    pairs += zip(_by_name(before.fields), _by_name(after.fields), strict=True)
    for mine, its in pairs:
        assert (mine is None) == (its is None)
        assert mine is None or its is None or mine.content() == its.content()


def _by_name(fields: Mapping[str, Column]) -> list[Column]:
    return [fields[name] for name in sorted(fields)]


@pytest.mark.parametrize("name", FORMATS)
def test_boxes_and_masks_come_back_on_what_they_mark(tmp_path: Path, name: str) -> None:
    """The boxes are those of the pictures that are written, not of the originals."""
    named = {"root": str(tmp_path / "pictures"), "fields": ("box",), "boxes": "box"}
    table, mask = spotted(tmp_path), str(tmp_path / "masks")
    convert(table, tmp_path / "one", Recipe(format=name, size=40), workers=0, mask=mask, **named)
    done = export(tmp_path / "one", tmp_path / "tree", workers=0)
    command = ["convert", done.source, "two", "--format", "shards", "--size", 40, "--workers", 0]
    answer = run_here("precache", *command, *shlex.split(done.flags), cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    one, two = (open_dataset(tmp_path / folder) for folder in ("one", "two"))
    assert one.read_index().mask_checksums is not None
    assert np.array_equal(one.read_index().mask_checksums, two.read_index().mask_checksums)
    assert two.manifest.source_options["boxes"] == "box"
    (left, top, right, bottom), *_ = two.read_index().fields["box"].array(0).tolist()
    (_, sample), *_ = stored(two)
    bright = sample.pixels("")[..., 0] > 127
    assert bright[round(top) : round(bottom), round(left) : round(right)].all()
    assert bright.sum() == round((right - left) * (bottom - top))


@pytest.mark.parametrize("channels", ["grey", "rgba"])
def test_channels_come_back(raw_tree: Path, tmp_path: Path, channels: str) -> None:
    recipe = small_recipe("shards", channels=channels)
    convert(raw_tree, tmp_path / "one", recipe, workers=0)
    export(tmp_path / "one", tmp_path / "tree", workers=0)
    convert(tmp_path / "tree", tmp_path / "two", recipe, workers=0)
    assert shards(tmp_path / "two") == shards(tmp_path / "one")
    if channels == "rgba":
        with pytest.raises(SettingError, match="transparency, which a JPEG cannot hold"):
            export(tmp_path / "one", tmp_path / "jpegs", file_format="jpeg", workers=0)


def hostile(tmp_path: Path) -> Path:
    """A dataset whose paths and classes are made to leave a folder, or to be alike."""
    tree = tmp_path / "hostile"
    for folder in ("a\\b", "con\nsole", "A", "a", " ..", "x" * 250, "\udcff"):
        (tree / folder).mkdir(parents=True)
        for name in (
            "1.jpg",
            "1.png",
            "\u00e9.jpg",
            "e\u0301.jpg",
            "..%2f.jpg",
            "y" * 240 + ".jpg",
            "\udcfe.jpg",
        ):
            picture(len(folder)).save(tree / folder / name, "PNG")
    convert(tree, tmp_path / "one", Recipe(format="shards", size=8), workers=0)
    return tmp_path / "one"


def test_no_name_leads_out_of_the_tree_or_hides_another(tmp_path: Path) -> None:
    dataset = hostile(tmp_path)
    beside = {path.name for path in tmp_path.iterdir()}
    done = export(dataset, tmp_path / "deep" / "tree", workers=0)
    assert {path.name for path in tmp_path.iterdir()} == beside | {"deep"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["tree"]
    names = [name for name in files(tmp_path / "deep" / "tree") if name.endswith(".png")]
    assert len(names) == len({name.casefold() for name in names}) == 42
    assert all(name.isprintable() and len(part.encode()) < 240 for name in names for part in name.split("/"))
    again = open_source(done.source, SourceOptions(label="label")).scan()
    assert len(again.samples) == 42
    assert len(again.classes) == 7


def test_a_tree_that_is_there_is_not_touched(converted: dict[str, Path], tmp_path: Path) -> None:
    source = converted["dali"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    with pytest.raises(SettingError, match="exists and is not empty"):
        export(source, tmp_path / "full", workers=0)
    with pytest.raises(SettingError, match="overlaps with"):
        export(source, source / "tree", workers=0)
    (tmp_path / "empty").mkdir()
    export(source, tmp_path / "empty", workers=0)
    assert len(files(tmp_path / "empty")) == IMAGES
    assert files(tmp_path / "full") == ["thesis.txt"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_sample_ends_an_export_and_leaves_nothing(
    converted: dict[str, Path], tmp_path: Path, name: str
) -> None:
    source = Path(shutil.copytree(converted[name], tmp_path / "source"))
    shard = open_dataset(source).shard_path(open_dataset(source).manifest.shards[3])
    content = bytearray(shard.read_bytes())
    start, size = FORMATS[name].find_samples(shard)[0].tolist()
    content[start + size // 2] ^= 0xFF
    shard.write_bytes(content)
    with pytest.raises(DatasetError, match=r"train-00003"):
        export(source, tmp_path / "tree", workers=0)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_killed_export_leaves_no_tree(converted: dict[str, Path], tmp_path: Path) -> None:
    code = (
        "import sys, time, precache\n"
        "def slow(done, total):\n"
        "    print(done, flush=True)\n"
        "    time.sleep(0.2)\n"
        "precache.export(sys.argv[1], sys.argv[2], workers=0, on_progress=slow)"
    )
    (tmp_path / "tree").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, converted["shards"], tmp_path / "tree"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 3:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "tree").exists()
    export(converted["shards"], tmp_path / "tree", workers=0)
    assert len(files(tmp_path / "tree")) == IMAGES


def test_the_command_says_how_to_read_it_back(converted: dict[str, Path], tmp_path: Path) -> None:
    done = run_here("precache", "export", converted["webdataset"], "tree", "--workers", 0, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        f"tree: {IMAGES} pictures as stored, not the originals; to convert them: precache convert"
        in done.stdout
    )
    check_bad_input(run_here("precache", "export", tmp_path, "x", cwd=tmp_path), "not a converted dataset")
    bad = run_here("precache", "export", converted["dali"], "other", "--format", "gif", cwd=tmp_path)
    check_bad_input(bad, "unknown format 'gif'; choose from: jpeg, png")
    check_bad_input(run_here("precache", "export", converted["dali"], "tree", cwd=tmp_path), "is not empty")
    assert np.all([path.name == "tree" for path in tmp_path.iterdir()])


def test_a_field_called_as_a_column_stands_beside_the_one_that_makes_room(tmp_path: Path) -> None:
    rows = [
        {"image": picture(n), "kind": "ab"[n % 2], "label": f"l{n}", "field_label": f"f{n}"} for n in range(3)
    ]
    names = ("label", "field_label")
    recipe = Recipe(format="shards", size=8)
    convert(Items(rows), tmp_path / "one", recipe, workers=0, label="kind", fields=names)
    export(tmp_path / "one", tmp_path / "tree", workers=0)
    lines = [json.loads(line) for line in (tmp_path / "tree/labels.jsonl").read_text().splitlines()]
    assert [sorted(set(line.values()) & {f"l{n}", f"f{n}"}) for n, line in enumerate(lines)] == [
        [f"f{n}", f"l{n}"] for n in range(3)
    ]
