"""Run an iterator ahead of its consumer, in a thread that never outlives it."""

import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from loaders.deliver.threads import EndingThread, end_threads
from precache.errors import WorkerError

T = TypeVar("T")
_LOOK_S = 1.0  # between looks at whether the thread is alive
# After a wait for room the thread sleeps so long, at most this share of the wait: the consumer has just taken
# an element and goes on with its step, which needs a core and the interpreter's lock.
_NAP_S, _NAP_SHARE = 0.001, 0.25


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


class Prefetch(Iterator[T]):
    """What `source` yields, computed up to `depth` elements ahead.

    An exception of `source` is raised here. The thread ends when this is closed, or thrown away: then
    without a line of Python in the thread that does so, in which Ctrl-C would reach nobody.
    """

    def __init__(self, source: Iterator[T], depth: int) -> None:
        # SimpleQueue, since it has no lock that Ctrl-C could leave locked: the room is counted by another one
        self._results: SimpleQueue[Any] = SimpleQueue()
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


def of_dead_worker(error: Exception) -> WorkerError | None:
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
        error = caught
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()
    results.put(_End(error))
    error = None  # or the error would hold this frame, and with it all that the source had open
