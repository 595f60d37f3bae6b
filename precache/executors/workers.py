"""A process that does tasks for another: how it is started, spoken to and outlived.

It says in shared memory which unit of its task it is about to do, so that the one that killed it is known.
"""

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from precache.errors import SettingError, WorkerError

REPORT_S = 0.1
"""How often a worker reports its progress."""
_NO_UNIT = -1


class Ticks:
    """What `function` of `run` reports its progress to; its units are numbered as it likes.

    Attributes:
        fatal: units over which two workers died: not to be done again, but to be left out.
    """

    fatal: frozenset[int] = frozenset()

    def begin(self, unit: int) -> None:
        """Say which unit is about to be done: if the worker dies, it died over that one."""

    def __call__(self) -> None:
        """Say that one more unit is done."""


KILLED = "killed the process that decoded it, twice; perhaps memory ran out"
"""The reason for which a picture in `Ticks.fatal` is rejected."""


class Worker:
    """A process that works on one task, while it may still finish the one before.

    Attributes:
        dead: whether it ended by itself; what it worked on is then lost.
    """

    def __init__(self, function: Callable[..., Any], finish: Callable[..., Any]) -> None:
        self.dead = False
        method = "fork" if _may_fork() else "spawn"
        context: Any = multiprocessing.get_context(method)
        work = (function, finish) if method == "fork" else _packed((function, finish))
        self.connection: Connection[Any, Any]
        self.connection, theirs = context.Pipe()
        # shared memory outlives the worker, and what it says there costs it no system call
        self._unit = context.RawValue("q", _NO_UNIT)
        arguments = (theirs, self._unit, work)
        self.process: BaseProcess = context.Process(target=_serve, args=arguments, daemon=True)
        try:
            # On Ctrl-C the parent ends the run. NumPy's threads would only idle.
            with blocked(signal.SIGINT), _environment(OPENBLAS_NUM_THREADS="1"):
                self.process.start()
        except OSError as error:
            self.connection.close()
            raise WorkerError(
                f"no worker process can be started ({error.strerror or error}); run the same command again "
                f"with fewer --workers; 0 needs none"
            ) from error
        finally:
            theirs.close()  # so that reading fails once the worker is gone

    @property
    def unit(self) -> int | None:
        """The unit that it has begun last of its task; None if it is at none."""
        return None if self._unit.value == _NO_UNIT else int(self._unit.value)

    def send(self, task: Any, fatal: frozenset[int]) -> None:
        """Give it a task, of which it leaves out the units that are `fatal`."""
        self._unit.value = _NO_UNIT
        with suppress(OSError):  # it is dead: `next_message` finds that out
            self.connection.send((task, fatal))

    def next_message(self) -> tuple[str, Any] | None:
        """What it sent; None if there is nothing yet, or never will be: then it is `dead`.

        That is ("progress", count), ("free", None) once it takes the next task, ("error", exception) or
        ("result", what `finish` returned).
        """
        try:
            return self.connection.recv() if self.connection.poll() else None
        except (EOFError, OSError):  # its end of the connection closed, be it in the middle of a message
            self.process.join()
            self.dead = True
            return None

    def end(self) -> None:
        """Kill it if it lives; may be called again."""
        if not self.connection.closed:
            self.process.kill()
            self.process.join()
            self.process.close()
            self.connection.close()


def _may_fork() -> bool:
    """Whether a fork is as safe as a new process; it is ready at once, where that has to import NumPy.

    A thread of this process may hold a lock that its copy would wait for; torch and obstore bring such ones.
    """
    threads = {"obstore", "torch"} & sys.modules.keys()
    return sys.platform == "linux" and threading.active_count() == 1 and not threads


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


class _ParentGone(BaseException):
    """Nobody listens: somebody runs the same command again, and does this task."""


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
        _let_go(connection.fileno())
    link = _Link(connection)
    with ThreadPoolExecutor(1) as finisher, suppress(_ParentGone):
        try:
            function, finish = pickle.loads(work) if isinstance(work, bytes) else work
        except Exception as error:  # unpacking runs the code of whoever wrote a class
            link.send("error", _not_to_be_sent(error))
            return
        finishing: Future[None] | None = None
        while True:
            task, fatal = link.receive()
            try:
                produced = function(task, _WorkerTicks(link, unit, fatal))
            except Exception as error:
                link.send("error", sendable(error))
                return
            unit.value = _NO_UNIT
            if finishing is not None:
                finishing.result()  # at most one is under way: what they hold is not held twice
            link.send("free")
            finishing = finisher.submit(_finish, link, finish, produced)


def _packed(work: Any) -> bytes:
    """`work` as bytes for a new process: unpacked there by us, what fails is said in one line."""
    try:
        return pickle.dumps(work)
    except Exception as error:  # packing runs the code of whoever wrote a class
        raise _not_to_be_sent(error) from error


def _not_to_be_sent(error: Exception) -> SettingError:
    return SettingError(
        f"what is to be read cannot be sent to worker processes ({' '.join(str(error).split())[:200]}); use "
        f"workers=0, or define its class at the top of a module"
    )


def _finish(link: "_Link", finish: Callable[..., Any], produced: Any) -> None:
    try:
        result = finish(produced)
    except Exception as error:
        link.send("error", sendable(error))
    else:
        link.send("result", result)


def sendable(error: Exception) -> Exception:
    """`error`, or what stands for it if it does not survive the way to the parent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return WorkerError(f"{type(error).__name__} in a worker: {error}")
    return error


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

    def receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise _ParentGone from error

    def tick(self) -> None:
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


class _WorkerTicks(Ticks):
    def __init__(self, link: _Link, unit: Any, fatal: frozenset[int]) -> None:
        self.fatal = fatal
        self._link, self._unit = link, unit

    def begin(self, unit: int) -> None:
        self._unit.value = unit

    def __call__(self) -> None:
        self._link.tick()
