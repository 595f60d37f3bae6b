"""Run the project's commands as users do, in a process of their own; or in this one, which is quicker."""

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
    """Run `python -m module arguments` in `cwd`, with the code of this checkout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def run_and_interrupt(
    when: Callable[[], bool], *arguments: object, cwd: Path, number: int = signal.SIGINT
) -> "tuple[subprocess.CompletedProcess[str], float]":
    """Run `precache arguments`, and send it a signal as soon as `when()` is true.

    Returns:
        The result, and how long the command went on after the signal, in seconds.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    command = [sys.executable, "-m", "precache", *map(str, arguments)]
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline_s = time.monotonic() + 60
    while not when():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    time.sleep(0.2)
    start_s = time.monotonic()
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=150)
    result = subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
    return result, time.monotonic() - start_s


def run_here(module: str, *arguments: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command in this process, which is quicker, as nothing is imported again; else like `run`.

    A command that starts workers is slow here, beside torch's threads: `run` is for those.
    """
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    command, previous_folder = list(map(str, arguments)), Path.cwd()
    os.chdir(cwd)
    try:
        with (
            mock.patch.dict(os.environ, COLUMNS="100"),
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
        ):
            code = commandline.run(import_module(MAINS[module]).main, module, command)
    finally:
        os.chdir(previous_folder)
    texts = [stream.buffer.getvalue().decode() for stream in (stdout, stderr)]  # type: ignore[attr-defined]
    return subprocess.CompletedProcess([module, *command], code, *texts)


def check_bad_input(result: "subprocess.CompletedProcess[str]", *mentions: str) -> None:
    """Check that a command ended with exit code 2, and one line on stderr that contains all `mentions`."""
    assert result.returncode == 2, result
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1, result.stderr
    for mention in mentions:
        assert mention in lines[0]
