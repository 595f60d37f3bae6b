"""Run a function in a process of its own: no trial sees what another one left behind."""

import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from precache.errors import WorkerError

T = TypeVar("T")


def run_fresh(function: Callable[..., T], *arguments: object) -> T:
    """What `function(*arguments)` returns, or raises; all of it must pickle.

    Raises:
        WorkerError: the process died.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(_METHOD)) as executor:
        try:
            return executor.submit(_run, function, *arguments).result()
        except BrokenProcessPool as error:
            raise WorkerError(
                "the process of a trial died; the machine may be out of memory: use fewer workers or a "
                "smaller batch size"
            ) from error


def _run(function: Callable[..., T], *arguments: object) -> T:
    # else the processes that a loader starts would be made like this one, not as in a training
    multiprocessing.set_start_method(None, force=True)  # back to the default
    return function(*arguments)


# A server that has imported torch, which takes seconds, and done nothing else, forks one process per trial.
_METHOD = "spawn" if sys.platform in ("win32", "darwin") else "forkserver"
if _METHOD == "forkserver":
    multiprocessing.get_context(_METHOD).set_forkserver_preload(["bench.measure.run"])
