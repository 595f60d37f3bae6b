"""Processes of their own: a function's, that sees nothing of other trials; a command's, watched."""

import multiprocessing
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from bench.measure.answer import Outcome, answer
from precache.engines.processes import set_environment
from precache.errors import SettingError, WorkerError
from precache.imports import child_environment

T = TypeVar("T")
_TOO_LITTLE_MEMORY = (
    "out of memory",  # CUDA, also where a later call tells, and cuDNN
    "can't allocate memory",  # torch, of main memory
    "storage size calculation overflowed",  # the same, of more than can be counted
    "alloc_failed",  # CUDNN_STATUS_ALLOC_FAILED, CUBLAS_STATUS_ALLOC_FAILED
    "allocation_failed",  # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "calling `cublascreate",  # a handle comes with a workspace
    # cuDNN, when it tunes: algorithms whose workspace does not fit are left out, until none is there
    "unable to find an engine to execute",
    "unable to find a valid cudnn algorithm",
)
_ENDING_S = 5.0  # for a process that has answered, or is told to end
_COMPILERS = ("torch._dynamo", "torch._inductor")


def run_fresh(function: Callable[..., T], *arguments: object) -> T:
    """What `function(*arguments)` returns, or raises, in a process of its own; all of it must pickle.

    Raises:
        WorkerError: the process died.
    """
    context: Any = multiprocessing.get_context(_METHOD)
    connection, theirs = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(theirs, pickle.dumps((function, arguments))))
    try:
        with set_environment(**child_environment()):
            process.start()
    except (EOFError, OSError) as error:
        raise WorkerError(
            f"no process can be started for a trial ({error or type(error).__name__}); its output is above"
        ) from error
    theirs.close()
    try:
        outcome: Outcome = connection.recv()
    except EOFError:
        process.join()
        raise WorkerError(_how_it_died(process.exitcode)) from None
    finally:
        connection.close()
        process.terminate()
        process.join(_ENDING_S)
        process.kill()
        process.join()
    if outcome.error is None:
        return outcome.result  # type: ignore[no-any-return]
    raised: BaseException = pickle.loads(outcome.error)
    if isinstance(raised, (Exception, KeyboardInterrupt)):
        raise raised
    raise WorkerError(f"the process of a trial ended: {type(raised).__name__}: {raised}")


def _how_it_died(code: int) -> str:
    """Say so, and what can be done about it."""
    if code == -signal.SIGKILL:
        return (
            "the process of a trial was killed, as the system does where memory runs out: use fewer workers "
            "or a smaller batch size"
        )
    if code < 0:
        return f"the process of a trial crashed ({signal.Signals(-code).name}); its last output is above"
    return f"the process of a trial ended by itself with exit code {code}; its last output is above"


# A server that has imported torch, which takes seconds, and done nothing else, forks one process per trial.
_METHOD = "spawn" if sys.platform in ("win32", "darwin") else "forkserver"
if _METHOD == "forkserver":
    multiprocessing.get_context(_METHOD).set_forkserver_preload(["bench.measure.trial"])


class DoesNotFit(SettingError):
    """The batch does not fit into memory."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory, the GPU's or the machine's, was too small: as torch, cuDNN or cuBLAS tells it."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    told = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in told for words in _TOO_LITTLE_MEMORY)


@contextmanager
def in_one_line(batch_size: int, size: int) -> Iterator[None]:
    """Say of the trial within, of such batches, what can be done about it.

    Raises:
        DoesNotFit: instead of what `out_of_memory` recognises.
        SettingError: instead of what torch.compile raises.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if out_of_memory(error):
            raise DoesNotFit(
                f"batch_size {batch_size:,} of {size}x{size} does not fit into memory; choose a smaller one"
            ) from error
        if type(error).__module__.startswith(_COMPILERS):
            reason = next(line for line in str(error).splitlines() if line.strip())
            raise SettingError(
                f"torch.compile failed ({reason}); fix that, or leave out --compile"
            ) from error
        raise


def run_watched(command: Sequence[str]) -> tuple[float, str]:
    """Run `command`, which is Python, to its end; seconds that it took, and what it printed.

    Raises:
        WorkerError: it ended with another exit code than 0; holds the last line that it printed.
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
        last = (text.strip().splitlines() or ["no output"])[-1]
        raise WorkerError(f"{' '.join(command[:4])} ...: exit code {process.returncode}; {last}")
    return wall_s, text
