"""Workers that die, and functions of the caller that raise."""

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from PIL import Image

from precache import check, convert, executors
from precache.conversion.lock import hold_lock
from precache.errors import DatasetError, SettingError, WorkerError
from precache.example_data.sample_tree import make_sample
from precache.executors import KILLED
from tests.conftest import small_recipe
from tests.precache import tasks
from tests.precache.tasks import UNITS, Deadly


@pytest.fixture(params=["fork", "spawn"])
def start_method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("precache.executors.workers._may_fork", lambda: request.param == "fork")
    return str(request.param)


@pytest.mark.usefixtures("start_method")
def test_a_unit_that_kills_two_workers_is_left_out_and_the_rest_is_done() -> None:
    given = [Deadly("a"), Deadly("b", 0, 4), Deadly("c"), Deadly("d", 5)]
    counts: list[int] = []
    done = dict(executors.run(tasks.do, given, 2, counts.append))
    assert done == {"a": [0, 1, 2, 3, 4, 5], "b": [1, 2, 3, 5], "c": [0, 1, 2, 3, 4, 5], "d": [0, 1, 2, 3, 4]}
    assert sum(counts) == UNITS * len(given)


def test_a_worker_that_dies_elsewhere_is_an_error_that_names_the_task() -> None:
    with pytest.raises(WorkerError, match=r"^train-00007: its worker died 2 times \(exit code -9"):
        list(executors.run(tasks.die_at_the_end, [Deadly("train-00007")], 1, lambda count: None))


def test_workers_that_die_over_one_unit_after_another_are_given_up(tmp_path: Path) -> None:
    task = tmp_path / "tries"
    with pytest.raises(WorkerError, match="tries: its worker died 3 times"):
        list(executors.run(tasks.die_anywhere, [str(task)], 1, lambda count: None))
    assert task.stat().st_size == 3


@pytest.mark.slow
def test_a_machine_on_which_every_unit_kills_is_given_up_soon() -> None:
    with pytest.raises(WorkerError, match="train-00000: its worker died"):
        list(executors.run(tasks.die_over_all, [Deadly("train-00000")], 1, lambda count: None))


def test_a_unit_that_kills_although_it_is_left_out_is_an_error() -> None:
    with pytest.raises(WorkerError, match="train-00000: its worker died 3 times"):
        list(executors.run(tasks.die_stubbornly, [Deadly("train-00000")], 1, lambda count: None))


def test_errors_of_the_function_arrive_whatever_they_are() -> None:
    with pytest.raises(WorkerError, match="Odd in a worker: one other"):
        list(executors.run(tasks.raise_odd, [1], 1, lambda count: None))
    with pytest.raises(ConnectionResetError, match="the disk's"):
        list(executors.run(tasks.raise_odd, [0], 1, lambda count: None))


def test_workers_that_cannot_be_started_are_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a limit on processes, which does not bind root."""

    def refuse(*arguments: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("multiprocessing.popen_fork.os.fork", refuse)
    monkeypatch.setattr("precache.executors.workers._may_fork", lambda: True)
    with pytest.raises(WorkerError, match=r"no worker process can be started \(Resource.*fewer --workers"):
        list(executors.run(tasks.do, [Deadly("a")], 2, lambda count: None))


# Pictures.


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Kills each child that takes more memory than a limit in bytes, as the kernel or earlyoom does."""
    # else they begin with this one's memory
    monkeypatch.setattr("precache.executors.workers._may_fork", lambda: False)
    ended = threading.Event()
    threads: list[threading.Thread] = []

    def watch(limit: int) -> None:
        while not ended.wait(0.002):
            for child in psutil.Process().children():
                try:
                    # one that is being started has this one's memory, and its command line
                    started = "--multiprocessing-fork" in child.cmdline()
                    if started and child.memory_info().rss > limit:
                        child.kill()
                except psutil.Error:
                    continue

    def start(limit: int) -> None:
        threads.append(threading.Thread(target=watch, args=(limit,)))
        threads[-1].start()

    yield start
    ended.set()
    for thread in threads:
        thread.join()


HUGE = "003.candle/huge.png"


@pytest.fixture(scope="module")
def tree_with_a_huge_picture(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = Path(shutil.copytree(raw_tree, tmp_path_factory.mktemp("huge") / "tree"))
    Image.new("RGB", (9_000, 9_000)).save(tree / HUGE, compress_level=1)  # 243 MB in memory
    return tree


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process as Linux counts it")
def test_a_picture_that_takes_all_memory_is_rejected_by_name_and_the_rest_converted(
    tree_with_a_huge_picture: Path, tmp_path: Path, killer: Callable[[int], None]
) -> None:
    killer(220 << 20)
    result = convert(
        tree_with_a_huge_picture, tmp_path / "out", small_recipe("shards"), workers=2, max_rejects=0.02
    )
    (rejected,) = result.manifest.rejected
    assert (rejected.path, rejected.reason) == (HUGE, KILLED)
    assert result.manifest.samples == 70
    report = check(tree_with_a_huge_picture, workers=1)
    assert [(bad.path, bad.reason) for bad in report.rejected] == [(HUGE, KILLED)]


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process as Linux counts it")
def test_a_picture_that_kills_counts_as_rejected(
    tree_with_a_huge_picture: Path, tmp_path: Path, killer: Callable[[int], None]
) -> None:
    killer(220 << 20)
    with pytest.raises(
        DatasetError, match=rf"1 picture is rejected and at most 0 may be; first: {HUGE}, killed"
    ):
        convert(tree_with_a_huge_picture, tmp_path / "out", small_recipe("shards"), workers=1, max_rejects=0)


# Functions of the caller.


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four pictures: a callback fails at the first of them."""
    path = tmp_path_factory.mktemp("few") / "tree"
    make_sample(path, images=4, classes=2, seed=1, like="caltech", workers=0)
    return path


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", ["on_start", "on_progress", "on_progress later"])
@pytest.mark.parametrize("kind", [BrokenPipeError, ConnectionResetError, EOFError, OSError, SettingError])
def test_an_error_of_a_callback_reaches_the_caller_unchanged(
    kind: type[Exception], where: str, workers: int, few: Path, tmp_path: Path
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


def is_worker(process: psutil.Process) -> bool:
    try:
        return "tracker" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def test_a_worker_that_dies_is_an_error_not_a_hang() -> None:
    with pytest.raises(WorkerError, match=r"^[12]: its worker died 2 times"):
        list(executors.run(tasks.die, [1, 2], 2, lambda count: None))
