"""`Reading(engine="ray")`: what dies on a cluster, and what is said of it; see test_backends for the rest."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loaders
from loaders.augment.cpu import Crops
from loaders.batch import Request
from loaders.dataset import open_split
from loaders.read import ray_reader
from precache.errors import MissingDependencyError, PrecacheError, SettingError, WorkerError
from precache.storage.urls import Url
from tests.building import build_loader
from tests.cloud.uploading import upload
from tests.command import ROOT
from tests.damage import flip_a_bit
from tests.loader_contract import ids_of
from tests.loaders.ray_nodes import STORE_BYTES


@pytest.fixture
def on_ray(ray_cluster: Any) -> dict[str, Any]:
    return {"engine": "ray", "workers": 2}


def same(ours: Any, theirs: Any) -> bool:
    """Whether two batches are."""
    pairs = ((ours.images, theirs.images), (ours.labels, theirs.labels), (ours.ids, theirs.ids))
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("kind", ["raw", "shards", "webdataset"])
def test_what_is_damaged_or_gone_is_named_or_left_out_as_by_a_local_reader(
    kind: str, raw_tree: Path, converted: dict[str, Path], tmp_path: Path, on_ray: dict[str, Any]
) -> None:
    path = Path(shutil.copytree(raw_tree if kind == "raw" else converted[kind], tmp_path / "copy"))
    file = sorted([*path.glob("*/*.jpg"), *path.glob("train-*[!x]")])[3]
    content = file.read_bytes()
    local = {"workers": 0 if kind == "raw" else 1, "threads": 1}

    def damage() -> None:
        file.write_bytes(content[: len(content) * 2 // 3]) if kind == "raw" else flip_a_bit(path, 3)

    for happens in (damage, file.unlink):
        said = []
        for reading in (on_ray, local):
            file.write_bytes(content)
            with build_loader(path, batch_size=16, **reading) as loader:
                happens()
                with pytest.raises(PrecacheError) as caught:
                    list(loader)
            said.append((type(caught.value), str(caught.value)))
        assert said[0] == said[1]
    file.write_bytes(content)
    damage()
    served = []
    for reading in (on_ray, local):
        with build_loader(path, batch_size=16, on_error="skip", **reading) as loader:
            served.append(list(loader))
    assert all(same(*pair) for pair in zip(*served, strict=True))
    assert len(ids_of(served[0])) == 69


def test_a_worker_that_dies_loses_nothing_and_repeats_nothing(
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
        assert all(same(*pair) for pair in zip(remote, local, strict=True))
    assert (tmp_path / "died").exists()


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


def test_no_more_than_two_batches_a_worker_are_held(raw_tree: Path, on_ray: dict[str, Any]) -> None:
    asked = 0

    def ask() -> Any:
        nonlocal asked
        for epoch in range(40):
            asked += 1
            yield Request(epoch, np.arange(4))

    with build_loader(raw_tree, batch_size=4, size=32, **on_ray) as loader:
        reader = ray_reader.open_reader(
            "pytorch", loader.spec, open_split(raw_tree, "train"), Crops(None, 32)
        )
        for served, _ in enumerate(reader.read(ask())):
            assert asked - served <= 4
        reader.close()


def test_a_state_goes_on_with_the_other_engine(raw_tree: Path, on_ray: dict[str, Any]) -> None:
    engines: list[dict[str, Any]] = [on_ray, {"engine": "local"}]
    for one, other in (engines, engines[::-1]):
        with build_loader(raw_tree, batch_size=8, size=32, **one) as loader:
            whole = [batch.ids.tolist() for batch in loader]
            loader.set_epoch(0)
            iterator = iter(loader)
            next(iterator), next(iterator)
            state = json.loads(json.dumps(loader.state_dict()))
        with build_loader(raw_tree, batch_size=8, size=32, **other) as resumed:
            resumed.load_state_dict(state)
            assert [batch.ids.tolist() for batch in resumed] == whole[2:]


@pytest.mark.parametrize("kind", ["shards", "webdataset"])
def test_a_node_fetches_what_it_decodes_of_a_url(
    kind: str,
    raw_tree: Path,
    converted: dict[str, Path],
    bucket: Url,
    tmp_path: Path,
    on_ray: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = upload(converted[kind], bucket / kind)
    access = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}

    def decode_with_access(job: list[Any], request: Request) -> Any:
        os.environ.update(access)  # a node has its own environment
        return ray_reader.decode(job, request)

    monkeypatch.setattr(ray_reader, "decode", decode_with_access)
    settings = {"batch_size": 8, "cache_dir": tmp_path / "cache"}
    with build_loader(url, **settings) as local:
        expected = list(local)
    shutil.rmtree(tmp_path / "cache")
    with build_loader(url, **settings, **on_ray) as remote:
        assert all(same(*pair) for pair in zip(remote, expected, strict=True))
    assert len(list((tmp_path / "cache").rglob("train-*"))) >= 6


def test_other_versions_on_a_node_are_refused_by_name(
    raw_tree: Path, on_ray: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = ray_reader.versions()
    monkeypatch.setattr(ray_reader, "versions", lambda: {**theirs, "simplejpeg": "0.1"})
    with pytest.raises(SettingError, match=f"simplejpeg is {theirs['simplejpeg']} .* and 0.1 here"):
        build_loader(raw_tree, size=32, **on_ray)


def test_what_cannot_be_decoded_there_is_refused_in_one_line(
    raw_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingError, match="how many CPUs"):
        loaders.Reading(engine="ray")
    for backend in ("dali", "synthetic"):
        with pytest.raises(SettingError, match=f"not with '{backend}'"):
            build_loader(raw_tree, backend=backend, size=32, engine="ray", workers=1)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match="precache\\[ray\\]"):
        build_loader(raw_tree, size=32, engine="ray", workers=1)


PROGRAM = """
import sys
import loaders

