"""Run a command and watch its processes: wall time, CPU time, peak memory of all together."""

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from precache.errors import WorkerError

_SAMPLE_S = 0.05


@dataclass(frozen=True, slots=True)
class ProcessRun:
    """What a command took.

    Attributes:
        wall_s: from its start to its end.
        peak_bytes: the most memory that the process and its descendants held together: proportional
            set size where the system has it (shared pages count once), else resident set size. 0 if
            it was not sampled.
        output: what it printed.
    """

    wall_s: float
    peak_bytes: int
    output: str


def run_watched(
    command: Sequence[str], environment: Mapping[str, str] | None = None, *, memory: bool = False
) -> ProcessRun:
    """Run `command` to its end, and sample its memory if asked to: that slows it down.

    Raises:
        WorkerError: it ended with another exit code than 0; holds the last line that it printed.
    """
    with tempfile.TemporaryFile("w+") as output:
        start_s = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        peak = 0
        try:
            while process.poll() is None:
                if memory:
                    peak = max(peak, tree_bytes(process.pid))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_SAMPLE_S if memory else None)
            wall_s = time.perf_counter() - start_s
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        text = output.read()
    if process.returncode != 0:
        last = (text.strip().splitlines() or ["no output"])[-1]
        raise WorkerError(f"{' '.join(command[:4])} ...: exit code {process.returncode}; {last}")
    return ProcessRun(wall_s, peak, text)


def tree_bytes(pid: int) -> int:
    """Memory of a process and its descendants, in bytes; 0 once it is gone."""
    return sum(tree_memory(pid))


def tree_memory(pid: int) -> tuple[int, int]:
    """Memory of a process and its descendants, in bytes; zeros once it is gone.

    Returns:
        Private pages, and the processes' proportions of pages that they share with one another or with
        others. Where the system does not tell them apart, all is private.
    """
    try:
        process = psutil.Process(pid)
        members = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0, 0
    each = [_process_memory(member) for member in members]
    return sum(private for private, _ in each), sum(shared for _, shared in each)


def _process_memory(process: psutil.Process) -> tuple[int, int]:
    try:
        if os.path.exists("/proc/self/smaps_rollup"):
            memory = process.memory_full_info()
            return int(memory.uss), int(memory.pss - memory.uss)
        return int(process.memory_info().rss), 0
    except psutil.Error:
        return 0, 0
