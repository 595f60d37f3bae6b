"""Datasets of manifest versions 3 and 4, which list their shards themselves, are read, served and updated."""

import shutil
from pathlib import Path

import pytest
from PIL import Image

from loaders.dataset import open_split
from precache import Recipe, convert, open_dataset, verify
from precache.errors import DatasetError
from tests.building import build_loader
from tests.command import ROOT
from tests.damage import flip_a_bit
from tests.loader_contract import ids_of

FOLDER = ROOT / "tests/data"
DIGESTS = {
    ("version-3", "shards"): "1a8f8f3240f46879ea01e3bcf51eaed76954e1dada1d58205971322f574d82ec",
    ("version-3", "webdataset"): "9492ef9b34d17c633458889e5ac7f004d2d02e1536f9e186bbf87894b1019fee",
    ("version-3", "dali"): "032fb34902353fa93c2da0f7d3e0104fae344f037f515eee461972310b471a5f",
    ("version-4", "shards"): "439a95836fd2d5fa94b9bf0be682f17b40a6af382b6771c65afb87fc59160600",
    ("version-4", "webdataset"): "a7c00e45a4709b58f5a9ac74a6ff5ac4878d1ea2ab0df5ac9d0bc3855d7e0e7c",
    ("version-4", "dali"): "b0e3cd017d4565a797a6aa3bd781f265cf0ec677a61ae3ebc1edabfde09da6e1",
}


@pytest.mark.parametrize(("version", "kind"), DIGESTS)
def test_it_is_what_it_was(version: str, kind: str) -> None:
    """Its identity, too: a state that a loader of an earlier release took still fits."""
    path = FOLDER / version / kind
    assert verify(path) == []
    dataset = open_dataset(path)
    manifest = dataset.manifest
    assert dataset.digest == DIGESTS[version, kind]
    assert (manifest.version, manifest.samples) == (int(version[-1]), 8)
    assert manifest.split_samples == {"train": 5, "val": 3}
    assert [(picture.path, picture.id) for picture in manifest.rejected] == [("c0/broken.jpg", 4)]
    assert manifest.ignored == (("notes.txt", "a file beside the class folders"),)
    assert open_split(path, "train").order_version == 1


@pytest.mark.parametrize(("version", "kind"), [key for key in DIGESTS if key[1] != "dali"])
def test_it_is_served_and_damage_is_named(version: str, kind: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(FOLDER / version / kind, tmp_path / "copy"))
    served = []
    for split in ("train", "val"):
        with build_loader(path, split=split, workers=1, batch_size=2) as loader:
            served += sorted(ids_of(loader))
            assert sorted(served[-len(open_split(path, split)) :]) == sorted(open_split(path, split).ids)
    assert len(set(served)) == 8
    shard, _ = flip_a_bit(path, shard_number=0, row=1)
    with build_loader(path, workers=1, batch_size=2) as loader, pytest.raises(DatasetError, match=str(shard)):
        ids_of(loader)


def test_an_update_makes_it_one_of_today(tmp_path: Path) -> None:
    """The files that were there stay as they are; a table of shards comes with the new manifest."""
    before = FOLDER / "version-4/shards"
    path, tree = Path(shutil.copytree(before, tmp_path / "set")), tmp_path / "tree"
    for number in range(5):
        picture = tree / f"c{number % 2}/new-{number}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(picture)
    recipe = Recipe(format="shards", size=8, shard_bytes=3 * 8 * 8 * 3, splits="train=0.7,val=0.3")
    manifest = convert(tree, path, recipe, workers=0, update=True).manifest
    assert (manifest.version, manifest.samples, len(manifest.updates)) == (5, 5, 2)
    assert manifest.table is not None
    assert manifest.table.name == "shards-00002.safetensors"
    assert verify(path) == []
    for shard in before.glob("*-0000?.safetensors"):
        assert (
            shard.name.startswith(("index", "source"))
            or (path / shard.name).read_bytes() == shard.read_bytes()
        )
    data = open_split(path, "train")
    assert data.order_version == 2
    with build_loader(path, workers=1, batch_size=2) as loader:
        assert sorted(ids_of(loader)) == sorted(data.ids)
