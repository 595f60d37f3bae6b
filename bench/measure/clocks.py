"""Who takes the times of waits and steps."""

import itertools
import time
from typing import Protocol

import torch


class Clock(Protocol):
    """Marked before the first wait, and after each wait and each step, by turns."""

    def mark(self) -> None:
        """Take the time."""

    def intervals_s(self) -> tuple[float, ...]:
        """Seconds between the marks: a wait, a step, a wait, a step."""


def make_clock(device: torch.device) -> Clock:
    """The clock of `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


class HostClock:
    """The host's."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        """See `Clock`."""
        self._marks.append(time.perf_counter())

    def intervals_s(self) -> tuple[float, ...]:
        """See `Clock`."""
        return tuple(stop - start for start, stop in itertools.pairwise(self._marks))


class CudaClock:
    """Times on the device: the host queues steps ahead of it and would see only the queueing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """See `Clock`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._marks.append(event)

    def intervals_s(self) -> tuple[float, ...]:
        """See `Clock`."""
        self._stream.synchronize()
        pairs = itertools.pairwise(self._marks)
        return tuple(start.elapsed_time(stop) / 1e3 for start, stop in pairs)
