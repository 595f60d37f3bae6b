"""The engine `local`: worker processes of this machine, or the calling process.

A picture can kill its worker: one that takes all memory, or that makes a decoder crash. So a task records
which unit it begins, in memory that outlives the worker, and is tried again. A unit that killed two workers
is left out, and the rest of its task is done. The engine `ray` runs this one on the node to find such a unit.

`concurrent.futures.ProcessPoolExecutor` does not do: if a worker is killed while it sends a result, the pool
waits for the rest of the result forever; and when one worker dies, it ends the others too, so that all their
tasks are done again. Here each worker has a pipe of its own, whose end says that the worker is gone.
"""

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

from precache.errors import (
    SettingError,
    WorkerError,
    check_open_files,
    check_range,
    os_reason,
    thread_errors,
)
from precache.reporting import Progress

Task = TypeVar("Task")
_CALLBACK_MARK = "_precache_callback_error"

KILLED = "killed the process that decoded it, twice; perhaps memory ran out"
"""Reason in the list of rejects of a picture that was in `Ticks.fatal`."""

# A task fails after more deaths of its workers than this, not counting deaths over units that are left out.
_MAX_DEATHS = 2
_MAX_FATAL = 16  # units of a task that are left out, at most

_REPORT_S = 0.1  # how often progress is reported
_NO_UNIT = -1
_REMEDY = (
    "use workers=0, or define its class at the top of a module, and leave open files out in __getstate__"
)


