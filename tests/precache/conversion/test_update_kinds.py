"""Updates of tables and archives, of every kind of target and field, and of pictures of varying size."""

import csv
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from precache import SourceOptions, convert, open_dataset, verify, verify_deep
from precache.conversion.convert import Conversion
from precache.errors import DatasetError
from precache.formats import FORMATS
from precache.recipe import Recipe
from precache.sources.tree import scan_tree
from tests.conftest import small_recipe
from tests.precache.conversion.updating import grow

FIELDS = ("fold", "width", "caption", "box")


def rows_of(tree: Path, count: int) -> list[dict[str, str]]:
    pictures = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*.*") if path.is_file())
    return [
        {
            "path": path,
            "label": path.split("/")[0],
            "several": ";".join(sorted({path.split("/")[0], f"odd{number % 2}"})),
            "score": f"{number / 4}",
            "fold": "val" if number % 5 == 0 else "train",
            "width": f"{number}",
            "caption": f"pïcture {number}",
            "box": f"[{', '.join(['1.5'] * (number % 3))}]",
        }
        for number, path in enumerate(pictures[:count])
    ]


def write(table: Path, rows: list[dict[str, str]]) -> None:
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def update(source: Path, out: Path, options: SourceOptions, recipe: Recipe | None = None) -> Conversion:
    return convert(source, out, recipe or small_recipe("webdataset"), workers=0, update=True, options=options)


def of_paths(out: Path, column: str) -> dict[str, object]:
    """Path -> what the index has in this column, of the samples that are served."""
    index = open_dataset(out).read_index()
    values = index.targets if column == "target" else index.fields[column]
    assert values is not None
    return {str(index.path(row)): values.value(row) for row in range(len(index))}


@pytest.fixture
def options(tree: Path) -> SourceOptions:
    return SourceOptions(root=str(tree), label="label", split="fold", fields=FIELDS)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_rows_of_a_table_come_go_and_change(
    tree: Path, tmp_path: Path, options: SourceOptions, name: str
) -> None:
    table, out = tmp_path / "labels.csv", tmp_path / "out"
    rows = rows_of(tree, 40)
    write(table, rows[:30])
    update(table, out, options, small_recipe(name))
    rows[3]["label"], rows[4]["caption"], rows[6]["fold"] = "another", "another", "val"
    rows[8]["box"] = "[9.5, 9.5]"
    del rows[0]
    write(table, rows[::-1])
    result = update(table, out, options, small_recipe(name))
    assert (result.converted, sum(result.manifest.removed.values())) == (10 + 4, 5)
    assert of_paths(out, "caption") == {row["path"]: row["caption"] for row in rows}
    assert of_paths(out, "width") == {row["path"]: int(row["width"]) for row in rows}
    assert of_paths(out, "box")[rows[7]["path"]] == [9.5, 9.5]
    splits = {split: open_dataset(out).read_index(split) for split in ("train", "val")}
    found = {str(index.path(row)): s for s, index in splits.items() for row in range(len(index))}
    assert found == {row["path"]: row["fold"] for row in rows}
    assert verify(out) == []
    assert verify_deep(out, table, workers=0).problems == ()
    write(table, rows)
    assert not update(table, out, options, small_recipe(name)).published  # the order is none of its business


@pytest.mark.parametrize(
    ("label", "target", "changed"),
    [("several", "classes", "odd0;unheard of"), ("score", "number", "17.25"), (None, "none", None)],
)
def test_targets_are_carried(
    tree: Path, tmp_path: Path, label: str | None, target: str, changed: str | None
) -> None:
    table, out = tmp_path / "labels.csv", tmp_path / "out"
    options = SourceOptions(
        root=str(tree), label=label, target=target, separator=";" if label == "several" else None
    )
    rows = rows_of(tree, 20)
    write(table, rows[:15])
    recipe = small_recipe("webdataset", splits="train=0.8,val=0.2")
    update(table, out, options, recipe)
    if label is not None and changed is not None:
        rows[2][label] = changed
    write(table, rows)
    result = update(table, out, options, recipe)
    index = open_dataset(out).read_index()
    assert (index.labels == -1).all()
    assert sum(result.manifest.removed.values()) == (changed is not None)
    if target == "number":
        assert of_paths(out, "target") == {row["path"]: float(row["score"]) for row in rows}
    if target == "classes":
        names = result.manifest.classes
        found = {path: {names[i] for i in of} for path, of in of_paths(out, "target").items()}  # type: ignore[attr-defined]
        assert found == {row["path"]: set(row["several"].split(";")) for row in rows}
        assert names[-1] == "unheard of"
    assert result.manifest.split_samples == {"train": 16, "val": 4}
    assert verify_deep(out, table, workers=0).problems == ()


