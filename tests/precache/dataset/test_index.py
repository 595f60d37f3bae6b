"""`dataset.index` as stock readers see it, and read by ranges of shards."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from precache import Recipe, convert, open_dataset
from precache.dataset.files import in_folder
from precache.dataset.index import IndexFile, IndexFileError, ShardRows
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


def rows_of(path: Path) -> ShardRows:
    manifest = open_dataset(path).manifest
    shards = manifest.shards
    assert shards.checksums is not None
    file = IndexFile(in_folder(path), manifest.index)
    return ShardRows(file, shards.samples, shards.checksums, shards.file_name)


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


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_pattern_of_shards_finds_shards_alone(name: str, converted: dict[str, Path]) -> None:
    manifest = open_dataset(converted[name]).manifest
    found = converted[name].glob(f"*{FORMATS[manifest.recipe.format].suffix}")
    assert {path.name for path in found} == {shard.file_name for shard in manifest.shards}


def test_any_range_of_shards_is_those_rows_of_the_whole(described: Path) -> None:
    rows, whole = rows_of(described), open_dataset(described).read_index()
    starts = np.concatenate(([0], np.cumsum(open_dataset(described).manifest.shards.samples)))
    assert len(starts) > 3
    for first in range(len(starts) - 1):
        for last in range(first + 1, len(starts)):
            part = slice(int(starts[first]), int(starts[last]))
            for name, column in whole.columns.items():
                assert rows.read(name, first, last).content() == column.select(part).content()


def test_what_is_damaged_is_told_by_the_file_of_its_shard_and_others_are_served(
    described: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(described, tmp_path / "copy"))
    shards = open_dataset(path).manifest.shards
    content = bytearray((path / "dataset.index").read_bytes())
    place = rows_of(path)._places["ids"].start + 8 * int(shards.samples[:2].sum())
    content[place] ^= 1
    (path / "dataset.index").write_bytes(content)
    rows = rows_of(path)
    for number, shard in enumerate(shards):
        if number == 2:
            with pytest.raises(IndexFileError, match=rf"dataset.index: .*{shard.file_name}: their ids"):
                rows.read("ids", number, number + 1)
        else:
            rows.read("ids", number, number + 1)