def available_cpus() -> int:
    """Return the number of CPUs that this process may use, by its affinity mask where the system has one."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_count(workers: int | None, least: int = 0) -> int:
    """Return `workers`, or one per CPU for None; SettingError unless it is `least` or more."""
    if workers is None:
        return available_cpus()
    try:
        return check_range("workers", workers, least)
    except SettingError as error:
        zero = "0 works in this process; " if least == 0 else ""
        raise SettingError(
            str(error), remedy=f"{zero}the default is one per CPU ({available_cpus()})"
        ) from None


def progress_counter(on_progress: Progress, total: int, done: int = 0) -> Callable[[int], None]:
    """Return the `on_progress` of `run`: it adds up the units done, and calls `on_progress(done, total)`."""
    on_progress = mark_callback_errors(on_progress)

    def report(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, total)

    return report


def mark_callback_errors(callback: Callable[..., None]) -> Callable[..., None]:
    """Return `callback`, wrapped so that `is_callback_error` recognises the errors that it raises."""

    def call(*arguments: Any) -> None:
        try:
            callback(*arguments)
        except Exception as error:
            error.__dict__[_CALLBACK_MARK] = True
            raise

    return call


def is_callback_error(error: BaseException) -> bool:
    """Whether a callback of the caller raised `error`, which is then passed on as it is."""
    return _CALLBACK_MARK in error.__dict__


def identity(result: Any) -> Any:
    """Return `result`: the default of `finish`."""
    return result


def accept_node(node: str) -> None:
    """Accept every node: the default of `Nodes.check`."""


@dataclass(slots=True)
class Nodes:
    """The nodes of an engine that runs on other machines.

    Attributes:
        check: function called with a node's name, on that node, before its first task; raises if the node
            cannot do the tasks.
        units: name of a node -> units that it has done; filled by the engine.
    """

    check: Callable[[str], None]
    units: dict[str, int] = field(default_factory=dict)
    _start_s: float = field(default_factory=time.perf_counter)

    @property
    def units_per_s(self) -> dict[str, float]:
        """Units per second of each node since this object was made."""
        elapsed_s = time.perf_counter() - self._start_s
        return {name: units / elapsed_s for name, units in self.units.items()}


class Ticks:
    """Receiver of the progress of a task, which may number its units as it likes.

    Attributes:
        fatal: units that killed two workers, which the task must leave out.
    """

    fatal: frozenset[int] = frozenset()

    def begin(self, unit: int) -> None:
        """Record which unit comes next, which is to blame if the worker dies."""

    def __call__(self) -> None:
        """Count one more unit as done."""


@dataclass(slots=True, eq=False)
class _RetriedTask:
    """A task, and the deaths of its workers.

    Attributes:
        deaths: unit -> number of workers that died over it; None is an unknown unit.
        fatal: units that killed two workers.
    """

    task: Any
    deaths: Counter[int | None] = field(default_factory=Counter)
    fatal: frozenset[int] = frozenset()

    def blame(self, unit: int | None, exit_status: str) -> None:
        """Record that a worker died over `unit`; WorkerError if another try makes no sense."""
        self.deaths[unit] += 1
        if unit is not None and self.deaths[unit] == 2 and len(self.fatal) < _MAX_FATAL:
            self.fatal |= {unit}
            return
        others = sum(times for unit, times in self.deaths.items() if unit not in self.fatal)
        if self.deaths[unit] > 1 or others > _MAX_DEATHS:
            times = sum(self.deaths.values())
            raise repeated_failure_error(self.task, "its worker died", times, exit_status)


def repeated_failure_error(task: Any, failure: str, times: int, detail: str) -> WorkerError:
    """Return the error for a task that has had a `failure`, such as 'its worker died', too often."""
    return WorkerError(
        f"{task_name(task)}: {failure} {times} times ({detail})",
        remedy="run the same command again, with fewer --workers if memory is short: a conversion continues "
        "where it stopped",
    )


def task_name(task: Any) -> str:
    """Return the name of a task in errors: its `name`, if it has one."""
    name = str(getattr(task, "name", task))
    return name if len(name) <= 100 else f"{name[:99]}…"


def run(
    function: Callable[[Task, Ticks], Any],
    tasks: Iterable[Task],
    workers: int,
    on_progress: Callable[[int], None],
    *,
    finish: Callable[[Any], Any] = identity,
    nodes: Nodes | None = None,
) -> Generator[Any, None, None]:
    """Yield `finish(function(task, tick))` for each task as soon as it is done, in any order.

    `function` calls `tick()` once per unit of progress. Its exceptions and those of `finish` are raised here.
    Leaving the iterator, by an exception or by closing it, ends the workers at once.

    A task whose worker died is tried again. If `function` calls `tick.begin(unit)` before each unit, a
    unit over which a second worker dies is in `tick.fatal` from then on. A death in `finish` is not blamed on
    a unit.

    Args:
        function: does a task, in a worker.
        tasks: taken one by one as workers become free; errors name a task by its `name`, if it has one.
        workers: processes; 0 for the calling process.
        on_progress: called with the units done since its last call; the number is negative when the units
            of a dead worker must be done again.
        finish: turns the result of `function` into that of the task, in the worker.
        nodes: nodes of engines on other machines; not used here.

    Raises:
        WorkerError: the workers of a task died too often, and not over the same unit.
    """
    if workers > 0:
        yield from _run_in_processes(function, tasks, workers, on_progress, finish)
        return
    for task in tasks:
        yield finish(function(task, _CallerTicks(on_progress)))


def _run_in_processes(
    function: Callable[[Task, Ticks], Any],
    tasks: Iterable[Task],
    workers: int,
    on_progress: Callable[[int], None],
    finish: Callable[[Any], Any],
) -> Generator[Any, None, None]:
    new_tasks = map(_RetriedTask, tasks)
    retries: deque[_RetriedTask] = deque()
    idle: list[_Worker] = []
    busy: list[_Worker] = []
    answers: list[_Answer] = []
    try:
        while True:
            while len(busy) < workers:
                task = retries.popleft() if retries else next(new_tasks, None)
                if task is None:
                    break
                worker = idle.pop() if idle else _Worker(function, finish)
                busy.append(worker)
                worker.start(task)
            for answer in answers:  # after the workers have new tasks, so that none waits for the caller
                if answer.error is not None:
                    raise answer.error
                yield answer.result
            if not busy:
                return
            wait([worker.connection for worker in busy], _REPORT_S)
            answers = []
            for worker in list(busy):
                new_answer = worker.receive()
                if units := worker.new_units():
                    on_progress(units)
                if worker.is_dead:
                    busy.remove(worker)
                    worker.task.blame(worker.unit, worker.end())
                    retries.append(worker.task)
                elif new_answer is not None:
                    busy.remove(worker)
                    idle.append(worker)
                    answers.append(new_answer)
    finally:
        for worker in (*busy, *idle):
            worker.end()


class _CallerTicks(Ticks):
    """Progress of tasks that run in the calling process."""

    def __init__(self, on_progress: Callable[[int], None]) -> None:
        self._on_progress = on_progress

    def __call__(self) -> None:
        self._on_progress(1)


class _Answer(NamedTuple):
    """Answer of a worker to a task: the result of `finish`, or the error."""

    result: Any = None
    error: Exception | None = None


class _SharedProgress(ctypes.Structure):
    """Progress of a worker, in memory that outlives it; writing to it costs no system call."""

    _fields_ = (("unit", ctypes.c_longlong), ("done", ctypes.c_longlong))
    unit: int
    done: int


class _Worker:
    """A process that does one task after another.

    Attributes:
        task: the task that it does, or did last.
        connection: pipe that becomes readable when there is an answer, or the process is dead.
        is_dead: whether the process has ended by itself.
    """

    task: _RetriedTask
    connection: "Connection[Any, Any]"

    def __init__(self, function: Callable[..., Any], finish: Callable[..., Any]) -> None:
        self.is_dead = False
        self._reported = 0
        method = "fork" if _may_fork() else "spawn"
        context: Any = multiprocessing.get_context(method)
        # A fork gets a copy, too: its open files would be those of the parent, which has their positions.
        work = _pickle((function, finish))
        try:
            self._shared = context.RawValue(_SharedProgress)
            self.connection, worker_end = context.Pipe()
            arguments = (worker_end, self._shared, work, method == "fork")
            self._process: BaseProcess = context.Process(target=_serve, args=arguments, daemon=True)
            try:
                # SIGINT: on Ctrl-C the parent ends the run. OPENBLAS_NUM_THREADS: NumPy's threads would only
                # idle. PYTHONSAFEPATH: a random.py in the working folder must not be imported; modules of the
                # source are found all the same, because the worker gets the parent's path.
                if method == "spawn":
                    resource_tracker.ensure_running()  # it unblocks SIGINT when it starts, so start it before
                with (
                    block_signals(signal.SIGINT),
                    set_environment(OPENBLAS_NUM_THREADS="1", PYTHONSAFEPATH="1"),
                ):
                    self._process.start()
            except BaseException:
                self.connection.close()
                raise
            finally:
                worker_end.close()  # so that reading fails once the worker is gone
        except OSError as error:
            check_open_files(error, error.filename)
            raise WorkerError(
                f"no worker process can be started ({os_reason(error)})",
                remedy="run the same command again with fewer --workers; 0 needs none",
            ) from error

    @property
    def unit(self) -> int | None:
        """Unit that the worker is at, if it is known."""
        return None if self._shared.unit == _NO_UNIT else self._shared.unit

    def start(self, task: _RetriedTask) -> None:
        """Send a task to the worker, which skips the task's fatal units."""
        self.task = task
        self._reported = 0
        self._shared.unit, self._shared.done = _NO_UNIT, 0
        try:
            self.connection.send((task.task, task.fatal))
        except OSError:
            pass  # the worker is dead, which `receive` will find
        except Exception as error:  # pickling runs other people's code
            raise unpicklable_error(error, "worker processes", _REMEDY) from error

    def receive(self) -> _Answer | None:
        """Return the worker's answer, if there is one, and note whether the worker is dead."""
        try:
            if self.connection.poll():
                answer: _Answer = self.connection.recv()
                return answer
            # the end of the pipe is not enough: a process that the worker forked may hold it open
            self.is_dead = not self._process.is_alive() and not self.connection.poll()
        except (EOFError, OSError):  # the worker's end closed, perhaps in the middle of an answer
            self.is_dead = True
        return None

    def new_units(self) -> int:
        """Return the units done since the last call; once the worker is dead, minus those of its task."""
        done = 0 if self.is_dead else self._shared.done
        units = done - self._reported
        self._reported = done
        return units

    def end(self) -> str:
        """End the process, if it lives, and return its exit status in words."""
        self._process.kill()
        self._process.join()
        code = self._process.exitcode
        meaning = "-9 means killed, often because memory ran out"
        if code == 1:  # an error ended it before it had a task
            meaning = "it has printed why; a script that converts needs 'if __name__ == \"__main__\":'"
        exit_status = f"exit code {code}; {meaning}"
        self._process.close()
        self.connection.close()
        return exit_status


