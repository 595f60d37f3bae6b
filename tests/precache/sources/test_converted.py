"""Converted datasets as sources: what a second conversion keeps, selects and refuses."""

from pathlib import Path
from typing import Any

import pytest

from precache import Recipe, convert, open_dataset, verify_deep
from precache.errors import SettingError
from tests.conftest import IMAGES, small_recipe
from tests.precache.sources.objects import Items, picture
from tests.precache.sources.tars import read_shards, scan_of


def test_converting_again_keeps_ids_targets_fields_and_splits(tmp_path: Path) -> None:
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
    for name, options, ids_of_splits in steps:
        recipe = Recipe(format=name, size=8)
        manifest = convert(source, tmp_path / name, recipe, workers=0, **options).manifest
        assert (manifest.target, manifest.classes) == ("classes", ("x", "y", "z"))
        for split, ids in zip("ab", ids_of_splits, strict=True):
            index = open_dataset(tmp_path / name).read_index(split)
            assert sorted(index.ids.tolist()) == ids
            assert index.targets is not None
            for row, number in enumerate(index.ids.tolist()):
                assert index.fields["caption"].row_value(row) == f"n° {number}"
                assert sorted(index.targets.row_value(row)) == sorted({number % 3, 2})
        assert verify_deep(tmp_path / name, source, workers=0) == []
        source = tmp_path / name


def test_splits_are_kept_unless_the_recipe_has_others(raw_tree: Path, tmp_path: Path) -> None:
    def convert_to(name: str, source: Path, **settings: str) -> list[bytes]:
        convert(source, tmp_path / name, small_recipe("shards", size=8, **settings), workers=0)
        return read_shards(tmp_path / name)

    halves = convert_to("halves", raw_tree, splits="train=0.5,val=0.5")
    assert convert_to("kept", tmp_path / "halves") == halves
    other = {"splits": "train=0.9,test=0.1"}
    assert convert_to("new", tmp_path / "halves", **other) == convert_to("direct", raw_tree, **other)


def test_rejected_and_ignored_files_stay_left_out(tree: Path, tmp_path: Path) -> None:
    victim = sorted((tree / "002.basket").iterdir())[0]
    victim.write_bytes(b"\xff\xd8\xff")
    (tree / "notes.txt").write_text("")
    convert(tree, tmp_path / "first", small_recipe("shards", size=8), workers=0, max_rejects=0.1)
    recipe = small_recipe("dali", size=8)
    manifest = convert(tmp_path / "first", tmp_path / "second", recipe, workers=0).manifest
    assert manifest.samples == IMAGES - 1
    assert {path for path, _ in manifest.ignored} == {"notes.txt", f"002.basket/{victim.name}"}


def test_a_list_of_ids_and_paths_selects_samples(converted: dict[str, Path], tmp_path: Path) -> None:
    list_file = tmp_path / "ids.txt"
    list_file.write_text("7\n\n003.candle/003_0001.jpg\n7\n")
    scan = scan_of(converted["shards"], ids=str(list_file))
    by_id, by_path = scan.samples
    assert (by_id.id, by_path.path, len(scan.ignored)) == (7, "003.candle/003_0001.jpg", IMAGES - 2)


def test_unknown_classes_and_ids_are_refused_by_name(converted: dict[str, Path], tmp_path: Path) -> None:
    list_file = tmp_path / "ids.txt"
    list_file.write_text("1\n70")
    for options, names in (({"classes": ("002.baskt",)}, "'002.basket'"), ({"ids": str(list_file)}, "'70'")):
        with pytest.raises(SettingError, match=names):
            scan_of(converted["shards"], **options)


STEPS: list[tuple[str, dict[str, object], dict[str, object]]] = [
    ("shards", {}, {}),  # the same recipe gives the same bytes: pixels are exact, JPEGs are copied
    ("webdataset", {}, {}),
    ("webdataset", {"fit": "keep", "size": 250, "enlarge": True}, {"fit": "keep", "size": 24}),
    ("shards", {"fit": "keep"}, {"size": 24}),
    ("dali", {"size": (40, 48)}, {"size": (20, 30), "fit": "pad"}),
    ("webdataset", {"channels": "grey"}, {"size": 24}),
]


"""Format and settings of the first recipe, and settings of the second."""


@pytest.mark.parametrize(("name", "first_settings", "second_settings"), STEPS, ids=str)
def test_converting_again_to_other_sizes_and_channels_verifies(
    raw_tree: Path,
    tmp_path: Path,
    name: str,
    first_settings: dict[str, object],
    second_settings: dict[str, object],
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    is_same = first_settings == second_settings
    convert(raw_tree, first, small_recipe(name, **first_settings), workers=0)
    convert(first, second, small_recipe(name if is_same else "shards", **second_settings), workers=0)
    assert verify_deep(second, first, workers=0) == []
    if is_same:
        for shard in open_dataset(first).manifest.shards:
            assert (second / shard.file_name).read_bytes() == (first / shard.file_name).read_bytes()


def test_convert_refuses_to_enlarge_a_converted_dataset(converted: dict[str, Path], tmp_path: Path) -> None:
    for settings in ({}, {"fit": "keep", "enlarge": True}):
        with pytest.raises(SettingError, match=r"size 49 .* \d+x\d+"):
            convert(converted["shards"], tmp_path / "x", small_recipe("dali", size=49, **settings), workers=0)
    assert not (tmp_path / "x").exists()
