"""Batches on their way to the training loop: threads, and the work of a device.

Threads end with whoever uses them, and with the program at the latest: a pool, one that reads ahead.

A thread that is inside torch or DALI while the interpreter is taken down is ended by it as soon as it asks
for the interpreter's lock, and what unwinds its stack then meets C++ that lets nothing through: 'terminate
called without an active exception', exit code 134. So none of ours lives on when that begins:
https://docs.python.org/3/c-api/init.html#c.PyEval_RestoreThread

They are daemons, or a read from a disk that hangs would keep the program for ever: `atexit` waits for them,
for so long and no longer. ThreadPoolExecutor's are waited for without end.

On CUDA a loader has one stream of its own, a lane. All that its reading thread does on the device is queued
there, ahead of the training: copies, gathers, augmentation, normalising. The training's stream waits for what
is served, by an event; no thread waits:
https://pytorch.org/docs/stable/notes/cuda.html#cuda-streams
"""

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from torch.utils.dlpack import from_dlpack

from precache.errors import SettingError, WorkerError, open_files_error

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)
_LENT = 2  # batches of another library that are being read at a time
_READERS_S, _HELPERS_S = 4.0, 0.5  # for which the program's end waits
_LOOK_S = 1.0  # between looks at whether a thread lives
# After a wait for room the thread that reads ahead sleeps so long, at most this share of the wait: the
# consumer has just taken an element and goes on with its step, which needs a core and the interpreter's lock.
_NAP_S, _NAP_SHARE = 0.001, 0.25
_exiting = False


class Ending(Exception):
    """The program ends: what is being done for it is not needed any more."""


class EndingThread(threading.Thread):
    """A thread that stops when asked to.

    Attributes:
        inbox: what it waits at; None wakes it.
        stopping: whether it is to end.
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
        self._done = threading.Event()
        self.inbox = inbox
        self.stopping = False
        self.helps = helps

    def start(self) -> None:
        """Start it; at the program's end it ends before what it may use, as Ray and torch's workers."""
        atexit.unregister(_end_all)
        atexit.register(_end_all)  # the last one that asks is called first
        super().start()

    def run(self) -> None:
        """Call `function(self, *arguments)`."""
        assert self._work is not None
        function, arguments = self._work
        self._work = None  # or this thread would hold until its end what it works on
        try:
            if not self.stopping:
                function(self, *arguments)
        finally:
            self._done.set()

    def ask_to_stop(self) -> None:
        """Return at once; `wait` waits."""
        self.stopping = True
        self.inbox.put(None)

    def wait(self, most_s: float | None = None) -> None:
        """Wait until it has ended, or for so long; not at all for one that was not started."""
        # not by `join` alone: up to Python 3.12 one that Ctrl-C breaks off takes the thread for ended
        if self.is_alive() and self._done.wait(most_s):
            self.join()


def end_threads(threads: Iterable[EndingThread]) -> None:
    """Stop them and wait until they have ended; Ctrl-C ends the waiting, and they end by themselves."""
    threads = list(threads)
    for thread in threads:
        thread.ask_to_stop()
    us = threading.current_thread()
    if isinstance(us, EndingThread):  # perhaps collecting garbage: none waits for one that may wait for it
        threads = [thread for thread in threads if thread.helps and not us.helps]
    for thread in threads:
        thread.wait()


class Pool:
    """Threads that do what they are given, in that order; they end with the pool."""

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: SimpleQueue[Any] = SimpleQueue()  # a tuple each; anything else wakes a thread
        gone = weakref.ref(self, self._tasks.put)  # wakes a thread, which wakes the next
        self._threads = [
            EndingThread(_work, (self._tasks, gone), self._tasks, f"{name}_{number}", helps=True)
            for number in range(threads)
        ]
        self._unstarted = deque(self._threads)

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Have `function(*arguments)` called by one of the threads."""
        if self._threads[0].stopping:
            raise Ending("the threads have been ended")
        with suppress(IndexError):  # each is taken out by one of those who call this at a time
            while self._unstarted:
                self._unstarted.popleft().start()
        future: Future[T] = Future()
        self._tasks.put((future, function, arguments))
        return future

    def map(self, function: Callable[[Any], T], values: Iterable[Any]) -> list[T]:
        """`function` of each value, in order."""
        futures = [self.submit(function, value) for value in values]
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads; what they have not begun is cancelled."""
        end_threads(self._threads)
        with suppress(Empty):
            while True:
                if isinstance(task := self._tasks.get_nowait(), tuple):
                    task[0].cancel()
                    task[0].set_running_or_notify_cancel()  # or `wait` would not see it


def _work(thread: EndingThread, tasks: "SimpleQueue[Any]", gone: "weakref.ref[Pool]") -> None:
    while not thread.stopping:
        task = tasks.get()
        if not isinstance(task, tuple):  # the pool is gone, or one of the threads stops
            if gone() is None or thread.stopping or _exiting:  # it may have been for one that stops
                break
            continue
        future, function, arguments = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
        del task, future, function, arguments  # or what they hold would be held until there is another one
    tasks.put(None)  # for the next thread


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


class Prefetch(Iterator[T]):
    """What `source` yields, computed up to `depth` elements ahead.

    An exception of `source` is raised here. The thread ends when this is closed, or thrown away.
    """

    def __init__(self, source: Iterator[T], depth: int) -> None:
        self._results: SimpleQueue[Any] = SimpleQueue()
        # a queue, too, since anybody can wake who waits there: when this is closed, or gone
        self._room: SimpleQueue[Any] = SimpleQueue()
        for _ in range(depth):
            self._room.put(True)
        gone = weakref.ref(self, self._room.put)
        self._thread = EndingThread(_produce, (source, self._results, self._room, gone), self._room)
        self._started = self._ended = False

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        if not self._started:
            self._started = True
            self._thread.start()
        while True:
            try:
                result = self._results.get(timeout=_LOOK_S)
            except Empty:
                if self._thread.is_alive() or not self._results.empty():
                    continue
                result = _End(WorkerError("the thread that reads ahead died without an exception"))
            if not isinstance(result, _End):
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


def dead_worker_error(error: Exception) -> WorkerError | None:
    """What to raise for what torch raises when a DataLoader's worker process died; None: it is not that."""
    if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
        return None
    return WorkerError(
        f"a worker died ({' '.join(str(error).split()) or type(error).__name__}); the machine may be "
        f"out of memory: build the loader with fewer workers or a smaller batch_size"
    )


