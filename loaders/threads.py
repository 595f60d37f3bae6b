"""Threads that end with the program: a pool of workers, and one that reads ahead.

A thread that is inside torch or DALI while the interpreter shuts down is ended by it as soon as it asks for
the interpreter's lock, and unwinding its stack then meets C++ code that lets no exception through: 'terminate
called without an active exception', exit code 134. So no thread of this module outlives the start of the
shutdown: https://docs.python.org/3/c-api/init.html#c.PyEval_RestoreThread

The threads are daemons, since a read from a disk that hangs would otherwise keep the program alive for ever.
An `atexit` handler waits for them, for a bounded time; the threads of ThreadPoolExecutor are waited for
without a bound.
"""

import atexit
import logging
import multiprocessing
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from precache.errors import WorkerError, open_files_error, thread_errors

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)
_READERS_S, _HELPERS_S = 4.0, 0.5  # how long the program's end waits for readers, then for their helpers
_LOOK_S = 1.0  # between checks whether a thread is alive
# After a wait for room the thread that reads ahead sleeps so long, at most this share of the wait: the
# consumer has just taken an element and goes on with its step, which needs a core and the interpreter's lock.
_NAP_S, _NAP_SHARE = 0.001, 0.25
_exiting = False


class Ending(Exception):
    """The program ends, so the work in progress is not needed any more."""


class EndingThread(threading.Thread):
    """A daemon thread that stops when `ask_to_stop` is called, and at the program's end.

    Attributes:
        inbox: queue that the thread waits at; None wakes it.
        stopping: whether it has been asked to stop.
        helps: whether other threads wait for its results; such a thread is ended after them.
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
        self._done = threading.Event()
        self.inbox = inbox
        self.stopping = False
        self.helps = helps

    def start(self) -> None:
        """Start the thread, and register `_end_all` anew so that it runs before all other exit handlers.

        atexit calls handlers in reverse order, and the thread may use Ray or torch's workers, which end by
        handlers of their own.

        Raises:
            WorkerError: the system starts no further thread; it may be started later.
        """
        atexit.unregister(_end_all)
        atexit.register(_end_all)
        with thread_errors():
            super().start()

    def run(self) -> None:
        """Call `function(self, *arguments)`."""
        assert self._work is not None
        function, arguments = self._work
        self._work = None  # or the thread would keep its arguments alive until it ends
        try:
            if not self.stopping:
                function(self, *arguments)
        finally:
            self._done.set()

    def ask_to_stop(self) -> None:
        """Tell the thread to stop, without waiting for it."""
        self.stopping = True
        self.inbox.put(None)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has ended, at most `timeout_s` seconds; do not wait if it never started."""
        # not by `join` alone: up to Python 3.12 a `join` that Ctrl-C breaks off marks the thread as ended
        if self.is_alive() and self._done.wait(timeout_s):
            self.join()


def end_threads(threads: Iterable[EndingThread]) -> None:
    """Stop `threads` and wait until they have ended.

    Ctrl-C ends the waiting; the threads then end by themselves.
    """
    threads = list(threads)
    for thread in threads:
        thread.ask_to_stop()
    current = threading.current_thread()
    if isinstance(current, EndingThread):
        # this may run in the garbage collector, in a thread that one of `threads` waits for
        threads = [thread for thread in threads if thread.helps and not current.helps]
    for thread in threads:
        thread.wait()


class Pool:
    """Threads that run submitted functions in the order of submission; they end with the pool."""

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: SimpleQueue[Any] = SimpleQueue()  # tuples are tasks; anything else wakes a thread
        # when the pool is collected this wakes a thread, which wakes the next one
        pool = weakref.ref(self, self._tasks.put)
        self._threads = [
            EndingThread(_run_tasks, (self._tasks, pool), self._tasks, f"{name}_{number}", helps=True)
            for number in range(threads)
        ]
        self._unstarted = deque(self._threads)

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Return a future of `function(*arguments)`, which one of the threads calls."""
        if self._threads[0].stopping:
            raise Ending("the threads have been ended")
        with suppress(IndexError):  # several threads may submit, each thread is popped by one of them
            while self._unstarted:
                thread = self._unstarted.popleft()
                try:
                    thread.start()
                except WorkerError:
                    self._unstarted.appendleft(thread)
                    raise
        future: Future[T] = Future()
        self._tasks.put((future, function, arguments))
        return future

    def map(self, function: Callable[[Any], T], values: Iterable[Any]) -> list[T]:
        """Return `function(value)` for each of `values`, in their order."""
        futures = [self.submit(function, value) for value in values]
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads, and cancel the tasks that none of them has begun."""
        end_threads(self._threads)
        with suppress(Empty):
            while True:
                if isinstance(task := self._tasks.get_nowait(), tuple):
                    task[0].cancel()
                    task[0].set_running_or_notify_cancel()  # or `wait` would not see it


