"""Where a plan runs: in processes of this machine, or in the calling one."""

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from precache.errors import WorkerError

Task = TypeVar("Task")
Result = TypeVar("Result")
Function = Callable[[Task, Callable[[], None]], Result]
_REPORT_S = 0.1
_MAX_ATTEMPTS = 2


def available_cpus() -> int:
    """CPUs that this process may use (its affinity mask where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run(
    function: Function[Task, Result],
    tasks: Sequence[Task],
    workers: int,
    on_progress: Callable[[int], None],
) -> Generator[Result, None, None]:
    """Yield `function(task, tick)` for each task as it finishes, in any order.

    `function` calls `tick()` once per unit of progress; `on_progress` gets the units done since
    its last call, a negative number where a dead worker's are done again. `workers=0` runs the
    tasks in this process. An exception of `function` is raised here. Leaving the iterator, by an
    exception or by closing it, ends the workers at once.

    Raises:
        WorkerError: a task's worker died, and so did the one that tried again.
    """
    if workers == 0:
        for task in tasks:
            yield function(task, lambda: on_progress(1))
        return
    waiting = deque(_Attempt(task) for task in tasks)
    pool = [_Worker(function) for _ in range(min(workers, len(tasks)))]
    try:
        while waiting or any(worker.attempt for worker in pool):
            for worker in pool:
                if worker.attempt is None and waiting:
                    worker.start(waiting.popleft())
            wait([worker.connection for worker in pool if worker.attempt], timeout=_REPORT_S)
            for index, worker in enumerate(pool):
                yield from worker.receive(on_progress)
                if worker.lost:
                    on_progress(-worker.lost.progress)
                    waiting.appendleft(worker.lost.again(worker.process.exitcode))
                    worker.end()
                    pool[index] = _Worker(function)
    finally:
        for worker in pool:
            worker.end()


@dataclass(slots=True)
class _Attempt:
    """A task, how often it was tried, and its progress in the present try."""

    task: Any
    number: int = 1
    progress: int = 0

    def again(self, exit_code: int | None) -> "_Attempt":
        if self.number == _MAX_ATTEMPTS:
            raise WorkerError(
                f"a conversion worker died twice over the same shard (exit code {exit_code}; -9 is killed, "
                f"often for want of memory); finished shards are kept: run the same command again, "
                f"with fewer --workers if memory was short"
            )
        return _Attempt(self.task, self.number + 1)


@dataclass(slots=True)
class _Worker:
    """A process that runs one task at a time; `lost` is the one that it died over."""

    function: Callable[..., Any]
    attempt: _Attempt | None = None
    lost: _Attempt | None = None
    process: SpawnProcess = field(init=False)
    connection: "Connection[Any, Any]" = field(init=False)

    def __post_init__(self) -> None:
        # spawn: forking a process that holds threads, as one with torch does, can deadlock
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.function), daemon=True)
        with _without_sigint():
            self.process.start()
        theirs.close()  # so that reading fails once the worker is gone

    def start(self, attempt: _Attempt) -> None:
        self.attempt = attempt
        with suppress(OSError):  # it is dead: `receive` finds that out
            self.connection.send(attempt.task)

    def receive(self, on_progress: Callable[[int], None]) -> Iterator[Any]:
        """Take what the worker sent: progress is passed on, a result yielded, an error raised."""
        try:
            while self.attempt is not None and self.connection.poll():
                kind, content = self.connection.recv()
                if kind == "progress":
                    self.attempt.progress += content
                    on_progress(content)
                    continue
                self.attempt = None
                if kind == "error":
                    raise content
                yield content
        except (EOFError, ConnectionError):  # its end of the connection closed: it is dead
            self.process.join()
            self.attempt, self.lost = None, self.attempt

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


@contextmanager
def _without_sigint() -> Iterator[None]:
    """Block SIGINT, in what is started in the block for good: the parent ends the run on Ctrl-C."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: "Connection[Any, Any]", function: Callable[..., Any]) -> None:
    """Run the tasks that the parent sends, until it is gone."""
    pending = 0
    reported_s = time.monotonic()

    def tick() -> None:
        nonlocal pending, reported_s
        pending += 1
        if time.monotonic() - reported_s >= _REPORT_S:
            connection.send(("progress", pending))
            pending, reported_s = 0, time.monotonic()

    try:
        while True:
            task = connection.recv()
            try:
                result = ("result", function(task, tick))
            except BrokenPipeError:
                raise
            except Exception as error:
                result = ("error", error)
            connection.send(("progress", pending))
            pending = 0
            connection.send(result)
    except (EOFError, OSError):
        return  # the parent is gone, and whoever runs the same command again does this task
