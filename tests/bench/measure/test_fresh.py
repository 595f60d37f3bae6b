"""Processes of their own: how they start and end, and what is said where memory is too small."""

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

from bench.measure.fresh import DoesNotFit, in_one_line, run_in_process
from precache.errors import WorkerError
from tests.command import ROOT


def process() -> tuple[int, str]:
    return os.getpid(), multiprocessing.get_start_method()


def leave() -> None:
    sys.exit("the user's script ended here")


class FromMissingModule:
    """Object whose unpickling raises, as where its module cannot be imported."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return importlib.import_module, ("no_such_module",)


def test_each_trial_is_a_process_of_its_own() -> None:
    found = [run_in_process(process) for _ in range(2)]
    assert len({pid for pid, _ in found} | {os.getpid()}) == 3
    assert {method for _, method in found} == {multiprocessing.get_start_method()}, "as a training has it"


def test_a_trial_that_dies_is_an_error_that_says_how() -> None:
    with pytest.raises(WorkerError, match="exit code 7"):
        run_in_process(os._exit, 7)
    with pytest.raises(WorkerError, match="SIGSEGV"):
        run_in_process(signal.raise_signal, signal.SIGSEGV)
    with pytest.raises(WorkerError, match="use fewer workers or a smaller batch size"):
        run_in_process(signal.raise_signal, signal.SIGKILL)


def test_what_a_trial_raises_is_raised_here() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):  # before the function is called
        run_in_process(len, FromMissingModule())
    with pytest.raises(WorkerError, match=r"SystemExit: the user's script ended here"):
        run_in_process(leave)
    with pytest.raises(ZeroDivisionError) as raised:
        run_in_process(divmod, 1, 0)
    assert "Traceback" in str(raised.value.__cause__)


def test_a_trial_ends_with_the_command_that_started_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_COMMAND)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = subprocess.Popen([sys.executable, program, tmp_path / "pid"], env=environment)
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    command.kill()
    command.wait()
    trial = int((tmp_path / "pid").read_text())
    until(lambda: not psutil.pid_exists(trial) or psutil.Process(trial).status() == psutil.STATUS_ZOMBIE)


_COMMAND = """
import os, pathlib, sys, time
from bench.measure.processes import run_in_process
def trial(file):
    pathlib.Path(file).write_text(str(os.getpid()))
    time.sleep(60)
if __name__ == "__main__":
    run_in_process(trial, sys.argv[1])
"""


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 50
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_too_little_memory_is_one_line_with_the_remedy_and_other_errors_stay_what_they_are() -> None:
    for said in (  # as users have reported them
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at ...",
        "FIND was unable to find an engine to execute this computation after trying 7 plans.",
    ):
        with pytest.raises(DoesNotFit, match=r"^batch_size 8 of 32x32 .*; choose a"), in_one_line(8, 32):
            raise RuntimeError(said)
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError) as other, in_one_line(8, 32):
        raise error
    assert other.value is error