def _may_fork() -> bool:
    """Whether workers may be forked, which is faster than spawning, where they import NumPy first.

    A fork is unsafe if another thread of this process may hold a lock: the copy of the lock would never be
    released. obstore, Ray and torch start such threads.
    """
    has_native_threads = bool({"obstore", "ray", "torch"} & sys.modules.keys())
    return sys.platform == "linux" and threading.active_count() == 1 and not has_native_threads


@contextmanager
def block_signals(*signals: signal.Signals) -> Iterator[None]:
    """Hold `signals` back until the end of the block; processes started in the block never get them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def set_environment(**variables: str) -> Iterator[None]:
    """Set environment variables during the block, for the processes that it starts."""
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


def _pickle(work: Any) -> bytes:
    """Return `work` as bytes, which `_serve` unpickles, so that an error there is reported in one line."""
    try:
        return pickle.dumps(work)
    except Exception as error:  # pickling runs other people's code
        raise unpicklable_error(error, "worker processes", _REMEDY) from error


def unpicklable_error(error: Exception, where: str, remedy: str) -> SettingError:
    """Return the error for a source that cannot be pickled."""
    reason = " ".join(str(error).split())[:200]
    return SettingError(f"the source cannot be sent to {where} ({reason})", remedy=remedy)


def picklable_error(error: Exception) -> Exception:
    """Return `error`, or if it cannot be pickled, a WorkerError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return WorkerError(f"{type(error).__name__} in a worker: {error}")
    return error


