"""Run a command of the project as a user does, in a process of its own; or here, which is quicker."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from unittest import mock

from precache.cli import commandline

ROOT = Path(__file__).resolve().parent.parent
MAINS = {"precache": "precache.cli.main", "bench": "bench.cli"}


def run(module: str, *arguments: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """`python -m module arguments` in `cwd`, on the code of this checkout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def run_and_interrupt(
    when: Callable[[], bool], *arguments: object, cwd: Path, number: int = signal.SIGINT
) -> "tuple[subprocess.CompletedProcess[str], float]":
    """`precache arguments`, which gets a signal when `when` holds; and for how long it lives on, in s."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    command = [sys.executable, "-m", "precache", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=cwd, env=environment, text=True, **pipes)  # type: ignore[call-overload]
    deadline_s = time.monotonic() + 60
    while not when():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    time.sleep(0.2)
    begin_s = time.monotonic()
    process.send_signal(number)
    said = process.communicate(timeout=150)
    return subprocess.CompletedProcess(command, process.returncode, *said), time.monotonic() - begin_s


def run_here(module: str, *arguments: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """The same in this process, where a process of its own is not the point: nothing is imported again.

    Workers of the command are slow to start here, beside torch's threads: leave those commands to `run`.
    """
    said = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
    command, before = list(map(str, arguments)), Path.cwd()
    os.chdir(cwd)
    try:
        with (
            mock.patch.dict(os.environ, COLUMNS="100"),
            contextlib.redirect_stdout(said[0]),
            contextlib.redirect_stderr(said[1]),
        ):
            code = commandline.run(import_module(MAINS[module]).main, module, command)
    finally:
        os.chdir(before)
    texts = [stream.buffer.getvalue().decode() for stream in said]  # type: ignore[attr-defined]
    return subprocess.CompletedProcess([module, *command], code, *texts)


def check_bad_input(result: "subprocess.CompletedProcess[str]", *mentions: str) -> None:
    """Exit code 2, and one line on stderr that mentions what it must."""
    assert result.returncode == 2, result
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1, result.stderr
    for mention in mentions:
        assert mention in lines[0]
