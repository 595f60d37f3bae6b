"""Threads that end with whoever uses them, and with the program at the latest.

A thread that is inside torch or DALI while the interpreter is taken down is ended by it as soon as it asks
for the interpreter's lock, and what unwinds its stack then meets C++ that lets nothing through: 'terminate
called without an active exception', exit code 134. So none of ours lives on when that begins:
https://docs.python.org/3/c-api/init.html#c.PyEval_RestoreThread

They are daemons, or a read from a disk that hangs would keep the program for ever: `atexit` waits for them,
for so long and no longer. ThreadPoolExecutor's are waited for without end.

What has to be done when an object goes is done by functions written in C, where it can be: Python's would
take the KeyboardInterrupt of Ctrl-C, and lose it, since what a finaliser raises reaches nobody.
"""

import _thread
import atexit
import logging
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)
_READERS_S, _HELPERS_S = 4.0, 0.5  # for which the program's end waits
_LOOK_S = 1.0  # between looks at whether a thread was started at all
_INTERRUPT_S = 0.002  # behind the end of a finaliser
_exiting = False
_first_at_exit: list[Callable[[], None]] = []
# Kept for the next thread to throw them away: threading's own bookkeeping, in Python, is called by then.
_ended: "deque[EndingThread]" = deque()


class Ending(Exception):
    """The program ends: what is being done for it is not needed any more."""


