"""Pictures of equal content are found by the checksums that the index has."""

import csv
import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from precache import Recipe, convert, open_dataset
from precache.dataset.converted import ConvertedDataset
from precache.dataset.inspection import write_duplicates
from precache.errors import SettingError
from precache.formats import FORMATS
from tests.command import run_here
from tests.precache.pictures.drawing import encode_image
from tests.precache.sources.examples import source_of_pictures

FILES = {
    "train/cat/a.png": 1,
    "train/cat/a copy.png": 1,
    "train/cat/b.png": 2,
    "train/dog/b.png": 2,
    "train/dog/c.png": 3,
    "val/dog/c, again.png": 3,
    "val/cat/c.png": 3,
    "train/cat/d.png": 4,
    "val/dog/e.png": 5,
    # as many bytes of black, in another shape
    "train/cat/wide.png": (30, 20),
    "val/cat/high.png": (20, 30),
}
"""Path -> number of what is drawn, or width and height of a black picture."""
GROUPS = [
    ["train/dog/c.png", "val/cat/c.png", "val/dog/c, again.png"],
    ["train/cat/b.png", "train/dog/b.png"],
    ["train/cat/a copy.png", "train/cat/a.png"],
]
"""In the order of the list: in several splits, then with several labels, then the others."""


def draw(what: Any) -> Image.Image:
    if isinstance(what, tuple):
        return Image.new("RGB", what)
    return Image.fromarray(np.random.default_rng(what).integers(0, 256, (24, 32, 3), np.uint8))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path, what in FILES.items():
        (tmp_path / "photos" / path).parent.mkdir(parents=True, exist_ok=True)
        draw(what).save(tmp_path / "photos" / path)
    return tmp_path / "photos"


def make(source: Any, path: Path, name: str = "shards", **how: Any) -> ConvertedDataset:
    recipe = Recipe(format=name, size=32, shard_bytes=3 * 32 * 32 * 3, splits=how.pop("splits", "train=1"))
    convert(source, path, recipe, workers=0, **how)
    return open_dataset(path)


def list_groups(dataset: ConvertedDataset) -> list[list[str]]:
    """The paths of each group in the list."""
    path = dataset.path.with_name("list.csv")
    with pytest.raises(SettingError, match=f"^{path.parent}/gone/x.csv: "):
        write_duplicates(dataset, path.parent / "gone/x.csv")
    write_duplicates(dataset, path)
    groups = defaultdict(list)
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            groups[int(row["group"])].append(row["path"])
            assert row["path"].startswith(f"{row['split']}/{row['label']}/")
    assert [*groups] == [*range(len(groups))]
    return [sorted(groups[number]) for number in groups]


@pytest.mark.parametrize("name", FORMATS)
def test_copies_are_listed_those_that_matter_first(name: str, tree: Path, tmp_path: Path) -> None:
    """A copy that an update removed is none."""
    dataset = make(tree, tmp_path / "out", name)
    found = dataset.find_duplicates()
    assert (len(found), found.in_splits, found.in_labels) == (3, 1, 2)
    assert list_groups(dataset) == GROUPS
    (tree / "train/dog/c.png").unlink()
    (tree / "train/dog/b.png").unlink()
    (tree / "val/dog/a.png").write_bytes((tree / "train/cat/a.png").read_bytes())
    updated = make(tree, tmp_path / "out", name, update=True)
    found = updated.find_duplicates()
    assert (len(found), found.in_splits, found.in_labels) == (2, 1, 2)
    assert list_groups(updated) == [
        ["train/cat/a copy.png", "train/cat/a.png", "val/dog/a.png"],
        ["val/cat/c.png", "val/dog/c, again.png"],
    ]


@pytest.mark.parametrize(
    ("target", "values", "differ"),
    [
        ("class", [0, 0, 1, 1, 2], 0),
        ("class", [0, 1, 1, 1, 2], 1),
        ("classes", [[0, 1], [1, 0], [], [], [2]], 0),
        ("classes", [[0, 1], [1], [2], [2, 2], [2]], 1),
        ("number", [0.5, 0.5, 1, 2, 3], 1),
        ("vector", [[1, 2], [1, 2], [1, 2], [2, 1], [0, 0]], 1),
        ("none", None, 0),
    ],
)
def test_labels_differ_by_what_they_say(target: str, values: Any, differ: int, tmp_path: Path) -> None:
    pictures = [encode_image(draw(what)) for what in (1, 1, 2, 2, 3)]
    fields = {"number": [*range(len(pictures))]}
    found = make(source_of_pictures(pictures, target, values, fields), tmp_path / "out").find_duplicates()
    assert (len(found), found.in_splits, found.in_labels) == (2, 0, differ)


def test_the_commands_count_them_and_write_the_list(
    tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is said where there are none; `convert` tells only of what is wrong."""
    command = ("convert", "photos", "out", "--format", "shards", "--workers", "0")
    said = run_here("precache", *command, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "3 pictures are there more than once: 1 in several splits, 2 with several labels" in caplog.text
    assert "precache inspect out --duplicates duplicates.csv" in caplog.text
    listed = run_here("precache", "inspect", "out", "--duplicates", "duplicates.csv", cwd=tmp_path)
    assert listed.stdout.startswith("duplicates.csv: 3 pictures are there more than once: ")
    assert len((tmp_path / "duplicates.csv").read_text().splitlines()) == 1 + sum(map(len, GROUPS))
    assert "duplicates" in run_here("precache", "inspect", "out", cwd=tmp_path).stdout
    shown = json.loads(run_here("precache", "inspect", "out", "--json", cwd=tmp_path).stdout)
    assert shown["duplicates"] == {"pictures": 3, "in_splits": 1, "in_labels": 2}
    for path in ("train/dog/c.png", "train/dog/b.png", "val/dog/c, again.png"):
        (tree / path).unlink()
    (tree / "train/dog/a.png").write_bytes((tree / "train/cat/a.png").read_bytes())
    caplog.clear()
    said = run_here("precache", *command, "--overwrite", cwd=tmp_path)
    assert "1 picture is there more than once: 1 with several labels" in said.stdout
    assert not caplog.records
    (tree / "train/dog/a.png").unlink()
    said = run_here("precache", *command, "--overwrite", cwd=tmp_path)
    assert "more than once" not in said.stdout
    shutil.rmtree(tree / "val")
    (tree / "train/cat/a copy.png").unlink()
    run_here("precache", *command, "--overwrite", cwd=tmp_path)
    assert "duplicates" not in run_here("precache", "inspect", "out", cwd=tmp_path).stdout
