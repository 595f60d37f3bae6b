"""Processes of their own: a function's, that sees nothing of other trials; a command's, watched."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

import bench
from precache.errors import SettingError, WorkerError

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
_COMPILERS = ("torch._dynamo", "torch._inductor")


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


def run_watched(command: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[float, str]:
    """Run `command` to its end; seconds that it took, and what it printed.

    Raises:
        WorkerError: it ended with another exit code than 0; holds the last line that it printed.
    """
    with tempfile.TemporaryFile("w+") as output:
        start_s = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
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


def environment() -> dict[str, str]:
    """This process's, in which Python finds the packages that this process uses."""
    root = str(Path(bench.__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, path] if path else [root])}
