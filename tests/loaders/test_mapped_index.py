"""The index of a dataset is mapped: memory does not grow with its samples, and processes share it."""

import multiprocessing
import pickle
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from loaders import ImageDataset
from loaders.dataset import SplitData, open_split
from loaders.read.integrity import SampleCheck
from precache import open_dataset
from precache.dataset.columns import Column
from precache.dataset.index import INDEX_NAME, Counts, SampleIndex, write_index
from precache.dataset.manifest import write_manifest
from precache.dataset.shard_table import ShardTable
from precache.errors import DatasetError

SAMPLES, SHARDS = 2_000_000, 2_000


@pytest.fixture(scope="module")
def large(converted: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dataset of two million samples, without its shards."""
    path = tmp_path_factory.mktemp("large")
    ids, per_shard = np.arange(SAMPLES), np.diff(np.arange(SHARDS + 1) * SAMPLES // SHARDS)
    manifest = open_dataset(converted["shards"]).manifest
    table = ShardTable(
        ("train",),
        manifest.shards.suffixes,
        splits=np.zeros(SHARDS, np.int32),
        numbers=np.arange(SHARDS),
        samples=per_shard,
        bytes=(per_shard * 48 * 48 * 3 + 8192).reshape(-1, 1),
        crc32c=np.zeros((SHARDS, 1), np.uint32),
    )
    columns = {
        "ids": Column(ids),
        "labels": Column(ids % 2),
        "source_sizes": Column(np.zeros((SAMPLES, 2), np.int32)),
        "checksums": Column(np.zeros(SAMPLES, np.uint64)),
        "byte_ranges": Column(np.tile(np.array([4096, 48 * 48 * 3]), (SAMPLES, 1))),
        "paths": Column(np.tile(np.frombuffer(b"1.jpg", np.uint8), SAMPLES), 5 * (ids + 1)),
    }
    source = {"source:modified_ns": ids, "source:checksums": ids.astype(np.uint64)}
    index = write_index(path, SampleIndex(columns), {**table.arrays(), **source})
    classes = {"classes": ("even", "odd"), "samples_per_class": {"train": (SAMPLES // 2,) * 2}}
    counts = Counts(SAMPLES, 0, 0, SHARDS)
    write_manifest(path, replace(manifest, counts=counts, shards=table, index=index, **classes))
    return path


def test_opening_two_million_samples_takes_little_memory(large: Path) -> None:
    """Opening and the first batch take some numbers per shard, another order 8 bytes per sample."""
    positions = np.random.default_rng(0).integers(0, SAMPLES, 64)
    tracemalloc.start()
    data = open_split(large, "train")
    assert np.array_equal(data.ids[positions], positions)
    assert np.array_equal(data.labels[positions], positions % 2)
    assert data.files[SHARDS - 1].endswith(f"train-{SHARDS - 1:05d}.safetensors")
    opened_bytes, peak_bytes = tracemalloc.get_traced_memory()
    with pytest.raises(DatasetError):
        SampleCheck(data, "first-read").compare(int(positions[0]), b"not what was written")
    checked_bytes = tracemalloc.get_traced_memory()[0]
    dataset = ImageDataset(large)  # in the order of the ids
    ordered_bytes = tracemalloc.get_traced_memory()[0] - checked_bytes
    tracemalloc.stop()
    assert dataset.ids[-1] == SAMPLES - 1
    assert opened_bytes < (1 << 19) + 300 * SHARDS
    assert peak_bytes < 2 * SAMPLES + (1 << 20)
    assert checked_bytes - opened_bytes < SAMPLES / 7  # a bit per sample, and the error
    assert ordered_bytes < 8.5 * SAMPLES + (1 << 20)


def send_rows(data: SplitData, positions: Any, answers: Any) -> None:
    answers.put((data.ids[positions].tolist(), data.labels[positions].tolist()))


def test_an_unpickled_split_maps_its_index_itself(large: Path) -> None:
    data = open_split(large, "train")
    positions = np.array([5, SAMPLES - 1, 0])
    expected = data.ids[positions].tolist(), data.labels[positions].tolist()
    assert len(pickle.dumps(data)) < 1 << 19
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.SimpleQueue()
    process = spawn.Process(target=send_rows, args=(data, positions, answers))
    process.start()
    assert answers.get() == expected
    process.join()


def test_a_replaced_index_stays_mapped_as_it_was(converted: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(converted["shards"], tmp_path / "copy"))
    data = open_split(path, "train")
    (path / "other").write_bytes(bytes(open_dataset(path).manifest.index.bytes))
    (path / "other").replace(path / INDEX_NAME)
    expected = open_split(converted["shards"], "train")
    assert data.index.names == expected.index.names
    for name in data.index.names:
        assert data.index[name].content() == expected.index[name].content()
    assert data.path_at(3) == expected.path_at(3)
    with pytest.raises(DatasetError, match=str(path / INDEX_NAME)):
        open_split(path, "train")


def test_a_truncated_index_is_named(converted: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(converted["shards"], tmp_path / "copy"))
    content = (path / INDEX_NAME).read_bytes()
    for length in (0, 7, 8, len(content) // 2, len(content) - 1):
        (path / INDEX_NAME).write_bytes(content[:length])
        with pytest.raises(DatasetError, match=str(path / INDEX_NAME)):
            open_dataset(path)
