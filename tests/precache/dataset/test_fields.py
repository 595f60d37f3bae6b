"""Targets and fields of every kind, in every format, as the index has them and `verify` sees them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from precache import Recipe, convert, open_dataset, verify, verify_across, verify_deep
from precache.dataset.columns import Column
from precache.formats import FORMATS
from precache.sources.base import Source
from tests.precache.sources.examples import FIELDS, KINDS, SAMPLES, TARGETS, example_source

MISSING = (0, 5)
ODD = {**FIELDS, "odd": [1, 1e300, *[math.nan, math.inf, -0.0] * (SAMPLES // 3 - 1), 0.5]}


def make(source: Source, path: Path, name: str = "shards") -> Path:
    recipe = Recipe(format=name, size=16, shard_bytes=6144, splits="train=0.75,val=0.25")
    convert(source, path, recipe, workers=0, max_rejects=1)
    return path


def deep(source: Source, path: Path) -> tuple[str, ...]:
    return verify_deep(path, source, workers=0).problems  # type: ignore[arg-type]


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_format_has_every_target_and_field_as_it_was(target: str, tmp_path: Path) -> None:
    """Those of samples without a picture are left out with them."""
    source = example_source(target, ODD, MISSING)
    for name in FORMATS:
        dataset = open_dataset(make(source, tmp_path / name, name))
        index = dataset.read_index()
        assert [rejected.id for rejected in dataset.manifest.rejected] == [*MISSING]
        assert dataset.manifest.fields == {**KINDS, "odd": "float"}
        for field, values in ODD.items():
            assert index.fields[field].content() == Column.from_values(values).select(index.ids).content()
        assert verify(dataset.path) == []
        assert deep(source, dataset.path) == ()
    assert verify_across([tmp_path / name for name in FORMATS]) == []


def test_other_fields_and_targets_are_found(tmp_path: Path) -> None:
    """In a shard, and between datasets."""
    path = make(example_source("number"), tmp_path / "out", "webdataset")
    changed: dict[str, Any] = {**FIELDS, "caption": ["other", *FIELDS["caption"][1:]]}
    for source, problem in (
        (example_source("number", changed), "in 1 sample"),
        (example_source("none"), "fields differ"),
    ):
        other = make(source, tmp_path / problem)
        assert [problem in said for said in verify_across([path, other])] == [True]
    (shard,) = (shard for shard in path.glob("*.tar") if b"number 9" in shard.read_bytes())
    shard.write_bytes(shard.read_bytes().replace(b"number 9", b"number 8"))
    (problem,) = deep(example_source("number"), path)
    assert "sample 9 (00000009)" in problem


def test_the_stock_reader_opens_the_index(tmp_path: Path) -> None:
    dataset = open_dataset(make(example_source("classes", missing=[3]), tmp_path))
    arrays, index = load_file(tmp_path / "dataset.index"), dataset.read_index()
    for name, column in index.columns.items():
        assert np.array_equal(arrays[name], column.values), name
        assert column.ends is None or np.array_equal(arrays[f"ends:{name}"], column.ends), name
    assert np.array_equal(arrays["shard:samples"], dataset.manifest.shards.samples)
    assert np.array_equal(arrays["source:bytes"], dataset.read_source_state().bytes)
    assert arrays["rejected:ids"].tolist() == [3]
