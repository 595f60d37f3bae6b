"""The engine `ray`: a task of a Ray cluster for each task of the plan.

The cluster is there already (see `precache/cluster/README.md`); nothing is started here but workers, which
Ray starts. Tasks are not retried by Ray but here, since the next try is not the same as the last: it knows
over which units workers died. What becomes of a task that is lost depends on what it is lost with:

    its node     it is tried again elsewhere
    its worker   it is tried again, and says of each unit that it begins it; a unit over which two workers die
                 is left out
    memory       of which Ray's monitor saw too little left: it is tried again once, then an error names task
                 and unit
"""

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from precache.console.notices import warn
from precache.errors import SettingError, WorkerError
from precache.executors import ray_node
from precache.executors.attempts import Attempt, name_of
from precache.executors.nodes import Nodes, unasked
from precache.executors.processes import unchanged
from precache.executors.ray_cluster import connected, imported, live_nodes
from precache.executors.workers import Ticks

__all__ = ["connected", "imported", "run"]

Task = TypeVar("Task")
_CPUS = 1  # of a task: decoding, resizing and encoding use one
_TASKS_PER_CPU = 2  # in flight: the next one waits on the node while the last one runs
_POLL_S = 0.2
_LOOK_S = 5.0  # how often the cluster is asked how large it is
_PROBE_S = 120.0  # a worker has to start; a folder that hangs takes for ever
_END_S = 10.0
_MAX_NODES_LOST = 5
_MAX_OUT_OF_MEMORY = 2


def run(
    function: Callable[[Task, Ticks], Any],
    tasks: Iterable[Task],
    workers: int | None,
    on_progress: Callable[[int], None],
    *,
    finish: Callable[[Any], Any] = unchanged,
    nodes: Nodes | None = None,
) -> Generator[Any, None, None]:
    """As `precache.executors.run`, on the cluster that this process is connected to.

    Args:
        workers: tasks at a time; None: twice the CPUs of the cluster, as many as it has at the moment.

    Raises:
        WorkerError: a task was lost too often, or a node does not answer.
    """
    if workers == 0:
        raise SettingError("workers=0 is for the engine local; give 1 or more, or leave it out")
    waiting = (_Flight(Attempt(task)) for task in tasks)
    first = next(waiting, None)
    if first is None:
        return
    flights = _Flights(function, finish, on_progress, nodes, workers)
    try:
        flights.check_nodes()
        flights.start(first)
        while True:
            while flights.has_room and (flight := flights.next_retry() or next(waiting, None)):
                flights.start(flight)
            if not flights.running:
                return
            yield from flights.receive()
    except SystemError as error:  # what a handler of SIGTERM raised while Ray waited
        raise error.__cause__ or error from None
    except imported().exceptions.RayError as error:
        raise WorkerError(
            f"the Ray cluster failed ({_last_line(error)}); look at 'ray status', then run the same command "
            f"again: a conversion continues where it stopped"
        ) from error
    finally:
        flights.end()


@dataclass(slots=True)
class _Flight:
    """A task in its present try.

    Attributes:
        number: of the try.
        node: id of the node that it runs on, "" while it is not known.
        unit: that it has begun last, if it is `careful`: it says so of each one.
        out_of_memory: how often Ray killed its worker for want of memory.
        nodes_lost: how many nodes it was lost with.
    """

    attempt: Attempt
    number: int = 0
    node: str = ""
    unit: int | None = None
    careful: bool = False
    out_of_memory: int = 0
    nodes_lost: int = 0


