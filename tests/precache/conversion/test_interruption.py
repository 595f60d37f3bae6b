"""Killed at any moment, a conversion loses nothing; the same command ends with the same bytes."""

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from precache import convert
from precache import engines as executors
from precache.conversion.journal import JOURNAL_NAME
from precache.dataset.converted import is_converted
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError, SourceError
from precache.example_data.sample_tree import make_sample
from precache.formats import FORMATS
from tests.command import ROOT, run
from tests.conftest import ROWS_PER_SHARD, small_recipe

# Each picture takes its time, so that there are moments in which to kill.
SLOWLY = """
import sys, time
from precache import Recipe, convert
from precache.pictures import images
render = images.render_or_copy
def slow_render(*arguments):
    time.sleep(0.004)
    return render(*arguments)
images.render_or_copy = slow_render
if __name__ == "__main__":
    source, out, name, workers, overwrite = sys.argv[1:]
    recipe = Recipe(format=name, size=48, fit="crop", resample="bilinear", shard_bytes=12 * 48 * 48 * 3)
    convert(source, out, recipe, workers=int(workers), overwrite=overwrite == "yes")
"""


def start(
    tree: Path, out: Path, name: str, workers: int, overwrite: bool = False
) -> "subprocess.Popen[bytes]":
    script = out.parent / "slowly.py"
    script.write_text(SLOWLY)
    command = [sys.executable, script, tree, out, name, str(workers), "yes" if overwrite else "no"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def beside(path: Path) -> list[str]:
    """What lies beside `path`, be it a lock."""
    return sorted({entry.name for entry in path.parent.iterdir()} - {path.name})


def check_killed_runs_end_alike(
    tree: Path, expected: Path, tmp_path: Path, name: str, kills: int, seed: int
) -> None:
    """Kill the parent, or one worker, after a random time; nothing half-written counts; go on."""
    moments = random.Random(seed)
    out = tmp_path / "out"
    killed = 0
    while killed < kills:
        workers = moments.choice((0, 1, 2))
        process = start(tree, out, name, workers)
        time.sleep(moments.uniform(0.1, 0.9))
        victim = psutil.Process(process.pid)
        if moments.random() < 0.3 and (children := victim.children()):
            victim = moments.choice(children)
        if victim.is_running() and process.poll() is None:
            victim.kill()
            killed += 1
        if victim.pid == process.pid:
            process.wait()
        elif process.wait(timeout=60) == 0:  # the shard was tried again
            assert contents(out) == contents(expected)
        if is_converted(out):
            found = {name for name in contents(out) if not name.endswith(".partial")}
            assert found - {JOURNAL_NAME} == contents(expected).keys()
            shutil.rmtree(out)
    convert(tree, out, small_recipe(name), workers=0)
    assert contents(out) == contents(expected)
    assert beside(out) == ["slowly.py"]


@pytest.mark.parametrize(("name", "kills"), [("shards", 3), ("webdataset", 1), ("dali", 1)])
def test_killed_runs_end_with_the_same_bytes(
    name: str, kills: int, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    check_killed_runs_end_alike(raw_tree, converted[name], tmp_path, name, kills=kills, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_many_killed_runs_end_with_the_same_bytes(
    name: str, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    check_killed_runs_end_alike(raw_tree, converted[name], tmp_path, name, kills=50, seed=1)


def test_an_overwrite_killed_at_any_moment_leaves_the_old_dataset_or_the_new(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    convert(raw_tree, out, small_recipe("shards", size=24), workers=0)
    old = contents(out)
    for delay_s in (0.3, 0.5, 0.7):
        process = start(raw_tree, out, "shards", 0, overwrite=True)
        time.sleep(delay_s)
        process.kill()
        process.wait()
        assert not out.exists() or contents(out) in (old, contents(converted["shards"]))
    convert(raw_tree, out, small_recipe("shards"), workers=0, overwrite=True)
    assert contents(out) == contents(converted["shards"])
    assert beside(out) == ["slowly.py"]


def test_an_unfinished_conversion_of_other_settings_is_discarded_by_overwrite(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    def stop(done: int, total: int) -> None:
        if done > 40:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(raw_tree, out, small_recipe("dali"), workers=0, on_progress=stop)
    convert(raw_tree, out, small_recipe("shards"), workers=0, overwrite=True)
    assert contents(out) == contents(converted["shards"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_with_one_line_and_their_code(
    number: signal.Signals, code: int, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    script = tmp_path / "slowly.py"
    script.write_text(
        SLOWLY.split("if __name__", maxsplit=1)[0]
        + "from precache.cli.main import entry_point\nentry_point()\n"
    )
    arguments = [
        "convert",
        raw_tree,
        "out",
        "--format",
        "shards",
        "--size",
        "48",
        "--fit",
        "crop",
        "--workers",
        "0",
    ]
    process = subprocess.Popen(
        [sys.executable, script, *arguments], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    journal = tmp_path / "out" / JOURNAL_NAME
    deadline = time.monotonic() + 60
    while not journal.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("precache: error: ")
    assert not (tmp_path / "out" / MANIFEST_NAME).exists()
    assert beside(tmp_path / "out") == ["slowly.py"]
    assert run("precache", *arguments, cwd=tmp_path).returncode == 0


def test_an_interrupted_conversion_says_what_is_kept_and_the_same_command_says_where_it_goes_on(
    raw_tree: Path, tmp_path: Path
) -> None:
    """Also with --overwrite, which writes beside the folder."""
    script = tmp_path / "slowly.py"
    script.write_text(
        SLOWLY.split("if __name__", maxsplit=1)[0].replace("0.004", "0.02")
        + "from precache.cli.main import entry_point\nentry_point()\n"
    )
    shards = ["--size", "48", "--fit", "crop", "--shard-bytes", str(12 * 48 * 48 * 3)]
    first = ["convert", raw_tree, "out", "--format", "shards", *shards, "--workers", "0"]
    again = ["convert", raw_tree, "out", "--format", "dali", *shards, "--workers", "0", "--overwrite"]
    for arguments in (first, again):
        process = subprocess.Popen(
            [sys.executable, script, *arguments], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while shards_written(tmp_path) < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        told = re.fullmatch(
            r"precache: error: interrupted after (\d+) of 70 pictures were finished; these are kept, and the "
            r"same command goes on from there\n",
            errors,
        )
        assert told, errors
        resumed = run("precache", *arguments, cwd=tmp_path)
        assert resumed.returncode == 0, resumed.stderr
        assert (
            f"out: {told[1]} of 70 pictures are already converted; continuing with the rest\n"
            in resumed.stdout
        )


def test_an_interruption_before_anything_was_begun_promises_nothing(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["precache.conversion.convert"], "_scanned", stop)
    with pytest.raises(KeyboardInterrupt, match="while nothing was being converted; nothing is lost, and"):
        convert(raw_tree, tmp_path / "out", small_recipe("shards"), workers=0)


def shards_written(folder: Path) -> int:
    """How many finished shards the journals in `folder` and below it hold."""
    journals = (path for path in folder.glob("**/" + JOURNAL_NAME))
    return sum(len(path.read_bytes().splitlines()) - 1 for path in journals)


def fail_once(task: str, tick: object) -> str:
    """Die over the task the first time."""
    path = Path(task)
    if not path.exists():
        path.write_text("tried")
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def test_a_task_whose_worker_died_is_tried_again(tmp_path: Path) -> None:
    tasks = [str(tmp_path / str(number)) for number in range(5)]
    assert sorted(executors.run(fail_once, tasks, 2, lambda count: None)) == tasks


def sleep_long(task: int, tick: object) -> None:
    time.sleep(60 if task else 0)


def test_leaving_the_iterator_ends_the_workers_at_once() -> None:
    before = psutil.Process().children()
    results = executors.run(sleep_long, [0, 1, 2], 2, lambda count: None)
    next(results)
    start_s = time.monotonic()
    results.close()
    assert time.monotonic() - start_s < 10
    assert [
        c for c in psutil.Process().children() if c not in before and "tracker" not in " ".join(c.cmdline())
    ] == []


def test_a_worker_ends_when_its_parent_is_gone(raw_tree: Path, tmp_path: Path) -> None:
    process = start(raw_tree, tmp_path / "out", "shards", 2)
    deadline = time.monotonic() + 60
    while not list((tmp_path).glob("out/*.safetensors*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    workers = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []


# Trouble with disks and sources.


@pytest.mark.parametrize("begun", [False, True])
def test_a_full_disk_is_a_clear_error_and_resumable(
    begun: bool, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    """A file-size limit stands in for the disk; SIGXFSZ is ignored by Python, so write() fails."""
    out = tmp_path / "out"

    def stop(done: int, total: int) -> None:
        if done > 2 * ROWS_PER_SHARD:
            raise KeyboardInterrupt

    if begun:
        with pytest.raises(KeyboardInterrupt):
            convert(raw_tree, out, small_recipe("shards"), workers=0, on_progress=stop)
    before = sorted(path.name for path in out.iterdir()) if begun else [JOURNAL_NAME]
    kept = "after 2. of 70 pictures were finished; these are kept" if begun else "nothing is kept"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        with pytest.raises(
            DatasetError, match=rf"cannot be written \(File too large\) .*{kept}, and the same"
        ):
            convert(raw_tree, out, small_recipe("shards"), workers=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in out.iterdir()) == before
    convert(raw_tree, out, small_recipe("shards"), workers=0)
    assert contents(out) == contents(converted["shards"])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("change", ["disappeared", "changed", "changed, of the same size"])
def test_a_source_that_changes_meanwhile_is_named(
    change: str, workers: int, raw_tree: Path, tmp_path: Path
) -> None:
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    victim = sorted(tree.glob("*/*.jpg"))[20]

    def meddle(done: int, total: int) -> None:
        if done == 0 and victim.exists():  # the scan is over, no picture is read yet
            if change == "disappeared":
                victim.unlink()
            else:
                victim.write_bytes(bytes(victim.stat().st_size if "same size" in change else 100))

    word = change.partition(",")[0]
    told = f"{victim}: {word} (while it was converted|after the tree was scanned)"
    with pytest.raises(SourceError, match=told):
        convert(tree, tmp_path / "out", small_recipe("shards"), workers=workers, on_progress=meddle)
    assert not (tmp_path / "out" / MANIFEST_NAME).exists()


def kill_at_calls(kind: str, tmp_path: Path, *moments: int) -> int:
    """The number of calls at the last of which `tests.killing` has killed a conversion; see there."""
    make_sample(tmp_path / "tree", images=10, classes=2, seed=1, like="caltech", workers=0)
    script = [sys.executable, "-m", "tests.killing", kind, tmp_path / "tree", tmp_path / "folder"]
    command = [*map(str, script), *map(str, moments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


@pytest.mark.parametrize(("kind", "first"), [("fresh", 1), ("overwrite", 3), ("discard", 5)])
def test_killed_at_a_call_of_the_system_a_conversion_is_completed(
    kind: str, first: int, tmp_path: Path
) -> None:
    assert kill_at_calls(kind, tmp_path, first, 7) > 90


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["fresh", "overwrite", "discard"])
def test_killed_at_every_call_of_the_system_a_conversion_is_completed(kind: str, tmp_path: Path) -> None:
    assert kill_at_calls(kind, tmp_path) > 90
