"""What the process of a trial runs; only Python's own modules are imported before it can report an error."""

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
    """What came of a function: its result, or the exception that it raised, pickled."""

    result: Any = None
    error: bytes | None = None


def answer(connection: "Connection[Outcome, Outcome]", work: bytes) -> None:
    """Unpack a function and its arguments, call it, and send the outcome."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        # else the processes that a loader starts would be made like this one, not as in a training
        multiprocessing.set_start_method(None, force=True)
        function, arguments = pickle.loads(work)
        connection.send(Outcome(result=function(*arguments)))
    except BrokenPipeError:
        return  # who asked is gone
    except BaseException as error:
        connection.send(Outcome(error=_packed(error)))


def _end_with_parent() -> None:
    """Wait for the end of the process that asked; a killed command leaves no trial that runs on."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _packed(error: BaseException) -> bytes:
    """Pickle `error` with its traceback, or its text alone where it does not pickle."""
    try:
        packed = pickle.dumps(ExceptionWithTraceback(error, error.__traceback__))
        pickle.loads(packed)
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return packed
