"""How much of the CPUs is taken by processes that are not ours, while something is measured."""

import os
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class _Seconds:
    """CPU seconds so far: of all CPUs that this process may use, those of them that were busy, and ours."""

    total: float
    busy: float
    ours: float


class OtherProcesses:
    """Watches from when it is made; `share()` at any time after.

    Ours are this process and its descendants, also those that have ended.
    """

    def __init__(self) -> None:
        self._start = _read()

    def share(self) -> float | None:
        """Of the CPUs that this process may use, 0 to 1, since then; None where that is not known."""
        now = _read()
        if self._start is None or now is None:
            return None
        total = now.total - self._start.total
        theirs = (now.busy - self._start.busy) - (now.ours - self._start.ours)
        return min(1.0, max(0.0, theirs) / total) if total > 0 else 0.0


def _read() -> _Seconds | None:
    if os.name == "nt":  # it does not keep the times of processes that have ended: ours would be others'
        return None
    each = psutil.cpu_times(percpu=True)
    if hasattr(os, "sched_getaffinity"):
        mine = [each[core] for core in os.sched_getaffinity(0) if core < len(each)]
        each = mine or each
    total = busy = 0.0
    for times in each:
        # Linux counts what guests take under user, too
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        # an interrupt is served for whoever asked, and that may be us
        interrupts = getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
        total += sum(times) - guests
        busy += sum(times) - guests - interrupts - times.idle - getattr(times, "iowait", 0.0)
    return _Seconds(total, busy, _tree_seconds())


def _tree_seconds() -> float:
    """Of this process and its descendants, each with its children that have ended."""
    mine = os.times()
    seconds = mine.user + mine.system + mine.children_user + mine.children_system
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has ended: its parent has its time, or soon will
            continue
        # only Linux tells those of a process's children
        seconds += times.user + times.system
        seconds += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return seconds