class _Flights:
    """The tasks that are on the cluster.

    Attributes:
        running: those that are, by Ray's reference of what comes of them.
    """

    def __init__(
        self,
        function: Any,
        finish: Any,
        on_progress: Callable[[int], None],
        nodes: Nodes | None,
        limit: int | None,
    ) -> None:
        self.running: dict[Any, _Flight] = {}
        self._ray = ray = imported()
        self._on_progress = on_progress
        self._nodes = nodes or Nodes(unasked)
        self._names: dict[str, str] = {}
        self._limit, self._room, self._looked_s = limit, 0, float("-inf")
        self._numbers = count(1)
        self._by_number: dict[int, _Flight] = {}
        self._retries: deque[_Flight] = deque()
        self._probes: dict[Any, str] = {}
        self._losses = (
            ray.exceptions.NodeDiedError,
            ray.exceptions.OutOfMemoryError,
            ray.exceptions.TaskUnschedulableError,
            ray.exceptions.WorkerCrashedError,
        )
        work = ray_node.Work(function, finish, self._nodes.check, os.getcwd())
        try:
            self._work = [ray.put(work)]  # in a list, it is not unpacked before a task asks for it
        except Exception as error:  # packing runs the code of whoever wrote a class
            raise SettingError(
                f"what is to be read cannot be sent to the cluster ({' '.join(str(error).split())[:200]}); "
                f"use the engine local"
            ) from error
        here = _on(ray, ray.get_runtime_context().get_node_id())  # which ends when this process cannot go on
        actor: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(ray_node.Reports)
        self._reports = actor.options(scheduling_strategy=here).remote()
        self._call: Any = ray.remote(num_cpus=_CPUS, max_retries=0)(ray_node.call)

    @property
    def has_room(self) -> bool:
        """Whether another task may go out."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            cpus = int(self._ray.cluster_resources().get("CPU", 0))
            self._room = self._limit or max(_TASKS_PER_CPU * cpus // _CPUS, 1)
            self._names |= live_nodes(self._ray, 0)
            self._looked_s = now_s
        return len(self.running) < self._room

    def next_retry(self) -> _Flight | None:
        """A task that was lost."""
        return self._retries.popleft() if self._retries else None

    def check_nodes(self) -> None:
        """Raise what is wrong with a node, before the first task."""
        ray = self._ray
        names = live_nodes(ray, _CPUS)
        if not names:
            warn("no node of the Ray cluster has a CPU yet; waiting for one")
        ask: Any = ray.remote(num_cpus=0, max_retries=0)(ray_node.probe)
        for node in names:
            self._probes[ask.options(scheduling_strategy=_on(ray, node)).remote(self._work)] = node
        until_s = time.monotonic() + _PROBE_S
        while self._probes:
            self._on_progress(0)
            for reference in ray.wait([*self._probes], timeout=_POLL_S)[0]:
                node = self._probes.pop(reference)
                try:
                    problem = ray.get(reference)
                except ray.exceptions.RayError as error:
                    if isinstance(error, self._losses) or self._is_gone(node):
                        continue  # what it is lost with, tasks deal with
                    raise WorkerError(
                        f"{names[node]}: cannot do tasks of precache ({_last_line(error)}); install the same "
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

    def start(self, flight: _Flight) -> None:
        """Send a task out."""
        flight.number, flight.node, flight.unit = next(self._numbers), "", None
        call = ray_node.Call(flight.number, flight.attempt.task, flight.attempt.fatal, flight.careful)
        self._by_number[flight.number] = flight
        self.running[self._call.remote(self._work, call, self._reports)] = flight

    def receive(self) -> Iterator[Any]:
        """Take what came meanwhile: progress is passed on, a result yielded, an error raised."""
        ray = self._ray
        ready, _ = ray.wait([*self.running], timeout=_POLL_S)
        self._take_reports()
        for reference in ready:
            flight = self.running.pop(reference)
            try:
                outcome = ray.get(reference)
            except ray.exceptions.RayError as error:
                self._take_reports()  # what it said last
                self._lose(flight, error)
                continue
            del self._by_number[flight.number]
            if outcome.error is not None:
                raise outcome.error
            self._on_progress(outcome.done - flight.attempt.progress)
            name = self._names.get(outcome.node, outcome.node)
            self._nodes.units[name] = self._nodes.units.get(name, 0) + outcome.done
            yield outcome.result

    def _take_reports(self) -> None:
        for number, report in self._ray.get(self._reports.take.remote()).items():
            flight = self._by_number.get(number)
            if flight is not None:  # else it is done, or was lost
                flight.node, flight.unit = report.node, report.unit
                self._on_progress(report.done - flight.attempt.progress)
                flight.attempt.progress = report.done

    def _lose(self, flight: _Flight, error: Exception) -> None:
        """Put a task that was lost among those to be done again; WorkerError if that makes no sense."""
        of_ray, attempt = self._ray.exceptions, flight.attempt
        del self._by_number[flight.number]
        self._on_progress(-attempt.progress)
        attempt.progress = 0
        said = str(error)  # Ray names the node, where nothing was heard from the task yet
        flight.node = flight.node or next((node for node in self._names if node in said), "")
        name = self._names.get(flight.node, "a node that is not known")
        if isinstance(error, of_ray.OutOfMemoryError):
            flight.out_of_memory += 1
            if flight.out_of_memory >= _MAX_OUT_OF_MEMORY:
                raise WorkerError(
                    f"{name_of(attempt.task)}: Ray killed its worker {flight.out_of_memory} times, for "
                    f"{name} had not enough memory{_over(flight)}; run the same command again with fewer "
                    f"--workers: a conversion continues where it stopped"
                ) from error
        elif isinstance(error, of_ray.WorkerCrashedError) and not self._is_gone(flight.node):
            attempt.blame(flight.unit, f"on {name}; often because memory ran out")
        elif isinstance(error, (of_ray.WorkerCrashedError, of_ray.NodeDiedError, of_ray.ObjectLostError)):
            flight.nodes_lost += 1
            if flight.nodes_lost >= _MAX_NODES_LOST:
                raise WorkerError(
                    f"{name_of(attempt.task)}: {flight.nodes_lost} nodes died while it ran on them, last "
                    f"{name}; look at their logs, then run the same command again: a conversion continues "
                    f"where it stopped"
                ) from error
        else:
            raise WorkerError(f"{name_of(attempt.task)}: Ray cannot run it ({_last_line(error)})") from error
        flight.careful = flight.careful or not isinstance(error, of_ray.NodeDiedError)
        self._retries.append(flight)

    def _is_gone(self, node: str) -> bool:
        return bool(node) and node not in live_nodes(self._ray, 0)

    def end(self) -> None:
        """Kill what is running; may be called again."""
        ray = self._ray
        left = [*self.running, *self._probes]
        self.running.clear()
        self._probes.clear()
        with suppress(Exception):  # the cluster may be gone
            for reference in left:
                ray.cancel(reference, force=True)
            ray.kill(self._reports)
            if left:  # so that they write nothing when this returns
                ray.wait(left, num_returns=len(left), timeout=_END_S)


def _on(ray: Any, node: str) -> Any:
    """On this node, and on no other."""
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def _over(flight: _Flight) -> str:
    """The unit over which the worker died, as the task calls it."""
    called = getattr(flight.attempt.task, "unit_name", None)
    return "" if called is None or flight.unit is None else f", the last time over {called(flight.unit)}"


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip()[:300]
