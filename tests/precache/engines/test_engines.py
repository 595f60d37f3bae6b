"""The same of both engines: processes, and a Ray cluster of several nodes on this machine."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import simplejpeg

from precache import Conversion, convert
from precache.conversion.journal import JOURNAL_NAME
from precache.dataset.manifest import MANIFEST_NAME
from precache.engines import KILLED, prepare_nodes
from precache.errors import PrecacheError, SettingError, SourceError, WorkerError
from precache.pictures.reading import read_picture
from precache.sources.tree import TreeSource
from tests.command import ROOT
from tests.conftest import IMAGES, small_recipe
from tests.precache.destinations import contents
from tests.precache.engines.conftest import until
from tests.precache.engines.slow import Slow, readers
from tests.precache.sources.archives import put

RECIPE = small_recipe("shards")


@pytest.fixture
def slow(raw_tree: Path, tmp_path: Path) -> Slow:
    (tmp_path / "marks").mkdir()
    return Slow(TreeSource(raw_tree, 1), tmp_path / "marks")


@pytest.fixture(params=["local", "ray"])
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("add_node")()
    return str(request.param)


def on_ray(source: Any, out: Path, **settings: Any) -> Conversion:
    return convert(source, out, RECIPE, engine="ray", **settings)


def test_an_error_names_its_file_and_the_next_run_completes(
    engine: str, tree: Path, converted: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From relative paths: they are those of the driver."""
    monkeypatch.chdir(tmp_path)
    how: dict[str, Any] = {"engine": engine, "workers": 2}
    victim, steps = sorted(tree.glob("*/*.jpg"))[20], []
    with pytest.raises(SourceError, match=f"{victim.name}: disappeared"):
        convert(tree.name, "out", RECIPE, on_start=lambda *_: victim.rename("victim") and None, **how)
    assert not (tmp_path / "out" / MANIFEST_NAME).exists()
    Path("victim").rename(victim)
    result = convert(tree.name, "out", RECIPE, on_progress=lambda *step: steps.append(step), **how)
    assert contents(tmp_path / "out") == contents(converted["shards"])
    assert steps[-1] == (IMAGES, IMAGES)
    assert (len(result.nodes) > 0) == (engine == "ray")


def test_a_picture_that_kills_workers_is_rejected_by_name(
    engine: str, slow: Slow, raw_tree: Path, tmp_path: Path
) -> None:
    """As where the kernel kills who takes too much memory."""
    shutil.copytree(raw_tree / "001.anchor", tmp_path / "few" / "001.anchor")
    few = TreeSource(tmp_path / "few", 1)
    source = Slow(few, slow.marks, deadly := few.scan().samples[5].path)
    result = convert(source, tmp_path / "out", RECIPE, engine=engine, workers=1, max_rejects=0.1)
    (rejected,) = result.manifest.rejected
    assert (rejected.path, rejected.reason) == (deadly, KILLED)
    assert result.manifest.samples == len(few.scan().samples) - 1


# Of a cluster alone.


def test_shards_of_a_node_that_dies_are_written_by_another(
    cluster: Any, add_node: Callable[..., Any], slow: Slow, converted: dict[str, Path], tmp_path: Path
) -> None:
    node, acts = add_node(), [1]

    def remove(done: int, total: int) -> None:
        if 0 < done < total and acts:
            acts.pop()
            until(lambda: node.node_id in readers(slow.marks).values())
            cluster.remove_node(node, allow_graceful=False)

    result = on_ray(slow, tmp_path / "out", on_progress=remove)
    assert contents(tmp_path / "out") == contents(converted["shards"])
    assert (result.converted, acts) == (IMAGES, [])


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


def driver(cluster: Any, slow: Slow, out: Path) -> "subprocess.Popen[str]":
    flags = RECIPE.to_flags().split()
    arguments = ["convert", slow.root, out, "--format", "shards", *flags, "--engine", "ray", "--address"]
    command = [sys.executable, "-m", "tests.precache.engines.slow", slow.marks, *arguments, cluster.address]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        list(map(str, command)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def has_finished_two_shards(out: Path) -> bool:
    """The signal may come between the line of the last one and its being counted."""
    journal = out / JOURNAL_NAME
    return journal.exists() and len(journal.read_bytes().splitlines()) > 2


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (signal.SIGKILL, -signal.SIGKILL, ""),
        pytest.param(signal.SIGINT, 130, "precache: error: interrupted after ", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, "precache: error: terminated after ", marks=pytest.mark.slow),
    ],
)
def test_the_same_command_continues_after_its_driver_ended(
    number: int, code: int, says: str, cluster: Any, slow: Slow, converted: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with driver(cluster, slow, out) as process:
        until(lambda: has_finished_two_shards(out) or process.poll() is not None)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    lines = [line for line in stderr.splitlines() if "image/s]" not in line]  # progress, every ten seconds
    assert [line[: len(says)] for line in lines] == ([says] if says else []), stderr
    result = on_ray(slow, out)
    assert 0 < result.converted < IMAGES
    assert contents(out) == contents(converted["shards"])


def test_a_folder_that_a_node_does_not_share_is_named_with_the_node(raw_tree: Path, tmp_path: Path) -> None:
    """Asked here of folders in which a file disappears."""
    (tmp_path / "out").mkdir()
    picture = put(tmp_path / "source", {"1.jpg": b"a picture"}) / "1.jpg"
    scanned_status = (picture.stat().st_size, picture.stat().st_mtime_ns)
    read = partial(read_picture, str(picture), scanned_status=scanned_status)
    for folder, says in ((tmp_path / "out", "is missing there"), (tmp_path / "source", "disappeared")):
        with prepare_nodes("ray", tmp_path / "out", JOURNAL_NAME, read) as nodes:
            nodes.check("node a")
            next(folder.iterdir()).unlink()
            with pytest.raises(PrecacheError, match=rf"^node a: .*{folder}.*{says}.*mount"):
                nodes.check("node a")
    assert list((tmp_path / "out").iterdir()) == []


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
