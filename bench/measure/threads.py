"""CPU time of a loader's threads: which part of it more workers do not relieve."""

import threading
from statistics import median

import psutil

_FILLING, _READING = "fill", "read"  # names of the threads that a loader has one of for each worker


def thread_seconds() -> dict[tuple[str, int], float]:
    """CPU seconds so far of each Python thread, by the pool that it is of, else its name, and its number."""
    names = {thread.native_id: thread.name.rsplit("_", 1)[0] for thread in threading.enumerate()}
    threads = psutil.Process().threads()
    return {(names[t.id], t.id): t.user_time + t.system_time for t in threads if t.id in names}


def serial_seconds(before: dict[tuple[str, int], float], now: dict[tuple[str, int], float]) -> float:
    """Of the busiest thread between the two that more workers do not relieve.

    Whoever asks for batches fills them, too, as much as each thread of that pool.
    """
    spent = {key: seconds - before.get(key, 0.0) for key, seconds in now.items()}
    filling = [seconds for (name, _), seconds in spent.items() if name == _FILLING]
    others = [seconds for (name, _), seconds in spent.items() if name not in (_FILLING, _READING)]
    return max(0.0, max(others, default=0.0) - (median(filling) if filling else 0.0))
