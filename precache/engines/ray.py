"""The engine `ray`: each task of the plan is a task of a Ray cluster.

Ray starts the workers, and retries nothing itself. A task that is lost is retried by its cause:

    its worker or node died    its next worker runs it in a process of its own, by the engine `local`, which
                               finds the picture that kills the process
    memory was short           Ray's monitor killed the worker: the task is tried again once, then an error
                               names task and node

Shards written into a folder that is not shared would be lost, so each node is checked before the first task,
see `connector`; workers on a node that joins later check it themselves.

Only paths and the results of `finish` go over the network with a task. `function`, with all that it holds, is
in Ray's object store once, and each worker, which Ray keeps alive, unpickles it once.
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
    import_ray,
    last_line,
    live_nodes,
    this_node,
    versions,
)
from precache.engines.processes import (
    Nodes,
    Task,
    Ticks,
    accept_node,
    identity,
    picklable_error,
    repeated_failure_error,
    task_name,
    unpicklable_error,
)
from precache.engines.processes import run as run_here
from precache.errors import DatasetError, SettingError, WorkerError, os_reason
from precache.pictures import large_pictures
from precache.reporting import warn
from precache.storage import open_new, read_regular, temporary_path

_CPUS = 1  # for each task: decoding, resizing and encoding use one
_TASKS_PER_CPU = 2  # submitted at a time, so that the next one waits on the node while the last one runs
_WAIT_S = 0.2
_RESIZED_S = 5.0  # how often the size of the cluster is read
_PROBE_S = 120.0  # for a worker to start and check its node, whose folders may hang
_END_S = 10.0


class _Loss(Enum):
    """Cause of the loss of a task: its words in an error, and the number of losses that is an error."""

    NODE = ("its Ray worker, or the node of it, died", 5)
    MEMORY = ("Ray killed its worker to free memory", 2)

    def __init__(self, words: str, limit: int) -> None:
        self.words, self.limit = words, limit


@dataclass(slots=True, eq=False)
class _ClusterTask:
    """A task, and the number of its losses by cause."""

    task: Any
    losses: Counter[_Loss] = field(default_factory=Counter)

    def record_loss(self, loss: _Loss, detail: str) -> None:
        """Record that the task was lost; WorkerError with the `detail` if that happened too often."""
        self.losses[loss] += 1
        if self.losses[loss] == loss.limit:
            raise repeated_failure_error(self.task, loss.words, loss.limit, detail)


def run(
    function: Callable[[Task, Ticks], Any],
    tasks: Iterable[Task],
    workers: int | None,
    on_progress: Callable[[int], None],
    *,
    finish: Callable[[Any], Any] = identity,
    nodes: Nodes | None = None,
) -> Generator[Any, None, None]:
    """Run tasks as `precache.engines.run` does, on the cluster that this process is connected to.

    Args:
        workers: tasks at a time; None: twice the CPUs that the cluster has at the moment.

    Raises:
        WorkerError: a task was lost too often, or a node does not answer.
    """
    if workers == 0:
        raise SettingError("workers=0 is for the engine local", remedy="give 1 or more, or leave it out")
    tasks = iter(tasks)
    first = next(tasks, None)
    if first is None:
        return
    cluster = _Cluster(function, finish, nodes or Nodes(accept_node), workers)
    try:
        cluster.check_nodes(on_progress)
        yield from cluster.run_tasks(chain([first], tasks), on_progress)
    except SystemError as error:  # Ray wraps the exception of a SIGTERM handler that ran while it waited
        raise error.__cause__ or error from None
    except import_ray().exceptions.RayError as error:
        raise WorkerError(
            f"the Ray cluster failed ({last_line(error)})",
            remedy="look at 'ray status', then run the same command again: a conversion continues where it "
            "stopped",
        ) from error
    finally:
        cluster.end()


class _Cluster:
    """The workers of a cluster and their tasks.

    Attributes:
        _names: id -> name of each node.
        _running: tasks by Ray's references to their outcomes.
        _probes: ids of nodes by Ray's references to the results of their checks.
        _max_tasks: most tasks that run at a time.
    """

    def __init__(self, function: Any, finish: Any, nodes: Nodes, limit: int | None) -> None:
        self._ray = ray = import_ray()
        self._nodes, self._limit = nodes, limit
        self._names: dict[str, str] = {}
        self._max_tasks, self._size_read_s = 0, float("-inf")
        self._running: dict[Any, _ClusterTask] = {}
        self._probes: dict[Any, str] = {}
        try:
            # in a list, so that Ray passes the reference, and does not unpickle it for each task
            self._work = [ray.put(Work(function, finish, nodes.check, os.getcwd()))]
        except Exception as error:  # pickling runs other people's code
            raise unpicklable_error(error, "the cluster", "use the engine local") from error
        self._call: Any = ray.remote(num_cpus=_CPUS, max_retries=0)(call)

    def check_nodes(self, on_progress: Callable[[int], None]) -> None:
        """Check every node before the first task, and raise the error of the first that fails."""
        ray = self._ray
        names = live_nodes(_CPUS)
        if not names:
            warn("no node of the Ray cluster has a CPU yet; waiting for one")
        probe: Any = ray.remote(num_cpus=0, max_retries=0)(probe_node)
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        for node in names:
            on_node = probe.options(scheduling_strategy=affinity(node_id=node, soft=False))
            self._probes[on_node.remote(self._work)] = node
        deadline_s = time.monotonic() + _PROBE_S
        while self._probes:
            on_progress(0)
            for reference in ray.wait([*self._probes], timeout=_WAIT_S)[0]:
                node = self._probes.pop(reference)
                try:
                    problem = ray.get(reference)
                except ray.exceptions.RayError as error:
                    if self._loss(error) is not None or node not in live_nodes(0):
                        continue  # the node died: its tasks are tried again elsewhere
                    raise WorkerError(
                        f"{names[node]}: cannot run precache's tasks ({last_line(error)})",
                        remedy="install the same version on every node",
                    ) from error
                if problem is not None:
                    raise problem
            if self._probes and time.monotonic() > deadline_s:
                node = next(iter(self._probes.values()))
                raise WorkerError(
                    f"{names[node]}: did not answer within {_PROBE_S:.0f} s",
                    remedy="see whether its folders hang, or take it out of the cluster",
                )

    def run_tasks(
        self, tasks: Iterable[Any], on_progress: Callable[[int], None]
    ) -> Generator[Any, None, None]:
        """Yield the result of each task, see `run`."""
        ray = self._ray
        new_tasks = map(_ClusterTask, tasks)
        retries: deque[_ClusterTask] = deque()
        while True:
            while self._has_room():
                task = retries.popleft() if retries else next(new_tasks, None)
                if task is None:
                    break
                reference = self._call.remote(self._work, task.task, in_process=bool(task.losses))
                self._running[reference] = task
            if not self._running:
                return
            for reference in ray.wait([*self._running], timeout=_WAIT_S)[0]:
                task = self._running.pop(reference)
                try:
                    outcome = ray.get(reference)
                except ray.exceptions.RayError as error:
                    loss = self._loss(error)
                    if loss is None:
                        raise WorkerError(
                            f"{task_name(task.task)}: Ray cannot run it ({last_line(error)})"
                        ) from error
                    task.record_loss(loss, f"last on {self._node_name_in(str(error))}")
                    retries.append(task)
                    continue
                if outcome.error is not None:
                    raise outcome.error
                name = self._names.get(outcome.node, outcome.node)
                self._nodes.units[name] = self._nodes.units.get(name, 0) + outcome.units
                on_progress(outcome.units)
                yield outcome.result

    def _has_room(self) -> bool:
        """Whether one more task may run now, by the size that the cluster had within the last seconds."""
        now_s = time.monotonic()
        if now_s - self._size_read_s >= _RESIZED_S:
            cpus = int(self._ray.cluster_resources().get("CPU", 0))
            self._max_tasks = self._limit or max(_TASKS_PER_CPU * cpus // _CPUS, 1)
            self._names |= live_nodes(0)
            self._size_read_s = now_s
        return len(self._running) < self._max_tasks

    def end(self) -> None:
        """Cancel the tasks and checks that still run, and wait until they write nothing more."""
        ray = self._ray
        unfinished = [*self._running, *self._probes]
        self._running.clear()
        self._probes.clear()
        with suppress(Exception):  # the cluster may be gone
            for reference in unfinished:
                ray.cancel(reference, force=True)
            if unfinished:
                ray.wait(unfinished, num_returns=len(unfinished), timeout=_END_S)

    def _node_name_in(self, message: str) -> str:
        """Return the name of the node whose id is in one of Ray's messages."""
        for node, name in self._names.items():
            if node in message:
                return name
        return "an unknown node"

    def _loss(self, error: Exception) -> _Loss | None:
        """Return why the task of `error` was lost; None if the error has another cause."""
        exceptions = self._ray.exceptions
        if isinstance(error, exceptions.OutOfMemoryError):
            return _Loss.MEMORY
        node_errors = (
            exceptions.NodeDiedError,
            exceptions.TaskUnschedulableError,
            exceptions.WorkerCrashedError,
            exceptions.ObjectLostError,
        )
        return _Loss.NODE if isinstance(error, node_errors) else None


