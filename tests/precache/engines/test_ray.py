"""The engine `ray`, on a cluster of several nodes on this machine."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import simplejpeg

from precache import Conversion, convert
from precache.conversion.journal import JOURNAL_NAME
from precache.engines import KILLED
from precache.errors import SettingError, WorkerError
from precache.sources.tree import TreeSource
from tests.command import ROOT
from tests.conftest import IMAGES, small_recipe
from tests.precache.destinations import contents
from tests.precache.engines.conftest import until
from tests.precache.engines.slow import Slow, readers

RECIPE = small_recipe("shards")


@pytest.fixture
def slow(raw_tree: Path, tmp_path: Path) -> Slow:
    (tmp_path / "marks").mkdir()
    return Slow(TreeSource(raw_tree, 1), tmp_path / "marks")


def on_ray(source: Any, out: Path, **settings: Any) -> Conversion:
    return convert(source, out, RECIPE, engine="ray", **settings)


def once(act: Callable[[], object]) -> Callable[[int, int], None]:
    """As `on_progress`: does it after the first pictures."""
    acts = [act]

    def report(done: int, total: int) -> None:
        if 0 < done < total and acts:
            acts.pop()()

    return report


def test_a_cluster_writes_the_bytes_that_this_machine_writes(
    cluster: Any,
    add_node: Callable[..., Any],
    tree: Path,
    converted: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From relative paths, too: they are those of the driver."""
    add_node()
    monkeypatch.chdir(tmp_path)
    steps: list[tuple[int, int]] = []
    result = on_ray(tree.name, Path("out"), on_progress=lambda *step: steps.append(step))
    assert contents(tmp_path / "out") == contents(converted["shards"])
    assert result.converted == IMAGES
    assert len(result.nodes) == 2
    assert all(name.startswith("node ") and rate > 0 for name, rate in result.nodes.items())
    assert (steps[0], steps[-1]) == ((0, IMAGES), (IMAGES, IMAGES))


def test_shards_of_a_node_that_dies_are_written_by_another(
    cluster: Any, add_node: Callable[..., Any], slow: Slow, converted: dict[str, Path], tmp_path: Path
) -> None:
    node = add_node()

    def remove() -> None:
        until(lambda: node.node_id in readers(slow.marks).values())
        cluster.remove_node(node, allow_graceful=False)

    result = on_ray(slow, tmp_path / "out", on_progress=once(remove))
    assert contents(tmp_path / "out") == contents(converted["shards"])
    assert result.converted == IMAGES


def test_a_picture_over_which_workers_die_is_left_out_by_name_as_on_this_machine(
    cluster: Any, slow: Slow, raw_tree: Path, tmp_path: Path
) -> None:
    shutil.copytree(raw_tree / "001.anchor", tmp_path / "few" / "001.anchor")
    few = TreeSource(tmp_path / "few", 1)
    source = Slow(few, slow.marks, deadly := few.scan().samples[5].path)
    result = on_ray(source, tmp_path / "out", max_rejects=0.1)
    (rejected,) = result.manifest.rejected
    assert (rejected.path, rejected.reason) == (deadly, KILLED)
    convert(source, tmp_path / "local", RECIPE, workers=1, max_rejects=0.1)
    assert contents(tmp_path / "out") == contents(tmp_path / "local")


@pytest.mark.slow
def test_a_node_without_memory_is_an_error_that_names_shard_and_node(
    cluster: Any, add_node: Callable[..., Any], slow: Slow, tmp_path: Path
) -> None:
    """Ray's memory monitor of that node sees more in use than it may, whatever that is."""
    import ray

    busy = ray.remote(num_cpus=1)(until).remote((tmp_path / "done").exists, 100)
    add_node(RAY_memory_usage_threshold="0.001", RAY_memory_monitor_refresh_ms="50")
    try:
        said = r"^train-0000\d: Ray killed its worker to free memory 2 times \(last on node"
        with pytest.raises(WorkerError, match=said):
            on_ray(slow, tmp_path / "out")
    finally:
        (tmp_path / "done").touch()
        ray.get(busy)


def test_a_node_with_another_version_is_refused_before_the_first_shard(
    cluster: Any, add_node: Callable[..., Any], raw_tree: Path, tmp_path: Path
) -> None:
    other = tmp_path / "site" / "simplejpeg"
    shutil.copytree(Path(simplejpeg.__file__).parent, other)
    with open(other / "__init__.py", "a") as file:
        file.write("\n__version__ = '9.8.7'\n")
    node = add_node(PYTHONPATH=f"{other.parent}{os.pathsep}{ROOT}")
    said = rf"^node [0-9.]+ \({node.node_id[:8]}\): simplejpeg is 9\.8\.7 there but {simplejpeg.__version__} "
    with pytest.raises(SettingError, match=said):
        on_ray(raw_tree, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [JOURNAL_NAME]


@pytest.mark.slow
def test_a_node_that_cannot_import_this_package_is_refused_by_name(
    cluster: Any, add_node: Callable[..., Any], raw_tree: Path, tmp_path: Path
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "simplejpeg.py").write_text("raise ModuleNotFoundError('No simplejpeg')")
    node = add_node(PYTHONPATH=str(tmp_path / "site"))
    said = rf"^node [0-9.]+ \({node.node_id[:8]}\): cannot run precache's tasks \(.*No simplejpeg"
    with pytest.raises(WorkerError, match=said):
        on_ray(raw_tree, tmp_path / "out")


def driver(cluster: Any, slow: Slow, out: Path) -> "subprocess.Popen[str]":
    flags = RECIPE.to_flags().split()
    arguments = ["convert", slow.root, out, "--format", "shards", *flags, "--engine", "ray", "--address"]
    command = [sys.executable, "-m", "tests.precache.engines.slow", slow.marks, *arguments, cluster.address]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        list(map(str, command)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def has_finished_a_shard(out: Path) -> bool:
    journal = out / JOURNAL_NAME
    return journal.exists() and len(journal.read_bytes().splitlines()) > 1


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (signal.SIGKILL, -signal.SIGKILL, ""),
        pytest.param(signal.SIGINT, 130, "precache: error: interrupted after ", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, "precache: error: terminated after ", marks=pytest.mark.slow),
    ],
)
def test_a_driver_that_ends_midway_leaves_what_the_same_command_goes_on_from(
    number: int, code: int, says: str, cluster: Any, slow: Slow, converted: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with driver(cluster, slow, out) as process:
        until(lambda: has_finished_a_shard(out) or process.poll() is not None)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert stderr.startswith(says)
    assert stderr.count("\n") == bool(says), stderr
    assert len(stdout.splitlines()) == 1, stdout  # how large it will be
    result = on_ray(slow, out)
    assert 0 < result.converted < IMAGES
    assert contents(out) == contents(converted["shards"])
