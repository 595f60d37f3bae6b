"""`dataset.index` as stock readers see it, and read by ranges of shards."""

import shutil
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from precache import Recipe, convert, open_dataset
from precache.dataset.files import in_folder
from precache.dataset.index import IndexFile, ShardRows
from precache.formats import FORMATS
from tests.conftest import IMAGES
from tests.precache.sources.listed import listed


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set with every kind of field, in two splits."""
    out = tmp_path_factory.mktemp("described") / "out"
    recipe = Recipe(format="shards", size=16, fit="crop", shard_bytes=7 * 768, splits="train=0.6,val=0.4")
    convert(listed("classes"), out, recipe, workers=0)
    return out


def test_the_stock_reader_opens_it(described: Path) -> None:
    arrays, dataset = load_file(described / "dataset.index"), open_dataset(described)
    index, shards = dataset.read_index(), dataset.manifest.shards
    for name, column in index.columns.items():
        assert np.array_equal(arrays[name], column.values), name
        assert column.ends is None or np.array_equal(arrays[f"ends:{name}"], column.ends), name
    assert np.array_equal(arrays["shard:samples"], shards.samples)
    assert np.array_equal(arrays["source:bytes"], dataset.read_source_state().bytes)
    described_arrays = {name.removeprefix("ends:") for name in arrays} - set(index.columns)
    assert {name.split(":")[0] for name in described_arrays} == {"shard", "source"}


def test_it_tells_what_is_left_out(raw_tree: Path, tmp_path: Path) -> None:
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    folder = next(path for path in tree.iterdir() if path.is_dir())
    (folder / "broken.jpg").write_bytes(b"")
    (folder / "notes.txt").write_text("notes")
    done = convert(tree, tmp_path / "out", Recipe(format="shards", size=16), workers=0, max_rejects=0.1)
    arrays, manifest = load_file(tmp_path / "out/dataset.index"), open_dataset(tmp_path / "out").manifest
    assert arrays["rejected:ids"].tolist() == [picture.id for picture in manifest.rejected]
    assert arrays["rejected:paths"].tobytes().decode() == f"{folder.name}/broken.jpg"
    assert arrays["ignored:paths"].tobytes().decode() == manifest.ignored[0][0] == f"{folder.name}/notes.txt"
    assert done.manifest.samples == len(arrays["ids"]) == IMAGES


def test_a_pattern_of_shards_finds_shards_alone(converted: dict[str, Path]) -> None:
    for name, path in converted.items():
        found = {file.name for file in path.glob(f"*{FORMATS[name].suffix}")}
        assert found == {shard.file_name for shard in open_dataset(path).manifest.shards}


def test_any_range_of_shards_is_those_rows_of_the_whole(described: Path) -> None:
    dataset = open_dataset(described)
    shards, whole = dataset.manifest.shards, dataset.read_index()
    assert shards.checksums is not None
    file = IndexFile(in_folder(described), dataset.manifest.index)
    rows = ShardRows(file, shards.samples, shards.checksums, shards.file_name)
    starts = np.concatenate(([0], np.cumsum(shards.samples))).tolist()
    assert len(starts) > 3
    for first, last in combinations(range(len(starts)), 2):
        for name, column in whole.columns.items():
            part = column.select(slice(starts[first], starts[last]))
            assert rows.read(name, first, last).content() == part.content()
