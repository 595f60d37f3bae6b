"""Where a plan runs: in processes of this machine, or in the calling one."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from precache.errors import WorkerError

Task = TypeVar("Task")
Result = TypeVar("Result")
_POLL_S = 0.1


class Counter(Protocol):
    """A shared integer with its lock, as of `multiprocessing.Value`."""

    value: int

    def get_lock(self) -> AbstractContextManager[Any]:
        """The lock to hold while changing `value`."""


_progress: Counter | None = None


def available_cpus() -> int:
    """CPUs that this process may use (its affinity mask where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run(
    function: Callable[[Task, Callable[[], None]], Result],
    tasks: Sequence[Task],
    workers: int,
    on_progress: Callable[[int], None],
) -> Iterator[Result]:
    """Yield `function(task, tick)` for each task as it finishes, in any order.

    `function` calls `tick()` once per unit of progress; `on_progress` gets the units done since
    its last call. `workers=0` runs the tasks in this process.

    Raises:
        WorkerError: a worker process died (killed, or out of memory).
    """
    if workers == 0:
        for task in tasks:
            yield function(task, lambda: on_progress(1))
        return
    # spawn: forking a process that holds threads, as one with torch does, can deadlock
    context = multiprocessing.get_context("spawn")
    progress = context.Value(ctypes.c_longlong, 0)
    pool = ProcessPoolExecutor(
        min(workers, len(tasks)), mp_context=context, initializer=_start_worker, initargs=(progress,)
    )
    try:
        pending: set[Future[Result]] = {pool.submit(_call, function, task) for task in tasks}
        reported = 0
        while pending:
            done, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            on_progress(progress.value - reported)
            reported = progress.value
            for future in done:
                yield future.result()
    except BrokenProcessPool as error:
        raise WorkerError(
            "a conversion worker died (killed, or out of memory); finished shards are kept: "
            "run the same command again, with fewer --workers if memory was short"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(progress: Counter) -> None:
    global _progress
    _progress = progress
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the run; a worker prints nothing


def _call(function: Callable[[Task, Callable[[], None]], Result], task: Task) -> Result:
    return function(task, _tick)


def _tick() -> None:
    assert _progress is not None
    with _progress.get_lock():
        _progress.value += 1
