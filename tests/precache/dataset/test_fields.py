"""Targets and fields of every kind and format are stored in the index."""

import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from precache import Recipe, convert, open_dataset, verify, verify_deep
from precache.dataset.columns import Column
from precache.formats import FORMATS
from precache.sources.base import Source
from tests import format_contract as contract
from tests.precache.sources.examples import FIELDS, KINDS, SAMPLES, TARGETS, example_source

MISSING = (0, 5)
ODD = {**FIELDS, "odd": [1, 1e300, *[math.nan, math.inf, -0.0] * (SAMPLES // 3 - 1), 0.5]}


def make(source: Source, path: Path, name: str = "shards") -> Path:
    recipe = Recipe(format=name, size=16, shard_bytes=6144, splits="train=0.75,val=0.25")
    convert(source, path, recipe, workers=0, max_rejects=1)
    return path


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_index_of_every_format_has_the_targets_and_fields_of_its_samples(target: str, tmp_path: Path) -> None:
    source = example_source(target, ODD, MISSING)
    for name in FORMATS:
        dataset = open_dataset(make(source, tmp_path / name, name))
        index = dataset.read_index()
        assert [rejected.id for rejected in dataset.manifest.rejected] == [*MISSING]
        assert dataset.manifest.fields == {**KINDS, "odd": "float"}
        for field, values in ODD.items():
            assert index.fields[field].content() == Column.from_values(values).select(index.ids).content()
        assert verify(dataset.path) == []
        assert verify_deep(dataset.path, source, workers=0) == []
    contract.check_hold_the_same_samples([open_dataset(tmp_path / name) for name in FORMATS])


def test_safetensors_opens_the_index(tmp_path: Path) -> None:
    dataset = open_dataset(make(example_source("classes", missing=[3]), tmp_path))
    arrays, index = load_file(tmp_path / "dataset.index"), dataset.read_index()
    for name, column in index.columns.items():
        assert np.array_equal(arrays[name], column.values), name
        assert column.ends is None or np.array_equal(arrays[f"ends:{name}"], column.ends), name
    assert np.array_equal(arrays["shard:samples"], dataset.manifest.shards.samples)
    assert np.array_equal(arrays["source:checksums"], dataset.read_source_state().checksums)
    assert arrays["rejected:ids"].tolist() == [3]
