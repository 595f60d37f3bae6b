"""Threads that end with the program: a pool of workers, and one that reads ahead.

A thread that is inside torch or DALI while the interpreter shuts down is ended by it as soon as it asks for
the interpreter's lock, and unwinding its stack then meets C++ code that lets no exception through: 'terminate
called without an active exception', exit code 134. So no thread of this module outlives the start of the
shutdown: https://docs.python.org/3/c-api/init.html#c.PyEval_RestoreThread

The threads are daemons, since a read from a disk that hangs would otherwise keep the program alive for ever.
An `atexit` handler waits for them, for a bounded time. That is why they are not those of ThreadPoolExecutor,
which are waited for without a bound, before any handler could tell them to stop.
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
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from precache.errors import WorkerError, open_files_error, thread_errors

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)
_READERS_S, _HELPERS_S = 4.0, 0.5  # how long the program's end waits for readers, then for their helpers
_exiting = False


class Ending(Exception):
    """The program ends, so the work in progress is not needed any more."""


class _Tasks:
    """Tasks of a pool, which its threads share; it holds the pool by a weak reference alone.

    Attributes:
        queue: tuples of a future, and of the call whose result it gets; anything else wakes a thread.
        stopped: whether the threads have been told to end; `stopping` is also true once the pool is gone.
        helps: whether threads of other pools wait for the results; such threads are ended after them.
        at_end: what each thread does at last.
    """

    def __init__(self, pool: "Pool", helps: bool, at_end: Callable[[], None] | None) -> None:
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self.stopped = False
        self.helps, self.at_end = helps, at_end
        self._pool = weakref.ref(pool, self.queue.put)  # puts itself there when the pool is collected

    @property
    def stopping(self) -> bool:
        """Whether the threads are to end."""
        return self.stopped or self._pool() is None

    def stop(self) -> None:
        """Tell the threads to end, without waiting for them."""
        self.stopped = True
        self.queue.put(None)

    def run(self) -> None:
        """Run tasks until the threads are to end; then cancel the others, and wake the next thread."""
        while not self.stopping:
            task = self.queue.get()
            if isinstance(task, tuple):
                future, function, arguments = task
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(function(*arguments))
                    except BaseException as error:
                        future.set_exception(error)
                del future, function, arguments  # or they would stay alive until the next task
            del task
        self.cancel()

    def cancel(self) -> None:
        """Cancel all tasks that no thread has begun."""
        with suppress(Empty):
            while True:
                task = self.queue.get_nowait()
                if isinstance(task, tuple) and task[0].cancel():
                    task[0].set_running_or_notify_cancel()  # or `wait` would not see it
        self.queue.put(None)


class PoolThread(threading.Thread):
    """A daemon thread that runs the tasks of a pool."""

    def __init__(self, tasks: _Tasks, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.tasks = tasks
        # held until the thread has run; no Event, in whose `wait` a Ctrl-C can turn into a RuntimeError
        self._running = threading.Lock()
        self.reading: _Reading | None = None  # that it reads ahead now

    def start(self) -> None:
        """Start the thread, and register `_end_all` anew so that it runs before all other exit handlers.

        atexit calls handlers in reverse order, and the thread may use Ray or torch's workers, which end by
        handlers of their own.

        Raises:
            WorkerError: the system starts no further thread; it may be started later.
        """
        atexit.unregister(_end_all)
        atexit.register(_end_all)
        self._running.acquire(blocking=False)
        with thread_errors():
            super().start()

    def run(self) -> None:
        """Run tasks until the thread is to end."""
        try:
            self.tasks.run()
            if self.tasks.at_end is not None:
                self.tasks.at_end()
        finally:
            self._running.release()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has ended, at most `timeout_s` seconds; do not wait if it never started."""
        # not by `join` alone: up to Python 3.12 a `join` that Ctrl-C breaks off marks the thread as ended
        if self.is_alive() and self._running.acquire(timeout=-1 if timeout_s is None else timeout_s):
            self._running.release()
            self.join()


class Pool:
    """Threads that run submitted functions in the order of submission; they end with the pool.

    Args:
        helps: whether threads of other pools wait for the results.
        at_end: what each thread that was started does at last.
    """

    def __init__(
        self, threads: int, name: str, *, helps: bool = True, at_end: Callable[[], None] | None = None
    ) -> None:
        self._tasks = _Tasks(self, helps, at_end)
        self._threads = [PoolThread(self._tasks, f"{name}_{number}") for number in range(threads)]
        self._unstarted = deque(self._threads)

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Return a future of `function(*arguments)`, which one of the threads calls."""
        if self._tasks.stopping:
            raise Ending("the threads have been ended")
        with suppress(IndexError):  # several threads may submit, each thread is popped by one of them
            while self._unstarted:
                thread = self._unstarted.popleft()
                try:
                    thread.start()
                except WorkerError:  # after a Ctrl-C it may be about to run: see `has_no_thread`
                    self._unstarted.appendleft(thread)
                    raise
        future: Future[T] = Future()
        self._tasks.queue.put((future, function, arguments))
        if self._tasks.stopping:  # meanwhile: the threads may have ended
            self._tasks.cancel()
        return future

    @property
    def has_no_thread(self) -> bool:
        """Whether no thread has started, or ever will: a Ctrl-C came as one was about to."""
        return not self._unstarted and all(thread.ident is None for thread in self._threads)

    def map(self, function: Callable[[Any], T], values: Iterable[Any]) -> list[T]:
        """Return `function(value)` for each of `values`, in their order."""
        futures = [self.submit(function, value) for value in values]
        return [future.result() for future in futures]

    def close(self) -> None:
        """Cancel the tasks that no thread has begun, and wait until the threads have ended.

        Ctrl-C ends the waiting; the threads then end by themselves.
        """
        self._tasks.stop()
        current = threading.current_thread()
        if isinstance(current, PoolThread) and (current.tasks.helps or not self._tasks.helps):
            return  # this may run in the garbage collector, in a thread that one of these waits for
        for thread in self._threads:
            thread.wait()


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Element that was computed ahead, or the exception that its computation raised."""

    element: Any = None
    error: BaseException | None = None


