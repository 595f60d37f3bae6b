"""Throughput of many GPUs that share storage, from measured stage rates: a discrete-event model. Pure.

    storage (one, shared) -> link of the node -> worker decodes -> queue of the GPU -> step of all GPUs

- A worker makes one batch after the other: it waits for its turn at the storage, reads the batch, decodes
  it. A GPU's workers begin a batch only while fewer than `prefetch` are in the making or ready.
- Storage, and the link of each node, serve one batch at a time, in the order asked.
- A step begins on a GPU when its batch is ready, and ends on all of them when the slowest has ended
  (synchronous data parallelism). The next one takes the next batch.

Not in the model: the network that gradients take (measure the trainer's rate with it), page caches, and
pictures of very unequal size.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from precache.errors import SettingError, check_range

STORAGE, LINK, DECODE, STEP, SLOWEST = "storage", "node link", "decode", "step", "slowest GPU"
MAX_GPUS = 16_384
_NEGLIGIBLE_SHARE = 0.02
_STEP_NOISE, _DECODE_NOISE = 1, 2  # tags of random streams


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Measured rates and settings of the loaders, checked once.

    Attributes:
        decode_s: CPU seconds per image of one worker: everything but reading.
        image_bytes: read from storage per image.
        storage_mbps: of the storage that all GPUs share, in MB/s (10^6 bytes); None: never binds.
        node_mbps: of each node's link to it, in MB/s; None: never binds.
        trainer_images_per_s: of one GPU on data that is there.
        batch_size: images per step and GPU.
        workers: per GPU.
        prefetch: batches that a GPU's loader has in the making or ready, at most.
        cpus: of a node; where its GPUs have more workers, those take turns. None: enough.
        noise: standard deviation of each step's and each batch's decoding time, relative to its mean.
        seed: of the noise.
    """

    decode_s: float
    image_bytes: float
    storage_mbps: float | None
    node_mbps: float | None
    trainer_images_per_s: float
    batch_size: int
    workers: int
    prefetch: int
    cpus: int | None
    noise: float
    seed: int

    def __post_init__(self) -> None:
        for name in ("batch_size", "workers", "prefetch"):
            check_range(name, getattr(self, name), 1)
        check_range("seed", self.seed, 0, 2**63 - 1)
        if self.cpus is not None:
            check_range("cpus", self.cpus, 1)
        for name in ("decode_s", "image_bytes"):
            _check_number(name, getattr(self, name), at_least=0.0)
        for name in ("storage_mbps", "node_mbps", "trainer_images_per_s"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), at_least=1e-6)
        if not 0 <= self.noise <= 1:
            raise SettingError(f"noise must be a share from 0 to 1, got {self.noise!r}")


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model says of one cluster.

    Attributes:
        images_per_s: of all GPUs together.
        wait_share: of the GPUs' time, 0 to 1, without work: waiting for data, or for the slowest of them.
        busy: share of the time, 0 to 1, that each stage works; `decode` is that of the workers with
            their reading, but without their waiting for it.
        binds: the stage that limits the throughput; SLOWEST where only the GPUs' noise does.
        needed_mbps: what the storage would have to give, in MB/s, for GPUs that never wait.
    """

    gpus: int
    nodes: int
    images_per_s: float
    wait_share: float
    busy: dict[str, float]
    binds: str
    needed_mbps: float


def simulate(rates: Rates, gpus: int, nodes: int) -> Prediction:
    """Run the model over enough steps that its rate is steady; the filling of the queues is left out.

    Raises:
        SettingError: `gpus` or `nodes` is out of range.
    """
    check_range("gpus", gpus, 1, MAX_GPUS)
    check_range("nodes", nodes, 1, gpus)
    cluster = _Cluster(rates, gpus, nodes)
    # Workers that began together deliver together, so the rate is steady over multiples of them only.
    cluster.run_steps(2 * max(rates.prefetch, rates.workers))
    before = cluster.totals()
    steps = rates.workers * math.ceil(max(100, 10 * rates.workers) / rates.workers)
    cluster.run_steps(steps)
    passed = cluster.totals() - before
    wall_s = passed[0]
    data_wait_share, rank_wait_share = passed[1:3] / (gpus * wall_s)
    servers = {STORAGE: 1, LINK: nodes, DECODE: gpus * rates.workers, STEP: gpus}
    busy = {  # work is booked when it begins, so at the window's edges it can exceed the time
        name: min(1.0, float(passed[3 + k] / (count * wall_s)))
        for k, (name, count) in enumerate(servers.items())
    }
    return Prediction(
        gpus=gpus,
        nodes=nodes,
        images_per_s=float(gpus * rates.batch_size * steps / wall_s),
        wait_share=float(data_wait_share + rank_wait_share),
        busy=busy,
        binds=_binding(busy, data_wait_share, rank_wait_share),
        needed_mbps=gpus * rates.trainer_images_per_s * rates.image_bytes / 1e6,
    )


def _binding(busy: dict[str, float], data_wait_share: float, rank_wait_share: float) -> str:
    if data_wait_share + rank_wait_share < _NEGLIGIBLE_SHARE:
        return STEP
    stage = max((STORAGE, LINK, DECODE), key=lambda stage: busy[stage])
    # A shared stage that binds serves some GPUs later than others: then ranks wait for ranks, too.
    return SLOWEST if busy[stage] < busy[STEP] and rank_wait_share > data_wait_share else stage


class _Cluster:
    """The state of the model between two events."""

    def __init__(self, rates: Rates, gpus: int, nodes: int) -> None:
        self._rates = rates
        self._gpus = gpus
        batch_bytes = rates.batch_size * rates.image_bytes
        self._read_s = batch_bytes / (rates.storage_mbps * 1e6) if rates.storage_mbps else 0.0
        self._link_s = batch_bytes / (rates.node_mbps * 1e6) if rates.node_mbps else 0.0
        self._step_s = rates.batch_size / rates.trainer_images_per_s
        self._node = [rank * nodes // gpus for rank in range(gpus)]
        gpus_per_node = np.bincount(self._node)
        crowding = np.maximum(1.0, gpus_per_node * rates.workers / (rates.cpus or math.inf))
        self._decode_s = [float(rates.batch_size * rates.decode_s * crowding[node]) for node in self._node]
        self._step_noise = _Noise(rates, _STEP_NOISE)
        self._decode_noise = _Noise(rates, _DECODE_NOISE)

        self._events: list[tuple[float, int, int]] = []  # (time, rank, batch that is then decoded)
        self._storage_free_s = 0.0
        self._link_free_s = [0.0] * nodes
        self._idle = [rates.workers] * gpus
        self._begun = [0] * gpus  # batches, of each rank
        self._taken = 0  # batches: steps that have begun on all ranks
        self._ready: list[set[int]] = [set() for _ in range(gpus)]
        self._now_s = 0.0
        self._busy_s = dict.fromkeys((STORAGE, LINK, DECODE, STEP), 0.0)
        self._data_wait_s = self._rank_wait_s = 0.0
        for rank in range(gpus):
            self._begin(rank, 0.0, taken=0)

    def totals(self) -> np.ndarray:
        """Seconds so far: wall, waiting for data, waiting for ranks, each stage's work; of all together."""
        return np.array([self._now_s, self._data_wait_s, self._rank_wait_s, *self._busy_s.values()])

    def run_steps(self, steps: int) -> None:
        """Go on for `steps` steps of all GPUs."""
        for _ in range(steps):
            self._run_step()

    def _run_step(self) -> None:
        batch, begin_s = self._taken, self._now_s
        lasts_s = [self._step_s * factor for factor in self._step_noise.draw(self._gpus)]
        waiting = {rank for rank in range(self._gpus) if batch not in self._ready[rank]}
        sum_s = end_s = 0.0  # of the times at which the GPUs end their steps: sum and latest

        def take(rank: int, now_s: float) -> None:
            nonlocal sum_s, end_s
            self._ready[rank].remove(batch)
            self._begin(rank, now_s, taken=batch + 1)
            sum_s += now_s + lasts_s[rank]
            end_s = max(end_s, now_s + lasts_s[rank])

        for rank in range(self._gpus):
            if rank not in waiting:
                take(rank, begin_s)
        # Until nobody waits for data, it is not known when the step ends.
        while waiting or (self._events and self._events[0][0] <= end_s):
            now_s, rank, decoded = heapq.heappop(self._events)
            self._idle[rank] += 1
            self._ready[rank].add(decoded)
            if rank in waiting and decoded == batch:
                waiting.remove(rank)
                self._data_wait_s += now_s - begin_s
                take(rank, now_s)
            else:
                self._begin(rank, now_s, taken=batch if rank in waiting else batch + 1)
        self._taken += 1
        self._now_s = end_s
        self._busy_s[STEP] += sum(lasts_s)
        self._rank_wait_s += self._gpus * end_s - sum_s

    def _begin(self, rank: int, now_s: float, taken: int) -> None:
        """Let idle workers begin batches, `taken` of which the GPU has taken."""
        while self._idle[rank] and self._begun[rank] - taken < self._rates.prefetch:
            node = self._node[rank]
            read_begin_s = max(now_s, self._storage_free_s)
            self._storage_free_s = read_begin_s + self._read_s
            link_begin_s = max(read_begin_s, self._link_free_s[node])
            self._link_free_s[node] = link_begin_s + self._link_s
            read_s = max(self._storage_free_s, self._link_free_s[node])
            decode_s = self._decode_s[rank] * self._decode_noise.draw(1)[0]
            heapq.heappush(self._events, (read_s + decode_s, rank, self._begun[rank]))
            self._idle[rank] -= 1
            self._begun[rank] += 1
            self._busy_s[STORAGE] += self._read_s
            self._busy_s[LINK] += self._link_s
            self._busy_s[DECODE] += max(self._read_s, self._link_s) + decode_s


class _Noise:
    """Positive factors of mean 1, log-normal: a step is late more often than it is early."""

    def __init__(self, rates: Rates, tag: int) -> None:
        self._random = np.random.default_rng((rates.seed, tag))
        self._sigma = math.sqrt(math.log1p(rates.noise**2))

    def draw(self, count: int) -> list[float]:
        """`count` factors."""
        if self._sigma == 0:
            return [1.0] * count
        mean = -(self._sigma**2) / 2  # of the logarithm, for a mean of 1
        factors: list[float] = self._random.lognormal(mean, self._sigma, count).tolist()
        return factors


def _check_number(name: str, value: float, at_least: float) -> None:
    if not (isinstance(value, (int, float)) and at_least <= value < math.inf):
        raise SettingError(f"{name} must be a number of at least {at_least:g}, got {value!r}")
