"""What `loaders.build` takes and refuses, and how a loader moves through epochs and states."""

import errno
import inspect
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from PIL import Image

import loaders
from loaders import Ranks, Reading, settings
from precache import Recipe, convert
from precache.errors import DatasetError, PrecacheError, SettingError, SourceError
from tests import loader_contract as contract
from tests.building import build_loader
from tests.conftest import IMAGES, STORED_SIZE


def test_auto_picks_the_backend_by_the_folder(raw_tree: Path, converted: dict[str, Path]) -> None:
    for path, backend in ((raw_tree, "pytorch"), *((converted[k], k) for k in ("shards", "webdataset"))):
        with build_loader(path, workers=0) as loader:
            assert type(loader._source._reader).__module__ == f"loaders.read.{backend}"  # type: ignore[attr-defined]


def test_the_default_size_is_224_or_all_that_is_stored_where_that_is_less(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    convert(raw_tree, tmp_path / "large", Recipe(format="shards", size=256, fit="crop"), workers=1)
    for path, size in ((raw_tree, 224), (tmp_path / "large", 224), (converted["shards"], STORED_SIZE)):
        for augment in (None, "train"):
            with build_loader(path, workers=0, augment=augment) as loader:
                assert loader.size == size
                assert next(iter(loader)).images.shape[2:] == (size, size)


def test_classes_are_the_folders(raw_tree: Path, converted: dict[str, Path]) -> None:
    for path in (raw_tree, converted["shards"]):
        with build_loader(path, workers=0) as loader:
            assert loader.classes[0] == "001.anchor"
            assert len(loader.classes) == 5


BAD: list[dict[str, Any]] = [
    {"backend": "dalli"}, {"batch_size": 0}, {"batch_size": -1}, {"workers": -1}, {"seed": -1},
    {"crop_ratio": 1e-9}, {"crop_ratio": True}, {"size": 0}, {"batch_size": 10**9, "last": "pad"},
    {"device": None}, {"device": "gpu"}, {"device": "mps"}, {"last": "some"}, {"check": "sometimes"},
    {"cache": "disk"}, {"on_error": "ignore"}, {"rank": 0}, {"rank": 2, "world_size": 2},
    {"world_size": 0, "rank": 0}, {"shuffle": "a bit"}, {"split": "validation"}, {"dtype": torch.int32},
    {"dtype": "int32"}, {"num_workers": 4}, {"drop_last": True}, {"transform": print}, {"batch_sampler": []},
]  # fmt: skip


@pytest.mark.parametrize("settings", BAD, ids=str)
def test_a_bad_setting_names_itself_and_what_would_do(
    converted: dict[str, Path], settings: dict[str, Any]
) -> None:
    with pytest.raises(SettingError) as caught:
        build_loader(converted["shards"], **settings)
    name = next(iter(settings))
    assert re.search(
        rf"\b{name}\b.*(must be .*, got |choose from: |; give |; leave |; use )", str(caught.value)
    )


def test_every_setting_of_torchs_dataloader_is_known_or_refused_by_name(converted: dict[str, Path]) -> None:
    theirs = set(inspect.signature(torch.utils.data.DataLoader).parameters) - {"dataset"}
    theirs |= {"num_replicas", "root", "transforms"}
    for name in theirs - set(inspect.signature(loaders.build).parameters):
        with pytest.raises(SettingError, match=f"^{name} is not a setting of build; "):
            build_loader(converted["shards"], **{name: None})
    with pytest.raises(SettingError, match=r"^root is not a setting of build; give path$"):
        loaders.build(root=converted["shards"])
    with pytest.raises(SettingError, match=r"^path is missing; "):
        loaders.build()
    with pytest.raises(TypeError, match="'batchsize'; did you mean batch_size\\?"):
        build_loader(converted["shards"], batchsize=3)
    with pytest.raises(TypeError, match=r"'worker'; did you mean reading=loaders.Reading\(workers=\.\.\.\)"):
        build_loader(converted["shards"], worker=3)


@pytest.mark.parametrize("name", ["workers", "check", "subset", "last", "dtype", "views", "rank"])
def test_a_setting_of_a_dataclass_given_flat_is_told_its_place(converted: dict[str, Path], name: str) -> None:
    with pytest.raises(
        TypeError, match=rf"did you mean (reading|serving|sampling|ranks)=.*\({name}=\.\.\.\)"
    ):
        loaders.build(converted["shards"], **{name: 1})


def test_ranks_are_checked_when_they_are_made() -> None:
    for bad in ({"rank": 1}, {"world_size": 2}, {"rank": 2, "world_size": 2}, {"per_node": 0}):
        with pytest.raises(SettingError, match=next(iter(bad))):
            Ranks(**bad)


def test_a_reading_is_checked_when_it_is_made() -> None:
    for bad, message in (
        ({"threads": 0}, "threads must be an integer of at least 1, got 0"),
        ({"memory_bytes": 0}, "memory_bytes must be an integer of at least 1, got 0"),
        ({"workers": "all"}, "workers must be an integer of at least 0, got 'all'"),
    ):
        with pytest.raises(SettingError, match=message):
            Reading(**bad)  # type: ignore[arg-type]
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


def test_cuda_without_a_gpu_is_an_error(converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingError, match="device 'cuda' asked for, but torch finds no GPU"):
        build_loader(converted["shards"], device="cuda")


@pytest.mark.parametrize(
    ("backend", "kind"),
    [("shards", "raw"), ("pytorch", "shards"), ("webdataset", "dali"), ("dali", "shards")],
)
def test_a_folder_of_the_wrong_format_is_refused(
    backend: str, kind: str, raw_tree: Path, converted: dict[str, Path]
) -> None:
    path = raw_tree if kind == "raw" else converted[kind]
    with pytest.raises(DatasetError, match=f"{path}: holds .*, backend '{backend}' reads .*; use backend"):
        build_loader(path, backend=backend)


def test_a_folder_without_manifest_or_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrecacheError, match=r"neither a converted dataset \(no dataset.json\)"):
        build_loader(tmp_path)
    with pytest.raises(PrecacheError, match="nowhere: does not exist"):
        build_loader(tmp_path / "nowhere")
    Image.new("RGB", (8, 8)).save(tmp_path / "flat.png")
    with pytest.raises(PrecacheError, match=rf"; expected {tmp_path}/CLASS/picture.jpg, or what 'precache"):
        build_loader(tmp_path)


