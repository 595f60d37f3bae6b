"""Sets whose index is read shard by shard: they serve what others do, and cost what a batch needs."""

import os
import pickle
import shutil
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loaders import ImageDataset
from loaders.dataset import SplitData, open_split
from loaders.mixture import unite_classes
from loaders.read.integrity import SampleCheck
from precache import Recipe, convert, open_dataset
from precache.dataset import converted as reading
from precache.dataset.columns import Column
from precache.dataset.index import SampleIndex, index_name, write_index
from precache.dataset.manifest import Manifest, write_manifest
from precache.dataset.shard_table import ShardTable, suffixes_of
from precache.errors import DatasetError, SettingError
from precache.formats import FORMATS
from precache.pictures.kinds import made_by
from tests.building import build_loader
from tests.conftest import IMAGES
from tests.precache.sources.listed import listed

MIB = 1 << 20


@pytest.fixture(autouse=True)
def lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every set were large."""
    monkeypatch.setattr(reading, "WHOLE_SAMPLES", 0)


def at_once(function: Any, *arguments: Any) -> Any:
    """What it gives where no set is large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "WHOLE_SAMPLES", 10**6)
        return function(*arguments)


def both(path: Path, split: str = "train") -> tuple[SplitData, SplitData]:
    """Read as a whole, and shard by shard."""
    whole, lazy = at_once(open_split, path, split), open_split(path, split)
    assert lazy.ids.in_pieces
    assert not whole.ids.in_pieces
    return whole, lazy


def check_same(whole: SplitData, lazy: SplitData) -> None:
    """In every column and by every kind of position."""
    count = len(whole)
    assert len(lazy) == count
    rng = np.random.default_rng(1)
    rows = (rng.permutation(count), np.array([count - 1, 0, 0]), np.empty(0, np.int64))
    for positions in (*rows, slice(2, 9), slice(None), count // 2, -2, rng.random(count) < 0.5):
        for name in ("ids", "labels", "shapes"):
            ours, theirs = getattr(lazy, name), getattr(whole, name)
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert np.array_equal(ours[positions], theirs[positions])
                assert ours[positions].dtype == theirs.dtype
    assert whole.index is not None
    assert lazy.index is not None
    assert sorted(lazy.index.columns) == sorted(whole.index.columns)
    for name, column in whole.index.columns.items():
        lazily = lazy.index[name]
        assert (lazily.kind, lazily.row_shape, len(lazily)) == (column.kind, column.row_shape, len(column))
        assert all(lazily.select(some).content() == column.select(some).content() for some in rows)
        assert lazily.value(count - 1) == column.value(count - 1)
    assert [lazy.path_at(row) for row in range(count)] == [whole.path_at(row) for row in range(count)]
    assert lazy.targets() == whole.targets()
    assert lazy.most_sides == tuple(whole.shapes_at(slice(None)).max(axis=0).tolist())


@pytest.mark.parametrize("target", ["class", "classes", "number", "none"])
def test_every_column_is_what_it_is_read_as_a_whole(target: str, tmp_path: Path) -> None:
    """Fields of every kind; also of a part, of a part of that, and of what went to another process."""
    sides = {"size": 16, "fit": "crop", "shard_bytes": 7 * 16 * 16 * 3}
    recipe = Recipe(format="webdataset", splits="train=0.6,val=0.4", **sides)
    convert(listed(target), tmp_path / "out", recipe, workers=0)
    for split in ("train", "val"):
        whole, lazy = both(tmp_path / "out", split)
        check_same(whole, lazy)
        some = np.flatnonzero(np.arange(len(whole)) % 3 > 0)
        check_same(whole.select(some), lazy.select(some))
        check_same(whole.select(some).select(np.arange(1, 4)), lazy.select(some).select(np.arange(1, 4)))
        assert whole.select(some).digest == lazy.select(some).digest
        check_same(whole, pickle.loads(pickle.dumps(lazy)))


def test_sets_of_a_mixture_are_relabelled_without_reading_them(converted: dict[str, Path]) -> None:
    whole, lazy = both(converted["shards"])
    names = ("new", *whole.classes[::-1])
    for parts in ((whole, whole), (lazy, lazy)):
        one, other = unite_classes((parts[0], parts[1].relabel(names, np.arange(len(whole.classes)) + 1)))
        assert one.classes == other.classes == (*whole.classes, "new")
        assert other.labels.in_pieces == (parts[0] is lazy)
    expected = np.array([one.classes.index(names[label + 1]) for label in whole.labels])
    assert np.array_equal(other.labels[np.arange(IMAGES)], expected)


HOW: list[dict[str, Any]] = [
    {},
    {"shuffle": "window", "check": "always"},
    {"shuffle": False, "size": 40},
    {"subset": [3, 60, 4, 20]},
    {"weights": "balanced"},
    {"augment": "train", "size": 40, "cache": "ram"},
]


@pytest.mark.parametrize("kind", ["shards", "keep-shards", "keep-webdataset"])
def test_loaders_and_the_map_style_dataset_serve_the_same(
    kind: str, converted: dict[str, Path], shaped: dict[str, Path]
) -> None:
    path = {**converted, **shaped}[kind]

    def serve(how: dict[str, Any]) -> Iterator[torch.Tensor]:
        with build_loader(path, batch_size=8, workers=2, **how) as loader:
            for batch in (*loader, *loader):
                yield from (batch.images.clone(), batch.labels, batch.ids)
            yield torch.tensor(loader.dataset.targets)

    def pictures() -> Iterator[torch.Tensor]:
        dataset = ImageDataset(path, decode="tensor")
        again = pickle.loads(pickle.dumps(dataset))
        for number in (0, 69, -3, 30):
            yield from (dataset[number][0], again[number][0], torch.tensor(dataset[number][1]))

    for how in HOW:
        for ours, theirs in zip(serve(how), at_once(list, serve(how)), strict=True):
            assert torch.equal(ours, theirs)
    for ours, theirs in zip(pictures(), at_once(list, pictures()), strict=True):
        assert torch.equal(ours, theirs)


def test_classes_and_paths_are_found(converted: dict[str, Path]) -> None:
    whole, lazy = both(converted["webdataset"])
    assert lazy.path_of(int(whole.ids[33])) == whole.path_at(33)
    with pytest.raises(SettingError, match="has none of this id"):
        lazy.path_of(10**6)
    with build_loader(converted["webdataset"], classes=whole.classes[:2], batch_size=8) as loader:
        assert loader.samples == int((whole.labels.values < 2).sum())
    with pytest.raises(IndexError):
        lazy.ids[[IMAGES]]


def test_threads_may_ask_at_once(converted: dict[str, Path]) -> None:
    whole, lazy = both(converted["shards"])
    turns = [np.random.default_rng(seed).integers(0, IMAGES, 40) for seed in range(200)]
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda rows: lazy.ids[rows], turns)]
    assert all(np.array_equal(ids, whole.ids[rows]) for ids, rows in zip(found, turns, strict=True))


