"""Conversions by both engines: processes, and a Ray cluster of several nodes on this machine."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg

from precache import Conversion, convert
from precache.conversion.shard_writer import check_node
from precache.dataset.manifest import MANIFEST_NAME
from precache.dataset.unfinished import CONVERSION_NAME, read_conversion
from precache.engines import KILLED
from precache.engines.connector import check_readable
from precache.errors import DatasetError, PrecacheError, SettingError, SourceError, WorkerError
from precache.sources.tree import TreeSource
from tests.command import ROOT
from tests.conftest import IMAGES, small_recipe
from tests.precache.destinations import contents
from tests.precache.engines.conftest import wait_until
from tests.precache.engines.slow import SlowSource, readers

RECIPE = small_recipe("shards")


@pytest.fixture
def slow(raw_tree: Path, tmp_path: Path) -> SlowSource:
    (tmp_path / "marks").mkdir()
    return SlowSource(TreeSource(raw_tree, 1), tmp_path / "marks")


@pytest.fixture(params=["local", "ray"])
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("add_node")()
    return str(request.param)


def convert_on_ray(source: Any, out: Path, **settings: Any) -> Conversion:
    return convert(source, out, RECIPE, engine="ray", **settings)


def test_an_error_names_its_file_and_the_next_run_completes(
    engine: str, tree: Path, converted: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paths are relative to the working folder of the driver."""
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"engine": engine, "workers": 2}
    victim, steps = sorted(tree.glob("*/*.jpg"))[20], []

    def hide_victim(*_: object) -> None:
        victim.rename("victim")

    with pytest.raises(SourceError, match=victim.name):
        convert(tree.name, "out", RECIPE, on_start=hide_victim, **options)
    assert not (tmp_path / "out" / MANIFEST_NAME).exists()
    Path("victim").rename(victim)
    result = convert(tree.name, "out", RECIPE, on_progress=lambda *step: steps.append(step), **options)
    assert contents(tmp_path / "out") == contents(converted["shards"])
    assert steps[-1] == (IMAGES, IMAGES)
    assert (len(result.nodes) > 0) == (engine == "ray")


def test_a_picture_that_kills_workers_is_rejected_by_name(
    engine: str, slow: SlowSource, raw_tree: Path, tmp_path: Path
) -> None:
    """The kernel kills a process that takes too much memory in the same way."""
    shutil.copytree(raw_tree / "001.anchor", tmp_path / "few" / "001.anchor")
    few = TreeSource(tmp_path / "few", 1)
    deadly = few.scan().samples[5].path
    source = SlowSource(few, slow.marks, deadly)
    result = convert(source, tmp_path / "out", RECIPE, engine=engine, workers=1, max_rejects=0.1)
    (rejected,) = result.manifest.rejected
    assert (rejected.path, rejected.reason) == (deadly, KILLED)
    assert result.manifest.samples == len(few.scan().samples) - 1


class ExitingDataset:
    """A dataset whose last sample ends the worker that reads it."""

    classes = ("black",)

    def __init__(self) -> None:
        self.process = os.getpid()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> tuple[np.ndarray[Any, Any], int]:
        if row == 2 and os.getpid() != self.process:
            sys.exit("no license")
        return np.zeros((8, 8, 3), np.uint8), 0


def test_an_exit_in_a_worker_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerError, match=r"sys.exit\('no license'\)") as raised:
        convert(ExitingDataset(), tmp_path / "out", RECIPE, workers=1)
    assert str(raised.value.path).startswith(f"{__file__}:")


# The engine `ray` alone.


def test_shards_of_a_node_that_dies_are_written_by_another(
    cluster: Any, add_node: Callable[..., Any], slow: SlowSource, converted: dict[str, Path], tmp_path: Path
) -> None:
    node = add_node()
    removed: list[str] = []

    def remove(done: int, total: int) -> None:
        if 0 < done < total and not removed:
            removed.append(node.node_id)
            wait_until(lambda: node.node_id in readers(slow.marks).values())
            cluster.remove_node(node, allow_graceful=False)

    result = convert_on_ray(slow, tmp_path / "out", on_progress=remove)
    assert contents(tmp_path / "out") == contents(converted["shards"])
    assert (result.converted, removed) == (IMAGES, [node.node_id])


