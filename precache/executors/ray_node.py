"""The engine `ray`, the part that runs on the nodes: one call for each task, in a worker that Ray keeps.

What goes over the network is paths, and what `finish` returns; `function`, with all that it holds, lies in
Ray's object store once, and is unpacked once by each worker.
"""

import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from precache.executors.workers import Ticks, sendable
from precache.pictures import turns

REPORT_S = 0.5
"""How often a task reports its progress, over the network."""


class Report(NamedTuple):
    """How far a task is.

    Attributes:
        node: id of the node that it runs on.
        done: units so far.
        unit: that it has begun last, exactly, where it is `careful`; else None.
    """

    node: str
    done: int
    unit: int | None


class Reports:
    """An actor that holds the last report of each task, until the driver takes them."""

    def __init__(self) -> None:
        self._latest: dict[int, Report] = {}

    def put(self, number: int, report: Report) -> None:
        """Of the task `number`."""
        self._latest[number] = report

    def take(self) -> dict[int, Report]:
        """Those that came since the last call."""
        latest, self._latest = self._latest, {}
        return latest


@dataclass(frozen=True, slots=True)
class Work:
    """What each worker gets once.

    Attributes:
        function, finish: see `precache.executors.run`.
        check: see `Nodes`.
        folder: the working folder of the driver; relative paths are seen from there.
    """

    function: Any
    finish: Any
    check: Any
    folder: str


@dataclass(frozen=True, slots=True)
class Call:
    """One try of a task.

    Attributes:
        number: of the try.
        fatal: see `Ticks`.
        careful: whether it says of each unit that it begins it, so that the one over which a worker dies is
            known.
    """

    number: int
    task: Any
    fatal: frozenset[int]
    careful: bool


class Outcome(NamedTuple):
    """What came of a task: `error`, or what `finish` returned; and the units done, on which node."""

    node: str
    done: int
    result: Any
    error: Exception | None = None


def probe(packed: list[Any]) -> Exception | None:
    """What is wrong with this node, or None; `packed` holds a reference to the `Work`."""
    try:
        with _in_folder(_unpacked(packed[0]).folder):
            pass
    except Exception as error:
        return sendable(error)
    return None


def call(packed: list[Any], call: Call, reports: Any) -> Outcome:
    """Do a task."""
    tick = _Ticks(reports, call)
    try:
        work = _unpacked(packed[0])
        with _in_folder(work.folder):
            result = work.finish(work.function(call.task, tick))
    except Exception as error:  # as a result: Ray would wrap it in one of its own
        return Outcome(tick.node, tick.done, None, sendable(error))
    return Outcome(tick.node, tick.done, result)


class _Ticks(Ticks):
    def __init__(self, reports: Any, call: Call) -> None:
        import ray

        self.fatal = call.fatal
        self.node = ray.get_runtime_context().get_node_id()
        self.done = 0
        self._unit: int | None = None
        self._reports, self._call = reports, call
        self._report()

    def begin(self, unit: int) -> None:
        if self._call.careful:
            import ray

            self._unit = unit
            ray.get(self._report())  # there before the unit can kill this process

    def __call__(self) -> None:
        self.done += 1
        if time.monotonic() - self._reported_s >= REPORT_S:
            self._report()

    def _report(self) -> Any:
        self._reported_s = time.monotonic()
        return self._reports.put.remote(self._call.number, Report(self.node, self.done, self._unit))


_work: dict[str, Work] = {}  # of this worker, by the reference


def _unpacked(reference: Any) -> Work:
    """The work behind `reference`; the first time, this worker asks itself whether it fits."""
    import ray

    key = reference.hex()
    if key not in _work:
        context = ray.get_runtime_context()
        # all workers of a run on a machine decode large pictures one after another
        turns.take_part_in(zlib.crc32(f"{context.gcs_address} {context.get_job_id()}".encode()))
        work: Work = ray.get(reference)
        with _in_folder(work.folder):
            address = ray.util.get_node_ip_address()
            work.check(node_name(address, context.get_node_id()))
        _work.clear()  # what another run left
        _work[key] = work
    return _work[key]


def node_name(address: str, node_id: str) -> str:
    """What messages call a node."""
    return f"node {address} ({node_id[:8]})"


@contextmanager
def _in_folder(folder: str) -> Iterator[None]:
    """Work in `folder`, where this node has it; a task of somebody else's may come next."""
    before = os.getcwd()
    if os.path.isdir(folder):
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