class _Reading:
    """Elements of one iterator, which a thread computes ahead.

    They come by a queue, not by futures: a Ctrl-C while the main thread asks a future for its result may
    leave the future's lock held, and the thread would wait for that for ever.

    Attributes:
        results: elements that wait to be taken.
        ahead: number of elements that are being computed, or wait.
        left: whether nobody takes the elements any more; `stop_check` tells the iterator so.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.results: SimpleQueue[_Ahead] = SimpleQueue()
        self.ahead, self.left = 0, False
        self._source = source

    def put_next(self) -> None:
        """Compute the next element."""
        try:
            self.results.put(_Ahead(next(self._source)))
        except BaseException as error:
            self.results.put(_Ahead(error=open_files_error(error, getattr(error, "filename", None)) or error))

    def end(self) -> None:
        """Close the iterator, and end whoever waits for its next element."""
        self.left = True
        try:
            close = getattr(self._source, "close", None)
            if close is not None:
                close()
        except Exception:
            _LOGGER.warning("what was read ahead could not be closed", exc_info=True)
        finally:
            self.results.put(_Ahead(error=StopIteration()))


class Prefetch(Iterator[T]):
    """Iterator that computes up to `depth` elements ahead, in a thread, of the iterator given to `restart`.

    An exception of that iterator is raised from `next`. The thread closes it before it begins with another
    one, and when the `Prefetch` is closed or collected; only then the thread ends. A thread for each iterator
    would cost more, and CPython loses a Ctrl-C that comes while it forgets a thread.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._current: _Reading | None = None
        self._readings: deque[_Reading] = deque()  # those that are not closed yet; the current one is last
        self._pool = Pool(1, "read-ahead", helps=False, at_end=partial(_end_readings, self._readings))
        self._is_closed = False

    @property
    def ended(self) -> bool:
        """Whether it has been closed, or cannot have a thread."""
        return self._is_closed or self._pool.has_no_thread

    def restart(self, source: Iterator[T]) -> None:
        """Go on with the elements of `source`, and with none that were computed before."""
        self._current = _Reading(source)
        self._readings.append(self._current)
        for reading in [*self._readings][:-1]:
            reading.left = True

    def leave(self) -> None:
        """Close the iterator, in the thread and without waiting; `restart` gives another one."""
        for reading in [*self._readings]:
            reading.left = True
        with suppress(Ending, WorkerError):
            self._pool.submit(_end_left, self._readings)

    def __next__(self) -> T:
        reading = self._current
        if self._is_closed or reading is None:
            raise StopIteration
        while reading.ahead <= self._depth:
            self._pool.submit(_read_next, self._readings, reading)
            reading.ahead += 1
        result = reading.results.get()
        reading.ahead -= 1
        if result.error is None:
            return result.element  # type: ignore[no-any-return]
        try:
            raise result.error
        finally:
            del result  # the error would hold this frame, which holds the error: a cycle

    def close(self) -> None:
        """End the thread, and wait until it has ended."""
        self._is_closed = True
        self._pool.close()


def _read_next(readings: deque[_Reading], reading: _Reading) -> None:
    """End the readings that were left, and compute the next element of `reading` if it was not."""
    _end_left(readings)
    if not reading.left:
        thread = threading.current_thread()
        assert isinstance(thread, PoolThread)
        thread.reading = reading
        reading.put_next()


def _end_left(readings: deque[_Reading]) -> None:
    while readings and readings[0].left:
        readings.popleft().end()


def _end_readings(readings: deque[_Reading]) -> None:
    while readings:
        readings.popleft().end()


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
    """Return a function that raises Ending, in any thread, once nobody needs what the caller reads."""
    caller = threading.current_thread()
    tasks, reading = (caller.tasks, caller.reading) if isinstance(caller, PoolThread) else (None, None)

    def check() -> None:
        check_exit()
        if (tasks is not None and tasks.stopping) or (reading is not None and reading.left):
            raise Ending("nobody waits for what this thread reads")

    return check


def _end_all() -> None:
    """End all threads of this kind, readers first, and log which did not end in time."""
    global _exiting
    _exiting = True
    running = [thread for thread in threading.enumerate() if isinstance(thread, PoolThread)]
    for helps, timeout_s in ((False, _READERS_S), (True, _HELPERS_S)):
        ending = [thread for thread in running if thread.tasks.helps == helps]
        for thread in ending:
            thread.tasks.stop()
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
