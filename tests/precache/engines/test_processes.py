"""The engine `local`: workers that die, tasks and callbacks that raise errors."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from precache import convert, engines
from precache.engines import processes
from precache.errors import SettingError, WorkerError
from precache.example_data.sample_tree import make_sample
from precache.storage.locks import hold_lock
from tests.command import ROOT
from tests.conftest import small_recipe
from tests.limits import no_more_threads
from tests.precache import tasks
from tests.precache.engines.conftest import wait_until
from tests.precache.tasks import UNITS, Deadly


def run(function: Callable[..., Any], *tasks: Any, workers: int = 1) -> list[Any]:
    return list(engines.run(function, tasks, workers, lambda units: None))


def test_a_unit_that_kills_two_workers_is_left_out_and_the_rest_is_done() -> None:
    deadly_tasks = [Deadly("a"), Deadly("b", 0, 4), Deadly("c"), Deadly("d", 5)]
    counts: list[int] = []
    results = dict(engines.run(tasks.do, deadly_tasks, 2, counts.append))
    for task in deadly_tasks:
        assert results[task.name] == [unit for unit in range(UNITS) if unit not in task.deadly]
    assert len(results) == len(deadly_tasks)
    assert sum(counts) == UNITS * len(deadly_tasks)


def test_a_task_whose_workers_keep_dying_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"^7: .* 2 times \(exit code -9"):
        run(tasks.die, Deadly("7"))
    for function in (tasks.die_over_other_units, tasks.die_over_a_fatal_unit):
        with pytest.raises(WorkerError, match=r"^7: .* 3 times"):
            run(function, Deadly("7", tries=tmp_path / "tries"))


def test_a_worker_that_may_start_no_thread_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = "import threading; threading.stack_size(1 << 47)  # more than there is\n"
    monkeypatch.setattr(processes, "_PROGRAM", limit + processes._PROGRAM)
    with pytest.raises(WorkerError, check=lambda error: "ulimit -u" in error.remedy):
        run(tasks.do, Deadly("7"))


def test_convert_goes_on_after_no_thread_could_be_started(raw_tree: Path, tmp_path: Path) -> None:
    recipe = small_recipe("shards", size=16)
    with no_more_threads(), pytest.raises(WorkerError, check=lambda error: "ulimit -u" in error.remedy):
        convert(raw_tree, tmp_path / "dst", recipe, workers=0)
    convert(raw_tree, tmp_path / "dst", recipe, workers=0)


def test_a_worker_that_dies_while_it_answers_is_replaced(tmp_path: Path) -> None:
    (answer,) = run(tasks.die_while_answering, Deadly("7", tries=tmp_path / "tries"))
    assert len(answer) == 100_000_000


def test_a_dead_worker_is_noticed_while_its_child_holds_the_pipe(tmp_path: Path) -> None:
    tries, start_s = tmp_path / "tries", time.monotonic()
    try:
        assert run(tasks.die_beside_a_child, Deadly("7", tries=tries)) == ["7"]
        assert psutil.pid_exists(int(tries.read_text()))
        assert time.monotonic() - start_s < 100  # before the child ends
    finally:
        psutil.Process(int(tries.read_text())).kill()


PARENT = """
import sys
from pathlib import Path
from precache import engines
from tests.precache import tasks

paths = [Path(path) for path in sys.argv[1:]]
list(engines.run(tasks.note_process_and_sleep, paths, len(paths), print))
"""


def test_workers_end_with_their_parent_and_not_by_ctrl_c(tmp_path: Path) -> None:
    """Nothing interrupts the workers."""
    notes = [tmp_path / "1", tmp_path / "2"]
    with subprocess.Popen([sys.executable, "-c", PARENT, *notes], cwd=ROOT) as parent:
        wait_until(
            lambda: all(note.exists() and note.read_text() for note in notes) or parent.poll() is not None
        )
        workers = [psutil.Process(int(note.read_text())) for note in notes]
        for worker in workers:
            worker.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            parent.wait(0.5)
        assert all(is_alive(worker) for worker in workers)
        parent.kill()
    wait_until(lambda: not any(is_alive(worker) for worker in workers), seconds=10)


def test_a_task_that_cannot_be_sent_is_an_error_with_a_remedy() -> None:
    with pytest.raises(SettingError) as raised:
        run(tasks.return_task, lambda: None)
    assert "workers=0" in raised.value.remedy


def test_an_error_in_a_worker_that_cannot_be_unpickled_keeps_its_text() -> None:
    with pytest.raises(WorkerError, match=r"Odd .*: first second"):
        run(tasks.raise_odd, 1)


def test_a_connection_error_of_a_task_is_not_taken_for_a_dead_worker() -> None:
    with pytest.raises(ConnectionResetError, match="the disk's"):
        run(tasks.raise_odd, 0)


def test_a_program_without_standard_files_has_workers() -> None:
    text = """
import os
from precache import engines
from tests.precache import tasks

os.closerange(0, 3)
answers = list(engines.run(tasks.return_task, range(4), 2, lambda units: None))
os._exit(sorted(answers) != [0, 1, 2, 3])
"""
    assert subprocess.run([sys.executable, "-c", text], cwd=ROOT, timeout=100, check=False).returncode == 0


def test_a_program_with_python_built_in_needs_workers_0() -> None:
    text = """
import sys
sys.executable = {executable}
from precache import engines, errors, packages
from tests.precache import tasks

assert list(engines.run(tasks.return_task, [7], 0, print)) == [7]
assert packages.install_command("table").startswith("python -m pip")
try:
    list(engines.run(tasks.return_task, [7], 2, print))
except errors.SettingError as error:
    sys.exit("workers=0" not in error.remedy)
sys.exit(3)
"""
    for executable in ("None", "''"):
        command = [sys.executable, "-c", text.format(executable=executable)]
        assert subprocess.run(command, cwd=ROOT, timeout=100, check=False).returncode == 0


def test_what_workers_log_has_tracebacks_and_fails_no_task(caplog: pytest.LogCaptureFixture) -> None:
    assert run(tasks.log_badly, "7") == ["7"]
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("library", "ERROR")
    assert record.getMessage().startswith("7 failed\nTraceback")


# Callbacks of the caller.


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of four pictures, enough for a callback to fail at the first."""
    path = tmp_path_factory.mktemp("few") / "tree"
    make_sample(path, images=4, classes=2, seed=1, like="caltech", workers=0)
    return path


@pytest.mark.parametrize(
    ("callback", "kind", "workers"),
    [("on_start", BrokenPipeError, 0), ("on_progress", EOFError, 2), ("on_progress later", SettingError, 2)],
)
def test_an_error_of_a_callback_reaches_the_caller_unchanged(
    callback: str, kind: type[Exception], workers: int, few: Path, tmp_path: Path
) -> None:
    error = kind("mine")

    def fail(done: int, total: int) -> None:
        if done or callback != "on_progress later":
            raise error

    out, before = tmp_path / "out", psutil.Process().children()
    callbacks = {callback.split(maxsplit=1)[0]: fail}
    with pytest.raises(kind) as raised:
        convert(few, out, small_recipe("shards", shard_bytes=1), workers=workers, **callbacks)
    assert raised.value is error
    assert [child for child in psutil.Process().children() if child not in before and is_worker(child)] == []
    with hold_lock(out):
        pass  # the lock was released
    convert(few, out, small_recipe("shards", shard_bytes=1), workers=0)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_worker(process: psutil.Process) -> bool:
    try:
        return "tracker" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
