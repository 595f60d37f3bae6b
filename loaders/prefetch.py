"""Run an iterator ahead of its consumer, in a thread that never outlives it."""

import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from precache.errors import WorkerError

T = TypeVar("T")
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


def prefetch(source: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yield what `source` yields, computed up to `depth` elements ahead.

    An exception of `source` is raised here. Closing or dropping this generator stops the thread.
    """
    results: queue.Queue[Any] = queue.Queue(depth)
    stop = threading.Event()
    thread = threading.Thread(target=_produce, args=(source, results, stop), daemon=True)
    thread.start()
    try:
        while True:
            try:
                result = results.get(timeout=_POLL_S)
            except queue.Empty:
                if not thread.is_alive() and results.empty():
                    raise WorkerError("the thread that reads ahead died without an exception") from None
                continue
            if isinstance(result, _End):
                if result.error is not None:
                    raise result.error
                return
            yield result
    finally:
        result = None  # an error would hold this frame, which holds the error: a cycle
        stop.set()
        thread.join()


def _produce(source: Iterator[Any], results: "queue.Queue[Any]", stop: threading.Event) -> None:
    error: BaseException | None = None
    try:
        for result in source:
            if not _put(results, result, stop):
                break
    except BaseException as caught:
        error = caught
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()
    _put(results, _End(error), stop)
    error = None  # or the error would hold this frame, and with it all that the source had open


def _put(results: "queue.Queue[Any]", result: Any, stop: threading.Event) -> bool:
    """Put `result`; False if the consumer left in the meantime."""
    while not stop.is_set():
        try:
            results.put(result, timeout=_POLL_S)
        except queue.Full:
            continue
        return True
    return False
