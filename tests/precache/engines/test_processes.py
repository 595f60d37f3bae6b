"""Workers that die, and functions of the caller that raise."""

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
from precache.errors import SettingError, WorkerError
from precache.example_data.sample_tree import make_sample
from precache.storage.locks import hold_lock
from tests.command import ROOT
from tests.conftest import small_recipe
from tests.precache import tasks
from tests.precache.engines.conftest import until
from tests.precache.tasks import UNITS, Deadly


def run(function: Callable[..., Any], *given: Any, workers: int = 1, **settings: Any) -> list[Any]:
    return list(engines.run(function, given, workers, lambda units: None, **settings))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_unit_that_kills_two_workers_is_left_out_and_the_rest_is_done(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precache.engines.processes._may_fork", lambda: method == "fork")
    given = [Deadly("a"), Deadly("b", 0, 4), Deadly("c"), Deadly("d", 5)]
    counts: list[int] = []
    done = dict(engines.run(tasks.do, given, 2, counts.append))
    assert done == {task.name: [unit for unit in range(UNITS) if unit not in task.deadly] for task in given}
    assert sum(counts) == UNITS * len(given)


def test_a_task_whose_workers_keep_dying_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"^7: its worker died 2 times \(exit code -9"):
        run(tasks.die, Deadly("7"))
    for function in (tasks.die_over_other_units, tasks.die_stubbornly):
        with pytest.raises(WorkerError, match=r"^7: its worker died 3 times"):
            run(function, Deadly("7", tries=tmp_path / "tries"))


def test_a_worker_that_dies_while_it_answers_is_replaced(tmp_path: Path) -> None:
    (answer,) = run(tasks.die_while_answering, Deadly("7", tries=tmp_path / "tries"))
    assert len(answer) == 100_000_000


def test_a_dead_worker_is_noticed_while_its_child_holds_the_pipe(tmp_path: Path) -> None:
    tries, start_s = tmp_path / "tries", time.monotonic()
    try:
        assert run(tasks.die_beside_a_child, Deadly("7", tries=tries)) == ["7"]
        assert psutil.pid_exists(int(tries.read_text()))
        assert time.monotonic() - start_s < 100  # not at the child's end
    finally:
        psutil.Process(int(tries.read_text())).kill()


PARENT = """
import sys
from pathlib import Path
from precache import engines
from precache.engines import processes
from tests.precache import tasks
from tests.precache.engines.conftest import until

processes._may_fork = lambda: sys.argv[1] == "fork"
given = [Path(path) for path in sys.argv[2:]]
list(engines.run(tasks.note_process, given, len(given), print, finish=tasks.sleep))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_end_with_their_parent_and_not_by_ctrl_c(method: str, tmp_path: Path) -> None:
    """Whatever they do: here they finish what is done."""
    notes = [tmp_path / "1", tmp_path / "2"]
    with subprocess.Popen([sys.executable, "-c", PARENT, method, *notes], cwd=ROOT) as parent:
        until(lambda: all(note.exists() and note.read_text() for note in notes) or parent.poll() is not None)
        workers = [psutil.Process(int(note.read_text())) for note in notes]
        for worker in workers:
            worker.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            parent.wait(0.5)
        assert all(lives(worker) for worker in workers)
        parent.kill()
    until(lambda: not any(lives(worker) for worker in workers), seconds=10)


def test_a_task_that_cannot_be_sent_is_an_error_with_a_remedy() -> None:
    with pytest.raises(SettingError, match=r"cannot be sent .*workers=0"):
        run(tasks.same, lambda: None)


def test_errors_of_the_function_and_of_finish_arrive_whatever_they_are() -> None:
    for function, finish in ((tasks.raise_odd, None), (tasks.same, tasks.raise_odd)):
        with pytest.raises(WorkerError, match="Odd in a worker: one other"):
            run(function, 1, finish=finish)
    with pytest.raises(ConnectionResetError, match="the disk's"):
        run(tasks.raise_odd, 0)


# Functions of the caller.


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four pictures: a callback fails at the first of them."""
    path = tmp_path_factory.mktemp("few") / "tree"
    make_sample(path, images=4, classes=2, seed=1, like="caltech", workers=0)
    return path


@pytest.mark.parametrize(
    ("where", "kind", "workers"),
    [("on_start", BrokenPipeError, 0), ("on_progress", EOFError, 2), ("on_progress later", SettingError, 2)],
)
def test_an_error_of_a_callback_reaches_the_caller_unchanged(
    where: str, kind: type[Exception], workers: int, few: Path, tmp_path: Path
) -> None:
    mine = kind("mine")

    def fail(done: int, total: int) -> None:
        if done or where != "on_progress later":
            raise mine

    out, before = tmp_path / "out", psutil.Process().children()
    callback = {where.split(maxsplit=1)[0]: fail}
    with pytest.raises(kind) as caught:
        convert(few, out, small_recipe("shards", shard_bytes=1), workers=workers, **callback)
    assert caught.value is mine
    assert [child for child in psutil.Process().children() if child not in before and is_worker(child)] == []
    with hold_lock(out):
        pass  # it was released
    convert(few, out, small_recipe("shards", shard_bytes=1), workers=0)


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_worker(process: psutil.Process) -> bool:
    try:
        return "tracker" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
