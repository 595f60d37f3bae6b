"""The engine `local`: processes of this machine, or the calling one; and the loop that every engine runs.

The loop hands out tasks, passes progress on, and tries a task again whose worker died. A worker may die over
a picture: one that takes all memory, or that makes a decoder crash. So a task says which unit it begins, in
memory that outlives the worker. A unit over which two workers died is left out, the rest of its task is done.
"""

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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Protocol, TypeVar

from precache.errors import SettingError, WorkerError, check_open_files, check_range
from precache.reporting import Progress

Task = TypeVar("Task")
_OF_CALLER = "_precache_of_caller"


KILLED = "killed the process that decoded it, twice; perhaps memory ran out"
"""The reason for which a picture in `Ticks.fatal` is rejected."""

# A task is given up after more deaths of its workers than this, not counting those over units that are left
# out for it; and at most so many units of it are left out.
_MAX_DEATHS = 2
_MAX_FATAL = 16


REPORT_S = 0.1
"""How often a worker reports its progress."""
_NO_UNIT = -1


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


class Loss(Enum):
    """What happened to the worker of a task that has no result."""

    WORKER = "its worker died"
    NODE = "its Ray worker, or the node of it, died"
    MEMORY = "Ray killed its worker to free memory"
    OTHER_TASK = "its worker died over another task"


_MAX_LOSSES = {Loss.NODE: 5, Loss.MEMORY: 2}


@dataclass(slots=True, eq=False)
class Attempt:
    """A task, and its failed tries so far.

    Attributes:
        done: units, in the present try.
        losses: how often it was lost, by what happened.
        deaths: how often a worker died over each unit; over None where it is not known which.
        fatal: units that two workers died over.
    """

    task: Any
    done: int = 0
    losses: Counter[Loss] = field(default_factory=Counter)
    deaths: Counter[int | None] = field(default_factory=Counter)
    fatal: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        """What errors call the task: its `name`, where it has one."""
        name = str(getattr(self.task, "name", self.task))
        return name if len(name) <= 100 else f"{name[:99]}…"

    def lose(self, loss: Loss, unit: int | None, detail: str) -> None:
        """Note that it was lost over `unit`; WorkerError with the `detail` if another try makes no sense."""
        self.losses[loss] += 1
        if loss is Loss.WORKER:
            self.deaths[unit] += 1
            if unit is not None and self.deaths[unit] == 2 and len(self.fatal) < _MAX_FATAL:
                self.fatal |= {unit}
                return
            others = sum(times for unit, times in self.deaths.items() if unit not in self.fatal)
            is_last = self.deaths[unit] > 1 or others > _MAX_DEATHS
        else:
            is_last = self.losses[loss] == _MAX_LOSSES.get(loss)
        if is_last:
            raise WorkerError(
                f"{self.name}: {loss.value} {self.losses[loss]} times ({detail}); run the same command "
                f"again, with fewer --workers if memory is short: a conversion continues where it stopped"
            )


class Advanced(NamedTuple):
    """So many more units are done."""

    attempt: Attempt
    units: int


class Finished(NamedTuple):
    """A task is done, and this is what `finish` returned."""

    attempt: Attempt
    result: Any


class Lost(NamedTuple):
    """A task was lost, over this unit if that is known; `detail` is for the message."""

    attempt: Attempt
    loss: Loss
    unit: int | None = None
    detail: str = ""


Event = Advanced | Finished | Lost


class Pool(Protocol):
    """The workers of an engine."""

    def has_room(self) -> bool:
        """Whether a worker is free for another task."""

    def is_busy(self) -> bool:
        """Whether it has a task that is neither finished nor lost."""

    def start(self, attempt: Attempt) -> None:
        """Start a task on a free worker."""

    def receive(self) -> Iterator[Event]:
        """Wait a moment for what happens to tasks; raises what a task raised."""

    def end(self) -> None:
        """Kill what runs; may be called again."""


def run_all(
    pool: Pool, tasks: Iterable[Any], on_progress: Callable[[int], None]
) -> Generator[Any, None, None]:
    """Yield what `pool` makes of each task; see `precache.engines.run`."""
    waiting = map(Attempt, tasks)
    again: deque[Attempt] = deque()
    try:
        while True:
            while pool.has_room() and (attempt := again.popleft() if again else next(waiting, None)):
                pool.start(attempt)
            if not pool.is_busy():
                return
            for event in pool.receive():
                attempt = event.attempt
                if isinstance(event, Finished):
                    yield event.result
                    continue
                units = event.units if isinstance(event, Advanced) else -attempt.done
                attempt.done += units
                on_progress(units)
                if isinstance(event, Lost):
                    attempt.lose(event.loss, event.unit, event.detail)
                    again.append(attempt)
    finally:
        pool.end()


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


