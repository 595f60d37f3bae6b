"""The engine `ray`: a task of a Ray cluster for each task of the plan.

Only workers are started here, by Ray. Ray itself retries nothing. What becomes of a task depends on what
happened:

    its worker or node died    it is tried again in a process of its worker, as the engine `local` does it,
                               which finds out over which picture the process dies
    memory was short           Ray's monitor killed the worker: the task is tried again once, then an error
                               names task and node

What is written into a folder that is not shared is lost, so each node is checked before the first task, see
`connector`; a worker on a node that joins later checks it itself.

Only paths and what `finish` returns go over the network with a task. `function`, with all that it holds, lies
in Ray's object store once, and each worker, which Ray keeps, unpacks it once.
"""

import os
import pickle
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from precache.engines.connector import (
    check_readable,
    check_versions,
    imported,
    last_line,
    live_nodes,
    this_node,
    versions,
)
from precache.engines.processes import (
    Nodes,
    Task,
    Ticks,
    cannot_be_sent,
    given_up,
    name_of,
    no_check,
    sendable,
    unchanged,
)
from precache.engines.processes import run as run_here
from precache.errors import DatasetError, SettingError, WorkerError, os_reason
from precache.pictures import turns
from precache.reporting import warn
from precache.storage import open_new, read_regular, temporary_path
from precache.storage.urls import Location, Url

_CPUS = 1  # of a task: decoding, resizing and encoding use one
_TASKS_PER_CPU = 2  # in flight: the next one waits on the node while the last one runs
_WAIT_S = 0.2
_RESIZED_S = 5.0  # how often the cluster is asked how large it is
_PROBE_S = 120.0  # a worker has to start; a folder that hangs takes forever
_END_S = 10.0


class _Loss(Enum):
    """What happened to the worker of a task, and how often it may."""

    NODE = ("its Ray worker, or the node of it, died", 5)
    MEMORY = ("Ray killed its worker to free memory", 2)

    def __init__(self, words: str, most: int) -> None:
        self.words, self.most = words, most


@dataclass(slots=True, eq=False)
class _Attempt:
    """A task, and how often it was lost."""

    task: Any
    losses: Counter[_Loss] = field(default_factory=Counter)

    def lose(self, loss: _Loss, detail: str) -> None:
        """Note that it was lost; WorkerError with the `detail` if another try makes no sense."""
        self.losses[loss] += 1
        if self.losses[loss] == loss.most:
            raise given_up(self.task, loss.words, loss.most, detail)


def run(
    function: Callable[[Task, Ticks], Any],
    tasks: Iterable[Task],
    workers: int | None,
    on_progress: Callable[[int], None],
    *,
    finish: Callable[[Any], Any] = unchanged,
    nodes: Nodes | None = None,
) -> Generator[Any, None, None]:
    """As `precache.engines.run`, on the cluster that this process is connected to.

    Args:
        workers: tasks at a time; None: twice the CPUs of the cluster, as many as it has at the moment.

    Raises:
        WorkerError: a task was lost too often, or a node does not answer.
    """
    if workers == 0:
        raise SettingError("workers=0 is for the engine local; give 1 or more, or leave it out")
    tasks = iter(tasks)
    first = next(tasks, None)
    if first is None:
        return
    cluster = _Cluster(function, finish, nodes or Nodes(no_check), workers)
    try:
        cluster.check_nodes(on_progress)
        yield from cluster.do(chain([first], tasks), on_progress)
    except SystemError as error:  # what a handler of SIGTERM raised while Ray waited
        raise error.__cause__ or error from None
    except imported().exceptions.RayError as error:
        raise WorkerError(
            f"the Ray cluster failed ({last_line(error)}); look at 'ray status', then run the same command "
            f"again: a conversion continues where it stopped"
        ) from error
    finally:
        cluster.end()