def _produce(
    thread: EndingThread,
    source: Iterator[Any],
    results: "SimpleQueue[Any]",
    room: "SimpleQueue[Any]",
    gone: "weakref.ref[Prefetch[Any]]",
) -> None:
    error: BaseException | None = None
    try:
        for result in source:
            asked_s = time.monotonic()
            if room.get() is not True or thread.stopping or gone() is None:
                break
            waited_s = time.monotonic() - asked_s
            results.put(result)
            del result  # or it would be held until the next one is there
            time.sleep(min(_NAP_S, _NAP_SHARE * waited_s))
    except BaseException as caught:
        error = open_files_error(caught, getattr(caught, "filename", None)) or caught
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()
    results.put(_End(error))
    error = None  # or the error would hold this frame, and with it all that the source had open


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


def _end_all() -> None:
    global _exiting
    _exiting = True
    running = [thread for thread in threading.enumerate() if isinstance(thread, EndingThread)]
    for helps, most_s in ((False, _READERS_S), (True, _HELPERS_S)):
        ending = [thread for thread in running if thread.helps == helps]
        for thread in ending:
            thread.ask_to_stop()
        deadline = time.monotonic() + most_s
        for thread in ending:
            while thread.is_alive() and (left_s := deadline - time.monotonic()) > 0:
                with suppress(KeyboardInterrupt):  # the program ends as it is, and soon
                    thread.wait(left_s)
    if left := [thread.name for thread in running if thread.is_alive()]:
        _LOGGER.warning(
            "the program ends while %d threads of a loader are still reading: they did not stop within %g s "
            "(%s); check the disk or network of the data", len(left), _READERS_S + _HELPERS_S, ", ".join(left)
        )  # fmt: skip


def find_device(name: str | torch.device) -> torch.device:
    """The device called `name`: `cpu`, `cuda` (the current one), `cuda:N`, or `auto`, a GPU if there is one.

    Returns:
        On CUDA with its index, which stays the same whatever device is made the current one later.

    Raises:
        SettingError: an unknown name, or a device that torch does not find.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(name)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise SettingError(f"unknown device {str(name)!r}; choose from: auto, cpu, cuda, cuda:0, ...")
    if found.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SettingError(f"device {str(name)!r} asked for, but torch finds no GPU; use 'cpu'")
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= (count := torch.cuda.device_count()):
        there = ", ".join(f"cuda:{number}" for number in range(count))
        raise SettingError(
            f"device {str(name)!r} asked for, but torch finds {there}; use one of them or 'cpu'"
        )
    return torch.device("cuda", index)


class Lane:
    """Where a loader's work on `device` is queued; on the CPU it is done at once, and this does nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def active(self) -> AbstractContextManager[object]:
        """Make it the current stream, and `device` the current device, of this thread."""
        return torch.cuda.stream(self.stream)

    def mark(self) -> torch.cuda.Event | None:
        """An event behind all that is queued."""
        return None if self.stream is None else self.stream.record_event()


class Borrowed:
    """Takes tensors of a library's own memory, and gives them back when they have been read."""

    def __init__(self) -> None:
        self._lent: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()  # and when it has been read

    def take(self, lent: Any) -> torch.Tensor:
        """What `lent` shows by DLPack, for work on the current stream; of the CPU shared, not copied."""
        shown: torch.Tensor = from_dlpack(lent)
        if not shown.is_cuda:
            return shown
        # on a GPU its owner knows nothing of the streams that still read what torch has dropped
        copied = shown.clone()
        self._lent.append((shown, torch.cuda.current_stream(shown.device).record_event()))
        self.give_back(_LENT)
        return copied

    def give_back(self, most: int = 0) -> None:
        """All but so many of them."""
        while len(self._lent) > most:
            self._lent[0][1].synchronize()
            self._lent.popleft()  # not before: then its owner has it


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, of the CPU, on `device`; on CUDA by the current stream, and no thread waits for it.

    Of pageable memory the driver makes a copy first, and waits; torch's pinned memory is not reused until
    the copies out of it are done: https://pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(device, non_blocking=True)
    return tensor.to(device)