class EndingThread(threading.Thread):
    """A thread that stops when asked to.

    Attributes:
        inbox: what it waits at; None wakes it.
        stopping: whether it is to end. Not an Event: Ctrl-C may come while that holds its lock.
        helps: others wait for what it does, so that it ends after them.
    """

    def __init__(
        self,
        function: Callable[..., None],
        arguments: tuple[Any, ...],
        inbox: "SimpleQueue[Any]",
        name: str | None = None,
        *,
        helps: bool = False,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._work: tuple[Callable[..., None], tuple[Any, ...]] | None = (function, arguments)
        self._returned: SimpleQueue[None] = SimpleQueue()
        self._begun = self._done = self._joined = False
        self._process = os.getpid()
        self.inbox = inbox
        self.stopping = False
        self.helps = helps

    def start(self) -> None:
        """As a Thread's, which a thread of the system calls: no handler of a signal runs in that.

        What one raises in the midst of it, as of Ctrl-C or of a dead worker, would leave a lock of
        `threading` locked, for which the new thread would wait for ever.
        """
        started: SimpleQueue[BaseException | None] = SimpleQueue()
        _thread.start_new_thread(self._start, (started,))
        if (error := started.get()) is not None:
            raise error

    def _start(self, started: "SimpleQueue[BaseException | None]") -> None:
        self._begun = True  # before a look at `stopping`, as who stops it looks here after that is set
        try:
            if self.stopping:
                self._done = True
                self._returned.put(None)
            else:
                super().start()
        except BaseException as error:
            self._begun = False
            started.put(error)
        else:
            started.put(None)

    def run(self) -> None:
        """Call `function(self, *arguments)`."""
        _ended.clear()
        assert self._work is not None
        function, arguments = self._work
        self._work = None  # or this thread would hold until its end what it works on
        try:
            function(self, *arguments)
        finally:
            self._done = True
            self._returned.put(None)

    def ask_to_stop(self) -> None:
        """Return at once; `end_threads` waits."""
        self.stopping = True
        self.inbox.put(None)
        if not self._begun:  # was never started, so that `run` does not let go of it
            self._work = None

    def has_ended(self) -> bool:
        """Whether it was not started, or somebody has waited for its end, or it runs in another process."""
        return not self._begun or self._joined or os.getpid() != self._process

    def wait(self, most_s: float) -> None:
        """Wait until it has ended, or for so long."""
        if self.has_ended():
            return
        # up to Python 3.12 a `join` that Ctrl-C breaks off takes a thread for ended that is not
        with suppress(Empty):
            while not self._done:  # not by what is in the queue: Ctrl-C may come when it has been taken out
                self._returned.put(self._returned.get(timeout=most_s))
        if self._done:
            if self.ident is not None:
                self.join()
            self._joined = True


def end_threads(threads: Iterable[EndingThread]) -> None:
    """Stop them and wait until they have ended.

    Ctrl-C is raised as soon as they have: this may run while an iterator is thrown away, where an exception
    reaches nobody. Pressed twice it ends the waiting, too.
    """
    threads = list(threads)
    interrupts = 0
    for thread in threads:
        thread.ask_to_stop()
    us = threading.current_thread()
    if isinstance(us, EndingThread):  # perhaps collecting garbage: none waits for one that may wait for it
        threads = [thread for thread in threads if thread.helps and not us.helps]
    for thread in threads:
        while interrupts < 2 and not thread.has_ended():
            try:
                thread.wait(_LOOK_S)
            except KeyboardInterrupt:
                interrupts += 1
    _ended.extend(threads)
    if interrupts:
        _thread.start_new_thread(_interrupt_soon, ())


def _interrupt_soon() -> None:
    time.sleep(_INTERRUPT_S)
    if hasattr(signal, "pthread_kill"):  # also ends what the main thread waits for, a `sleep` of its own
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        _thread.interrupt_main()


@dataclass(frozen=True, slots=True)
class _Task:
    future: "Future[Any]"
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Pool:
    """Threads that do what they are given, in that order; they end with the pool."""

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        gone = weakref.ref(self, self._tasks.put)  # wakes a thread, which wakes the next
        self._threads = [
            EndingThread(_work, (self._tasks, gone), self._tasks, f"{name}_{number}", helps=True)
            for number in range(threads)
        ]
        self._started = False

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Have `function(*arguments)` called by one of the threads."""
        if self._threads[0].stopping:
            raise Ending("the threads have been ended")
        if not self._started:
            self._started = True
            for thread in self._threads:
                thread.start()
        future: Future[T] = Future()
        self._tasks.put(_Task(future, function, arguments))
        return future

    def map(self, function: Callable[[Any], T], values: Iterable[Any]) -> list[T]:
        """`function` of each value, in order."""
        futures = [self.submit(function, value) for value in values]
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads; what they have not begun is cancelled."""
        end_threads(self._threads)
        _cancel(self._tasks)


def _work(thread: EndingThread, tasks: "SimpleQueue[Any]", gone: "weakref.ref[Pool]") -> None:
    while not thread.stopping:
        task = tasks.get()
        if not isinstance(task, _Task):  # the pool is gone, or one of the threads stops
            if gone() is None or thread.stopping:
                break
            continue
        if task.future.set_running_or_notify_cancel():
            try:
                result = task.function(*task.arguments)
            except BaseException as error:
                task.future.set_exception(error)
            else:
                task.future.set_result(result)
                del result
        del task  # or what it holds would be held until there is another one
    tasks.put(None)  # for the next thread


def _cancel(tasks: "SimpleQueue[Any]") -> None:
    with suppress(Empty):
        while True:
            task = tasks.get_nowait()
            if isinstance(task, _Task):
                task.future.cancel()
                task.future.set_running_or_notify_cancel()  # or `wait` would not see it


def check_exit() -> None:
    """Raise Ending where the program ends."""
    if _exiting:
        raise Ending


def stop_check() -> Callable[[], None]:
    """What raises Ending, in any thread, as soon as the thread that calls this is to stop."""
    us = threading.current_thread()

    def check() -> None:
        check_exit()
        if isinstance(us, EndingThread) and us.stopping:
            raise Ending("the thread is to end")

    return check


def begin_exit_with(function: Callable[[], None]) -> None:
    """Have `function` called before the threads are ended; as `end_first`."""
    if function not in _first_at_exit:
        _first_at_exit.append(function)
    end_first()


def end_first() -> None:
    """Have the threads ended before what others have asked `atexit` for so far; it begins with the last."""
    atexit.unregister(_end_all)
    atexit.register(_end_all)


def _end_all() -> None:
    global _exiting
    _exiting = True
    for function in _first_at_exit:
        function()
    running = [thread for thread in threading.enumerate() if isinstance(thread, EndingThread)]
    for helps, most_s in ((False, _READERS_S), (True, _HELPERS_S)):
        ending = [thread for thread in running if thread.helps == helps]
        for thread in ending:
            thread.ask_to_stop()
        deadline = time.monotonic() + most_s
        for thread in ending:
            _wait_for(thread, deadline)
    if left := [thread.name for thread in running if not thread.has_ended()]:
        _LOGGER.warning(
            "the program ends while %d threads of a loader are still reading: they did not stop within %g s "
            "(%s); check the disk or network of the data", len(left), _READERS_S + _HELPERS_S, ", ".join(left)
        )  # fmt: skip


def _wait_for(thread: EndingThread, deadline: float) -> None:
    while not thread.has_ended() and (left_s := deadline - time.monotonic()) > 0:
        with suppress(KeyboardInterrupt):  # the program ends as it is, and soon
            thread.wait(left_s)


atexit.register(_end_all)
