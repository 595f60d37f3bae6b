"""A split says where its samples lie."""

from pathlib import Path

import numpy as np
import pytest

from loaders.dataset import RAW, open_split
from precache.formats import FORMATS
from tests.conftest import IMAGES


@pytest.mark.parametrize("kind", ["shards", "webdataset", "dali"])
def test_each_sample_is_located_where_its_shard_holds_it(converted: dict[str, Path], kind: str) -> None:
    data = open_split(converted[kind], "train")
    stored = [[sample.id for sample in FORMATS[kind].read_shard(Path(file))] for file in data.files]
    shards, rows = data.locate(np.arange(IMAGES))
    assert [stored[shard][row] for shard, row in zip(shards, rows, strict=True)] == data.ids.tolist()
    assert len(data.shard_starts) == len(data.files) + 1 > 2
    for number, ids in enumerate(stored):
        positions = data.shard_positions(number)
        assert data.ids[positions].tolist() == ids
        assert {data.file(position) for position in range(IMAGES)[positions]} == {data.files[number]}


def test_a_sample_of_a_raw_tree_is_a_file_of_its_own(raw_tree: Path, converted: dict[str, Path]) -> None:
    data = open_split(raw_tree, "train")
    assert data.kind == RAW
    assert [data.file(position) for position in range(IMAGES)] == list(data.files)
    assert all(raw_tree / data.path_at(position) == Path(data.files[position]) for position in range(IMAGES))
    assert [data.path_of(int(i)) for i in data.ids] == [data.path_at(row) for row in range(IMAGES)]
    other = open_split(converted["shards"], "train")
    assert {other.path_at(row) for row in range(IMAGES)} == {data.path_at(row) for row in range(IMAGES)}
