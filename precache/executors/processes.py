"""The engine `local`: processes of this machine, or the calling one; and what every engine is called with."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, TypeVar

from precache.console.progress import Progress
from precache.errors import SettingError
from precache.executors.attempts import Attempt
from precache.executors.nodes import Nodes
from precache.executors.workers import REPORT_S, Ticks, Worker

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
    """`callback`, such that `is_of_caller` knows what it raises."""

    def call(*arguments: Any) -> None:
        try:
            callback(*arguments)
        except Exception as error:
            error.__dict__[_OF_CALLER] = True
            raise

    return call


def is_of_caller(error: BaseException) -> bool:
    """Whether a caller's function raised `error`: it is the caller's to deal with, as it is."""
    return _OF_CALLER in error.__dict__


def unchanged(produced: Any) -> Any:
    """For `finish`, where there is nothing to finish."""
    return produced


class _OwnTicks(Ticks):
    """Of the calling process, which nobody outlives."""

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
    progress; `on_progress` gets the units done since its last call, a negative number where a dead
    worker's are done again. `workers=0` runs all in this process. An exception of any of them is raised
    here. Leaving the iterator, by an exception or by closing it, ends the workers at once.

    A task whose worker died is tried again. If `function` calls `tick.begin(unit)` before each unit, a
    unit over which a second worker dies is in `tick.fatal` from then on.

    Args:
        tasks: taken one by one, as workers ask for them; one that has a `name` is called so in errors.
        nodes: for engines that have some; this one has none.

    Raises:
        WorkerError: a task's workers died, and not over the same unit.
    """
    if workers == 0:
        for task in tasks:
            yield finish(function(task, _OwnTicks(on_progress)))
        return
    waiting = (Attempt(task) for task in tasks)
    retries: deque[Attempt] = deque()
    pool: list[_Desk] = []
    try:
        while len(pool) < workers:
            pool.append(_Desk(Worker(function, finish)))
        while True:
            for desk in pool:
                if desk.free and (attempt := retries.popleft() if retries else next(waiting, None)):
                    desk.start(attempt)
            busy = [desk.worker.connection for desk in pool if desk.attempts]
            if not busy:
                return
            wait(busy, timeout=REPORT_S)
            for desk in pool:
                yield from desk.receive(on_progress)
                if desk.worker.dead:
                    retries += desk.clear(on_progress)
                    desk.worker = Worker(function, finish)
    finally:
        for desk in pool:
            desk.worker.end()


@dataclass(slots=True)
class _Desk:
    """A worker and what it works on: one task, while it may still finish the one before.

    Attributes:
        attempts: what it works on, oldest first.
        free: whether it takes another task.
    """

    worker: Worker
    attempts: deque[Attempt] = field(default_factory=deque)
    free: bool = True

    def start(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        self.free = False
        self.worker.send(attempt.task, attempt.fatal)

    def receive(self, on_progress: Callable[[int], None]) -> Iterator[Any]:
        """Take what the worker sent: progress is passed on, a result yielded, an error raised."""
        while self.attempts and (message := self.worker.next_message()) is not None:
            kind, content = message
            if kind == "progress":
                self.attempts[-1].progress += content
                on_progress(content)
            elif kind == "free":
                self.free = True
            elif kind == "error":
                raise content
            else:
                self.attempts.popleft()
                yield content

    def clear(self, on_progress: Callable[[int], None]) -> list[Attempt]:
        """Take from a dead worker what is to be tried again."""
        # what it was finishing besides is not what it died over
        code = self.worker.process.exitcode
        how = f"exit code {code}; -9 means killed, often because memory ran out"
        self.attempts[-1].blame(self.worker.unit, how)
        taken = list(self.attempts)
        self.attempts.clear()
        self.free = True
        self.worker.end()
        for attempt in taken:
            on_progress(-attempt.progress)
            attempt.progress = 0
        return taken
