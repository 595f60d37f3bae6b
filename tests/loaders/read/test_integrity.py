"""No loader serves a byte that was not written: each sample is compared with its checksum by who reads it."""

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
from precache.dataset.index import index_name
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError, ImageError, SampleError
from precache.formats import FORMATS
from tests.building import build_loader
from tests.conftest import IMAGES
from tests.damage import flip_a_bit
from tests.loader_contract import ids_of
from tests.loaders.cases import CONVERTED_CASES, backend_params

HOW: list[dict[str, Any]] = [
    {"shuffle": "window"},
    {"shuffle": False, "size": 40},
    {"size": 40, "augment": "crop"},
    {"cache": "ram", "size": 40, "augment": "train"},
]


EACH = [*CONVERTED_CASES, *backend_params(("shards", "keep-shards"), ("dali", "keep-dali"))]


@pytest.fixture(params=[pytest.param(arm.values, id=arm.id, marks=arm.marks) for arm in EACH])
def build(
    request: pytest.FixtureRequest, converted: dict[str, Path], shaped: dict[str, Path], tmp_path: Path
) -> partial[Loader]:
    """One backend over a copy of its folder."""
    backend, kind = request.param
    path = Path(shutil.copytree({**converted, **shaped}[kind], tmp_path / "copy"))
    return partial(build_loader, path, backend=backend, workers=2, batch_size=8)


@pytest.mark.parametrize("how", HOW, ids=str)
def test_damaged_sample_raises_sample_error_in_every_epoch(
    build: partial[Loader], how: dict[str, Any]
) -> None:
    """Or left out alone, if that is asked for."""
    with build(**how) as loader:
        expected = {int(i): p for b in loader for i, p in zip(b.ids, b.images, strict=True)}
    shard, bad = flip_a_bit(build.args[0])
    with build(**how) as loader:
        source = loader.path_of(bad)
        for epoch in range(2):
            loader.set_epoch(epoch)
            served: list[int] = []
            with pytest.raises(SampleError) as caught:
                served.extend(i for batch in loader for i in batch.ids.tolist())
            assert bad not in served
            assert f"{shard}: sample {bad} ({source})" in str(caught.value)
            assert isinstance(caught.value, DatasetError)
            assert isinstance(caught.value, ImageError)
    with build(on_error="skip", **how) as loader:
        for epoch in (0, 1):
            loader.set_epoch(epoch)
            found = {int(i): p for b in loader for i, p in zip(b.ids, b.images, strict=True)}
            assert sorted(found) == [i for i in range(IMAGES) if i != bad]
            assert epoch or all(torch.equal(picture, expected[i]) for i, picture in found.items())


def test_checking_always_finds_damage_after_the_first_epoch(
    build: partial[Loader],
) -> None:
    with build(check="always") as always, build(check="first-read") as first:
        assert len(ids_of(always)) == len(ids_of(first)) == IMAGES
        flip_a_bit(build.args[0])
        for epoch in (5, 7):  # nothing of which is on its way already
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


@pytest.mark.parametrize("file", [MANIFEST_NAME, index_name()])
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
        with pytest.raises(DatasetError, match=str(path)) as caught:
            read_all(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", [MANIFEST_NAME, index_name(), "shard"])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_pipe_folder_or_link_in_place_of_a_file_raises_dataset_error(
    name: str, file: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(converted[name], tmp_path / "copy"))
    dataset = open_dataset(path)
    target = dataset.shard_path(dataset.manifest.shards[1]) if file == "shard" else path / file
    for put in (os.mkfifo, os.mkdir, lambda target: target.symlink_to(target.name)):
        target.rmdir() if target.is_dir() else target.unlink()
        put(target)
        with pytest.raises(DatasetError, match=str(target)):
            read_all(path)
