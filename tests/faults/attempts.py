"""`precache` commands in a forked process of their own, attacked on the way."""

import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # noqa: F401 (the lock loads it; now, so that this costs no run)

import precache.cli.main
from precache.cli import commandline
from tests.faults.nursery import HANG_S
from tests.faults.shim import Shim, Strike
from tests.faults.tally import Outcome

TRACEBACK = 70  # no exit code of ours
_ERROR = re.compile(r"precache( convert)?: error: ")


@dataclass(frozen=True, slots=True)
class Attempt:
    """How a run of the command ended.

    Attributes:
        code: its exit code, or the negative number of the signal that ended it; None: it hung.
        text: what it wrote to stderr.
    """

    code: int | None
    text: str
    seconds: float

    def fault(self) -> Outcome | None:
        """What no run may do: hang, die by itself, end in a traceback, say nothing or more than a line."""
        if self.code is None:
            return Outcome("hang", self.text)
        last = " | ".join(self.text.splitlines()[-3:])[:300]
        if self.code < 0:
            return Outcome("crash", f"{signal.Signals(-self.code).name} {last}")
        if self.code == TRACEBACK or "Traceback" in self.text:
            return Outcome("traceback", last)
        errors = [line for line in self.text.splitlines() if _ERROR.match(line)]
        if self.code not in (0, 2):
            return Outcome("traceback", f"exit code {self.code}: {last}")
        if self.code == 2 and (len(errors) != 1 or errors[0] != self.text.splitlines()[-1]):
            return Outcome("traceback", f"{len(errors)} lines of errors: {last}")
        return None

    @property
    def error(self) -> str:
        """The last line that it wrote."""
        return (self.text.splitlines() or [""])[-1][:200]


def attempt(
    command: Sequence[str],
    log: Path,
    *,
    shim: Shim | None = None,
    strike: Strike | None = None,
    kill_after_s: float | None = None,
    spare_workers: bool = False,
) -> Attempt:
    """Run `precache COMMAND` in a forked process, in a group of its own, and wait for it and its workers.

    Args:
        kill_after_s: kill it and its workers then; with `spare_workers` it alone, and do not wait for them.
    """
    if shim is not None:
        shim.reset()
    log.write_text("")  # it may be killed before it opens it
    start_s = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(command, log, shim, strike)
    with suppress(OSError):  # it does the same: whoever comes first
        os.setpgid(child, 0)
    deadline = HANG_S if kill_after_s is None else kill_after_s
    code = _wait(child, deadline)
    if code is None and kill_after_s is not None:
        (os.kill if spare_workers else os.killpg)(child, signal.SIGKILL)
        code = _wait(child, HANG_S)
    text = log.read_text(errors="replace")
    if code is None:
        os.kill(child, signal.SIGUSR1)
        time.sleep(0.2)
        stack = [
            line.strip() for line in log.read_text(errors="replace").splitlines() if "/precache/" in line
        ]
        text = f"at {' | '.join(stack[:3])}"
    if not spare_workers:
        _end_group(child)
    return Attempt(code, text, time.monotonic() - start_s)


def _become(command: Sequence[str], log: Path, shim: Shim | None, strike: Strike | None) -> None:
    code = TRACEBACK
    try:
        os.setpgid(0, 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(output, 2)
        if shim is not None and strike is not None:
            shim.arm(strike)
        code = commandline.run(precache.cli.main.main, "precache", command)
    except BaseException:
        traceback.print_exc()
    try:
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait(child: int, seconds: float) -> int | None:
    """The exit code; None if it still runs after `seconds`."""
    process = os.pidfd_open(child)
    try:
        if not select.select([process], [], [], seconds)[0]:
            return None
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(process)


def _end_group(group: int) -> None:
    """Kill what is left of a process group, and wait until it is gone: it may hold files."""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        try:
            os.killpg(group, signal.SIGKILL)
            os.waitpid(-group, os.WNOHANG)
        except (ProcessLookupError, ChildProcessError):
            if not _group_lives(group):
                return
        time.sleep(0.001)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
