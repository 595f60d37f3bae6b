"""Sets whose index is read shard by shard: they serve what others do, and cost what a batch needs."""

import pickle
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loaders import ImageDataset
from loaders.dataset import open_split
from loaders.mixture import unite_classes
from loaders.read.integrity import SampleCheck
from precache import Recipe, convert, open_dataset
from precache.dataset import converted as reading
from precache.dataset.columns import Column
from precache.dataset.index import SampleIndex, index_name, write_index
from precache.dataset.manifest import write_manifest
from precache.dataset.shard_table import ShardTable
from precache.errors import DatasetError
from tests.building import build_loader
from tests.precache.sources.listed import listed

HOW: list[dict[str, Any]] = [
    {},
    {"shuffle": "window", "check": "always"},
    {"subset": [3, 60, 4, 20]},
    {"classes": ["001.anchor"]},
    {"weights": "balanced"},
    {"augment": "train", "size": 40, "cache": "ram"},
]


@pytest.fixture(autouse=True)
def lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every set were large."""
    monkeypatch.setattr(reading, "WHOLE_SAMPLES", 0)


def at_once(function: Any, *arguments: Any) -> Any:
    """What it gives where no set is large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "WHOLE_SAMPLES", 10**6)
        return function(*arguments)


def served(path: Path, **how: Any) -> Iterator[Any]:
    """All that a loader serves and says, part by part."""
    with build_loader(path, batch_size=8, workers=2, **how) as loader:
        for batch in (*loader, *loader):
            yield from (batch.images.clone(), batch.labels, batch.ids)
            for name, values in batch.fields.items():
                yield name
                yield from values
            yield from map(loader.path_of, batch.ids)
        yield from (loader.dataset.targets, loader.state_dict(), loader.size)


def by_index(path: Path) -> Iterator[Any]:
    """What the map-style dataset says, here and in another process."""
    dataset = ImageDataset(path, decode="tensor")
    yield from (dataset.targets, dataset.samples)
    for number in (0, len(dataset) - 1, -3, 5):
        yield from (*dataset[number], *pickle.loads(pickle.dumps(dataset))[number])


def check_same(parts: Callable[..., Iterator[Any]], path: Path, **how: Any) -> None:
    """Of what is read shard by shard, as of what is read as a whole."""
    whole = at_once(lambda: list(parts(path, **how)))
    for ours, theirs in zip(parts(path, **how), whole, strict=True):
        assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


@pytest.mark.parametrize("target", ["class", "classes", "number", "none"])
def test_targets_and_fields_of_every_kind_are_served(target: str, tmp_path: Path) -> None:
    sides = {"size": 16, "fit": "crop", "shard_bytes": 7 * 16 * 16 * 3}
    recipe = Recipe(format="webdataset", splits="train=0.6,val=0.4", **sides)
    convert(listed(target), tmp_path / "out", recipe, workers=0)
    check_same(by_index, tmp_path / "out")
    for how in ({}, {"split": "val"}, {"subset": open_split(tmp_path / "out", "train").ids[2:9].tolist()}):
        check_same(served, tmp_path / "out", **how)


@pytest.mark.parametrize("kind", ["shards", "keep-shards", "keep-webdataset"])
def test_every_order_and_choice_is_served(
    kind: str, converted: dict[str, Path], shaped: dict[str, Path]
) -> None:
    path = {**converted, **shaped}[kind]
    check_same(by_index, path)
    for how in HOW:
        check_same(served, path, **how)


def test_sets_of_a_mixture_are_relabelled_without_reading_them(converted: dict[str, Path]) -> None:
    relabelled = []
    whole = at_once(open_split, converted["shards"], "train")
    for data in (whole, open_split(converted["shards"], "train")):
        names = ("new", *data.classes[::-1])
        _, other = unite_classes((data, data.relabel(names, np.arange(len(data.classes)) + 1)))
        assert other.classes == (*data.classes, "new")
        relabelled.append(other.labels)
    assert relabelled[1].in_pieces
    assert relabelled[1].tolist() == relabelled[0].tolist()


def read_all(path: Path) -> None:
    dataset = open_dataset(path)
    dataset.read_source_state()
    for column in dataset.open_index("train").columns.values():
        column.content()


def test_an_index_that_changed_is_an_error_where_its_rows_are_read(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    """In the header at once, in the rows by who reads them; no other rows than those that were written."""
    path = Path(shutil.copytree(converted["shards"], tmp_path / "copy"))
    content = (path / index_name()).read_bytes()
    rng = np.random.default_rng(3)
    for place, bit in zip(rng.integers(0, len(content), 60), rng.integers(0, 8, 60), strict=True):
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        (path / index_name()).write_bytes(changed)
        with pytest.raises(DatasetError, match=str(path / index_name())):
            read_all(path)


def test_what_two_million_samples_cost_is_less_than_a_byte_each_and_a_few_numbers_a_shard(
    converted: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open them, for the first batch, and to note that all were compared; no shard is there."""
    monkeypatch.undo()  # they are many
    samples, shards = 2_000_000, 2_000
    ids, per_shard = np.arange(samples), np.diff(np.arange(shards + 1) * samples // shards)
    manifest = open_dataset(converted["shards"]).manifest
    table = ShardTable(
        ("train",),
        manifest.shards.suffixes,
        splits=np.zeros(shards, np.int32),
        numbers=np.arange(shards),
        samples=per_shard,
        bytes=(per_shard * 48 * 48 * 3 + 8192).reshape(-1, 1),
        crc32c=np.zeros((shards, 1), np.uint32),
    )
    columns = {
        "ids": Column(ids),
        "labels": Column(ids % 2),
        "source_sizes": Column(np.zeros((samples, 2), np.int32)),
        "checksums": Column(np.zeros(samples, np.uint64)),
        "paths": Column(np.empty(0, np.uint8), np.zeros(samples, np.int64)),
    }
    none = np.empty(0, np.int64)
    source = {"source:bytes": none, "source:modified_ns": none, "source:checksums": none.astype(np.uint64)}
    index = write_index(tmp_path, SampleIndex(columns), per_shard, {**table.arrays(), **source})
    counted = {"classes": ("even", "odd"), "samples_per_class": {"train": (samples // 2,) * 2}}
    write_manifest(tmp_path, replace(manifest, shards=table, index=index, scanned=samples, **counted))
    positions = np.random.default_rng(0).integers(0, samples, 64)
    tracemalloc.start()
    data = open_split(tmp_path, "train")
    assert np.array_equal(data.ids[positions], positions)
    assert data.files[shards - 1].endswith(f"train-{shards - 1:05d}.safetensors")
    opened = tracemalloc.get_traced_memory()[1]
    with pytest.raises(DatasetError):
        SampleCheck(data, "first-read").compare(int(positions[0]), b"not what was written")
    most = tracemalloc.get_traced_memory()[1]
    before = tracemalloc.get_traced_memory()[0]
    dataset = ImageDataset(tmp_path)  # in the order of the ids, 8 bytes each
    by_index = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert dataset.ids[-1] == samples - 1
    assert by_index < 8.5 * samples + (17 << 20)  # and rows that each process keeps, of any dataset
    assert opened < (3 << 19) + 300 * shards  # and rows of 64 of them
    assert most - opened < samples / 7
