"""Entry of the process that `bench.measure.processes` starts for a trial.

It imports only Python's own modules, so that an error of a later import is reported like any other.
"""

import multiprocessing
import os
import pickle
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from typing import Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a function, or the exception that it raised.

    Attributes:
        result: what the function returned; None where it raised.
        error: the pickled exception; None where the function returned.
    """

    result: Any = None
    error: bytes | None = None


def run_and_send(connection: "Connection[Outcome, Outcome]", pickled_call: bytes) -> None:
    """Unpickle a function and its arguments, call it, and send its Outcome through `connection`."""
    threading.Thread(target=_exit_after_parent, daemon=True).start()
    try:
        # a loader's processes would be started by this process's method otherwise, unlike those of a training
        multiprocessing.set_start_method(None, force=True)
        function, arguments = pickle.loads(pickled_call)
        connection.send(Outcome(result=function(*arguments)))
    except BrokenPipeError:
        return  # the parent has ended
    except BaseException as error:
        connection.send(Outcome(error=_pickle_error(error)))


def _exit_after_parent() -> None:
    """Exit as soon as the parent process has ended, so that a killed command leaves no trial running."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _pickle_error(error: BaseException) -> bytes:
    """Pickle `error` with its traceback; where it does not pickle, a RuntimeError with its text."""
    try:
        pickled = pickle.dumps(ExceptionWithTraceback(error, error.__traceback__))
        pickle.loads(pickled)
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return pickled