def test_a_bit_that_changed_in_the_index_is_found_where_its_rows_are_read(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    """In the header at once, in the rows by who reads them; no other rows than those that were written."""
    path = Path(shutil.copytree(converted["shards"], tmp_path / "copy"))
    whole, _ = both(path)
    content = (path / index_name()).read_bytes()
    rng = np.random.default_rng(3)
    found = set()
    for place, bit in zip(rng.integers(0, len(content), 100), rng.integers(0, 8, 100), strict=True):
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        (path / index_name()).write_bytes(changed)
        with pytest.raises(DatasetError, match=str(path / index_name())) as caught:
            read_all(path, whole)
        assert "\n" not in str(caught.value)
        found.add("rows of the shard train-" in str(caught.value))
    assert found == {True, False}


def read_all(path: Path, whole: SplitData) -> None:
    check_same(whole, open_split(path, "train"))
    open_dataset(path).read_source_state()


def test_an_index_that_is_cut_off_gone_or_a_pipe_is_an_error_when_it_is_opened_or_read(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(converted["shards"], tmp_path / "copy"))
    opened = open_split(path, "train")
    os.truncate(path / index_name(), 900)
    with pytest.raises(DatasetError, match=str(path / index_name())):
        opened.labels[:]
    for change in (lambda: None, (path / index_name()).unlink, lambda: os.mkfifo(path / index_name())):
        change()
        with pytest.raises(DatasetError, match=str(path)):
            open_split(path, "train")


def make(folder: Path, samples: int, shards: int) -> SplitData:
    """A split of so many samples, of which there are manifest and index, and no shards; it is counted."""
    ids, per_shard = np.arange(samples), np.full(shards, samples // shards)
    recipe, none = Recipe(format="shards", size=224, fit="crop"), np.empty(0, np.int64)
    columns = {
        "ids": Column(ids),
        "labels": Column(ids % 2),
        "source_sizes": Column(np.zeros((samples, 2), np.int32)),
        "checksums": Column(np.zeros(samples, np.uint64)),
        "paths": Column(np.empty(0, np.uint8), np.zeros(samples, np.int64)),
    }
    table = ShardTable(
        ("train",),
        suffixes_of(FORMATS[recipe.format]),
        splits=np.zeros(shards, np.int32),
        numbers=np.arange(shards),
        samples=per_shard,
        bytes=(per_shard * 224 * 224 * 3 + 8192).reshape(-1, 1),
        crc32c=np.zeros((shards, 1), np.uint32),
    )
    source = {f"source:{name}": none for name in ("bytes", "modified_ns")}
    others = {**table.arrays(), **source, "source:checksums": none.astype(np.uint64)}
    manifest = Manifest(
        recipe=recipe,
        made_by=made_by(),
        source_digest="0" * 64,
        source_bytes=0,
        classes=("even", "odd"),
        samples_per_class={"train": (samples // 2, samples // 2)},
        shards=table,
        index=write_index(folder, SampleIndex(columns), per_shard, others),
        scanned=samples,
        rejected=(),
        ignored=(),
    )
    write_manifest(folder, manifest)
    tracemalloc.start()
    return open_split(folder, "train")


def test_what_a_sample_costs_is_less_than_a_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To open two millions, for the first batch, and for what notes that all of them were compared."""
    monkeypatch.undo()  # they are many
    data = make(tmp_path, samples := 2_000_000, 2_000)
    positions = np.random.default_rng(0).integers(0, samples, 64)
    assert np.array_equal(data.ids[positions], positions)
    opened = tracemalloc.get_traced_memory()[1]
    check = SampleCheck(data, "first-read")
    with pytest.raises(DatasetError):
        check.compare(int(positions[0]), b"not what was written")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert opened < 2 * MIB  # 128 bytes and more for each of the shards, and rows of 64 of them
    assert most - opened < samples / 7


def test_what_a_shard_costs_is_a_few_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    data = make(tmp_path, 2_000_000, shards := 60_000)  # of a few the whole index would be read
    assert data.files[shards - 1].endswith("train-59999.safetensors")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 300 * shards