def test_other_options_and_kinds_are_refused_by_name(
    tree: Path, tmp_path: Path, options: SourceOptions
) -> None:
    table, out = tmp_path / "labels.csv", tmp_path / "out"
    rows = rows_of(tree, 20)
    write(table, rows[:15])
    update(table, out, options)
    other = SourceOptions(root=str(tree), label="several", split="fold", fields=FIELDS)
    with pytest.raises(DatasetError, match="label label, asked for several"):
        update(table, out, other)
    rows[2]["width"] = "wide"
    for row in rows:
        row["width"] = f"w{row['width']}"
    write(table, rows)
    with pytest.raises(DatasetError, match=r"its 'width' is int, but in .* it is now text"):
        update(table, out, options)
    assert verify(out) == []


def test_members_of_an_archive_come_and_go(tree: Path, tmp_path: Path) -> None:
    archive, out = tmp_path / "photos.tar", tmp_path / "out"
    for times in (0, 1):
        with tarfile.open(archive, "w") as tar:
            tar.add(tree, ".")
        result = convert(archive, out, small_recipe("shards"), workers=0, update=True, max_rejects=0.5)
        grow(tree, 1) if not times else None
    assert sum(result.manifest.removed.values()) == 2
    assert result.converted == result.manifest.updates[0].added < 30
    assert verify_deep(out, archive, workers=0).problems == ()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_pictures_of_varying_size_are_added(tree: Path, tmp_path: Path, name: str) -> None:
    out, recipe = tmp_path / "out", small_recipe(name, fit="keep")
    convert(tree, out, recipe, workers=0, update=True)
    grow(tree, 1)
    result = convert(tree, out, recipe, workers=0, update=True, max_rejects=0.5)
    index = open_dataset(out).read_index()
    assert index.shapes is not None
    assert len(index.shapes) == result.manifest.samples
    shutil.rmtree(tree / "001.new")  # nothing is added
    result = convert(tree, out, recipe, workers=0, update=True, max_rejects=0.5)
    assert result.converted == 0
    assert np.array_equal(open_dataset(out).read_index().served, np.ones(result.manifest.samples, bool))
    assert verify_deep(out, tree, workers=0).problems == ()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_masks_are_carried_and_a_changed_mask_is_a_changed_picture(
    tree: Path, tmp_path: Path, name: str
) -> None:
    masks, out = tmp_path / "masks", tmp_path / "out"
    for picture in scan_tree(tree).samples:
        upright = ImageOps.exif_transpose(Image.open(tree / picture.path))
        mask = (masks / picture.path).with_suffix(".png")
        mask.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", upright.size, picture.id % 7).save(mask)
    options, recipe = SourceOptions(mask=str(masks)), small_recipe(name)
    update(tree, out, options, recipe)
    assert not update(tree, out, options, recipe).published
    victims = sorted(masks.rglob("*.png"))[:2]
    Image.new("L", Image.open(victims[0]).size, 9).save(victims[0])
    shutil.copy(victims[1], victims[1].with_name("new.png"))
    (picture,) = (tree / victims[1].parent.name).glob(f"{victims[1].stem}.*")
    shutil.copy(picture, picture.with_stem("new"))
    result = update(tree, out, options, recipe)
    assert (result.converted, sum(result.manifest.removed.values())) == (2, 1)
    index = open_dataset(out).read_index()
    assert index.mask_checksums is not None
    assert len(index.mask_checksums) == len(index)
    assert verify_deep(out, tree, workers=0).problems == ()


def test_statistics_grow_with_what_is_stored(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(tree, tmp_path / "less")
    for picture in sorted((tmp_path / "less").rglob("*.*"))[::2]:
        picture.is_dir() or picture.unlink()
    recipe = small_recipe("shards")
    update(tmp_path / "less", out, SourceOptions(), recipe)
    grown = update(tree, out, SourceOptions(), recipe).manifest.statistics["train"]
    whole = convert(tree, tmp_path / "whole", recipe, workers=0).manifest.statistics["train"]
    assert grown.is_near(whole, 1e-9)
    assert verify_deep(out, tree, workers=0).problems == ()
