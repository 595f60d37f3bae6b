"""Pictures of equal content are found by the checksums in the index."""

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
    # equal bytes, all black, in another shape
    "train/cat/wide.png": (30, 20),
    "val/cat/high.png": (20, 30),
}
"""Path -> seed of the pixels, or width and height of a black picture."""
GROUPS = [
    ["train/dog/c.png", "val/cat/c.png", "val/dog/c, again.png"],
    ["train/cat/b.png", "train/dog/b.png"],
    ["train/cat/a copy.png", "train/cat/a.png"],
]
"""Groups in the order of the list: in several splits, then with several labels, then the others."""


def draw(seed_or_size: Any) -> Image.Image:
    if isinstance(seed_or_size, tuple):
        return Image.new("RGB", seed_or_size)
    return Image.fromarray(np.random.default_rng(seed_or_size).integers(0, 256, (24, 32, 3), np.uint8))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path, seed_or_size in FILES.items():
        (tmp_path / "photos" / path).parent.mkdir(parents=True, exist_ok=True)
        draw(seed_or_size).save(tmp_path / "photos" / path)
    return tmp_path / "photos"


def make(source: Any, path: Path, name: str = "shards", **options: Any) -> ConvertedDataset:
    recipe = Recipe(format=name, size=32, shard_bytes=3 * 32 * 32 * 3, splits="train=1")
    convert(source, path, recipe, workers=0, **options)
    return open_dataset(path)


def list_groups(dataset: ConvertedDataset) -> list[list[str]]:
    """Write the list of duplicates, and return the paths of each group in it."""
    path = dataset.path.with_name("list.csv")
    write_duplicates(dataset, path)
    groups = defaultdict(list)
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            groups[int(row["group"])].append(row["path"])
            assert row["path"].startswith(f"{row['split']}/{row['label']}/")
    assert [*groups] == [*range(len(groups))]
    return [sorted(groups[number]) for number in groups]


@pytest.mark.parametrize("name", FORMATS)
def test_duplicates_across_splits_and_labels_are_listed_first(name: str, tree: Path, tmp_path: Path) -> None:
    dataset = make(tree, tmp_path / "out", name)
    duplicates = dataset.find_duplicates()
    assert (len(duplicates), duplicates.in_splits, duplicates.in_labels) == (3, 1, 2)
    assert list_groups(dataset) == GROUPS


def test_write_duplicates_raises_for_a_file_in_a_missing_folder(tree: Path, tmp_path: Path) -> None:
    dataset = make(tree, tmp_path / "out")
    with pytest.raises(SettingError, match=f"^{tmp_path}/gone/x.csv: "):
        write_duplicates(dataset, tmp_path / "gone/x.csv")


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
def test_duplicates_count_labels_that_differ(target: str, values: Any, differ: int, tmp_path: Path) -> None:
    pictures = [encode_image(draw(seed)) for seed in (1, 1, 2, 2, 3)]
    fields = {"number": [*range(len(pictures))]}
    source = source_of_pictures(pictures, target, values, fields)
    duplicates = make(source, tmp_path / "out").find_duplicates()
    assert (len(duplicates), duplicates.in_splits, duplicates.in_labels) == (2, 0, differ)


CONVERT = ("convert", "photos", "out", "--format", "shards", "--workers", "0")


def test_convert_warns_of_duplicates_across_splits(
    tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = run_here("precache", *CONVERT, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "3 pictures are there more than once: 1 in several splits, 2 with several labels" in caplog.text
    assert "precache inspect out --duplicates duplicates.csv" in caplog.text


def test_convert_reports_duplicates_with_several_labels_without_a_warning(
    tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in ("train/dog/c.png", "train/dog/b.png", "val/dog/c, again.png"):
        (tree / path).unlink()
    (tree / "train/dog/a.png").write_bytes((tree / "train/cat/a.png").read_bytes())
    result = run_here("precache", *CONVERT, cwd=tmp_path)
    assert "1 picture is there more than once: 1 with several labels" in result.stdout
    assert not caplog.records


def test_convert_does_not_report_duplicates_of_one_split_and_label(tree: Path, tmp_path: Path) -> None:
    for path in ("train/dog/c.png", "train/dog/b.png", "val/dog/c, again.png"):
        (tree / path).unlink()
    assert "more than once" not in run_here("precache", *CONVERT, cwd=tmp_path).stdout


def test_inspect_counts_duplicates_and_writes_the_list(tree: Path, tmp_path: Path) -> None:
    make(tree, tmp_path / "out")
    result = run_here("precache", "inspect", "out", "--duplicates", "duplicates.csv", cwd=tmp_path)
    assert result.stdout.startswith("duplicates.csv: 3 pictures are there more than once: ")
    assert len((tmp_path / "duplicates.csv").read_text().splitlines()) == 1 + sum(map(len, GROUPS))
    assert "duplicates" in run_here("precache", "inspect", "out", cwd=tmp_path).stdout
    summary = json.loads(run_here("precache", "inspect", "out", "--json", cwd=tmp_path).stdout)
    assert summary["duplicates"] == {"pictures": 3, "in_splits": 1, "in_labels": 2}


def test_inspect_does_not_mention_duplicates_where_there_are_none(tree: Path, tmp_path: Path) -> None:
    for path in ("train/dog/c.png", "train/dog/b.png", "train/cat/a copy.png"):
        (tree / path).unlink()
    shutil.rmtree(tree / "val")
    make(tree, tmp_path / "out")
    assert "duplicates" not in run_here("precache", "inspect", "out", cwd=tmp_path).stdout
