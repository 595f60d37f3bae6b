"""The engine `ray`: each task of the plan is a task of a Ray cluster, which writes into a shared folder.

Only the paths of its pictures go over the network with a task, and a small result comes back. `function`,
with all that it holds, is in Ray's object store once. Each worker, which Ray keeps alive, unpickles it once,
after it has checked the versions on its node.

A task that is lost is submitted again, and from then on runs in a process of its own on its node, by the
engine `local`, which finds the picture that kills the process. Ray's `max_retries` does not do: the same
picture would kill each try, and where memory is short, Ray tries without end.
"""

import pickle
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from precache.engines.connector import (
    Origin,
    check_readable,
    enter_node,
    import_ray,
    last_line,
    live_nodes,
    versions,
)
from precache.engines.processes import (
    Task,
    Ticks,
    picklable_error,
    repeated_failure_error,
    task_name,
    unpicklable_error,
)
from precache.engines.processes import run as run_here
from precache.errors import SettingError, WorkerError
from precache.pictures import large_pictures
from precache.reporting import warn

_TASKS_PER_CPU = 2  # submitted at a time, so that the next one waits on the node while the last one runs
_WAIT_S = 0.2
_END_S = 10.0  # for shards in work; those that take longer are lost, when this process disconnects
_MAX_LOSSES, _MAX_MEMORY_LOSSES = 5, 2
"""Losses of a task that are an error: whatever the cause, and if memory was short at the last one."""


@dataclass(slots=True, eq=False)
class _ClusterTask:
    """A task, and the number of times that its worker or node was lost."""

    task: Any
    losses: int = 0


class _Work(NamedTuple):
    """Work of all tasks: `function` and `check` of `run`, pickled by Ray, and where they come from."""

    functions: bytes
    origin: Origin


class _Outcome(NamedTuple):
    """Outcome of a task: the name of its node, the units done and the result; or the error."""

    node: str = ""
    units: int = 0
    result: Any = None
    error: Exception | None = None


def run(
    function: Callable[[Task, Ticks], Any],
    tasks: Iterable[Task],
    workers: int | None,
    on_progress: Callable[[int, str], None],
    *,
    check: Callable[[], object] = object,
) -> Generator[Any, None, None]:
    """Run tasks as `processes.run` does, on the cluster that this process is connected to.

    Args:
        workers: tasks at a time; None: twice the CPUs that the cluster has at the moment.
        on_progress: called with the units of a finished task, and the name of its node.
        check: reads, on a node before its first task, what the tasks need.

    Raises:
        SettingError: a node has other versions of what decides the bytes.
        SourceError, DatasetError: `check` fails on a node; names it.
        WorkerError: a task was lost too often, or the cluster is gone.
    """
    if workers == 0:
        raise SettingError("workers=0 is for the engine local", remedy="give 1 or more, or leave it out")
    ray = import_ray()
    if not live_nodes(cpus=1):
        warn("no node of the Ray cluster has a CPU yet; waiting for one")
    # in a list, so that Ray passes the reference, and does not unpickle it for each task
    work = [ray.put(_Work(_pickle((function, check)), Origin.here(versions())))]
    call: Any = ray.remote(num_cpus=1, max_retries=0)(do_task)
    new_tasks = map(_ClusterTask, tasks)
    retries: deque[_ClusterTask] = deque()
    running: dict[Any, _ClusterTask] = {}
    with _wait_for_tasks(running):
        while True:
            limit = workers or max(1, _TASKS_PER_CPU * int(ray.cluster_resources().get("CPU", 0)))
            while len(running) < limit:
                task = retries.popleft() if retries else next(new_tasks, None)
                if task is None:
                    break
                running[call.remote(work, task.task, task.losses > 0)] = task
            if not running:
                return
            for reference in ray.wait([*running], timeout=_WAIT_S)[0]:
                task = running.pop(reference)
                outcome = _outcome(task, reference)
                if outcome is None:
                    retries.append(task)
                    continue
                on_progress(outcome.units, outcome.node)
                yield outcome.result


