"""CPUs that a watched script and the workers of its loaders may use, and how long the workers wait for one.

This module runs in the processes of a script that `bench watch` started, and imports the standard library
alone. `inject/sitecustomize.py` imports it when Python starts, before OpenMP can pin the process.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "SLURM_JOB_ID")
"""Variables of the environment that say who limits the CPUs."""


def _read_mask(pid: int = 0) -> set[int]:
    """Return the CPUs that a process, or this thread, may use; none on a system without masks."""
    return set(os.sched_getaffinity(pid)) if hasattr(os, "sched_getaffinity") else set()


_START = _read_mask()


class WorkerCpus:
    """Reader of the CPUs of this process and of a loader's workers."""

    def __init__(self) -> None:
        self._queued_s: dict[int, float] = {}
        self._read_s = 0.0

    def read(self, workers: Sequence[int]) -> dict[str, Any]:
        """Return the values of an event `cpus`, see `hook`.

        Args:
            workers: process ids of the loader's workers.
        """
        now_s = time.monotonic()
        mask: set[int] = set()
        queued_s: dict[int, float] = {}
        for pid in workers:
            with suppress(OSError):  # it has ended
                mask |= _read_mask(pid)
                with open(f"/proc/{pid}/schedstat") as file:
                    queued_s[pid] = int(file.read().split()[1]) / 1e9
        passed_s = now_s - self._read_s
        shares = [
            (queued_s[pid] - self._queued_s[pid]) / passed_s for pid in queued_s.keys() & self._queued_s
        ]
        self._queued_s, self._read_s = queued_s, now_s
        return {
            "start": sorted(_START),
            "own": sorted(_read_mask()),
            "workers": sorted(mask),
            "queued_share": sum(shares) / len(shares) if shares else None,
            "machine": os.cpu_count(),
            "variables": {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)},
        }
