"""The engine `ray`: a task of a Ray cluster for each task of the plan.

The cluster is running already (see `precache/cluster/README.md`); only workers are started here, by Ray. Ray
itself retries nothing. What becomes of a task depends on what happened:

    its worker or node died    it is tried again in a process of its worker, as the engine `local` does it,
                               which finds out over which picture the process dies
    memory was short           Ray's monitor killed the worker: the task is tried again once, then an error
                               names task and node

Every node must have the versions and the folders of this machine: bytes would differ where libraries do, and
what is written into a folder that is not shared is lost. So each node is checked before the first task; a
worker on a node that joins later checks it itself.

Only paths and what `finish` returns go over the network with a task. `function`, with all that it holds, lies
in Ray's object store once, and each worker, which Ray keeps, unpacks it once.
"""

import logging
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from precache.engines.processes import (
    Advanced,
    Attempt,
    Event,
    Finished,
    Loss,
    Lost,
    Nodes,
    Task,
    Ticks,
    cannot_be_sent,
    no_check,
    run_all,
    sendable,
    unchanged,
)
from precache.engines.processes import run as run_here
from precache.errors import (
    DatasetError,
    MissingDependencyError,
    PrecacheError,
    SettingError,
    SourceError,
    WorkerError,
)
from precache.packages import install_extra
from precache.pictures import turns
from precache.reporting import warn
from precache.storage import open_new, read_regular, temporary_path
from precache.storage.urls import Location, Url

_MOUNT = "mount it on every node at the same path"
_CPUS = 1  # of a task: decoding, resizing and encoding use one
_TASKS_PER_CPU = 2  # in flight: the next one waits on the node while the last one runs
_WAIT_S = 0.2
_RESIZED_S = 5.0  # how often the cluster is asked how large it is
_PROBE_S = 120.0  # a worker has to start; a folder that hangs takes forever
_END_S = 10.0
_ANSWER_S = 5.0
# What a client of HTTP/2 sends first, its settings being none; a server answers with its own (RFC 9113, 3.4).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_HEADER_BYTES, _SETTINGS = 9, 4


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
    first = list(zip(range(1), tasks, strict=False))
    if not first:
        return
    pool = _Cluster(function, finish, nodes or Nodes(no_check), workers)
    try:
        pool.check_nodes(on_progress)
        yield from run_all(pool, chain((task for _, task in first), tasks), on_progress)
    except SystemError as error:  # what a handler of SIGTERM raised while Ray waited
        raise error.__cause__ or error from None
    except imported().exceptions.RayError as error:
        raise WorkerError(
            f"the Ray cluster failed ({_last_line(error)}); look at 'ray status', then run the same command "
            f"again: a conversion continues where it stopped"
        ) from error
    finally:
        pool.end()


