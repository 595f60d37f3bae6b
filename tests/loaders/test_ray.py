"""`Reading(engine="ray")`: what dies on a cluster, and what is said of it; see test_backends for the rest."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loaders
from loaders.batch import Request
from loaders.read import ray_reader
from loaders.read.ray_reader import RayReader
from precache.errors import MissingDependencyError, PrecacheError, SettingError, WorkerError
from precache.storage.urls import Url
from tests.building import build_loader
from tests.cloud.uploading import upload
from tests.command import ROOT
from tests.damage import flip_a_bit
from tests.loader_contract import ids_of
from tests.loaders.ray_nodes import STORE_BYTES

Break = Callable[[Path], None]


@pytest.fixture
def on_ray(ray_cluster: Any) -> dict[str, Any]:
    return {"engine": "ray", "workers": 2}


def reader_of(loader: Any) -> RayReader:
    reader = loader._source._reader
    assert isinstance(reader, RayReader)
    return reader


def same(ours: Any, theirs: Any) -> bool:
    """Whether two batches are."""
    pairs = ((ours.images, theirs.images), (ours.labels, theirs.labels), (ours.ids, theirs.ids))
    return all(torch.equal(one, other) for one, other in pairs)


def said(source: Path, path: Path, damage: Break, **settings: Any) -> tuple[type[BaseException], str]:
    """What a loader raises of a copy of `source` at `path` that is damaged once it is open."""
    shutil.copytree(source, path)
    with build_loader(path, batch_size=16, **settings) as loader:
        damage(path)
        with pytest.raises(PrecacheError) as caught:
            list(loader)
    shutil.rmtree(path)
    return type(caught.value), str(caught.value)


def truncate(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * 2 // 3])


def blank_a_header(file: Path) -> None:
    """Of the first sample of a tar."""
    content = bytearray(file.read_bytes())
    content[:512] = bytes(512)
    file.write_bytes(content)


def of_one_file(damage: Break) -> Break:
    """`damage` to the fourth picture, or shard."""
    return lambda path: damage(sorted([*path.glob("*/*.jpg"), *path.glob("train-*[!x]")])[3])


DAMAGES = {
    "gone": of_one_file(Path.unlink),
    "truncated": of_one_file(truncate),
    "header": of_one_file(blank_a_header),
    "flipped bit": lambda path: flip_a_bit(path, 3),
}


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        *[(kind, damage) for kind in ("raw", "shards", "webdataset") for damage in ("gone", "truncated")],
        ("webdataset", "header"),
        ("shards", "flipped bit"),
        ("webdataset", "flipped bit"),
    ],
)
def test_what_is_damaged_is_named_as_by_a_local_reader(
    kind: str,
    damage: str,
    raw_tree: Path,
    converted: dict[str, Path],
    tmp_path: Path,
    on_ray: dict[str, Any],
) -> None:
    source, copy = raw_tree if kind == "raw" else converted[kind], tmp_path / "copy"
    local = {"workers": 0 if kind == "raw" else 1, "threads": 1}
    assert said(source, copy, DAMAGES[damage], **on_ray) == said(source, copy, DAMAGES[damage], **local)


@pytest.mark.parametrize("kind", ["raw", "shards", "webdataset"])
def test_what_is_damaged_is_left_out_if_asked(
    kind: str, raw_tree: Path, converted: dict[str, Path], tmp_path: Path, on_ray: dict[str, Any]
) -> None:
    path = Path(shutil.copytree(raw_tree if kind == "raw" else converted[kind], tmp_path / "copy"))
    DAMAGES["truncated" if kind == "raw" else "flipped bit"](path)
    settings = {"batch_size": 16, "on_error": "skip"}
    with build_loader(path, **settings) as local, build_loader(path, **settings, **on_ray) as remote:
        ours, theirs = list(remote), list(local)
    assert all(same(*pair) for pair in zip(ours, theirs, strict=True))
    assert len(ids_of(ours)) == 69


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
    with build_loader(raw_tree, batch_size=4, size=32, **on_ray) as loader:
        reader, asked = reader_of(loader), 0

        def ask() -> Any:
            nonlocal asked
            for epoch in range(40):
                asked += 1
                yield Request(epoch, np.arange(4))

        for served, _ in enumerate(reader.read(ask())):
            assert asked - served <= 4


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
    said = f"simplejpeg is {theirs['simplejpeg']} on a node of the cluster and 0.1 here"
    with pytest.raises(SettingError, match=said):
        build_loader(raw_tree, size=32, **on_ray)


def test_what_cannot_be_decoded_there_is_refused_in_one_line(
    raw_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingError, match="give how many CPUs of the cluster"):
        loaders.Reading(engine="ray")
    for backend in ("dali", "synthetic"):
        with pytest.raises(SettingError, match=f"engine 'ray' decodes with backend .*, not with '{backend}'"):
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