@pytest.mark.parametrize(
    "path", [b"data", None, 5, "x" * 5000, "/".join(["x" * 200] * 30), "", "a\0b", "\ud800", [b"data"]]
)
@pytest.mark.parametrize("build", [loaders.build, loaders.ImageDataset])
def test_what_is_no_path_is_refused_in_one_line(build: Callable[..., object], path: object) -> None:
    with pytest.raises(PrecacheError, match=r"^[^\n]+$"):
        build(path)


def test_a_batch_may_be_larger_than_the_split(converted: dict[str, Path]) -> None:
    """Only what it can hold takes memory."""
    for kind, backend in (("shards", "shards"), ("webdataset", "webdataset")):
        with build_loader(converted[kind], backend=backend, batch_size=10**9, last="partial") as loader:
            assert [len(batch.ids) for batch in loader] == [loader.samples]


def test_full_shuffle_of_a_sequential_format_is_refused(converted: dict[str, Path]) -> None:
    with pytest.raises(SettingError, match="shuffle 'full' needs random access"):
        build_loader(converted["webdataset"], shuffle="full")


def test_a_missing_package_is_named_with_its_install_command(
    raw_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nvidia.dali", None)
    with pytest.raises(ImportError, match="pip install nvidia-dali-cuda120"):
        build_loader(raw_tree, backend="dali")


def test_what_is_no_state_is_refused(converted: dict[str, Path]) -> None:
    with build_loader(converted["shards"]) as loader:
        for state in (None, [], "x", 5, {}):
            with pytest.raises(SettingError, match=r"this state was taken|a state is what state_dict"):
                loader.load_state_dict(state)


@pytest.mark.parametrize(
    "state", [{}, {"epoch": "x"}, {"epoch": 0, "served_batches": -3}, {"epoch": 0, "served_batches": 99}]
)
def test_a_malformed_state_is_refused(converted: dict[str, Path], state: dict[str, object]) -> None:
    with build_loader(converted["shards"]) as loader:
        whole = {k: v for k, v in loader.state_dict().items() if k not in ("epoch", "served_batches")}
        with pytest.raises(SettingError, match="this state has"):
            loader.load_state_dict({**whole, **state})


def test_set_epoch_in_the_middle_of_an_epoch_holds_for_the_next(converted: dict[str, Path]) -> None:
    with build_loader(converted["shards"], batch_size=16) as loader:
        for _ in loader:
            loader.set_epoch(5)
        assert loader.state_dict()["epoch"] == 5


def test_a_closed_loader_says_so(converted: dict[str, Path]) -> None:
    loader = build_loader(converted["shards"])
    loader.close()
    loader.close()
    with pytest.raises(SettingError, match="is closed; build another one"):
        iter(loader)


@pytest.mark.parametrize("change", ["seed", "batch_size", "path"])
def test_a_state_of_other_data_or_settings_is_refused(converted: dict[str, Path], change: str) -> None:
    with build_loader(converted["shards"], batch_size=16) as loader:
        state = loader.state_dict()
    other = {"batch_size": 16, "seed": 0, "path": converted["shards"]}
    other[change] = converted["dali"] if change == "path" else 7
    backend = "synthetic"  # random access over any folder
    with (
        build_loader(backend=backend, **other) as loader,
        pytest.raises(SettingError, match="this state was taken with"),
    ):
        loader.load_state_dict(state)


def test_another_epoch_starts_at_its_beginning(converted: dict[str, Path]) -> None:
    with build_loader(converted["shards"], batch_size=16) as loader:
        next(iter(loader))
        assert (loader.state_dict()["epoch"], loader.state_dict()["served_batches"]) == (0, 1)
        loader.set_epoch(3)
        assert (loader.state_dict()["epoch"], loader.state_dict()["served_batches"]) == (3, 0)
        assert len(contract.ids_of(loader)) == IMAGES
        assert loader.state_dict()["epoch"] == 4


def test_a_split_smaller_than_a_dropped_batch_is_an_empty_epoch(converted: dict[str, Path]) -> None:
    with build_loader(converted["shards"], batch_size=IMAGES + 1, last="drop") as loader:
        assert len(loader) == 0
        assert list(loader) == []


def test_a_cache_reads_each_file_for_one_epoch_only(converted: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(converted["webdataset"], tmp_path / "copy"))
    with build_loader(path, cache="ram", batch_size=16) as loader:
        first = contract.ids_of(loader)
        list(loader)  # what was read ahead of the first epoch's end
        for shard in path.glob("*.tar"):
            shard.unlink()
        assert sorted(contract.ids_of(loader)) == sorted(first)


def test_threads_serve_what_worker_processes_serve(raw_tree: Path) -> None:
    with (
        build_loader(raw_tree, size=32, workers=2, batch_size=16) as processes,
        build_loader(raw_tree, size=32, workers=0, threads=3, batch_size=16) as threads,
    ):
        before = len(psutil.Process().children())
        for ours, theirs in zip(threads, processes, strict=True):
            assert torch.equal(ours.ids, theirs.ids)
            assert torch.equal(ours.images, theirs.images)
    with build_loader(raw_tree, size=32, workers=0) as threads:
        assert len(list(threads)) == 2
        assert len(psutil.Process().children()) <= before, "no process was started"


def test_auto_shares_the_cpus_among_the_ranks_of_this_machine(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "available_cpus", lambda: 96)
    for ranks, workers in ((None, 96), ("8", 12), ("200", 1)):
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        with build_loader(converted["shards"]) as loader:
            assert (loader.spec.workers, loader.spec.threads) == (workers, workers)
    with pytest.raises(SettingError, match="workers must be an integer of at least 0, got 'many'"):
        build_loader(converted["shards"], workers="many")


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


def test_a_tree_that_may_not_be_read_is_not_called_something_else(
    raw_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who runs the tests may be root, who may read everything."""

    def refuse(folder: object) -> object:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SourceError, match=r"Permission denied.*check its permissions"):
        build_loader(raw_tree)
