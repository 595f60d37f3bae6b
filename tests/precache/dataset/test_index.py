"""`dataset.index` as stock readers see it, and read by ranges of shards."""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from precache import Recipe, convert, open_dataset
from precache.formats import FORMATS
from tests.precache.sources.listed import listed


def test_the_stock_reader_opens_it(tmp_path: Path) -> None:
    """What it holds of every kind of field, by ranges of shards, too: `tests/loaders/test_huge.py`."""
    recipe = Recipe(format="shards", size=16, splits="train=0.6,val=0.4")
    convert(listed("classes", missing=[3]), tmp_path, recipe, workers=0, max_rejects=1)
    arrays, dataset = load_file(tmp_path / "dataset.index"), open_dataset(tmp_path)
    index, shards = dataset.read_index(), dataset.manifest.shards
    for name, column in index.columns.items():
        assert np.array_equal(arrays[name], column.values), name
        assert column.ends is None or np.array_equal(arrays[f"ends:{name}"], column.ends), name
    assert np.array_equal(arrays["shard:samples"], shards.samples)
    assert np.array_equal(arrays["source:bytes"], dataset.read_source_state().bytes)
    assert arrays["rejected:ids"].tolist() == [3]
    others = {name.removeprefix("ends:") for name in arrays} - set(index.columns)
    assert {name.split(":")[0] for name in others} == {"shard", "source", "rejected"}


def test_a_pattern_of_shards_finds_shards_alone(converted: dict[str, Path]) -> None:
    for name, path in converted.items():
        found = {file.name for file in path.glob(f"*{FORMATS[name].suffix}")}
        assert found == {shard.file_name for shard in open_dataset(path).manifest.shards}
