"""The engine `ray`, the part that runs on the nodes: one call for each task, in a worker that Ray keeps.

Only paths and what `finish` returns go over the network with a task. `function`, with all that it holds,
lies in Ray's object store once, and each worker unpacks it once.
"""

import os
import pickle
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from precache.engines.processes import Ticks, run, sendable
from precache.pictures import turns


class Work(NamedTuple):
    """What each worker gets once.

    Attributes:
        function, finish: see `precache.engines.run`.
        check: see `Nodes`.
        folder: the working folder of the driver; relative paths are seen from there.
    """

    function: Any
    finish: Any
    check: Any
    folder: str


class Outcome(NamedTuple):
    """The result of a task: `error`, or what `finish` returned; and the units done, on which node."""

    node: str
    units: int = 0
    result: Any = None
    error: Exception | None = None


def probe(packed: list[Any]) -> Exception | None:
    """What is wrong with this node, or None; `packed` holds a reference to the `Work`."""
    try:
        _unpacked(packed[0])
    except Exception as error:
        return sendable(error)
    return None


def call(packed: list[Any], task: Any, in_process: bool) -> Outcome:
    """Do a task; `in_process`, by the engine `local`, which finds out over which unit its process dies."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    units: list[int] = []
    try:
        work = _unpacked(packed[0])
        function = _Packed(work.function) if in_process else work.function
        with _in_folder(work.folder):
            (result,) = run(function, [task], int(in_process), units.append, finish=work.finish)
    except Exception as error:  # as a result: Ray would wrap it in one of its own
        return Outcome(node, error=sendable(error))
    return Outcome(node, sum(units), result)


class _Packed:
    """A function as Ray packs it, even one of a class that no module has; for a process of its worker."""

    def __init__(self, function: Any) -> None:
        import ray

        self._run_number, self._packed = _run_number(), ray.cloudpickle.dumps(function)

    def __call__(self, task: Any, tick: Ticks) -> Any:
        turns.take_part_in(self._run_number)
        return pickle.loads(self._packed)(task, tick)


_work: dict[str, Work] = {}  # of this worker, by the reference


def _unpacked(reference: Any) -> Work:
    """The work behind `reference`; the first time, this worker checks its node."""
    import ray

    key = reference.hex()
    if key not in _work:
        turns.take_part_in(_run_number())
        work: Work = ray.get(reference)
        with _in_folder(work.folder):
            address = ray.util.get_node_ip_address()
            work.check(node_name(address, ray.get_runtime_context().get_node_id()))
        _work.clear()  # what another run left
        _work[key] = work
    return _work[key]


def _run_number() -> int:
    """The same for all workers of a run: on one machine they decode large pictures one after another."""
    import ray

    context = ray.get_runtime_context()
    return zlib.crc32(f"{context.gcs_address} {context.get_job_id()}".encode())


def node_name(address: str, node_id: str) -> str:
    """The name of a node for messages."""
    return f"node {address} ({node_id[:8]})"


@contextmanager
def _in_folder(folder: str) -> Iterator[None]:
    """Work in `folder`, where this node has it; the next task may be of another run."""
    before = os.getcwd()
    if os.path.isdir(folder):
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
