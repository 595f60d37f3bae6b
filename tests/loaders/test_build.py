"""Settings that `loaders.build` takes and refuses, and states that belong to another loader."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loaders
from loaders import dataset
from precache.errors import DatasetError, SettingError
from tests.building import build_loader
from tests.conftest import IMAGES
from tests.loader_contract import ids_of


def test_auto_backend_builds_without_dali_for_any_folder(
    raw_tree: Path, converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    for path in (raw_tree, converted["shards"], converted["webdataset"]):
        with build_loader(path, workers=0, shuffle=False) as loader:
            assert len(loader.classes) == 5
            assert next(iter(loader)).images.float().std() > 20, "pictures"


def test_a_missing_dali_is_named_with_its_install_command(
    raw_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(ImportError, match=r"pip install .*precache\[dali\]"):
        build_loader(raw_tree, backend="dali")


def test_size_is_by_default_at_most_default_size(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "DEFAULT_SIZE", 32)
    with build_loader(converted["shards"]) as loader:
        assert loader.size == 32


BAD: list[dict[str, Any]] = [
    {"backend": "dalli"}, {"batch_size": 0}, {"workers": "many"}, {"seed": -1}, {"threads": 0},
    {"memory_bytes": 0}, {"crop_ratio": True}, {"size": 0}, {"batch_size": 10**9, "last": "pad"},
    {"device": "gpu"}, {"last": "some"}, {"check": "sometimes"}, {"cache": "disk"}, {"on_error": "ignore"},
    {"rank": 0}, {"rank": 2, "world_size": 2}, {"per_node": 0}, {"shuffle": "a bit"},
    {"split": "validation"}, {"split": 3}, {"num_workers": 4}, {"augment": "trian"}, {"augment": 3},
    {"dtype": torch.int32}, {"dtype": "float"}, {"dtype": None}, {"dtype": np.uint8}, {"dtype": "int8"},
    {"backend": None}, {"shuffle": None}, {"normalize": 3}, {"normalize": {}}, {"normalize": (0.5, "x")},
    {"reading": {"workers": 2}}, {"sampling": loaders.Sampling}, {"ranks": 0},
]  # fmt: skip


def test_a_bad_setting_is_named_with_what_to_give(converted: dict[str, Path]) -> None:
    for given in BAD:
        with pytest.raises(SettingError) as caught:
            build_loader(converted["shards"], **given)
        name, remedy = next(iter(given)), "(must be .*[,;] got |choose from: |; give |; leave |; use )"
        assert re.search(rf"\b{name}\b.*{remedy}", str(caught.value)), given


INTEGERS = {
    "batch_size": 8, "size": 24, "seed": 3, "rank": 1, "world_size": 2, "per_node": 1, "workers": 2,
    "threads": 1, "memory_bytes": 2**24, "cache_bytes": 2**30,
}  # fmt: skip


def test_integer_settings_accept_numpy_and_torch_values(converted: dict[str, Path]) -> None:
    """Integers of NumPy and torch become Python's, so that a state is JSON."""
    settings: dict[str, Any] = {"shuffle": "window", "augment": "train", **INTEGERS}
    with build_loader(converted["shards"], **settings) as loader:
        expected = [batch.ids.tolist() for batch in loader]
    for kind in (np.int64, np.int32, np.array, torch.tensor):
        integers = {name: kind(value) for name, value in INTEGERS.items()}
        with build_loader(converted["shards"], **{**settings, **integers}) as other:
            assert other.spec == loader.spec
            assert [batch.ids.tolist() for batch in other] == expected
            other.set_epoch(kind(4))
            other.load_state_dict({**json.loads(json.dumps(other.state_dict())), "epoch": kind(5)})
            assert json.loads(json.dumps(other.state_dict()))["epoch"] == 5


def test_integer_settings_refuse_other_types(converted: dict[str, Path]) -> None:
    settings: dict[str, Any] = {"shuffle": "window", "augment": "train", **INTEGERS}
    for name, value in INTEGERS.items():
        for wrong in (True, float(value), str(value), np.True_, np.float64(value), [value]):
            with pytest.raises(SettingError, match=rf"\b{name}\b .*{re.escape(repr(wrong))}"):
                build_loader(converted["shards"], **{**settings, name: wrong})


def test_build_refuses_a_backend_order_or_device_it_cannot_use(
    raw_tree: Path, converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folders = {"raw": raw_tree, **converted}
    for kind, name, value in (
        ("shards", "backend", "dali"),
        ("webdataset", "shuffle", "full"),
        ("shards", "device", "cuda"),
    ):
        with pytest.raises((DatasetError, SettingError), match=f"{value!r}.* use "):
            build_loader(folders[kind], **{name: value})


def test_a_batch_may_be_larger_than_the_split(raw_tree: Path, converted: dict[str, Path]) -> None:
    """Memory is taken for the samples that there are, not for `batch_size` samples."""
    for path in (raw_tree, converted["shards"], converted["webdataset"]):
        with build_loader(path, batch_size=10**9, last="partial", size=16, workers=2) as loader:
            assert [len(batch.ids) for batch in loader] == [loader.samples]
    with build_loader(converted["shards"], batch_size=IMAGES + 1, last="drop") as loader:
        assert (len(loader), list(loader)) == (0, [])


def test_a_state_of_another_loader_is_refused(converted: dict[str, Path]) -> None:
    with build_loader(converted["shards"], batch_size=16) as loader:
        changes: list[dict[str, Any]] = [
            {"epoch": None}, {"epoch": "x"}, {"epoch": 2**64}, {"served_batches": -3}, {"served_batches": 99},
            {"seed": 7}, {"global_batch_size": 7}, {"dataset": "another"},
        ]  # fmt: skip
        others = [{**loader.state_dict(), **change} for change in changes]
        for state in (None, [], "x", 5, {}, *others):
            with pytest.raises(SettingError, match="state"):
                loader.load_state_dict(state)  # type: ignore[arg-type]
        with pytest.raises(SettingError, match="epoch must be"):
            loader.set_epoch(2**64)
        loader.set_epoch(2**32)
        assert sorted(ids_of(loader)) == [*range(IMAGES)]