def _serve(
    connection: "Connection[Any, Any]",
    shared: _SharedProgress,
    work: bytes,
    is_fork: bool,
) -> None:
    """Run the tasks that the parent sends, until the parent is gone.

    Args:
        connection: the worker's end of the pipe.
        shared: memory for the worker's progress.
        work: `function` and `finish`, pickled.
        is_fork: whether this process is a fork.
    """
    parent: Any = multiprocessing.parent_process()
    if is_fork:
        _drop_inherited({connection.fileno(), parent.sentinel})
    try:
        with thread_errors():
            threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
        function, finish = pickle.loads(work)
    except WorkerError as error:
        connection.send(_Answer(error=error))
        return
    except Exception as error:  # unpickling runs other people's code
        connection.send(_Answer(error=unpicklable_error(error, "worker processes", _REMEDY)))
        return
    with suppress(EOFError, OSError):  # the parent is gone
        while True:
            task, fatal = connection.recv()
            connection.send(_do(task, _SharedTicks(shared, fatal), function, finish))


def _do(task: Any, tick: "_SharedTicks", function: Callable[..., Any], finish: Callable[..., Any]) -> _Answer:
    try:
        result = function(task, tick)
        tick.begin(_NO_UNIT)
        return _Answer(finish(result))
    except Exception as error:
        return _Answer(error=picklable_error(error))


def _drop_inherited(needed: set[int]) -> None:
    """Reset the handler of SIGTERM in a fork, and close its files but the standard ones and `needed`.

    Pipes and locks of the parent would otherwise stay open as long as a worker lives.
    """
    gc.freeze()  # so that the collector does not touch, and so copy, the parent's objects
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    start = 3
    for descriptor in (*sorted(needed), os.sysconf("SC_OPEN_MAX")):
        os.closerange(start, descriptor)
        start = descriptor + 1


def _end_after(parent: Any) -> None:
    """End this process as soon as its parent is gone, so that it writes nothing more."""
    while os.getppid() == parent.pid:
        parent.join(
            _REPORT_S
        )  # with a time limit, because another child of the parent may hold the pipe open
    os._exit(1)


class _SharedTicks(Ticks):
    """Progress of a worker's task, which the parent reads in `shared`."""

    def __init__(self, shared: _SharedProgress, fatal: frozenset[int]) -> None:
        self._shared, self.fatal = shared, fatal

    def begin(self, unit: int) -> None:
        self._shared.unit = unit

    def __call__(self) -> None:
        self._shared.done += 1
