"""`Reading(engine="ray")` when workers, nodes or files are lost; test_backends has its batches."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import loaders
from loaders.batch import Request
from loaders.read import ray_reader
from precache.errors import DatasetError, PrecacheError, SettingError, WorkerError
from tests.building import build_loader
from tests.command import ROOT
from tests.damage import flip_a_bit
from tests.loader_contract import ids_of
from tests.loaders.ray_nodes import NODE_CPUS, STORE_BYTES


@pytest.fixture
def on_ray(ray_cluster: Any) -> dict[str, Any]:
    return {"engine": "ray", "workers": 2}


def are_equal(a: Any, b: Any) -> bool:
    """Return whether two batches have the same images in each view, labels and ids."""
    pairs = zip((*a.views, a.labels, a.ids), (*b.views, b.labels, b.ids), strict=True)
    return all(part.dtype == due.dtype and torch.equal(part, due) for part, due in pairs)


def shrink(image: Any) -> torch.Tensor:
    """Return floats of another shape than the stored picture's."""
    return torch.from_numpy(np.array(image.resize((10, 12)), np.float32)[..., 0])[None] + torch.rand(1)


@pytest.mark.parametrize(
    "settings",
    [
        {"augment": "simclr", "size": 24},
        {"augment": "torchvision", "size": 24},
        {"augment": loaders.per_picture(shrink), "dtype": "float32"},
    ],
    ids=["simclr", "torchvision", "per_picture"],
)
def test_augmentation_on_ray_is_that_of_a_local_reader(
    settings: dict[str, Any], converted: dict[str, Path], on_ray: dict[str, Any]
) -> None:
    settings = {"batch_size": 16, **settings}
    with (
        build_loader(converted["shards"], **settings, engine="local", workers=1) as local,
        build_loader(converted["shards"], **settings, **on_ray) as remote,
    ):
        for batch, due in zip(remote, local, strict=True):
            assert are_equal(batch, due)


