"""What `loaders.build` takes and refuses, and states that belong to another loader."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch

import loaders
from loaders import Ranks, Reading, settings
from precache import Recipe, convert
from precache.errors import DatasetError, PrecacheError, SettingError
from tests.building import build_loader
from tests.command import ROOT
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


def test_a_bad_setting_names_itself_and_what_would_do(converted: dict[str, Path]) -> None:
    for given in BAD:
        with pytest.raises(SettingError) as caught:
            build_loader(converted["shards"], **given)
        name, remedy = next(iter(given)), "(must be .*, got |choose from: |; give |; leave |; use )"
        assert re.search(rf"\b{name}\b.*{remedy}", str(caught.value)), given


def test_a_setting_of_others_is_refused_and_told_its_place(converted: dict[str, Path]) -> None:
    """Those of torch's DataLoader, those that belong into a dataclass, and what is misspelt."""
    theirs = set(inspect.signature(torch.utils.data.DataLoader).parameters) - {"dataset"}
    theirs |= {"num_replicas", "root", "transforms"}
    for name in theirs - set(inspect.signature(loaders.build).parameters):
        with pytest.raises(SettingError, match=f"^{name} is not a setting of build; "):
            loaders.build(converted["shards"], **{name: None})
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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("uint8", "float32", "torch.float16", "bfloat16"):
        with build_loader(converted["shards"], dtype=name, device="auto") as loader:
            images = next(iter(loader)).images
        assert (f"torch.{images.dtype}".endswith(name), images.device.type) == (True, "cpu")


def test_what_cannot_be_done_here_is_refused(
    raw_tree: Path, converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folders = {"raw": raw_tree, **converted}
    for kind, given, remedy in (
        ("raw", {"backend": "shards"}, "'shards' reads .*; use backend"),
        ("shards", {"backend": "pytorch"}, "'pytorch' reads .*; use backend"),
        ("dali", {"backend": "webdataset"}, "'webdataset' reads .*; use backend"),
        ("shards", {"backend": "dali"}, "'dali' reads .*; use backend"),
        ("webdataset", {"shuffle": "full"}, "shuffle 'full' needs random access"),
        ("raw", {"backend": "nvjpeg"}, "'nvjpeg' decodes on a GPU, device is 'cpu'"),
        ("shards", {"device": "cuda"}, "device 'cuda' .* finds no GPU"),
    ):
        with pytest.raises((DatasetError, SettingError), match=remedy):
            build_loader(folders[kind], **given)


@pytest.mark.parametrize("build", [loaders.build, loaders.ImageDataset])
def test_what_is_no_path_is_refused_in_one_line(build: Callable[..., object]) -> None:
    for path in (b"data", None, 5, "x" * 5000, "/".join(["x" * 200] * 30), "", "a\0b", "\ud800", [b"data"]):
        with pytest.raises(PrecacheError, match=r"^[^\n]+$"):
            build(path)


def test_a_batch_may_be_larger_than_the_split(raw_tree: Path, converted: dict[str, Path]) -> None:
    """Only what it can hold takes memory."""
    for path in (raw_tree, converted["shards"], converted["webdataset"]):
        with build_loader(path, batch_size=10**9, last="partial", size=16, workers=2) as loader:
            assert [len(batch.ids) for batch in loader] == [loader.samples]
    with build_loader(converted["shards"], batch_size=IMAGES + 1, last="drop") as loader:
        assert (len(loader), list(loader)) == (0, [])


def test_what_is_no_state_of_this_loader_is_refused(converted: dict[str, Path]) -> None:
    with build_loader(converted["shards"], batch_size=16) as loader:
        changes: list[dict[str, Any]] = [
            {"epoch": None}, {"epoch": "x"}, {"served_batches": -3}, {"served_batches": 99}, {"seed": 7},
            {"global_batch_size": 7}, {"dataset": "another"},
        ]  # fmt: skip
        others = [{**loader.state_dict(), **change} for change in changes]
        for state in (None, [], "x", 5, {}, *others):
            with pytest.raises(SettingError, match="state"):
                loader.load_state_dict(state)  # type: ignore[arg-type]


def test_auto_shares_the_cpus_among_the_ranks_of_this_machine(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "available_cpus", lambda: 96)
    for ranks, workers in (("1", 96), ("8", 12), ("200", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        with build_loader(converted["shards"]) as loader:
            assert (loader.spec.workers, loader.spec.threads) == (workers, workers)


def test_an_id_that_is_not_there_has_no_source_path(raw_tree: Path, converted: dict[str, Path]) -> None:
    for path in (raw_tree, converted["shards"]):
        with build_loader(path, workers=0, size=32) as loader:
            for unknown in (IMAGES, -1, 2**70, "3", 1.5, None):
                with pytest.raises(SettingError, match=f"^sample {unknown!r}: "):
                    loader.path_of(unknown)  # type: ignore[arg-type]


WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None  # as Python has it of what is not there
import loaders
"""


@pytest.mark.parametrize("package", ["torch", "cv2"])
def test_a_missing_package_of_the_extra_is_one_line_with_the_command(package: str) -> None:
    command = [sys.executable, "-c", WITHOUT, package]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"precache.errors.MissingDependencyError: loaders need {package}")
    assert last.endswith("pip install 'precache[loaders]'")
    assert "During handling" not in result.stderr