def _run_tasks(thread: EndingThread, tasks: "SimpleQueue[Any]", pool: "weakref.ref[Pool]") -> None:
    while not thread.stopping:
        task = tasks.get()
        if not isinstance(task, tuple):
            # the pool was collected, or a thread of it stops, perhaps another one than this
            if pool() is None or thread.stopping or _exiting:
                break
            continue
        future, function, arguments = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
        del task, future, function, arguments  # or they would stay alive until the next task
    tasks.put(None)  # wakes the next thread


@dataclass(frozen=True, slots=True)
class _SourceEnd:
    """Last element of a `Prefetch` queue, with the exception that ended the source."""

    error: BaseException | None


class Prefetch(Iterator[T]):
    """Iterator over `source` that computes up to `depth` elements ahead, in a thread.

    An exception of `source` is raised from `next`. The thread ends when the iterator is closed or collected.
    """

    def __init__(self, source: Iterator[T], depth: int) -> None:
        self._results: SimpleQueue[Any] = SimpleQueue()
        # one token for each element that may be computed ahead: a queue and no semaphore, since closing or
        # collecting this object has to wake the thread that waits there
        self._room: SimpleQueue[Any] = SimpleQueue()
        for _ in range(depth):
            self._room.put(True)
        owner = weakref.ref(self, self._room.put)
        self._thread = EndingThread(_produce, (source, self._results, self._room, owner), self._room)
        self._started = self._ended = False

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        if not self._started:
            self._thread.start()
            self._started = True
        while True:
            try:
                result = self._results.get(timeout=_LOOK_S)
            except Empty:
                if self._thread.is_alive() or not self._results.empty():
                    continue
                result = _SourceEnd(WorkerError("the thread that reads ahead died without an exception"))
            if not isinstance(result, _SourceEnd):
                self._room.put(True)
                return result  # type: ignore[no-any-return]
            self.close()
            if result.error is None:
                raise StopIteration
            try:
                raise result.error
            finally:
                del result  # the error would hold this frame, which holds the error: a cycle

    def close(self) -> None:
        """End the thread, and wait until it has ended."""
        self._ended = True
        end_threads([self._thread])


def _produce(
    thread: EndingThread,
    source: Iterator[Any],
    results: "SimpleQueue[Any]",
    room: "SimpleQueue[Any]",
    owner: "weakref.ref[Prefetch[Any]]",
) -> None:
    error: BaseException | None = None
    try:
        for result in source:
            start_s = time.monotonic()
            if room.get() is not True or thread.stopping or owner() is None:
                break
            waited_s = time.monotonic() - start_s
            results.put(result)
            del result  # or it would stay alive until the next one is there
            time.sleep(min(_NAP_S, _NAP_SHARE * waited_s))
    except BaseException as caught:
        error = open_files_error(caught, getattr(caught, "filename", None)) or caught
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()
    results.put(_SourceEnd(error))
    error = None  # or the error would hold this frame, and with it all that the source had open


def dead_worker_error(error: Exception) -> WorkerError | None:
    """Return the error to raise if torch's `error` says that a worker of a DataLoader died, else None."""
    if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
        return None
    remedy = "the machine may be out of memory: build the loader with fewer workers or a smaller batch_size"
    if start_method() != "fork":  # each worker imports the script first
        remedy = f"put what the script does below 'if __name__ == \"__main__\":'; or {remedy}"
    return WorkerError(
        f"a worker died ({' '.join(str(error).split()) or type(error).__name__})", remedy=remedy
    )


def start_method() -> str:
    """Return how the program starts worker processes; to ask for it does not fix it."""
    # the first of all is the default
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def check_exit() -> None:
    """Raise Ending if the program is ending."""
    if _exiting:
        raise Ending


def stop_check() -> Callable[[], None]:
    """Return a function that raises Ending, in any thread, once the calling thread is to stop."""
    caller = threading.current_thread()

    def check() -> None:
        check_exit()
        if isinstance(caller, EndingThread) and caller.stopping:
            raise Ending("the thread is to end")

    return check


def _end_all() -> None:
    """End all threads of this kind, readers first, and log which did not end in time."""
    global _exiting
    _exiting = True
    running = [thread for thread in threading.enumerate() if isinstance(thread, EndingThread)]
    for helps, timeout_s in ((False, _READERS_S), (True, _HELPERS_S)):
        ending = [thread for thread in running if thread.helps == helps]
        for thread in ending:
            thread.ask_to_stop()
        deadline = time.monotonic() + timeout_s
        for thread in ending:
            while thread.is_alive() and (left_s := deadline - time.monotonic()) > 0:
                with suppress(KeyboardInterrupt):  # the program is ending anyway
                    thread.wait(left_s)
    if alive := [thread.name for thread in running if thread.is_alive()]:
        _LOGGER.warning(
            "the program ends while %d threads of a loader are still reading: they did not stop within %g s "
            "(%s); check the disk or network of the data",
            len(alive),
            _READERS_S + _HELPERS_S,
            ", ".join(alive),
        )
