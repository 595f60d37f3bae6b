"""The actors of this process on a Ray cluster: each decodes on one CPU, for all loaders that ask for as many.

A loader of `train` and one of `val` that take turns need the CPUs once. The actors end with the last loader
that uses them, also where nobody closes it: Ray ends those that nobody can ask any more, and all of a process
with it.
"""

import logging
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

from loaders.backends.ray_decoder import Decoder, versions
from loaders.deliver.threads import end_first, stop_check
from precache.errors import MissingDependencyError, SettingError, WorkerError
from precache.packages import install_extra

LOOK_S = 0.2  # between looks at what is waited for
START_S = 300.0  # for the first of them to run, on a cluster that others use
NO_NODE_S = 10.0  # without any node that could run one
MOST_DEATHS = 3  # in a row
_PATIENCE_S = 30.0  # before it says that some of them do not start
_LOGGER = logging.getLogger(__name__)


class User(Protocol):
    """A reader that uses workers.

    Attributes:
        number: of its job, in this process.
    """

    number: int


@dataclass(eq=False, slots=True)
class Worker:
    """One actor.

    Attributes:
        checked: what it says of its versions, a reference; None once they were compared.
        ready_s: when they were.
    """

    actor: Any
    checked: Any
    ready_s: float = 0.0


class Workers:
    """Actors that are there, and those that are being started in the place of others; for several threads."""

    def __init__(self, ray: Any, count: int) -> None:
        self.ray = ray
        self.count = count
        self._actor = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(Decoder)
        self._workers: list[Worker] = []
        self._users: weakref.WeakSet[User] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._versions = versions()
        self._deaths = 0
        self._alive_s = time.monotonic()  # when one was there, or a node that could run one
        self._started_s = time.monotonic()
        self._full_s, self._warned = time.monotonic(), False

    def add(self, user: User) -> None:
        """Have as many as there are to be, for `user` too."""
        with self._lock:
            self._users.add(user)
            self._tell_jobs()
            while len(self._workers) < self.count:
                self._start()

    def remove(self, user: User) -> None:
        """End what only `user` has used."""
        with self._lock:
            self._users.discard(user)
            self._tell_jobs()
            if not self._users:
                for worker in self._workers:
                    self._end(worker)
                self._workers.clear()

    def running(self) -> list[Worker]:
        """Those that take work.

        Raises:
            SettingError: one of them has other versions than this process.
            WorkerError: they cannot be started.
        """
        with self._lock:
            for worker in [w for w in self._workers if w.checked is not None]:
                if self.ray.wait([worker.checked], timeout=0)[0]:
                    self._check(worker)
            running = [worker for worker in self._workers if worker.checked is None]
            self._warn_of_few(len(running))
            if running:
                self._alive_s = self._started_s = time.monotonic()
            else:
                self._check_cluster()
            return running

    def wait(self) -> None:
        """Until one has started, or for the time between two looks."""
        with self._lock:
            starting = [worker.checked for worker in self._workers if worker.checked is not None]
        if starting:
            self.ray.wait(starting, timeout=LOOK_S)
        else:
            time.sleep(LOOK_S)

    def replace(self, worker: Worker) -> None:
        """Start another one in the place of one that is lost."""
        with self._lock:
            if worker in self._workers:
                self._workers.remove(worker)
                self._end(worker)
                self._start()

    def _start(self) -> None:
        actor = self._actor.remote()
        self._workers.append(Worker(actor, actor.versions.remote()))

    def _end(self, worker: Worker) -> None:
        if self.ray.is_initialized():
            self.ray.kill(worker.actor)

    def _tell_jobs(self) -> None:
        numbers = [user.number for user in self._users]
        if self.ray.is_initialized():
            for worker in self._workers:
                worker.actor.keep.remote(numbers)

    def _check(self, worker: Worker) -> None:
        """Compare the versions of one that has started; one that has died is replaced."""
        try:
            theirs = self.ray.get(worker.checked)
        except self.ray.exceptions.RayError as error:
            self._deaths += 1
            of_code = isinstance(error, self.ray.exceptions.RayTaskError)
            of_code |= getattr(error, "actor_init_failed", False)
            if not of_code and self._deaths < MOST_DEATHS * self.count:  # all may have been on one node
                self.replace(worker)
                return
            said = str(error).strip().splitlines()[-1]
            raise WorkerError(
                f"workers on the Ray cluster fail to start ({said}); install precache[loaders,ray] "
                f"{self._versions['precache']} on every node; 'ray list actors' says more"
            ) from error
        for name in sorted(self._versions.keys() | theirs.keys()):
            ours, other = self._versions.get(name, "none"), theirs.get(name, "none")
            if ours != other:
                raise SettingError(
                    f"engine 'ray': {name} is {other} on a node of the cluster and {ours} here, so pixels "
                    f"would differ; install the same versions on every node"
                )
        self._deaths = 0
        worker.checked, worker.ready_s = None, time.monotonic()

    def _warn_of_few(self, running: int) -> None:
        now_s = time.monotonic()
        if running in (0, self.count):
            self._full_s = now_s
        elif now_s - self._full_s > _PATIENCE_S and not self._warned:
            self._warned = True
            _LOGGER.warning(
                "engine 'ray': %d of %d workers run, the cluster has no free CPU for the others; "
                "'ray status' says who has them", running, self.count
            )  # fmt: skip

    def _check_cluster(self) -> None:
        now_s = time.monotonic()
        nodes = self.ray.nodes()
        if any(node["Alive"] and node["Resources"].get("CPU", 0) >= 1 for node in nodes):
            self._alive_s = now_s
        if now_s - self._alive_s > NO_NODE_S:
            raise WorkerError(
                "no node of the Ray cluster is left with a CPU to decode on; start some ('ray start "
                "--address=HEAD:6379'), or go on with Reading(engine='local'), which takes the same state"
            )
        if now_s - self._started_s > START_S:
            raise WorkerError(
                f"the Ray cluster has started no decoding worker within {START_S:g} s: others use its CPUs; "
                f"free some, or wait for them ('ray status' says who has them)"
            )


# By cluster, job of this process there, and how many; they go with the last loader that has them.
_shared: "weakref.WeakValueDictionary[tuple[str, str, int], Workers]" = weakref.WeakValueDictionary()


def join(user: User, count: int) -> Workers:
    """The workers of this process on the cluster, `count` of them, with `user` among those who use them.

    Raises:
        MissingDependencyError: Ray is not installed.
        SettingError: no cluster was found.
        SettingError, WorkerError: as of `Workers.running`.
    """
    ray = _connect()
    context = ray.get_runtime_context()
    key = (context.gcs_address, context.get_job_id(), count)
    workers = _shared.get(key)
    if workers is None:
        workers = _shared[key] = Workers(ray, count)
    workers.add(user)
    check = stop_check()
    try:
        while not workers.running():
            check()
            workers.wait()
    except BaseException:
        workers.remove(user)
        raise
    return workers


def _connect() -> Any:
    """Ray, connected to a cluster that runs."""
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(
            f"engine 'ray' needs Ray; install it with '{install_extra('ray')}', on every node of the cluster"
        ) from error
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
        except ConnectionError as error:
            reason = str(error).strip().partition("\n")[0]
            raise SettingError(
                f"engine 'ray' found no Ray cluster that takes it ({reason}); start one ('ray start --head' "
                f"here, 'ray start --address=HEAD:6379' on other machines), or name it in RAY_ADDRESS"
            ) from error
    end_first()  # our threads wait for what Ray's own exit takes away
    return ray
