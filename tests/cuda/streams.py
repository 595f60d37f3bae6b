"""Simulated streams and events, the schedules, and the current stream and device of each thread.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#asynchronous-concurrent-execution
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

DEVICES = 2
Schedule = Callable[["Stream"], bool]
"""Whether the work of a stream is put off as long as CUDA may put it off."""

SCHEDULES: dict[str, Schedule] = {
    "at once": lambda stream: False,
    "training late": lambda stream: stream.is_default,
    "loader late": lambda stream: not stream.is_default,
    "all late": lambda stream: True,
    # If a loader has several streams, one of them lags behind the others.
    "first late": lambda stream: stream.number % 2 == 0 and not stream.is_default,
    "second late": lambda stream: stream.number % 2 == 1 and not stream.is_default,
}


@dataclass
class SimulatedCuda:
    """State of the simulation: its streams, and a record of what was done.

    Attributes:
        syncs: (name of the thread, name of what it waited for), for each time that the host waited.
        used: devices on which anything was done.
        pinned: bytes of each copy by the host into pinned memory.
    """

    late: Schedule
    lock: Any = field(default_factory=threading.RLock)
    local: threading.local = field(default_factory=threading.local)
    streams: list["Stream"] = field(default_factory=list)
    defaults: dict[int, "Stream"] = field(default_factory=dict)
    syncs: list[tuple[str, str]] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    pinned: list[int] = field(default_factory=list)

    def record_wait(self, reason: str) -> None:
        """Record that this thread waited for the device."""
        self.syncs.append((threading.current_thread().name, reason))


_active: list[SimulatedCuda] = []


def world() -> SimulatedCuda:
    """Return the active simulation."""
    return _active[-1]


@contextmanager
def activate(new: SimulatedCuda) -> Iterator[None]:
    """Make a simulation the active one until the end of the block."""
    _active.append(new)
    try:
        for index in range(DEVICES):
            new.defaults[index] = Stream(torch.device("cuda", index))
        new.used.clear()
        yield
    finally:
        _active.pop()


def index_of(device: "torch.device | str | int | None") -> int:
    """Return the number of a device; of the current one where `device` has none."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else int(index)


class Stream:
    """Simulates torch.cuda.Stream: work that is done in order, of which the first `done` entries are done."""

    def __init__(self, device: Any = None) -> None:
        index = index_of(device)
        self.device = torch.device("cuda", index)
        self.is_default = index not in world().defaults
        self.number = len(world().streams)
        self.queue: list[Callable[[], object] | None] = []
        self.done = 0
        world().streams.append(self)
        world().used.add(index)

    def put(self, work: Callable[[], object]) -> None:
        """Queue `work`."""
        with world().lock:
            world().used.add(self.device.index)
            self.queue.append(work)
            if not world().late(self):
                self.run(len(self.queue))

    def run(self, position: int) -> None:
        """Run the work that is queued before `position`."""
        with world().lock:
            while self.done < position:
                work, self.queue[self.done] = self.queue[self.done], None
                self.done += 1
                assert work is not None
                work()

    def synchronize(self) -> None:
        world().record_wait("stream")
        self.run(len(self.queue))

    def wait_event(self, event: "Event") -> None:
        self.put(event.run)

    def record_event(self) -> "Event":
        return Event(self, len(self.queue))


@dataclass
class Event:
    """Simulates torch.cuda.Event: a position in the queue of a stream."""

    stream: Stream
    position: int

    def run(self) -> None:
        """Run the work that was queued before the event."""
        self.stream.run(self.position)

    def synchronize(self) -> None:
        world().record_wait("event")
        self.run()


def current_device() -> int:
    """Simulate torch.cuda.current_device."""
    return getattr(world().local, "device", 0)


def set_device(device: Any) -> None:
    """Simulate torch.cuda.set_device."""
    world().local.device = index_of(device)


def current_stream(device: Any = None) -> Stream:
    """Simulate torch.cuda.current_stream."""
    index = index_of(device)
    own: dict[int, Stream] = world().local.__dict__.setdefault("streams", {})
    return own.get(index, world().defaults[index])


def synchronize(device: Any = None) -> None:
    """Simulate torch.cuda.synchronize."""
    world().record_wait("device")
    for stream in list(world().streams):
        if stream.device.index == index_of(device):
            stream.run(len(stream.queue))


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    """Simulate torch.cuda.stream: make it, and its device, the current ones of this thread."""
    index = stream.device.index
    before = current_device(), current_stream(index)
    set_device(index)
    world().local.streams[index] = stream
    try:
        yield
    finally:
        device, world().local.streams[index] = before
        set_device(device)
