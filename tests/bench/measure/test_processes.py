"""Functions in processes of their own: start, end, errors, and the message where memory is too small."""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bench.measure.processes import BatchTooLargeError, run_in_process
from bench.measure.trial import explain_trial_errors
from precache.errors import WorkerError
from tests.command import ROOT


def describe_process() -> tuple[int, str]:
    return os.getpid(), multiprocessing.get_start_method()


def exit_with_message() -> None:
    sys.exit("the user's script ended here")


class FromMissingModule:
    """Object whose unpickling raises ModuleNotFoundError."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return importlib.import_module, ("no_such_module",)


def test_each_call_has_a_process_of_its_own() -> None:
    processes = [run_in_process(describe_process) for _ in range(2)]
    assert len({pid for pid, _ in processes} | {os.getpid()}) == 3
    start_methods = {start_method for _, start_method in processes}
    assert start_methods == {multiprocessing.get_start_method()}, "as in a training"


@pytest.mark.parametrize(
    ("function", "argument", "mention"),
    [
        (os._exit, 7, "exit code 7"),
        (signal.raise_signal, signal.SIGSEGV, "SIGSEGV"),
        (signal.raise_signal, signal.SIGKILL, "batch size"),
    ],
)
def test_a_process_that_dies_raises_with_its_exit_code(
    function: Callable[[int], object], argument: int, mention: str
) -> None:
    with pytest.raises(WorkerError, match=mention):
        run_in_process(function, argument)


def test_an_exception_of_the_function_is_raised_with_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        run_in_process(divmod, 1, 0)
    assert "Traceback" in str(raised.value.__cause__)


def test_an_exception_of_unpickling_the_call_is_raised() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        run_in_process(len, FromMissingModule())


def test_a_function_that_exits_raises_with_its_message() -> None:
    with pytest.raises(WorkerError, match=r"SystemExit: the user's script ended here"):
        run_in_process(exit_with_message)


def test_a_process_ends_with_the_command_that_started_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = subprocess.Popen([sys.executable, program, tmp_path / "pid"], env=environment)
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    command.kill()
    command.wait()
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


_PROGRAM = """
import os, pathlib, sys, time
from bench.measure.processes import run_in_process
def trial(file):
    pathlib.Path(file).write_text(str(os.getpid()))
    time.sleep(60)
if __name__ == "__main__":
    run_in_process(trial, sys.argv[1])
"""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 50
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize(
    "message",
    [  # as users have reported them
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at ...",
        "FIND was unable to find an engine to execute this computation after trying 7 plans.",
    ],
)
def test_too_little_memory_is_an_error_of_the_batch_size(message: str) -> None:
    raises = pytest.raises(BatchTooLargeError, match=r"^batch_size 8 of 32x32 ")
    with raises as raised, explain_trial_errors(8, 32):
        raise RuntimeError(message)
    assert "smaller" in raised.value.remedy


def test_other_errors_of_cuda_are_raised_as_they_are() -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError) as raised, explain_trial_errors(8, 32):
        raise error
    assert raised.value is error