class Worker:
    """A process that works on one task, while it may still finish the one before.

    Attributes:
        attempts: what it has, oldest first.
        is_free: whether it takes another task.
        is_dead: whether it ended by itself.
    """

    def __init__(self, function: Callable[..., Any], finish: Callable[..., Any]) -> None:
        self.attempts: deque[Attempt] = deque()
        self.is_free, self.is_dead = True, False
        method = "fork" if _may_fork() else "spawn"
        context: Any = multiprocessing.get_context(method)
        work = (function, finish) if method == "fork" else _packed((function, finish))
        self.connection: Connection[Any, Any]
        self.connection, theirs = context.Pipe()
        # shared memory outlives the worker, and writing to it costs no system call
        self._unit = context.RawValue("q", _NO_UNIT)
        arguments = (theirs, self._unit, work)
        self._process: BaseProcess = context.Process(target=_serve, args=arguments, daemon=True)
        try:
            # On Ctrl-C the parent ends the run. NumPy's threads would only idle. A random.py in the working
            # folder is not ours to import; what the source needs is found, for the path is the parent's.
            with blocked(signal.SIGINT), environment_with(OPENBLAS_NUM_THREADS="1", PYTHONSAFEPATH="1"):
                self._process.start()
        except OSError as error:
            self.connection.close()
            check_open_files(error, error.filename)
            raise WorkerError(
                f"no worker process can be started ({error.strerror or error}); run the same command again "
                f"with fewer --workers; 0 needs none"
            ) from error
        finally:
            theirs.close()  # so that reading fails once the worker is gone

    def start(self, attempt: Attempt) -> None:
        """Send it a task, of which it skips the fatal units."""
        self.attempts.append(attempt)
        self.is_free = False
        self._unit.value = _NO_UNIT
        with suppress(OSError):  # it is dead: `receive` finds that out
            self.connection.send((attempt.task, attempt.fatal))

    def receive(self) -> Iterator[Event]:
        """What happened to its tasks; raises what one of them raised."""
        while self.attempts and (message := self._next_message()) is not None:
            kind, content = message
            if kind == "progress":
                yield Advanced(self.attempts[-1], content)
            elif kind == "free":
                self.is_free = True
            elif kind == "error":
                raise content
            else:
                yield Finished(self.attempts.popleft(), content)
        if self.is_dead:
            yield from self._lose()

    def _next_message(self) -> tuple[str, Any] | None:
        try:
            return self.connection.recv() if self.connection.poll() else None
        except (EOFError, OSError):  # its end of the connection closed, perhaps in the middle of a message
            self.is_dead = True
            return None

    def _lose(self) -> Iterator[Event]:
        self._process.join()
        how = f"exit code {self._process.exitcode}; -9 means killed, often because memory ran out"
        unit = None if self._unit.value == _NO_UNIT else int(self._unit.value)
        while self.attempts:
            # it died over the last one, not over what it was still finishing
            loss = Loss.WORKER if len(self.attempts) == 1 else Loss.OTHER_TASK
            yield Lost(self.attempts.popleft(), loss, unit, how)

    def end(self) -> None:
        """Kill it if it lives; may be called again."""
        if not self.connection.closed:
            self._process.kill()
            self._process.join()
            self._process.close()
            self.connection.close()


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
def environment_with(**variables: str) -> Iterator[None]:
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


class _ParentGone(BaseException):
    """The parent process has ended: the result of the task is not needed."""


def _serve(
    connection: "Connection[Any, Any]",
    unit: Any,
    work: tuple[Callable[..., Any], Callable[..., Any]] | bytes,
) -> None:
    """Run the tasks that the parent sends, until it is gone.

    Args:
        work: `function` and `finish`, as they are in a fork, else packed.
    """
    if not isinstance(work, bytes):
        _drop_inherited(connection.fileno())
    tick = _PipeTicks(connection, unit)
    with ThreadPoolExecutor(1) as finisher, suppress(_ParentGone):
        try:
            function, finish = pickle.loads(work) if isinstance(work, bytes) else work
        except Exception as error:  # unpacking runs other people's code
            tick.send("error", cannot_be_sent(error, "worker processes", _REMEDY))
            return
        finishing: Future[None] | None = None
        while True:
            task = tick.receive()
            try:
                produced = function(task, tick)
            except Exception as error:
                tick.send("error", sendable(error))
                return
            unit.value = _NO_UNIT
            if finishing is not None:
                finishing.result()  # one at a time: a finished shard and the next one are memory enough
            tick.send("free")
            finishing = finisher.submit(_finish, tick, finish, produced)


_REMEDY = "use workers=0, or define its class at the top of a module"


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


def _finish(tick: "_PipeTicks", finish: Callable[..., Any], produced: Any) -> None:
    try:
        result = finish(produced)
    except Exception as error:
        tick.send("error", sendable(error))
    else:
        tick.send("result", result)


def sendable(error: Exception) -> Exception:
    """`error`, or one with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return WorkerError(f"{type(error).__name__} in a worker: {error}")
    return error


def _drop_inherited(connection: int) -> None:
    """Drop what a fork inherits: the handler of SIGTERM, and open files but the standard ones and this one.

    A worker that held the parent's ends of the pipes open would never see that the parent has ended.
    """
    gc.freeze()  # the parent's objects are not ours to collect
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.closerange(3, connection)
    os.closerange(connection + 1, os.sysconf("SC_OPEN_MAX"))


class _PipeTicks(Ticks):
    """The worker's end of the pipe, used by two threads; progress is sent at most every `REPORT_S`.

    Args:
        unit: in shared memory, the unit that is about to be done.
    """

    def __init__(self, connection: "Connection[Any, Any]", unit: Any) -> None:
        self._connection, self._unit = connection, unit
        self._lock = threading.Lock()
        self._pending, self._reported_s = 0, time.monotonic()

    def receive(self) -> Any:
        """The next task; from then on `fatal` is of this one."""
        try:
            task, self.fatal = self._connection.recv()
        except (EOFError, OSError) as error:
            raise _ParentGone from error
        return task

    def begin(self, unit: int) -> None:
        self._unit.value = unit

    def __call__(self) -> None:
        self._pending += 1
        if time.monotonic() - self._reported_s >= REPORT_S:
            self._report()

    def send(self, kind: str, content: Any = None) -> None:
        if kind == "free":  # the task's last progress comes before the next task's first
            self._report()
        try:
            with self._lock:
                self._connection.send((kind, content))
        except OSError as error:
            raise _ParentGone from error

    def _report(self) -> None:
        self.send("progress", self._pending)
        self._pending, self._reported_s = 0, time.monotonic()
