"""Datasets of manifest version 2 are still read, with what they have: checksums of whole shards."""

import hashlib
import shutil
from pathlib import Path

import pytest

from loaders.dataset import open_split
from precache import open_dataset, verify
from precache.errors import DatasetError, SettingError
from tests.building import build_loader
from tests.command import ROOT
from tests.damage import flip_a_bit
from tests.loader_contract import ids_of
from tests.loaders.backends.test_integrity import serve_into

FOLDER = ROOT / "tests/data/version-2"
KINDS = [("shards", "shards"), ("webdataset", "webdataset"), ("dali", "dali"), ("dali", "webdataset")]


@pytest.mark.parametrize(("backend", "kind"), KINDS)
def test_it_is_served_and_verified(backend: str, kind: str) -> None:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    assert verify(FOLDER / kind) == []
    served = []
    for split in ("train", "val"):
        for check in ("always", "first-read", "never"):
            with build_loader(
                FOLDER / kind, backend=backend, split=split, check=check, workers=1, batch_size=4
            ) as loader:
                ids = [ids_of(loader) for _ in range(2)]
                assert sorted(ids[0]) == sorted(ids[1]) == sorted(open_split(FOLDER / kind, split).ids)
        served += ids[0]
    assert sorted(served) == list(range(8))


@pytest.mark.parametrize(("backend", "kind"), KINDS)
def test_damage_is_found_before_anything_of_the_shard_is_served(
    backend: str, kind: str, tmp_path: Path
) -> None:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    path = Path(shutil.copytree(FOLDER / kind, tmp_path / "copy"))
    shard, bad = flip_a_bit(path, shard_number=1, row=1)
    with build_loader(path, backend=backend, workers=1, batch_size=1) as loader:
        served: list[int] = []
        with pytest.raises(DatasetError, match=f"{shard}.*checksum"):
            serve_into(served, loader)
        assert bad not in served


def test_its_identity_is_that_of_before() -> None:
    """A state that a loader of an earlier release took still fits."""
    for kind in ("shards", "webdataset", "dali"):
        manifest = (FOLDER / kind / "dataset.json").read_bytes()
        assert open_dataset(FOLDER / kind).digest == hashlib.sha256(manifest).hexdigest()


def test_it_knows_no_paths() -> None:
    with pytest.raises(SettingError, match="of version 2, which stores no paths; convert it again"):
        open_split(FOLDER / "shards", "train").path_of(int(open_split(FOLDER / "shards", "train").ids[0]))
