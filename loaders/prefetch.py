"""Run an iterator ahead of its consumer, in a thread that never outlives it."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from loaders.threads import EndingThread, end_threads
from precache.errors import WorkerError

T = TypeVar("T")
_LOOK_S = 1.0  # between looks at whether the thread is alive


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


def prefetch(source: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yield what `source` yields, computed up to `depth` elements ahead.

    An exception of `source` is raised here. Closing or dropping this generator stops the thread.
    """
    # SimpleQueue, since it has no lock that Ctrl-C could leave locked: the room is counted by another one
    results: SimpleQueue[Any] = SimpleQueue()
    room: SimpleQueue[Any] = SimpleQueue()
    for _ in range(depth):
        room.put(True)
    thread = EndingThread(_produce, (source, results, room), room)
    try:
        thread.start()
        while True:
            try:
                result = results.get(timeout=_LOOK_S)
            except Empty:
                if not thread.is_alive() and results.empty():
                    raise WorkerError("the thread that reads ahead died without an exception") from None
                continue
            if isinstance(result, _End):
                if result.error is not None:
                    raise result.error
                return
            room.put(True)
            yield result
    finally:
        result = None  # an error would hold this frame, which holds the error: a cycle
        end_threads([thread])


def of_dead_worker(error: Exception) -> WorkerError | None:
    """What to raise for what torch raises when a DataLoader's worker process died; None: it is not that."""
    if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
        return None
    return WorkerError(
        f"a worker died ({' '.join(str(error).split()) or type(error).__name__}); the machine may be "
        f"out of memory: build the loader with fewer workers or a smaller batch_size"
    )


def _produce(
    thread: EndingThread, source: Iterator[Any], results: "SimpleQueue[Any]", room: "SimpleQueue[Any]"
) -> None:
    error: BaseException | None = None
    try:
        for result in source:
            room.get()
            if thread.stopping:
                break
            results.put(result)
            del result  # or it would be held until the next one is there
    except BaseException as caught:
        error = caught
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()
    results.put(_End(error))
    error = None  # or the error would hold this frame, and with it all that the source had open
