"""A process that does tasks for this one, over a pipe.

It writes to shared memory which unit of its task it is about to do, so that the one that killed it is known.
"""

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from precache.engines.attempts import Advanced, Attempt, Event, Finished, Loss, Lost, Ticks
from precache.errors import SettingError, WorkerError

REPORT_S = 0.1
"""How often a worker reports its progress."""
_NO_UNIT = -1


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
            # On Ctrl-C the parent ends the run. NumPy's threads would only idle.
            with blocked(signal.SIGINT), _environment(OPENBLAS_NUM_THREADS="1"):
                self._process.start()
        except OSError as error:
            self.connection.close()
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