class _Cluster:
    """The workers of a cluster, and the tasks that they have."""

    def __init__(self, function: Any, finish: Any, nodes: Nodes, limit: int | None) -> None:
        self._ray = ray = imported()
        self._nodes, self._limit = nodes, limit
        self._names: dict[str, str] = {}
        self._most_tasks, self._asked_s = 0, float("-inf")
        self._running: dict[Any, _Attempt] = {}  # by Ray's reference of what comes of them
        self._probes: dict[Any, str] = {}
        try:
            # in a list, it is not unpacked before a task asks for it
            self._work = [ray.put(Work(function, finish, nodes.check, os.getcwd()))]
        except Exception as error:  # packing runs other people's code
            raise cannot_be_sent(error, "the cluster", "use the engine local") from error
        self._call: Any = ray.remote(num_cpus=_CPUS, max_retries=0)(call)

    def check_nodes(self, on_progress: Callable[[int], None]) -> None:
        """Raise what is wrong with a node, before the first task."""
        ray = self._ray
        names = live_nodes(_CPUS)
        if not names:
            warn("no node of the Ray cluster has a CPU yet; waiting for one")
        ask: Any = ray.remote(num_cpus=0, max_retries=0)(probe_node)
        for node in names:
            self._probes[ask.options(scheduling_strategy=_on(ray, node)).remote(self._work)] = node
        until_s = time.monotonic() + _PROBE_S
        while self._probes:
            on_progress(0)
            for reference in ray.wait([*self._probes], timeout=_WAIT_S)[0]:
                node = self._probes.pop(reference)
                try:
                    problem = ray.get(reference)
                except ray.exceptions.RayError as error:
                    if self._loss(error) is not None or node not in live_nodes(0):
                        continue  # its tasks are tried again elsewhere
                    raise WorkerError(
                        f"{names[node]}: cannot run precache's tasks ({last_line(error)}); install the same "
                        f"version on every node"
                    ) from error
                if problem is not None:
                    raise problem
            if self._probes and time.monotonic() > until_s:
                (node, *_) = self._probes.values()
                raise WorkerError(
                    f"{names[node]}: did not answer within {_PROBE_S:.0f} s; see whether its folders hang, "
                    f"or take it out of the cluster"
                )

    def do(self, tasks: Iterable[Any], on_progress: Callable[[int], None]) -> Generator[Any, None, None]:
        """Yield what comes of each task, see `run`."""
        ray = self._ray
        waiting = map(_Attempt, tasks)
        again: deque[_Attempt] = deque()
        while True:
            while self._has_room() and (attempt := again.popleft() if again else next(waiting, None)):
                call = self._call.remote(self._work, attempt.task, in_process=bool(attempt.losses))
                self._running[call] = attempt
            if not self._running:
                return
            for reference in ray.wait([*self._running], timeout=_WAIT_S)[0]:
                attempt = self._running.pop(reference)
                try:
                    outcome = ray.get(reference)
                except ray.exceptions.RayError as error:
                    loss = self._loss(error)
                    if loss is None:
                        raise WorkerError(
                            f"{name_of(attempt.task)}: Ray cannot run it ({last_line(error)})"
                        ) from error
                    attempt.lose(loss, f"last on {self._node_in(str(error))}")
                    again.append(attempt)
                    continue
                if outcome.error is not None:
                    raise outcome.error
                name = self._names.get(outcome.node, outcome.node)
                self._nodes.units[name] = self._nodes.units.get(name, 0) + outcome.units
                on_progress(outcome.units)
                yield outcome.result

    def _has_room(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._asked_s >= _RESIZED_S:
            cpus = int(self._ray.cluster_resources().get("CPU", 0))
            self._most_tasks = self._limit or max(_TASKS_PER_CPU * cpus // _CPUS, 1)
            self._names |= live_nodes(0)
            self._asked_s = now_s
        return len(self._running) < self._most_tasks

    def end(self) -> None:
        ray = self._ray
        left = [*self._running, *self._probes]
        self._running.clear()
        self._probes.clear()
        with suppress(Exception):  # the cluster may be gone
            for reference in left:
                ray.cancel(reference, force=True)
            if left:  # so that they write nothing when this returns
                ray.wait(left, num_returns=len(left), timeout=_END_S)

    def _node_in(self, said: str) -> str:
        """The node that most of Ray's errors name."""
        return next((name for node, name in self._names.items() if node in said), "an unknown node")

    def _loss(self, error: Exception) -> _Loss | None:
        """What happened to the worker; None if the error says something else."""
        of_ray = self._ray.exceptions
        if isinstance(error, of_ray.OutOfMemoryError):
            return _Loss.MEMORY
        died = of_ray.NodeDiedError, of_ray.TaskUnschedulableError, of_ray.WorkerCrashedError
        return _Loss.NODE if isinstance(error, (*died, of_ray.ObjectLostError)) else None


def _on(ray: Any, node: str) -> Any:
    """On this node, and on no other."""
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)


@contextmanager
def nodes_of(folder: Location, name: str, read: Callable[[], object]) -> Iterator[Nodes]:
    """The nodes of a cluster that writes into `folder`, where a small file shows them that it is shared.

    At a URL there is no such file: the first shard shows whether a node can write there.

    Args:
        name: of a file in `folder`; the small file is named as a leftover of writing it.
        read: reads a sample; raises a SourceError where the source cannot be read.
    """
    if isinstance(folder, Url):
        yield Nodes(partial(_check_node, versions(), None, read))
        return
    probe = temporary_path(Path(os.path.abspath(folder)) / name)
    with open(open_new(probe), "wb") as file:
        file.write(probe.name.encode())
    try:
        yield Nodes(partial(_check_node, versions(), probe, read))
    finally:
        probe.unlink(missing_ok=True)


def _check_node(expected: dict[str, str], probe: Path | None, read: Callable[[], object], node: str) -> None:
    """Raise what is wrong with this machine, whose name in messages is `node`.

    Args:
        expected: versions of the machine that plans.
        probe: a file in the folder that is written to, which holds its own name; None at a URL.
        read: as of `nodes_of`.

    Raises:
        SettingError: versions differ.
        DatasetError: the folder that is written to is another one here, or cannot be written to.
        SourceError: a sample cannot be read here.
    """
    check_versions(node, versions(), expected)
    if probe is not None:
        check_readable(node, partial(_look_into_folder, probe))
    check_readable(node, read)


def _look_into_folder(probe: Path) -> None:
    """Raise DatasetError unless the folder of `probe` is the driver's, and can be written to."""
    folder, written = probe.parent, temporary_path(probe)
    try:
        is_shared = read_regular(probe) == probe.name.encode()
        os.close(open_new(written))
        written.unlink()
    except FileNotFoundError:
        is_shared = False
    except OSError as error:
        raise DatasetError(f"{folder}: cannot be read and written there ({os_reason(error)})") from error
    if not is_shared:
        raise DatasetError(f"{folder}: is missing there, or another folder")


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


def probe_node(packed: list[Any]) -> Exception | None:
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
            (result,) = run_here(function, [task], int(in_process), units.append, finish=work.finish)
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
            work.check(this_node())
        _work.clear()  # what another run left
        _work[key] = work
    return _work[key]


def _run_number() -> int:
    """The same for all workers of a run: on one machine they decode large pictures one after another."""
    import ray

    context = ray.get_runtime_context()
    return zlib.crc32(f"{context.gcs_address} {context.get_job_id()}".encode())


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
