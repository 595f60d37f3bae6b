"""Whose CPU time is whose: ours is this process and its descendants, whether they live or have ended."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.machine.monitor import OtherProcesses, _tree_seconds
from precache.engines import available_cpus

SPIN = "import time\nend = time.process_time() + {seconds}\nwhile time.process_time() < end: pass"


@contextmanager
def a_stranger() -> Iterator[None]:
    """A busy process that is no descendant of this one: its parent has ended."""
    # else it keeps the pipes open, and nobody sees them end
    quiet = "quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}"
    child = f"subprocess.Popen([sys.executable, '-c', {SPIN.format(seconds=30)!r}], **quiet)"
    start = [sys.executable, "-c", f"import subprocess, sys; {quiet}; print({child}.pid)"]
    pid = int(subprocess.run(start, capture_output=True, text=True, check=True).stdout)
    try:
        yield
    finally:
        os.kill(pid, 9)


@pytest.mark.skipif(sys.platform != "linux", reason="told by Linux alone")
def test_a_process_of_ours_counts_while_it_lives_and_after_it_has_ended() -> None:
    """Also one whose parent lives on, as that of a server of processes does."""
    before = _tree_seconds()
    subprocess.run([sys.executable, "-c", SPIN.format(seconds=0.2)], check=True)
    after = _tree_seconds()
    assert 0.2 <= after - before < 5
    run = f"subprocess.run([sys.executable, '-c', {SPIN.format(seconds=0.2)!r}])"
    code = f"import subprocess, sys, time; {run}; print(flush=True); time.sleep(30)"
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert server.stdout is not None
    server.stdout.readline()  # its child has ended
    assert _tree_seconds() >= after + 0.2
    server.kill()
    server.communicate()


@pytest.mark.skipif(sys.platform == "win32", reason="not told there")
def test_what_a_strange_process_takes_is_others() -> None:
    with a_stranger():
        others = OtherProcesses()
        time.sleep(0.5)
        share = others.share()
    assert share is not None
    assert 0.2 / available_cpus() < share <= 1