@contextmanager
def prepare_nodes(folder: Path, name: str, read: Callable[[], object]) -> Iterator[Nodes]:
    """Give the nodes of a cluster that writes into `folder`, with a check of each.

    For the check, a small file in `folder` shows whether a node sees the same folder.

    Args:
        name: name of a file in `folder`; the small file has the name of its temporary file, so that it is
            removed like one if it is left over.
        read: reads a sample; raises a SourceError where the source cannot be read.
    """
    probe = temporary_path(Path(os.path.abspath(folder)) / name)
    with open(open_new(probe), "wb") as file:
        file.write(probe.name.encode())
    try:
        yield Nodes(partial(_check_node, versions(), probe, read))
    finally:
        probe.unlink(missing_ok=True)


def _check_node(expected: dict[str, str], probe: Path, read: Callable[[], object], node: str) -> None:
    """Check this machine, whose name in messages is `node`.

    Args:
        expected: versions of the machine that plans.
        probe: file in the folder that is written to, which holds its own name.
        read: reads a sample.

    Raises:
        SettingError: versions differ.
        DatasetError: the folder that is written to is another one here, or cannot be written to.
        SourceError: a sample cannot be read here.
    """
    check_versions(node, versions(), expected)
    check_readable(node, partial(_check_folder, probe))
    check_readable(node, read)


