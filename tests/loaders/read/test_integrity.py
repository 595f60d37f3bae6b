"""Loaders compare each sample with its checksum, and serve no byte that the conversion did not write."""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loaders import Loader
from precache import open_dataset
from precache.dataset.index import INDEX_NAME
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError, ImageError, SampleError
from precache.formats import FORMATS
from tests.building import build_loader
from tests.conftest import IMAGES
from tests.damage import flip_a_bit
from tests.loader_contract import ids_of
from tests.loaders.cases import CONVERTED_CASES, backend_params

SETTINGS: list[dict[str, Any]] = [
    {"shuffle": "window"},
    {"shuffle": False, "size": 40},
    {"size": 40, "augment": "crop"},
    {"size": 40, "augment": "train"},
]
CASES = [*CONVERTED_CASES, *backend_params(("shards", "keep-shards"), ("dali", "keep-dali"))]


@pytest.fixture(params=[pytest.param(case.values, id=case.id, marks=case.marks) for case in CASES])
def build(
    request: pytest.FixtureRequest, converted: dict[str, Path], shaped: dict[str, Path], tmp_path: Path
) -> partial[Loader]:
    """Function that builds a loader of one backend over a copy of its folder."""
    backend, kind = request.param
    path = Path(shutil.copytree({**converted, **shaped}[kind], tmp_path / "copy"))
    return partial(build_loader, path, backend=backend, workers=2, batch_size=8)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_damaged_sample_raises_sample_error_in_every_epoch(
    build: partial[Loader], settings: dict[str, Any]
) -> None:
    shard, damaged_id = flip_a_bit(build.args[0])
    with build(**settings) as loader:
        source = loader.path_of(damaged_id)
        for epoch in range(2):
            loader.set_epoch(epoch)
            served: list[int] = []
            with pytest.raises(SampleError) as raised:
                served.extend(i for batch in loader for i in batch.ids.tolist())
            assert damaged_id not in served
            assert raised.value.path == f"{shard}: sample {damaged_id} ({source})"
            assert isinstance(raised.value, DatasetError)
            assert isinstance(raised.value, ImageError)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_skipping_leaves_out_the_damaged_sample_alone(
    build: partial[Loader], settings: dict[str, Any]
) -> None:
    with build(**settings) as loader:
        expected = {int(i): p for b in loader for i, p in zip(b.ids, b.images, strict=True)}
    _, damaged_id = flip_a_bit(build.args[0])
    with build(on_error="skip", **settings) as loader:
        for epoch in (0, 1):
            loader.set_epoch(epoch)
            pictures = {int(i): p for b in loader for i, p in zip(b.ids, b.images, strict=True)}
            assert sorted(pictures) == [i for i in range(IMAGES) if i != damaged_id]
            if epoch == 0:
                assert all(torch.equal(picture, expected[i]) for i, picture in pictures.items())


def test_checking_always_finds_damage_after_the_first_epoch(build: partial[Loader]) -> None:
    with build(check="always") as always, build(check="first-read") as first:
        assert len(ids_of(always)) == len(ids_of(first)) == IMAGES
        flip_a_bit(build.args[0])
        for epoch in (5, 7):  # no batch of these epochs has been read ahead
            always.set_epoch(epoch)
            with pytest.raises(SampleError):
                ids_of(always)


def read_all(path: Path) -> None:
    dataset = open_dataset(path)
    dataset.read_source_state()
    index = dataset.read_index()
    for name in index.names:
        index[name].content()
    with build_loader(path, workers=1) as loader:
        ids_of(loader)


@pytest.mark.parametrize("file", [MANIFEST_NAME, INDEX_NAME])
def test_one_changed_bit_of_manifest_or_index_raises_dataset_error(
    file: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(converted["shards"], tmp_path / "copy"))
    content = (path / file).read_bytes()
    rng = np.random.default_rng(4)
    for place, bit in zip(rng.integers(0, len(content), 60), rng.integers(0, 8, 60), strict=True):
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        (path / file).write_bytes(changed)
        with pytest.raises(DatasetError, match=str(path)) as raised:
            read_all(path)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("file", [MANIFEST_NAME, INDEX_NAME, "shard"])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_pipe_folder_or_link_in_place_of_a_file_raises_dataset_error(
    name: str, file: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(converted[name], tmp_path / "copy"))
    dataset = open_dataset(path)
    target = dataset.shard_path(dataset.manifest.shards[1]) if file == "shard" else path / file
    for make in (os.mkfifo, os.mkdir, lambda target: target.symlink_to(target.name)):
        if target.is_dir():
            target.rmdir()
        else:
            target.unlink()
        make(target)
        with pytest.raises(DatasetError, match=str(target)):
            read_all(path)
