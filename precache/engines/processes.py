"""The engine `local`: processes of this machine, or the calling one.

A worker may die over a picture: one that takes all memory, or that makes a decoder crash. So a task says
which unit it begins, in memory that outlives the worker, and is tried again. A unit over which two workers
died is left out, the rest of its task is done. The engine `ray` finds such a unit by this one, on the node.

Why no `concurrent.futures.ProcessPoolExecutor`: where a worker is killed while it sends a result, that waits
for the rest of the result forever; and when one worker dies, it ends the others too, so that the tasks of all
are done again. Here each worker has a pipe of its own, and the end of the pipe says that the worker is gone.
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

from precache.errors import SettingError, WorkerError, check_open_files, check_range, os_reason
from precache.reporting import Progress

Task = TypeVar("Task")
_OF_CALLER = "_precache_of_caller"


KILLED = "killed the process that decoded it, twice; perhaps memory ran out"
"""The reason for which a picture in `Ticks.fatal` is rejected."""

# A task is given up after more deaths of its workers than this, not counting those over units that are left
# out for it; and at most so many units of it are left out.
_MAX_DEATHS = 2
_MAX_FATAL = 16


_REPORT_S = 0.1  # how often progress is reported
_NO_UNIT = -1
_REMEDY = "use workers=0, or define its class at the top of a module"


def available_cpus() -> int:
    """CPUs that this process may use (its affinity mask where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_count(workers: int | None, least: int = 0) -> int:
    """`workers`, or one per CPU for None; SettingError unless it is `least` or more."""
    if workers is None:
        return available_cpus()
    try:
        return check_range("workers", workers, least)
    except SettingError as error:
        none = "0 works in this process; " if least == 0 else ""
        raise SettingError(f"{error}; {none}the default is one per CPU ({available_cpus()})") from None


def progress_counter(on_progress: Progress, total: int, done: int = 0) -> Callable[[int], None]:
    """For `run`: turns units done since the last call into calls of `on_progress(done, total)`."""
    on_progress = mark_callback_errors(on_progress)

    def report(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, total)

    return report


def mark_callback_errors(callback: Callable[..., None]) -> Callable[..., None]:
    """`callback`, wrapped so that `is_callback_error` recognises what it raises."""

    def call(*arguments: Any) -> None:
        try:
            callback(*arguments)
        except Exception as error:
            error.__dict__[_OF_CALLER] = True
            raise

    return call


def is_callback_error(error: BaseException) -> bool:
    """Whether a function of the caller raised `error`: it is passed on as it is."""
    return _OF_CALLER in error.__dict__


def unchanged(produced: Any) -> Any:
    """For `finish`, where there is nothing to finish."""
    return produced


def no_check(node: str) -> None:
    """A check of nodes that accepts every one."""


@dataclass(slots=True)
class Nodes:
    """What an engine needs that runs on other machines.

    Attributes:
        check: called with the name of a node, on it, before its first task: raises what is wrong with it.
        units: by the names of nodes, the units that each has done; filled by the engine.
    """

    check: Callable[[str], None]
    units: dict[str, int] = field(default_factory=dict)
    _start_s: float = field(default_factory=time.perf_counter)

    @property
    def units_per_s(self) -> dict[str, float]:
        """`units` over the time since this was made."""
        elapsed_s = time.perf_counter() - self._start_s
        return {name: units / elapsed_s for name, units in self.units.items()}


class Ticks:
    """What `function` of `run` reports its progress to; it may number its units as it likes.

    Attributes:
        fatal: units over which two workers died: to be left out.
    """

    fatal: frozenset[int] = frozenset()

    def begin(self, unit: int) -> None:
        """Note which unit comes next: if the worker dies, that unit is to blame."""

    def __call__(self) -> None:
        """Count one more unit as done."""


@dataclass(slots=True, eq=False)
class _Attempt:
    """A task, and over which of its units workers have died.

    Attributes:
        deaths: how often over each unit; over None where it is not known which.
        fatal: units over which two died.
    """

    task: Any
    deaths: Counter[int | None] = field(default_factory=Counter)
    fatal: frozenset[int] = frozenset()

    def blame(self, unit: int | None, how: str) -> None:
        """Note that a worker died over `unit`, and `how`; WorkerError if another try makes no sense."""
        self.deaths[unit] += 1
        if unit is not None and self.deaths[unit] == 2 and len(self.fatal) < _MAX_FATAL:
            self.fatal |= {unit}
            return
        others = sum(times for unit, times in self.deaths.items() if unit not in self.fatal)
        if self.deaths[unit] > 1 or others > _MAX_DEATHS:
            raise given_up(self.task, "its worker died", sum(self.deaths.values()), how)


def given_up(task: Any, what: str, times: int, detail: str) -> WorkerError:
    """The error for a task to which `what` happened too often."""
    return WorkerError(
        f"{name_of(task)}: {what} {times} times ({detail}); run the same command again, with fewer --workers "
        f"if memory is short: a conversion continues where it stopped"
    )


def name_of(task: Any) -> str:
    """What errors call a task: its `name`, where it has one."""
    name = str(getattr(task, "name", task))
    return name if len(name) <= 100 else f"{name[:99]}…"


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

    `function` calls `tick()` once per unit of progress; `on_progress` gets the units done since its last
    call, a negative number where those of a dead worker are done again. `workers=0` runs all in this
    process. An exception of any of them is raised here. Leaving the iterator, by an exception or by closing
    it, ends the workers at once.

    A task whose worker died is tried again. If `function` calls `tick.begin(unit)` before each unit, a
    unit over which a second worker dies is in `tick.fatal` from then on. A death in `finish` is no unit's
    fault.

    Args:
        tasks: taken one by one, as workers ask for them; errors name one by its `name`, if it has one.
        nodes: for engines that have some; this one has none.

    Raises:
        WorkerError: a task's workers died, and not over the same unit.
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
    waiting = map(_Attempt, tasks)
    again: deque[_Attempt] = deque()
    idle: list[_Worker] = []
    busy: list[_Worker] = []
    answers: list[_Answer] = []
    try:
        while True:
            while len(busy) < workers and (attempt := again.popleft() if again else next(waiting, None)):
                busy.append(idle.pop() if idle else _Worker(function, finish))
                busy[-1].start(attempt)
            for answer in answers:  # only now, so that no worker waits for what is done with it
                if answer.error is not None:
                    raise answer.error
                yield answer.result
            if not busy:
                return
            wait([worker.connection for worker in busy], _REPORT_S)
            answers = []
            for worker in list(busy):
                received = worker.receive()
                if units := worker.new_units():
                    on_progress(units)
                if worker.is_dead:
                    busy.remove(worker)
                    worker.attempt.blame(worker.unit, worker.end())
                    again.append(worker.attempt)
                elif received is not None:
                    busy.remove(worker)
                    idle.append(worker)
                    answers.append(received)
    finally:
        for worker in (*busy, *idle):
            worker.end()


class _CallerTicks(Ticks):
    """Progress of tasks that the calling process does itself."""

    def __init__(self, on_progress: Callable[[int], None]) -> None:
        self._on_progress = on_progress

    def __call__(self) -> None:
        self._on_progress(1)


class _Answer(NamedTuple):
    """What comes of a task: `error`, or what `finish` returned."""

    result: Any = None
    error: Exception | None = None


class _Shared(ctypes.Structure):
    """How far a worker is, in memory that outlives it; writing to it costs no system call."""

    _fields_ = (("unit", ctypes.c_longlong), ("done", ctypes.c_longlong))
    unit: int
    done: int


class _Worker:
    """A process that does one task after another.

    Attributes:
        attempt: the task that it does, or did last.
        connection: can be read as soon as there is an answer, or the process is dead.
        is_dead: whether it ended by itself.
    """

    attempt: _Attempt
    connection: "Connection[Any, Any]"

    def __init__(self, function: Callable[..., Any], finish: Callable[..., Any]) -> None:
        self.is_dead = False
        self._reported = 0
        method = "fork" if _may_fork() else "spawn"
        context: Any = multiprocessing.get_context(method)
        work = (function, finish) if method == "fork" else _packed((function, finish))
        try:
            self._shared = context.RawValue(_Shared)
            self.connection, theirs = context.Pipe()
            arguments = (theirs, self._shared, work)
            self._process: BaseProcess = context.Process(target=_serve, args=arguments, daemon=True)
            try:
                # On Ctrl-C the parent ends the run. NumPy's threads would only idle. A random.py in the
                # working folder is not ours to import; what the source needs is found, for the path is the
                # parent's.
                if method == "spawn":
                    resource_tracker.ensure_running()  # unblocks SIGINT, where the first worker starts it
                with blocked(signal.SIGINT), set_environment(OPENBLAS_NUM_THREADS="1", PYTHONSAFEPATH="1"):
                    self._process.start()
            except BaseException:
                self.connection.close()
                raise
            finally:
                theirs.close()  # so that reading fails once the worker is gone
        except OSError as error:
            check_open_files(error, error.filename)
            raise WorkerError(
                f"no worker process can be started ({os_reason(error)}); run the same command again "
                f"with fewer --workers; 0 needs none"
            ) from error

    @property
    def unit(self) -> int | None:
        """The unit that it is at, if that is known."""
        return None if self._shared.unit == _NO_UNIT else self._shared.unit

    def start(self, attempt: _Attempt) -> None:
        """Send it a task, of which it skips the fatal units."""
        self.attempt = attempt
        self._reported = 0
        self._shared.unit, self._shared.done = _NO_UNIT, 0
        try:
            self.connection.send((attempt.task, attempt.fatal))
        except OSError:
            pass  # it is dead: `receive` finds that out
        except Exception as error:  # packing runs other people's code
            raise cannot_be_sent(error, "worker processes", _REMEDY) from error

    def receive(self) -> _Answer | None:
        """The answer, if there is one."""
        try:
            if self.connection.poll():
                answer: _Answer = self.connection.recv()
                return answer
            # asked for, too: a process that it forked may hold its end of the connection open
            self.is_dead = not self._process.is_alive() and not self.connection.poll()
        except (EOFError, OSError):  # its end of the connection closed, perhaps in the middle of an answer
            self.is_dead = True
        return None

    def new_units(self) -> int:
        """Units done since the last call; once it is dead, none of its task are."""
        done = 0 if self.is_dead else self._shared.done
        units = done - self._reported
        self._reported = done
        return units

    def end(self) -> str:
        """Kill it if it lives; how it ended."""
        self._process.kill()
        self._process.join()
        how = f"exit code {self._process.exitcode}; -9 means killed, often because memory ran out"
        self._process.close()
        self.connection.close()
        return how


def _may_fork() -> bool:
    """Whether a fork is safe; it is ready at once, while a new process has to import NumPy first.

    It is not where a thread of this process may hold a lock, which its copy would wait for: obstore, Ray and
    torch start such threads.
    """
    threads = {"obstore", "ray", "torch"} & sys.modules.keys()
    return sys.platform == "linux" and threading.active_count() == 1 and not threads


@contextmanager
def blocked(*signals: signal.Signals) -> Iterator[None]:
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


def _packed(work: Any) -> bytes:
    """`work` as bytes, which we unpack in the new process: so an error there is reported in one line."""
    try:
        return pickle.dumps(work)
    except Exception as error:  # packing runs other people's code
        raise cannot_be_sent(error, "worker processes", _REMEDY) from error


def cannot_be_sent(error: Exception, where: str, remedy: str) -> SettingError:
    """The error for a source that cannot be pickled."""
    reason = " ".join(str(error).split())[:200]
    return SettingError(f"the source cannot be sent to {where} ({reason}); {remedy}")


def sendable(error: Exception) -> Exception:
    """`error`, or one with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return WorkerError(f"{type(error).__name__} in a worker: {error}")
    return error


def _serve(
    connection: "Connection[Any, Any]",
    shared: _Shared,
    work: tuple[Callable[..., Any], Callable[..., Any]] | bytes,
) -> None:
    """Do the tasks that the parent sends, until it is gone.

    Args:
        work: `function` and `finish`, as they are in a fork, else packed.
    """
    parent: Any = multiprocessing.parent_process()
    if not isinstance(work, bytes):
        _drop_inherited({connection.fileno(), parent.sentinel})
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    try:
        function, finish = pickle.loads(work) if isinstance(work, bytes) else work
    except Exception as error:  # unpacking runs other people's code
        connection.send(_Answer(error=cannot_be_sent(error, "worker processes", _REMEDY)))
        return
    with suppress(EOFError, OSError):  # the parent is gone
        while True:
            task, fatal = connection.recv()
            connection.send(_do(task, _SharedTicks(shared, fatal), function, finish))


def _do(task: Any, tick: "_SharedTicks", function: Callable[..., Any], finish: Callable[..., Any]) -> _Answer:
    try:
        produced = function(task, tick)
        tick.begin(_NO_UNIT)
        return _Answer(finish(produced))
    except Exception as error:
        return _Answer(error=sendable(error))


def _drop_inherited(needed: set[int]) -> None:
    """Drop what a fork inherits: the handler of SIGTERM, and open files but the standard ones and `needed`.

    A pipe or a lock of the parent would else stay open as long as a worker lives.
    """
    gc.freeze()  # the parent's objects are not ours to collect
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    start = 3
    for descriptor in (*sorted(needed), os.sysconf("SC_OPEN_MAX")):
        os.closerange(start, descriptor)
        start = descriptor + 1


def _end_after(parent: Any) -> None:
    """End this process as soon as its parent is gone, whatever it is doing: nothing more is to be written."""
    while os.getppid() == parent.pid:
        parent.join(_REPORT_S)  # not without end: another child of the parent may hold this pipe open
    os._exit(1)


class _SharedTicks(Ticks):
    """Progress of a worker's task; the parent reads it in `shared`."""

    def __init__(self, shared: _Shared, fatal: frozenset[int]) -> None:
        self._shared, self.fatal = shared, fatal

    def begin(self, unit: int) -> None:
        self._shared.unit = unit

    def __call__(self) -> None:
        self._shared.done += 1