class _Cluster:
    """A `Pool` of the workers of a cluster."""

    def __init__(self, function: Any, finish: Any, nodes: Nodes, limit: int | None) -> None:
        self._ray = ray = imported()
        self._nodes, self._limit = nodes, limit
        self._names: dict[str, str] = {}
        self._most_tasks, self._asked_s = 0, float("-inf")
        self._running: dict[Any, Attempt] = {}  # by Ray's reference of what comes of them
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
        names = _live_nodes(ray, _CPUS)
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
                    if self._loss(error) is not None or node not in _live_nodes(ray, 0):
                        continue  # its tasks are tried again elsewhere
                    raise WorkerError(
                        f"{names[node]}: cannot run precache's tasks ({_last_line(error)}); install the same "
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

    def has_room(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._asked_s >= _RESIZED_S:
            cpus = int(self._ray.cluster_resources().get("CPU", 0))
            self._most_tasks = self._limit or max(_TASKS_PER_CPU * cpus // _CPUS, 1)
            self._names |= _live_nodes(self._ray, 0)
            self._asked_s = now_s
        return len(self._running) < self._most_tasks

    def is_busy(self) -> bool:
        return bool(self._running)

    def start(self, attempt: Attempt) -> None:
        call = self._call.remote(self._work, attempt.task, in_process=bool(attempt.losses))
        self._running[call] = attempt

    def receive(self) -> Iterator[Event]:
        ready, _ = self._ray.wait([*self._running], timeout=_WAIT_S)
        for reference in ready:
            attempt = self._running.pop(reference)
            try:
                outcome = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                yield self._lost(attempt, error)
                continue
            if outcome.error is not None:
                raise outcome.error
            name = self._names.get(outcome.node, outcome.node)
            self._nodes.units[name] = self._nodes.units.get(name, 0) + outcome.units
            yield Advanced(attempt, outcome.units)
            yield Finished(attempt, outcome.result)

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

    def _lost(self, attempt: Attempt, error: Exception) -> Lost:
        loss = self._loss(error)
        if loss is None:
            raise WorkerError(f"{attempt.name}: Ray cannot run it ({_last_line(error)})") from error
        said = str(error)  # of most errors it names the node
        name = next((name for node, name in self._names.items() if node in said), "an unknown node")
        return Lost(attempt, loss, detail=f"last on {name}")

    def _loss(self, error: Exception) -> Loss | None:
        """What happened to the worker; None if the error says something else."""
        of_ray = self._ray.exceptions
        if isinstance(error, of_ray.OutOfMemoryError):
            return Loss.MEMORY
        died = of_ray.NodeDiedError, of_ray.TaskUnschedulableError, of_ray.WorkerCrashedError
        return Loss.NODE if isinstance(error, (*died, of_ray.ObjectLostError)) else None


def imported() -> Any:
    """The package `ray`; MissingDependencyError without it."""
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(
            f"the engine ray needs the extra 'ray' ({error}); run: {install_extra('ray')}"
        ) from error
    return ray


@contextmanager
def connected(ray: Any, address: str | None = None) -> Iterator[None]:
    """Be connected to a cluster for the duration of the block; an existing connection is used.

    Args:
        ray: the package.
        address: `HOST:PORT` of its head; None or "auto": RAY_ADDRESS of the environment, else the cluster
            that this machine is a node of.

    Raises:
        SettingError: there is none.
    """
    if ray.is_initialized():
        there = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", there):
            raise SettingError(f"address {address!r}: this process is connected to {there}; leave it out")
        yield
        return
    address = os.environ.get("RAY_ADDRESS") if address in (None, "auto") else address
    if address not in (None, "", "auto"):
        _check_answers(str(address))
    handler = signal.getsignal(signal.SIGTERM)
    printed: list[str] = []
    try:
        with _capture_stderr(printed):
            ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        reasons = [*(line.rpartition("] ")[2] for line in printed[-1:]), " ".join(str(error).split())]
        raise _no_cluster(address or "auto", f"{'; '.join(reasons)}"[:400]) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has put its own there
    try:
        worker = ray._private.worker
        if hasattr(worker, "_worker_logs_enabled"):
            # else it prints the last lines of the log of each node that dies
            worker._worker_logs_enabled = False
        yield
    finally:
        ray.shutdown()


@contextmanager
def _capture_stderr(printed: list[str]) -> Iterator[None]:
    """Add to `printed`, at the end of the block, the lines that C++ code wrote on descriptor 2 in it."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            printed += file.read().decode(errors="replace").splitlines()


def _check_answers(address: str) -> None:
    """Raise SettingError unless something like a cluster answers: Ray itself takes minutes to give up."""
    host, _, port = address.rpartition(":")
    if "/" in host or not host or not port.isdecimal():
        raise _no_cluster(address, "expected auto or HOST:PORT, the address that 'ray start' printed")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") in ("0", ""):
                connection.sendall(_PREFACE)
                answer = connection.recv(_FRAME_HEADER_BYTES, socket.MSG_WAITALL)
                if len(answer) < _FRAME_HEADER_BYTES or answer[3] != _SETTINGS:
                    raise _no_cluster(address, "something else answers there")
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, getattr(error, "strerror", None) or str(error)) from error


def _no_cluster(address: str, reason: str) -> SettingError:
    return SettingError(
        f"address {address!r}: no Ray cluster ({reason}); start one, or run the command on a node of it: "
        f"precache/cluster/README.md says how"
    )


def _live_nodes(ray: Any, cpus: int) -> dict[str, str]:
    """Id -> name of each node that has so many CPUs."""
    return {
        node["NodeID"]: node_name(node["NodeManagerAddress"], node["NodeID"])
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) >= cpus
    }


def _on(ray: Any, node: str) -> Any:
    """On this node, and on no other."""
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip()[:300]


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


def versions() -> dict[str, str]:
    """What must be the same on every node, since bytes depend on it."""
    import precache  # which imports this
    from precache.pictures.kinds import made_by  # which needs PIL, and `precache doctor` runs without

    return {"precache": precache.__version__, **made_by()}


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
    found = versions()
    for name in sorted({*expected, *found}):
        if expected.get(name) != found.get(name):
            raise SettingError(
                f"{node}: {name} is {found.get(name, 'missing')} there but {expected.get(name, 'missing')} "
                f"where the command runs, so bytes would differ; install the same on every node"
            )
    if probe is not None:
        _check_folder(node, probe)
    try:
        read()
    except PrecacheError as error:
        raise SourceError(f"{node}: {error}; if it is not mounted there, {_MOUNT}") from error


def _check_folder(node: str, probe: Path) -> None:
    folder, written = probe.parent, temporary_path(probe)
    try:
        is_shared = read_regular(probe) == probe.name.encode()
        os.close(open_new(written))
        written.unlink()
    except FileNotFoundError:
        is_shared = False
    except OSError as error:
        raise DatasetError(
            f"{node}: cannot read and write in {folder} ({error.strerror}); {_MOUNT}, for the same user"
        ) from error
    if not is_shared:
        raise DatasetError(f"{node}: {folder} is missing there, or another folder; {_MOUNT}")


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