@contextmanager
def _wait_for_tasks(running: dict[Any, _ClusterTask]) -> Iterator[None]:
    """Explain errors of the cluster, and wait at the end of the block for tasks that still write."""
    ray = import_ray()
    try:
        yield
    except SystemError as error:  # Ray wraps the exception of a SIGTERM handler that ran while it waited
        raise error.__cause__ or error from None
    except ray.exceptions.RayError as error:
        raise WorkerError(
            f"the Ray cluster failed ({last_line(error)})",
            remedy="look at 'ray status', then run the same command again: a conversion continues where it "
            "stopped",
        ) from error
    finally:
        # Not cancelled: Ray 2.60 ends the whole program where a cancelled task returns at the same time.
        with suppress(ray.exceptions.RayError):  # the cluster may be gone
            if running:
                ray.wait([*running], num_returns=len(running), timeout=_END_S)


def _outcome(task: _ClusterTask, reference: Any) -> _Outcome | None:
    """Return the outcome of a task that has ended; None if it was lost, and is to be tried again.

    Raises:
        Exception: that of the task.
        WorkerError: it was lost too often, or cannot be run.
    """
    ray = import_ray()
    try:
        outcome: _Outcome = ray.get(reference)
    except ray.exceptions.RayTaskError as error:  # `do_task` returns all of its own
        raise WorkerError(
            f"{task_name(task.task)}: Ray cannot run it ({last_line(error)})",
            remedy="install the same version on every node",
        ) from error
    except ray.exceptions.RayError as error:
        task.losses += 1
        lacks_memory = isinstance(error, ray.exceptions.OutOfMemoryError)
        if task.losses == _MAX_LOSSES or (lacks_memory and task.losses >= _MAX_MEMORY_LOSSES):
            reason = " ".join(str(error).split())[:300]
            raise repeated_failure_error(task.task, "its Ray worker was lost", task.losses, reason) from error
        return None
    if outcome.error is not None:
        raise outcome.error
    return outcome


def _pickle(functions: Any) -> bytes:
    """Pickle as Ray does, which can pickle classes of no module, too."""
    try:
        pickled: bytes = import_ray().cloudpickle.dumps(functions)
    except Exception as error:  # pickling runs other people's code
        raise unpicklable_error(error, "the cluster", "use the engine local") from error
    return pickled


# The functions below run on the nodes.


def do_task(work: list[Any], task: Any, in_process: bool) -> _Outcome:
    """Do a task in this process, or in a process of it, so that the engine `local` finds a fatal unit."""
    units: list[int] = []
    try:
        node, function, isolated = _load_work(work[0])
        (result,) = run_here(isolated if in_process else function, [task], int(in_process), units.append)
    except Exception as error:  # returned, because Ray would wrap it in an error of its own
        return _Outcome(error=picklable_error(error))
    return _Outcome(node, sum(units), result)


@lru_cache(1)
def _load_work(reference: Any) -> tuple[str, Callable[..., Any], "_Isolated"]:
    """Check the node of this worker; return its name and `function`, for this process and one of its own."""
    ray = import_ray()
    work: _Work = ray.get(reference)
    node = enter_node(work.origin, versions())
    job = int(ray.get_runtime_context().get_job_id(), 16)
    large_pictures.join_run(job)
    function, check = pickle.loads(work.functions)
    check_readable(node, check)
    return node, function, _Isolated(job, work.functions)


@dataclass(frozen=True, slots=True)
class _Isolated:
    """`function`, pickled, for a process of a worker; it decodes large pictures in turn with the others."""

    job: int
    functions: bytes

    def __call__(self, task: Any, tick: Ticks) -> Any:
        large_pictures.join_run(self.job)
        return pickle.loads(self.functions)[0](task, tick)