@pytest.mark.parametrize("kind", [pytest.param("raw", marks=pytest.mark.slow), "shards"])
def test_ray_handles_damaged_and_missing_files_like_a_local_reader(
    kind: str, raw_tree: Path, converted: dict[str, Path], tmp_path: Path, on_ray: dict[str, Any]
) -> None:
    path = Path(shutil.copytree(raw_tree if kind == "raw" else converted[kind], tmp_path / "copy"))
    file = sorted([*path.glob("*/*.jpg"), *path.glob("train-*[!x]")])[3]
    content = file.read_bytes()
    local = {"workers": 0 if kind == "raw" else 1, "threads": 1}

    def damage() -> None:
        file.write_bytes(content[: len(content) * 2 // 3]) if kind == "raw" else flip_a_bit(path, 3)

    for change_file in (damage, file.unlink):
        errors = []
        for reading in (on_ray, local):
            file.write_bytes(content)
            with build_loader(path, batch_size=16, **reading) as loader:
                change_file()
                with pytest.raises(PrecacheError) as caught:
                    list(loader)
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1]
    file.write_bytes(content)
    damage()
    served = []
    for reading in (on_ray, local):
        with build_loader(path, batch_size=16, on_error="skip", **reading) as loader:
            served.append(list(loader))
    assert all(are_equal(*pair) for pair in zip(*served, strict=True))
    assert len(ids_of(served[0])) == 69


def test_a_dead_ray_worker_loses_and_repeats_no_sample(
    raw_tree: Path, tmp_path: Path, on_ray: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies_once(job: list[Any], request: Request) -> Any:
        if len(request.positions) and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return ray_reader.decode(job, request)

    monkeypatch.setattr(ray_reader, "decode", dies_once)
    settings = {"batch_size": 4, "size": 32, "augment": "train"}
    with build_loader(raw_tree, **settings) as local, build_loader(raw_tree, **settings, **on_ray) as remote:
        assert all(are_equal(*pair) for pair in zip(remote, local, strict=True))
    assert (tmp_path / "died").exists()


def test_a_node_with_other_versions_is_named(
    raw_tree: Path, on_ray: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_another(job: list[Any], request: Request) -> Any:
        with mock.patch("simplejpeg.__version__", "9.8.7"):
            return ray_reader.decode(job, request)

    monkeypatch.setattr(ray_reader, "decode", with_another)
    with pytest.raises(SettingError, match=r"^node [0-9.]+ \(\w+\): simplejpeg is 9\.8\.7 there"):
        build_loader(raw_tree, batch_size=4, **on_ray)


@pytest.mark.parametrize("seen", ["raw", "webdataset", "none"])
def test_a_node_that_sees_other_data_is_named(
    seen: str,
    raw_tree: Path,
    converted: dict[str, Path],
    tmp_path: Path,
    on_ray: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node does not see the tree, or sees another dataset, or no dataset at the path."""
    path = Path(shutil.copytree(raw_tree if seen == "raw" else converted["shards"], tmp_path / "copy"))

    def elsewhere(job: list[Any], request: Request) -> Any:
        path.rename(path.with_name(f"copy-{os.getpid()}"))
        if seen == "webdataset":
            path.symlink_to(converted[seen])
        return ray_reader.decode(job, request)

    monkeypatch.setattr(ray_reader, "decode", elsewhere)
    with pytest.raises(DatasetError, match=rf"^node [0-9.]+ \(\w+\): {path}: .*; mount it on every node"):
        build_loader(path, batch_size=4, **on_ray)


@pytest.mark.slow
def test_a_batch_that_kills_its_worker_is_one_error(
    raw_tree: Path, on_ray: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(job: list[Any], request: Request) -> Any:
        return os._exit(1) if len(request.positions) else ray_reader.decode(job, request)

    monkeypatch.setattr(ray_reader, "decode", dies)
    with (
        build_loader(raw_tree, batch_size=70, size=32, **on_ray) as loader,
        pytest.raises(WorkerError, match=f"3 workers .* died at the same batch.*{raw_tree}") as caught,
    ):
        list(loader)
    assert "\n" not in str(caught.value)


PROGRAM = """
import sys
import loaders

reading = loaders.Reading(engine="ray", workers=1)
loader = loaders.build(sys.argv[1], batch_size=4, size=32, reading=reading)
iterator = iter(loader)
next(iterator)
sys.exit(3)
"""


def test_a_program_that_closes_nothing_ends_with_its_own_exit_code(raw_tree: Path, ray_cluster: Any) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(raw_tree)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": ray_cluster.address},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (3, "")


def serve_an_epoch(settings: dict[str, str]) -> None:
    """Serve an epoch in a worker of Ray Train, and write the ids to a file."""
    from ray import train

    reading = loaders.Reading(workers=0, threads=1)
    with loaders.build(settings["path"], batch_size=8, size=32, reading=reading) as loader:
        served = [i for batch in loader for i in batch.ids.tolist()]
    (Path(settings["folder"]) / f"{train.get_context().get_world_rank()}.json").write_text(json.dumps(served))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_of_ray_train_share_an_epoch(raw_tree: Path, tmp_path: Path, ray_cluster: Any) -> None:
    """Here torch.distributed is not initialised; Ray's TorchTrainer initialises it."""
    pytest.importorskip("ray.train", exc_type=ImportError, reason="pip install 'ray[train]'")
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    DataParallelTrainer(
        serve_an_epoch,
        train_loop_config={"path": str(raw_tree), "folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "runs")),
    ).fit()
    served = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(served) == 2
    assert sorted(served[0] + served[1]) == list(range(70))


@pytest.mark.slow
def test_a_lost_node_loses_and_repeats_no_sample(
    raw_tree: Path, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing one node of two is no error; removing the last one is."""
    monkeypatch.setattr(ray_reader, "_NO_NODE_S", 1.0)
    settings = {"batch_size": 4, "size": 32, "augment": "train"}
    node = ray_cluster.add_node(num_cpus=NODE_CPUS, object_store_memory=STORE_BYTES)
    with (
        build_loader(raw_tree, **settings) as local,
        build_loader(raw_tree, **settings, engine="ray", workers=3) as remote,
    ):
        batches, expected = iter(remote), list(local)
        served = [next(batches)]
        ray_cluster.remove_node(node, allow_graceful=False)
        served += batches
        assert all(are_equal(*pair) for pair in zip(served, expected, strict=True))

        batches = iter(remote)
        next(batches)
        (last,) = ray_cluster.worker_nodes
        ray_cluster.remove_node(last, allow_graceful=False)
        # its workers outlive a node for a moment, in which they may serve some epochs
        endless = chain(batches, chain.from_iterable(repeat(remote)))
        with pytest.raises(WorkerError, match="no node of the Ray cluster is left"):
            deque(endless, maxlen=0)
    ray_cluster.add_node(num_cpus=NODE_CPUS, object_store_memory=STORE_BYTES)  # for other tests