path, ending = sys.argv[1:]
reading = loaders.Reading(engine="ray", workers=1)
loader = loaders.build(path, batch_size=4, size=32, reading=reading)
iterator = iter(loader)
next(iterator)
if ending == "dropped":
    del loader, iterator
print("served", flush=True)
sys.stdin.readline()
if ending == "error":
    raise ValueError("of the training")
sys.exit(3)
"""


SLOW_ENDINGS = [pytest.param(ending, marks=pytest.mark.slow) for ending in ("dropped", "error", "SIGKILL")]


@pytest.mark.parametrize("ending", ["kept", *SLOW_ENDINGS])
def test_a_program_that_closes_nothing_ends_with_its_own_exit_code(
    ending: str, raw_tree: Path, ray_cluster: Any
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(raw_tree), ending],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": ray_cluster.address},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "served\n"
    if ending == "SIGKILL":
        process.kill()
    _, errors = process.communicate("\n", timeout=60)
    assert process.returncode == {"SIGKILL": -9, "error": 1}.get(ending, 3), errors
    assert errors.count("Traceback") == (ending == "error"), errors
    assert errors.endswith("ValueError: of the training\n") or not errors


@pytest.mark.slow
def test_a_node_that_goes_loses_nothing_and_repeats_nothing(
    raw_tree: Path, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First one of two; then the last one, which is an error, and with a new one it goes on."""
    monkeypatch.setattr(ray_reader, "_NO_NODE_S", 1.0)
    settings = {"batch_size": 4, "size": 32, "augment": "train"}
    node = ray_cluster.add_node(num_cpus=8, object_store_memory=STORE_BYTES)
    with (
        build_loader(raw_tree, **settings) as local,
        build_loader(raw_tree, **settings, engine="ray", workers=3) as remote,
    ):
        batches, expected = iter(remote), list(local)
        served = [next(batches)]
        ray_cluster.remove_node(node, allow_graceful=False)
        served += batches
        assert all(same(*pair) for pair in zip(served, expected, strict=True))

        batches = iter(remote)
        served = [next(batches)]
        (last,) = ray_cluster.worker_nodes
        ray_cluster.remove_node(last, allow_graceful=False)
        with pytest.raises(WorkerError, match="no node of the Ray cluster is left"):
            served += batches
        state = remote.state_dict()
        ray_cluster.add_node(num_cpus=8, object_store_memory=STORE_BYTES)
        remote.load_state_dict(state)
        expected = list(local)
        assert all(same(*pair) for pair in zip([*served, *remote], expected, strict=True))
