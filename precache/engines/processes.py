"""The engine `local`: processes of this machine, or the calling one; and what every engine is called with."""

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing.connection import wait
from typing import Any, TypeVar

from precache.engines.attempts import Attempt, Event, Ticks, run_all
from precache.engines.nodes import Nodes
from precache.engines.workers import REPORT_S, Worker
from precache.errors import SettingError
from precache.reporting import Progress

Task = TypeVar("Task")
_OF_CALLER = "_precache_of_caller"


def available_cpus() -> int:
    """CPUs that this process may use (its affinity mask where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_count(workers: int | None, least: int = 0) -> int:
    """`workers`, or one per CPU for None; SettingError unless it is `least` or more."""
    if workers is None:
        return available_cpus()
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < least:
        none = "0 works in this process; " if least == 0 else ""
        raise SettingError(
            f"workers must be {least} or more, got {workers!r}; {none}the default is one per CPU "
            f"({available_cpus()})"
        )
    return workers


def counted(on_progress: Progress, total: int, done: int = 0) -> Callable[[int], None]:
    """For `run`: turns units done since the last call into calls of `on_progress(done, total)`."""
    on_progress = of_caller(on_progress)

    def report(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, total)

    return report


def of_caller(callback: Callable[..., None]) -> Callable[..., None]:
    """`callback`, wrapped so that `is_of_caller` recognises what it raises."""

    def call(*arguments: Any) -> None:
        try:
            callback(*arguments)
        except Exception as error:
            error.__dict__[_OF_CALLER] = True
            raise

    return call


def is_of_caller(error: BaseException) -> bool:
    """Whether a function of the caller raised `error`: it is passed on as it is."""
    return _OF_CALLER in error.__dict__


def unchanged(produced: Any) -> Any:
    """For `finish`, where there is nothing to finish."""
    return produced


class _CallerTicks(Ticks):
    """Progress of tasks that the calling process does itself."""

    def __init__(self, on_progress: Callable[[int], None]) -> None:
        self._on_progress = on_progress

    def __call__(self) -> None:
        self._on_progress(1)


def run(
    function: Callable[[Task, Ticks], Any],
    tasks: Iterable[Task],
    workers: int,
    on_progress: Callable[[int], None],
    *,
    finish: Callable[[Any], Any] = unchanged,
    nodes: Nodes | None = None,
) -> Generator[Any, None, None]:
    """Yield `finish(function(task, tick))` for each task as it is done, in any order.

    `function` is for what needs the CPU, `finish` for what waits for the disk: it runs in a thread of
    its worker, while the next task's `function` begins. `function` calls `tick()` once per unit of
    progress; `on_progress` gets the units done since its last call, a negative number where those of a dead
    worker are done again. `workers=0` runs all in this process. An exception of any of them is raised
    here. Leaving the iterator, by an exception or by closing it, ends the workers at once.

    A task whose worker died is tried again. If `function` calls `tick.begin(unit)` before each unit, a
    unit over which a second worker dies is in `tick.fatal` from then on.

    Args:
        tasks: taken one by one, as workers ask for them; errors name one by its `name`, if it has one.
        nodes: for engines that have some; this one has none.

    Raises:
        WorkerError: a task's workers died, and not over the same unit.
    """
    if workers == 0:
        for task in tasks:
            yield finish(function(task, _CallerTicks(on_progress)))
        return
    yield from run_all(_Processes(function, finish, workers), tasks, on_progress)


class _Processes:
    """A `Pool` of at most `limit` processes, started as tasks come."""

    def __init__(self, function: Callable[..., Any], finish: Callable[..., Any], limit: int) -> None:
        self._function, self._finish, self._limit = function, finish, limit
        self._workers: list[Worker] = []

    def has_room(self) -> bool:
        return len(self._workers) < self._limit or any(worker.is_free for worker in self._workers)

    def is_busy(self) -> bool:
        return any(worker.attempts for worker in self._workers)

    def start(self, attempt: Attempt) -> None:
        worker = next((worker for worker in self._workers if worker.is_free), None)
        if worker is None:
            worker = Worker(self._function, self._finish)
            self._workers.append(worker)
        worker.start(attempt)

    def receive(self) -> Iterator[Event]:
        wait([worker.connection for worker in self._workers if worker.attempts], timeout=REPORT_S)
        for worker in list(self._workers):
            yield from worker.receive()
            if worker.is_dead:
                self._workers.remove(worker)
                worker.end()

    def end(self) -> None:
        for worker in self._workers:
            worker.end()
