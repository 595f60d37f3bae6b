"""What is peculiar to converted datasets as sources: what is kept, what is taken of them, what is refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precache import Recipe, SourceOptions, convert, export, open_dataset, verify_deep
from precache.dataset.boxes import placement
from precache.errors import SettingError
from tests.conftest import IMAGES, small_recipe
from tests.format_contract import stored_samples
from tests.precache.sources.archives import scan_of
from tests.precache.sources.objects import Items, picture
from tests.precache.sources.tables import spotted
from tests.precache.sources.test_dataset import shards


def test_targets_fields_and_splits_are_kept_and_of_a_subset_ids(tmp_path: Path) -> None:
    items = [
        {"image": picture(n), "label": [n % 3, 2], "caption": f"n° {n}", "part": "ab"[n % 2]}
        for n in range(9)
    ]
    source: Any = Items(items, classes=["x", "y", "z"])
    (tmp_path / "ids.txt").write_text("6\n3\n")
    steps: list[tuple[str, dict[str, Any], list[list[int]]]] = [
        ("shards", {"split": "part", "fields": ("caption",)}, [[0, 2, 4, 6, 8], [1, 3, 5, 7]]),
        ("webdataset", {"classes": ("x",)}, [[0, 6], [3]]),
        ("dali", {"ids": str(tmp_path / "ids.txt")}, [[6], [3]]),
    ]
    for name, options, left in steps:
        recipe = Recipe(format=name, size=8)
        manifest = convert(source, tmp_path / name, recipe, workers=0, **options).manifest
        assert (manifest.target, manifest.classes) == ("classes", ("x", "y", "z"))
        for split, expected in zip("ab", left, strict=True):
            index = open_dataset(tmp_path / name).read_index(split)
            assert sorted(index.ids.tolist()) == expected
            assert index.targets is not None
            for row, number in enumerate(index.ids.tolist()):
                assert index.fields["caption"].value(row) == f"n° {number}"
                assert sorted(index.targets.value(row)) == sorted({number % 3, 2})
        assert not verify_deep(tmp_path / name, source, workers=0).problems
        source = tmp_path / name


def test_splits_are_those_of_the_source_unless_others_are_asked_for(raw_tree: Path, tmp_path: Path) -> None:
    def convert_to(name: str, source: Path, **settings: str) -> list[bytes]:
        convert(source, tmp_path / name, small_recipe("shards", size=8, **settings), workers=0)
        return shards(tmp_path / name)

    one = convert_to("one", raw_tree, splits="train=0.5,val=0.5")
    assert convert_to("kept", tmp_path / "one") == one
    other = {"splits": "train=0.9,test=0.1"}
    assert convert_to("new", tmp_path / "one", **other) == convert_to("direct", raw_tree, **other)


def test_what_is_rejected_and_left_out_stays_so(tree: Path, tmp_path: Path) -> None:
    victim = sorted((tree / "002.basket").iterdir())[0]
    victim.write_bytes(b"\xff\xd8\xff")
    (tree / "notes.txt").write_text("")
    convert(tree, tmp_path / "one", small_recipe("shards", size=8), workers=0, max_rejects=0.1)
    manifest = convert(tmp_path / "one", tmp_path / "two", small_recipe("dali", size=8), workers=0).manifest
    assert manifest.samples == IMAGES - 1
    assert {path for path, _ in manifest.ignored} == {"notes.txt", f"002.basket/{victim.name}"}


def test_samples_are_taken_by_a_list_of_ids_and_paths(converted: dict[str, Path], tmp_path: Path) -> None:
    listed = tmp_path / "ids.txt"
    listed.write_text("7\n\n003.candle/003_0001.jpg\n7\n")
    scan = scan_of(converted["shards"], ids=str(listed))
    one, other = scan.samples
    assert (one.id, other.path, len(scan.ignored)) == (7, "003.candle/003_0001.jpg", IMAGES - 2)
    listed.write_text("1\n70")
    for options, says in (
        ({"classes": ("002.baskt",)}, "did you mean '002.basket'?"),
        ({"ids": str(listed)}, "1 of these 2 samples are not in the dataset (first: '70')"),
    ):
        with pytest.raises(SettingError, match=re.escape(says)):
            scan_of(converted["shards"], **options)


def test_16_bits_are_neither_converted_on_nor_exported(raw_tree: Path, tmp_path: Path) -> None:
    recipe = small_recipe("shards", size=8, channels="grey", dtype="uint16")
    convert(raw_tree, tmp_path / "one", recipe, workers=0)
    with pytest.raises(SettingError, match="holds uint16 of channels grey"):
        convert(tmp_path / "one", tmp_path / "two", small_recipe("dali"), workers=0)
    with pytest.raises(SettingError, match="holds uint16; only uint8"):
        export(tmp_path / "one", tmp_path / "tree", workers=0)


# Pictures of other sizes, fits and channels; boxes and masks stay on what they mark.

STEPS: list[tuple[str, dict[str, object], dict[str, object]]] = [
    ("shards", {}, {}),  # the same recipe gives the same bytes again: pixels are exact, JPEGs are copied
    ("webdataset", {}, {}),
    ("webdataset", {"fit": "keep", "size": 250, "enlarge": True}, {"fit": "keep", "size": 24}),
    ("shards", {"fit": "keep"}, {"size": 24}),
    ("dali", {"size": (40, 48)}, {"size": (20, 30), "fit": "pad"}),
    ("webdataset", {"channels": "grey"}, {"size": 24}),
]


@pytest.mark.parametrize(("name", "first", "second"), STEPS, ids=str)
def test_every_size_and_channel_is_converted_on_and_verified(
    raw_tree: Path, tmp_path: Path, name: str, first: dict[str, object], second: dict[str, object]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    convert(raw_tree, one, small_recipe(name, **first), workers=0)
    convert(one, two, small_recipe(name if first == second else "shards", **second), workers=0)
    assert not verify_deep(two, one, workers=0).problems
    if first == second:
        for shard in open_dataset(one).manifest.shards:
            assert (two / shard.file_name).read_bytes() == (one / shard.file_name).read_bytes()


def test_enlarging_is_refused(converted: dict[str, Path], tmp_path: Path) -> None:
    for settings in ({}, {"fit": "keep", "enlarge": True}):
        with pytest.raises(SettingError, match=r"size 49 is more than the \d+x\d+ that .* stores"):
            convert(converted["shards"], tmp_path / "x", small_recipe("dali", size=49, **settings), workers=0)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("second", [{"fit": "stretch", "size": 20}, {"fit": "pad", "size": (20, 40)}])
def test_boxes_and_masks_stay_on_what_they_mark(tmp_path: Path, second: dict[str, Any]) -> None:
    """Crop, then something else, of one picture: where the original's size would say another place."""
    options = SourceOptions(
        root=str(tmp_path / "pictures"), fields=("box",), boxes="box", mask=str(tmp_path / "masks")
    )
    first = Recipe(format="shards", size=40, fit="crop")
    convert(spotted(tmp_path), tmp_path / "one", first, workers=0, options=options)
    convert(tmp_path / "one", tmp_path / "two", Recipe(format="shards", **second), workers=0)
    assert not verify_deep(tmp_path / "two", tmp_path / "one", workers=0).problems
    dataset = open_dataset(tmp_path / "two")
    index, how = dataset.read_index(), dataset.manifest.recipe.rendering
    assert dataset.manifest.source_options["boxes"] == "box"
    ((_, sample),) = stored_samples(dataset)
    x_scale, y_scale, x, y = placement(*index.source_sizes[0].tolist(), how)
    box = index.fields["box"].array(0)[0] * (x_scale, y_scale, x_scale, y_scale) + (x, y, x, y)
    bright = sample.pixels("")[..., 0] > 127
    rows, columns = np.flatnonzero(bright.any(1)), np.flatnonzero(bright.any(0))
    assert np.allclose(box, (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1), atol=1)
    assert isinstance(sample.mask, np.ndarray)
    assert ((sample.mask > 127) == bright).mean() > 0.95