def _check_folder(probe: Path) -> None:
    """Raise DatasetError unless the folder of `probe` is the driver's, and can be written to."""
    folder, written = probe.parent, temporary_path(probe)
    try:
        is_shared = read_regular(probe) == probe.name.encode()
        os.close(open_new(written))
        written.unlink()
    except FileNotFoundError:
        is_shared = False
    except OSError as error:
        raise DatasetError(f"cannot be read and written there ({os_reason(error)})", path=folder) from error
    if not is_shared:
        raise DatasetError("is missing there, or another folder", path=folder)


class Work(NamedTuple):
    """The functions that each worker gets once.

    Attributes:
        function, finish: see `precache.engines.run`.
        check: see `Nodes`.
        folder: working folder of the driver, from which relative paths begin.
    """

    function: Any
    finish: Any
    check: Any
    folder: str


class Outcome(NamedTuple):
    """Outcome of a task on a node: the units done and the result of `finish`, or the error."""

    node: str
    units: int = 0
    result: Any = None
    error: Exception | None = None


def probe_node(references: list[Any]) -> Exception | None:
    """Return why this node cannot do tasks; None if it can. `references` holds one to the `Work`."""
    try:
        _load_work(references[0])
    except Exception as error:
        return picklable_error(error)
    return None


def call(references: list[Any], task: Any, in_process: bool) -> Outcome:
    """Run a task in this process, or in a process of it, so that the engine `local` finds the fatal unit."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    units: list[int] = []
    try:
        work = _load_work(references[0])
        function = _PickledFunction(work.function) if in_process else work.function
        with _working_folder(work.folder):
            (result,) = run_here(function, [task], int(in_process), units.append, finish=work.finish)
    except Exception as error:  # returned, because Ray would wrap it in an error of its own
        return Outcome(node, error=picklable_error(error))
    return Outcome(node, sum(units), result)


class _PickledFunction:
    """A function for a process of this worker, pickled by Ray, which can pickle classes of no module, too."""

    def __init__(self, function: Any) -> None:
        import ray

        self._run_number, self._pickled = _run_number(), ray.cloudpickle.dumps(function)

    def __call__(self, task: Any, tick: Ticks) -> Any:
        large_pictures.join_run(self._run_number)
        return pickle.loads(self._pickled)(task, tick)


_work: dict[str, Work] = {}  # the work that this worker has loaded, by its reference


def _load_work(reference: Any) -> Work:
    """Return the work behind `reference`; the first time, check the node of this worker."""
    import ray

    key = reference.hex()
    if key not in _work:
        large_pictures.join_run(_run_number())
        work: Work = ray.get(reference)
        with _working_folder(work.folder):
            work.check(this_node())
        _work.clear()  # drops the work of another run
        _work[key] = work
    return _work[key]


def _run_number() -> int:
    """Return a number that all workers of a run share, by which they decode large pictures in turn."""
    import ray

    context = ray.get_runtime_context()
    return zlib.crc32(f"{context.gcs_address} {context.get_job_id()}".encode())


@contextmanager
def _working_folder(folder: str) -> Iterator[None]:
    """Make `folder` the working folder for the block, if this node has it."""
    before = os.getcwd()
    if os.path.isdir(folder):
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