def test_a_node_with_another_version_is_refused_before_its_first_shard(
    cluster: Any, add_node: Callable[..., Any], slow: SlowSource, tmp_path: Path
) -> None:
    other = tmp_path / "site" / "simplejpeg"
    shutil.copytree(Path(simplejpeg.__file__).parent, other)
    with open(other / "__init__.py", "a") as file:
        file.write("\n__version__ = '9.8.7'\n")
    node = add_node(PYTHONPATH=f"{other.parent}{os.pathsep}{ROOT}")
    details = rf"^node [0-9.]+ \({node.node_id[:8]}\): simplejpeg .*9\.8\.7 .*{simplejpeg.__version__} "
    with pytest.raises(SettingError, match=details):
        convert_on_ray(slow, tmp_path / "out")
    assert node.node_id not in readers(slow.marks).values()


def start_driver(cluster: Any, slow: SlowSource, out: Path) -> "subprocess.Popen[str]":
    """Start a program that converts `slow` on the cluster."""
    flags = RECIPE.to_flags().split()
    arguments = ["convert", slow.root, out, "--format", "shards", *flags, "--engine", "ray", "--address"]
    command = [sys.executable, "-m", "tests.precache.engines.slow", slow.marks, *arguments, cluster.address]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        list(map(str, command)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def has_finished_two_shards(out: Path) -> bool:
    """Whether two shards have their sidecars, of which at least one is counted in a message."""
    return len(list(out.glob("*-*.json"))) > 1


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGKILL, -signal.SIGKILL, ""),
        pytest.param(signal.SIGINT, 130, "precache: error: interrupted after ", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, "precache: error: terminated after ", marks=pytest.mark.slow),
    ],
)
def test_the_same_command_continues_after_its_driver_ended(
    number: int,
    code: int,
    message: str,
    cluster: Any,
    slow: SlowSource,
    converted: dict[str, Path],
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    with start_driver(cluster, slow, out) as process:
        wait_until(lambda: has_finished_two_shards(out) or process.poll() is not None)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    lines = [line for line in stderr.splitlines() if "image/s]" not in line]  # progress, every ten seconds
    assert [line[: len(message)] for line in lines] == ([message] if message else []), stderr
    result = convert_on_ray(slow, out)
    assert 0 < result.converted < IMAGES
    assert contents(out) == contents(converted["shards"])


def test_a_folder_that_a_node_does_not_share_is_named_with_the_node(tree: Path, tmp_path: Path) -> None:
    """The check of a node runs here, on folders in which a file disappears."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    out, source = tmp_path / "out", TreeSource(tree, 1)
    with pytest.raises(KeyboardInterrupt):
        convert(tree, out, RECIPE, on_start=stop)
    conversion = read_conversion(out)
    assert conversion is not None
    first = source.scan().samples[0]
    check = partial(check_node, out, conversion.inputs.digest, source, [first])
    check_readable("node a", check)
    check_readable("node a", partial(check_node, out, conversion.inputs.digest, source, []))
    with pytest.raises(DatasetError, match=f"^node a: {out}"):
        check_readable("node a", partial(check_node, out, "another", source, []))
    for folder, file in ((tree, tree / first.path), (out, out / CONVERSION_NAME)):
        file.unlink()
        with pytest.raises(PrecacheError, match=f"^node a: .*{folder}") as raised:
            check_readable("node a", check)
        assert "mount" in raised.value.remedy


@pytest.mark.slow
def test_a_node_without_memory_is_an_error_that_names_shard_and_node(
    cluster: Any, add_node: Callable[..., Any], slow: SlowSource, tmp_path: Path
) -> None:
    """Ray's memory monitor of that node allows next to no memory, so that it kills every worker."""
    import ray

    busy = ray.remote(num_cpus=1)(wait_until).remote((tmp_path / "done").exists, 100)
    add_node(RAY_memory_usage_threshold="0.001", RAY_memory_monitor_refresh_ms="50")
    try:
        with pytest.raises(WorkerError, match=r"^train-0000\d: .* 2 times \(.* memory"):
            convert_on_ray(slow, tmp_path / "out")
    finally:
        (tmp_path / "done").touch()
        ray.get(busy)
