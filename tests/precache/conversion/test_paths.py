"""Whatever is given for a path: it is one, or a message says in one line why not."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precache import PrecacheError, check, convert, export, open_dataset, open_source, verify, verify_deep
from precache.sharing.push_pull import push
from tests.conftest import small_recipe

RECIPE = small_recipe("shards")
CALLS: dict[str, Callable[[Any, Path, Path, Path], object]] = {
    "open_dataset": lambda odd, tree, data, new: open_dataset(odd),
    "open_source": lambda odd, tree, data, new: open_source(odd).scan(),
    "verify_deep": lambda odd, tree, data, new: verify_deep(data, odd),
    "check": lambda odd, tree, data, new: check(odd, workers=0),
    "destination": lambda odd, tree, data, new: convert(tree, odd, RECIPE, workers=0),
    "list": lambda odd, tree, data, new: convert(tree, new, RECIPE, workers=0, split_list=odd),
    "mask": lambda odd, tree, data, new: convert(tree, new, RECIPE, workers=0, mask=odd),
    "export to": lambda odd, tree, data, new: export(data, odd, workers=0),
    "push": lambda odd, tree, data, new: push(odd, "s3://bucket/set"),
}
ODD: tuple[Any, ...] = ("x" * 5000, "x/" * 2500, "a\0b", "\ud800", 5, b"x" * 5000)


@pytest.mark.parametrize("name", CALLS)
def test_no_path_is_a_bug(name: str, raw_tree: Path, converted: dict[str, Path], tmp_path: Path) -> None:
    for odd in ODD:
        with pytest.raises(PrecacheError) as caught:
            CALLS[name](odd, raw_tree, converted["shards"], tmp_path / "new")
        assert len(str(caught.value)) < 400
        assert "\n" not in str(caught.value)


def test_bytes_are_the_path_that_they_spell(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    convert(os.fsencode(raw_tree), os.fsencode(tmp_path / "new"), RECIPE, workers=0)
    assert verify(os.fsencode(tmp_path / "new")) == []
    assert open_dataset(tmp_path / "new").digest == open_dataset(os.fsencode(converted["shards"])).digest
