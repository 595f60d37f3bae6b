"""Where a plan runs: in processes of this machine, or in the calling one."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from precache.errors import WorkerError

Task = TypeVar("Task")
_REPORT_S = 0.1
_MAX_ATTEMPTS = 2


def available_cpus() -> int:
    """CPUs that this process may use (its affinity mask where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def counted(on_progress: Callable[[int, int], None], total: int, done: int = 0) -> Callable[[int], None]:
    """For `run`: turns units done since the last call into calls of `on_progress(done, total)`."""

    def report(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, total)

    return report


def _unchanged(produced: Any) -> Any:
    return produced


def run(
    function: Callable[[Task, Callable[[], None]], Any],
    tasks: Iterable[Task],
    workers: int,
    on_progress: Callable[[int], None],
    *,
    finish: Callable[[Any], Any] = _unchanged,
) -> Generator[Any, None, None]:
    """Yield `finish(function(task, tick))` for each task as it is done, in any order.

    `function` is for what needs the CPU, `finish` for what waits for the disk: it runs in a thread of
    its worker, while the next task's `function` begins. `function` calls `tick()` once per unit of
    progress; `on_progress` gets the units done since its last call, a negative number where a dead
    worker's are done again. `workers=0` runs all in this process. An exception of either is raised
    here. Leaving the iterator, by an exception or by closing it, ends the workers at once.

    Args:
        tasks: taken one by one, as workers ask for them.

    Raises:
        WorkerError: a task's worker died, and so did the one that tried again.
    """
    if workers == 0:
        for task in tasks:
            yield finish(function(task, lambda: on_progress(1)))
        return
    waiting = (_Attempt(task) for task in tasks)
    retries: deque[_Attempt] = deque()
    pool = [_Worker(function, finish) for _ in range(workers)]
    try:
        while True:
            for worker in pool:
                if worker.free and (attempt := retries.popleft() if retries else next(waiting, None)):
                    worker.start(attempt)
            busy = [worker.connection for worker in pool if worker.attempts]
            if not busy:
                return
            wait(busy, timeout=_REPORT_S)
            for index, worker in enumerate(pool):
                yield from worker.receive(on_progress)
                if worker.dead:
                    for attempt in worker.attempts:
                        on_progress(-attempt.progress)
                        # what it was finishing besides is not what it died over
                        died_over = attempt is worker.attempts[-1]
                        retries.append(attempt.again(died_over, worker.process.exitcode))
                    worker.end()
                    pool[index] = _Worker(function, finish)
    finally:
        for worker in pool:
            worker.end()


@dataclass(slots=True)
class _Attempt:
    """A task, how often it was tried, and its progress in the present try."""

    task: Any
    number: int = 1
    progress: int = 0

    def again(self, died_over: bool, exit_code: int | None) -> "_Attempt":
        """The next try; WorkerError if a worker has died over the task before."""
        if died_over and self.number == _MAX_ATTEMPTS:
            raise WorkerError(
                f"a worker died twice over the same pictures (exit code {exit_code}; -9 is killed, often "
                f"for want of memory); run the same command again, with fewer --workers if memory was "
                f"short: a conversion goes on where it was"
            )
        return _Attempt(self.task, self.number + died_over)


@dataclass(slots=True)
class _Worker:
    """A process that works on one task, while it may still finish the one before.

    Attributes:
        attempts: what it works on, oldest first.
        free: whether it takes another task.
        dead: whether it ended by itself; `attempts` are then lost.
    """

    function: Callable[..., Any]
    finish: Callable[..., Any]
    attempts: deque[_Attempt] = field(default_factory=deque)
    free: bool = True
    dead: bool = False
    process: BaseProcess = field(init=False)
    connection: "Connection[Any, Any]" = field(init=False)

    def __post_init__(self) -> None:
        method = "fork" if _may_fork() else "spawn"
        context: Any = multiprocessing.get_context(method)
        self.connection, theirs = context.Pipe()
        arguments = (theirs, self.function, self.finish, method == "fork")
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        # On Ctrl-C the parent ends the run. NumPy's threads would only idle.
        with blocked(signal.SIGINT), _environment(OPENBLAS_NUM_THREADS="1"):
            self.process.start()
        theirs.close()  # so that reading fails once the worker is gone

    def start(self, attempt: _Attempt) -> None:
        self.attempts.append(attempt)
        self.free = False
        with suppress(OSError):  # it is dead: `receive` finds that out
            self.connection.send(attempt.task)

    def receive(self, on_progress: Callable[[int], None]) -> Iterator[Any]:
        """Take what the worker sent: progress is passed on, a result yielded, an error raised."""
        try:
            while self.attempts and self.connection.poll():
                kind, content = self.connection.recv()
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
        except (EOFError, ConnectionError):  # its end of the connection closed: it is dead
            self.process.join()
            self.dead = True

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


def _may_fork() -> bool:
    """Whether a fork is as safe as a new process; it is ready at once, where that has to import NumPy.

    A thread of this process may hold a lock that its copy would wait for; torch brings such threads.
    """
    return sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules


@contextmanager
def blocked(*signals: signal.Signals) -> Iterator[None]:
    """Let `signals` wait until the end of the block; in what is started in the block, for good."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables for what is started in the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(
    connection: "Connection[Any, Any]",
    function: Callable[..., Any],
    finish: Callable[..., Any],
    forked: bool,
) -> None:
    """Run the tasks that the parent sends, until it is gone."""
    if forked:
        _let_go(connection.fileno())
    link = _Link(connection)
    with ThreadPoolExecutor(1) as finisher, suppress(EOFError, OSError):  # the parent is gone: somebody
        finishing: Future[None] | None = None  # runs the same command again, and does this task
        while True:
            task = connection.recv()
            try:
                produced = function(task, link.tick)
            except BrokenPipeError:
                raise
            except Exception as error:
                link.send("error", error)
                return
            if finishing is not None:
                finishing.result()  # at most one is under way: what they hold is not held twice
            link.send("free")
            finishing = finisher.submit(_finish, link, finish, produced)


def _finish(link: "_Link", finish: Callable[..., Any], produced: Any) -> None:
    try:
        result = finish(produced)
    except Exception as error:
        link.send("error", error)
    else:
        link.send("result", result)


def _let_go(kept: int) -> None:
    """Drop what a fork inherits: open files, but for the standard ones and `kept`, and the handler.

    A worker that held the parent's ends of the connections would keep itself and others from seeing
    that the parent is gone.
    """
    gc.freeze()  # the parent's objects are not ours to collect
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


class _Link:
    """The worker's end of the connection, used by two threads; progress goes out in bundles."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._pending = 0
        self._reported_s = time.monotonic()

    def tick(self) -> None:
        self._pending += 1
        if time.monotonic() - self._reported_s >= _REPORT_S:
            self._report()

    def send(self, kind: str, content: Any = None) -> None:
        if kind == "free":  # the task's last progress comes before the next task's first
            self._report()
        with self._lock:
            self._connection.send((kind, content))

    def _report(self) -> None:
        with self._lock:
            self._connection.send(("progress", self._pending))
        self._pending, self._reported_s = 0, time.monotonic()
