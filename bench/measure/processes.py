"""Functions and commands run in a process of their own, where nothing is left of other trials."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from bench.measure.child import Outcome, run_and_send
from bench.measure.settings import Settings
from bench.report.result import Trial
from precache.errors import SettingError, WorkerError
from precache.packages import child_environment

T = TypeVar("T")
_END_TIMEOUT_S = 5.0  # before a process that was terminated is killed


def run_in_process(function: Callable[..., T], *arguments: object) -> T:
    """Call `function(*arguments)` in a new process and return its result; all of them must pickle.

    An exception that the function raises is raised here, with its traceback as the cause.

    Raises:
        WorkerError: the process died, or could not be started.
    """
    context: Any = multiprocessing.get_context(_METHOD)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_and_send, args=(sender, pickle.dumps((function, arguments))))
    try:
        with _set_environment(**child_environment()):
            process.start()
    except (EOFError, OSError) as error:
        raise WorkerError(
            f"no process can be started for a trial ({error or type(error).__name__}); its output is above"
        ) from error
    sender.close()
    try:
        outcome: Outcome = receiver.recv()
    except EOFError:
        process.join()
        raise WorkerError(_describe_exit(process.exitcode)) from None
    finally:
        receiver.close()
        process.terminate()
        process.join(_END_TIMEOUT_S)
        process.kill()
        process.join()
    if outcome.error is None:
        return outcome.result  # type: ignore[no-any-return]
    raised: BaseException = pickle.loads(outcome.error)
    if isinstance(raised, (Exception, KeyboardInterrupt)):
        raise raised
    raise WorkerError(f"the process of a trial ended: {type(raised).__name__}: {raised}")


@contextmanager
def _set_environment(**variables: str) -> Iterator[None]:
    """Set environment variables during the block, for the processes that it starts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _describe_exit(code: int) -> str:
    """Return a message for a process that ended with exit code `code` before it sent an outcome."""
    if code == -signal.SIGKILL:
        return (
            "the process of a trial was killed, as the system does where memory runs out: use fewer workers "
            "or a smaller batch size"
        )
    if code < 0:
        return f"the process of a trial crashed ({signal.Signals(-code).name}); its last output is above"
    return f"the process of a trial ended by itself with exit code {code}; its last output is above"


def measure_trial(kind: str, settings: Settings, *more: object) -> Trial:
    """Measure a trial of that kind; this runs in the trial's process, which alone imports what measures.

    Args:
        kind: one of `bench.measure.trial.KINDS`.
        more: further arguments of the function that measures it.
    """
    from bench.measure.trial import KINDS

    return KINDS[kind](settings, *more)


# The fork server imports torch once, which takes seconds, and then forks a process for each trial.
_METHOD = "spawn" if sys.platform in ("win32", "darwin") else "forkserver"
if _METHOD == "forkserver":
    multiprocessing.get_context(_METHOD).set_forkserver_preload(["bench.measure.trial"])


class BatchTooLargeError(SettingError):
    """A batch does not fit into the memory of the GPU or of the machine."""


def run_command(command: Sequence[str]) -> tuple[float, str]:
    """Run a command of Python to its end.

    Returns:
        Seconds that it took, start included, and the text that it printed on stdout and stderr.

    Raises:
        WorkerError: its exit code is not 0; the message has the last line that it printed.
    """
    with tempfile.TemporaryFile("w+") as output:
        start_s = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_environment(),
        )
        try:
            process.wait()
            wall_s = time.perf_counter() - start_s
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        text = output.read()
    if process.returncode != 0:
        lines = text.strip().splitlines()
        last_line = lines[-1] if lines else "no output"
        raise WorkerError(f"{' '.join(command[:4])} ...: exit code {process.returncode}; {last_line}")
    return wall_s, text
