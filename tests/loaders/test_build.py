"""What `loaders.build` takes and refuses, and states that belong to another loader."""

import errno
import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import loaders
from loaders import Ranks, Reading, settings
from precache import Recipe, convert
from precache.errors import DatasetError, PrecacheError, SettingError, SourceError
from tests.building import build_loader
from tests.conftest import IMAGES


def test_auto_needs_nothing_else_for_any_folder(
    raw_tree: Path, converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    for path in (raw_tree, converted["shards"], converted["webdataset"]):
        with build_loader(path, workers=0, shuffle=False) as loader:
            assert loader.classes[0] == "001.anchor"
            assert len(loader.classes) == 5
            assert next(iter(loader)).images.float().std() > 20, "pictures"
    with pytest.raises(ImportError, match="pip install nvidia-dali-cuda120"):
        build_loader(raw_tree, backend="dali")


def test_the_default_size_is_224_where_more_is_stored(raw_tree: Path, tmp_path: Path) -> None:
    convert(raw_tree, tmp_path / "large", Recipe(format="shards", size=256, fit="crop"), workers=0)
    with build_loader(tmp_path / "large") as loader:
        assert loader.size == 224
        assert next(iter(loader)).images.shape[2:] == (224, 224)


BAD: list[dict[str, Any]] = [
    {"backend": "dalli"}, {"batch_size": 0}, {"batch_size": -1}, {"workers": -1}, {"workers": "many"},
    {"seed": -1}, {"threads": 0}, {"memory_bytes": 0}, {"crop_ratio": 1e-9}, {"crop_ratio": True},
    {"size": 0}, {"batch_size": 10**9, "last": "pad"}, {"device": None}, {"device": "gpu"},
    {"device": "mps"}, {"last": "some"}, {"check": "sometimes"}, {"cache": "disk"}, {"on_error": "ignore"},
    {"rank": 0}, {"rank": 2, "world_size": 2}, {"world_size": 0, "rank": 0}, {"per_node": 0},
    {"shuffle": "a bit"}, {"split": "validation"}, {"dtype": torch.int32}, {"dtype": "int32"},
    {"num_workers": 4}, {"drop_last": True}, {"transform": print}, {"batch_sampler": []},
]  # fmt: skip


@pytest.mark.parametrize("given", BAD, ids=str)
def test_a_bad_setting_names_itself_and_what_would_do(
    converted: dict[str, Path], given: dict[str, Any]
) -> None:
    with pytest.raises(SettingError) as caught:
        build_loader(converted["shards"], **given)
    name, remedy = next(iter(given)), "(must be .*, got |choose from: |; give |; leave |; use )"
    assert re.search(rf"\b{name}\b.*{remedy}", str(caught.value))


def test_a_setting_of_others_is_refused_and_told_its_place(converted: dict[str, Path]) -> None:
    """Those of torch's DataLoader, those that belong into a dataclass, and what is misspelt."""
    theirs = set(inspect.signature(torch.utils.data.DataLoader).parameters) - {"dataset"}
    theirs |= {"num_replicas", "root", "transforms"}
    for name in theirs - set(inspect.signature(loaders.build).parameters):
        with pytest.raises(SettingError, match=f"^{name} is not a setting of build; "):
            loaders.build(converted["shards"], **{name: None})
    with pytest.raises(SettingError, match=r"give path$"):
        loaders.build(root=converted["shards"])
    with pytest.raises(SettingError, match=r"^path is missing; "):
        loaders.build()
    for name, place in (
        ("workers", "reading"), ("check", "reading"), ("worker", "reading"), ("dtype", "serving"),
        ("subset", "sampling"), ("last", "sampling"), ("rank", "ranks"), ("batchsize", "batch_size"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=rf"did you mean {place}"):
            loaders.build(converted["shards"], **{name: 1})
    for bad in ({"rank": 1}, {"world_size": 2}):  # when they are made
        with pytest.raises(SettingError, match=next(iter(bad))):
            Ranks(**bad)
    with pytest.raises(FrozenInstanceError):
        Reading().workers = 3  # type: ignore[misc]


def test_device_and_dtype_are_understood_by_name(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("uint8", "float32", "torch.float16", "bfloat16"):
        with build_loader(converted["shards"], dtype=name) as loader:
            assert str(next(iter(loader)).images.dtype).removeprefix("torch.") == name.removeprefix("torch.")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with build_loader(converted["shards"], device="auto") as loader:
        assert next(iter(loader)).images.device.type == "cpu"
    with pytest.raises(SettingError, match=r"device 'cuda' .* finds no GPU"):
        build_loader(converted["shards"], device="cuda")


@pytest.mark.parametrize(
    ("backend", "kind"),
    [("shards", "raw"), ("pytorch", "shards"), ("webdataset", "dali"), ("dali", "shards")],
)
def test_a_folder_of_the_wrong_format_is_refused(
    backend: str, kind: str, raw_tree: Path, converted: dict[str, Path]
) -> None:
    path = {"raw": raw_tree, **converted}[kind]
    with pytest.raises(DatasetError, match=f"{path}: .*'{backend}' reads .*; use backend"):
        build_loader(path, backend=backend)


def test_what_is_no_dataset_is_refused_in_one_line(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "flat.png")
    (tmp_path / "empty").mkdir()
    for path, said in (
        (tmp_path / "empty", "neither a converted dataset"),
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path, "CLASS/picture.jpg"),
    ):
        with pytest.raises(PrecacheError, match=rf"^{path}: [^\n]*{said}"):
            build_loader(path)

    def refuse(folder: object) -> object:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)

    monkeypatch.setattr(os, "scandir", refuse)  # who runs the tests may be root, who may read everything
    with pytest.raises(SourceError, match=r"Permission denied.*check its permissions"):
        build_loader(raw_tree)


@pytest.mark.parametrize(
    "path", [b"data", None, 5, "x" * 5000, "/".join(["x" * 200] * 30), "", "a\0b", "\ud800", [b"data"]]
)
@pytest.mark.parametrize("build", [loaders.build, loaders.ImageDataset])
def test_what_is_no_path_is_refused_in_one_line(build: Callable[..., object], path: object) -> None:
    with pytest.raises(PrecacheError, match=r"^[^\n]+$"):
        build(path)


def test_what_cannot_be_done_here_is_refused(raw_tree: Path, converted: dict[str, Path]) -> None:
    with pytest.raises(SettingError, match="shuffle 'full' needs random access"):
        build_loader(converted["webdataset"], shuffle="full")
    with pytest.raises(SettingError, match="'nvjpeg' decodes on a GPU, device is 'cpu'"):
        build_loader(raw_tree, backend="nvjpeg")


def test_a_batch_may_be_larger_than_the_split(raw_tree: Path, converted: dict[str, Path]) -> None:
    """Only what it can hold takes memory."""
    for path in (raw_tree, converted["shards"], converted["webdataset"]):
        with build_loader(path, batch_size=10**9, last="partial", size=16, workers=2) as loader:
            assert [len(batch.ids) for batch in loader] == [loader.samples]
    with build_loader(converted["shards"], batch_size=IMAGES + 1, last="drop") as loader:
        assert len(loader) == 0
        assert list(loader) == []


@pytest.mark.parametrize(
    "state",
    [
        None, [], "x", 5, {}, {"epoch": None}, {"epoch": "x"}, {"served_batches": -3},
        {"served_batches": 99}, {"seed": 7}, {"global_batch_size": 7}, {"dataset": "another"},
    ],
)  # fmt: skip
def test_what_is_no_state_of_this_loader_is_refused(converted: dict[str, Path], state: Any) -> None:
    with build_loader(converted["shards"], batch_size=16) as loader:
        given = {**loader.state_dict(), **state} if isinstance(state, dict) and state else state
        with pytest.raises(SettingError, match="state"):
            loader.load_state_dict(given)


def test_auto_shares_the_cpus_among_the_ranks_of_this_machine(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "available_cpus", lambda: 96)
    for ranks, workers in ((None, 96), ("8", 12), ("200", 1)):
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        with build_loader(converted["shards"]) as loader:
            assert (loader.spec.workers, loader.spec.threads) == (workers, workers)


def test_the_source_path_of_an_id_is_one_call(raw_tree: Path, converted: dict[str, Path]) -> None:
    for path in (raw_tree, *converted.values()):
        backend = "auto" if path == raw_tree else "synthetic"
        with build_loader(path, backend=backend, workers=0, size=32) as loader:
            batch = next(iter(loader))
            for sample_id, label in zip(batch.ids, batch.labels, strict=True):
                name = loader.path_of(sample_id)
                assert (raw_tree / name).is_file()
                assert name.startswith(f"{loader.classes[label]}/")
                assert loader.path_of(int(sample_id)) == name
            for unknown in (IMAGES, -1, 2**70, "3", 1.5, None):
                with pytest.raises(SettingError, match=f"^sample {unknown!r}: "):
                    loader.path_of(unknown)  # type: ignore[arg-type]
