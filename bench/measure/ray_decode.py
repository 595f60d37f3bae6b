"""What decoding on nodes of a Ray cluster costs beside decoding on the rank's own CPUs.

    python -m bench.measure.ray_decode TREE|FOLDER [--workers 2] [--nodes 1] [--address HOST:PORT]

Without --address it starts a cluster on this machine: a head without CPUs, where the rank is, and nodes that
share the workers, so that every batch goes from one node to another through the loopback device. Both ways
take turns on the same CPUs then, and Ray can only be slower: what counts is what the rank's own CPUs are
spared. With --address the nodes are other machines. The page cache is warm.
"""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import click
import psutil
import torch

import loaders
from bench.machine.hardware import describe_machine, versions_of
from bench.measure.settings import LAST, endless
from bench.report.stats import Estimate, estimate, ratio
from loaders.batch import Batch
from precache.console import commandline
from precache.console.commandline import ProgressBar
from precache.errors import MissingDependencyError
from precache.executors import available_cpus
from precache.packages import install_extra, version_of

_KEPT_AHEAD = 4  # batches that a loader holds beside those of its workers
_STORE_BYTES = 500_000_000
_LOOK_S, _LONGEST_LOOKS, _QUIET_BYTES = 0.3, 30, 300_000


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn measured.

    Attributes:
        rank_ms: CPU time a picture, of the rank's process, its own workers, and Ray's daemon on its node.
        received_kib: a picture, from other nodes.
    """

    images_per_s: float
    rank_ms: float
    received_kib: float


@dataclass(frozen=True, slots=True)
class Meter:
    """Where to look for what a turn costs.

    Attributes:
        raylet: Ray's daemon on the rank's node.
        device: network device; empty: all but the loopback.
    """

    raylet: psutil.Process
    device: str

    def cpu_s(self) -> float:
        """So far, of all that works for the rank on its node."""
        own = psutil.Process()
        workers = [child for child in own.children() if not _is_of_ray(child)]
        return sum(_cpu_s(process) for process in (own, *workers, self.raylet))

    def received_bytes(self) -> int:
        """So far."""
        found = psutil.net_io_counters(pernic=True)
        names = [self.device] if self.device else [name for name in found if name != "lo"]
        return sum(int(found[name].bytes_recv) for name in names)

    def wait_for_quiet(self) -> None:
        """Until the loader whose turn is over has read ahead as far as it does."""
        for _ in range(_LONGEST_LOOKS):
            before = self.received_bytes()
            time.sleep(_LOOK_S)
            if self.received_bytes() - before < _QUIET_BYTES:
                return


def _is_of_ray(process: psutil.Process) -> bool:
    try:
        return any("ray" in Path(word).name for word in process.cmdline()[:2])
    except psutil.Error:
        return True


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has just ended
        return 0.0
    return float(times.user + times.system)


def measure(source: Iterator[Batch], ahead: int, batches: int, meter: Meter) -> Turn:
    """A turn of so many batches, behind those that are there already, `ahead` at most."""
    for _ in islice(source, ahead):
        pass
    meter.wait_for_quiet()
    for _ in islice(source, ahead):  # what was read while it waited
        pass
    cpu_s, received, start_s = meter.cpu_s(), meter.received_bytes(), time.perf_counter()
    images = sum(len(batch.ids) for batch in islice(source, batches))
    spent_s = time.perf_counter() - start_s
    rank_ms = 1e3 * (meter.cpu_s() - cpu_s) / images
    return Turn(images / spent_s, rank_ms, (meter.received_bytes() - received) / 1024 / images)


@contextmanager
def cluster(address: str | None, nodes: int, workers: int) -> Iterator[Meter]:
    """Be connected to the cluster at `address`, or to one that goes with this.

    Raises:
        MissingDependencyError: Ray is not installed.
    """
    try:
        import ray
        from ray.cluster_utils import Cluster
    except ImportError as error:
        raise MissingDependencyError(f"Ray is not installed; run: {install_extra('ray')}") from error
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address is not None:
        ray.init(address=address, **quiet)
        raylets = [process for process in psutil.process_iter() if process.name() == "raylet"]
        yield Meter(raylets[0], "")
        ray.shutdown()
        return
    store = {"object_store_memory": _STORE_BYTES}
    own = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **store})
    try:
        for number in range(nodes):
            own.add_node(num_cpus=(workers + number) // nodes, **store)
        ray.init(address=own.address, **quiet)
        raylet = own.head_node.all_processes["raylet"][0].process.pid
        yield Meter(psutil.Process(raylet), "lo")
    finally:
        ray.shutdown()
        own.shutdown()


@click.command(cls=commandline.Command)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--workers", default=available_cpus(), show_default="one per CPU")
@click.option("--nodes", default=1, show_default=True, help="That share the workers, without --address.")
@click.option("--address", help="Of a cluster that runs: HOST:PORT, or auto.")
@click.option("--batch-size", default=64, show_default=True)
@click.option("--size", default=224, show_default=True)
@click.option("--augment", default="train", show_default=True)
@click.option("--batches", default=40, show_default=True, help="Of each turn.")
@click.option("--repeats", default=5, show_default=True, help="Turns of each way.")
def ray_decode(
    path: Path,
    workers: int,
    nodes: int,
    address: str | None,
    batch_size: int,
    size: int,
    augment: str,
    batches: int,
    repeats: int,
) -> None:
    """Print images/s, CPU time and bytes received of decoding PATH here and on nodes of a Ray cluster."""
    found: dict[str, list[Turn]] = {"local": [], "ray": []}
    settings: dict[str, Any] = {"batch_size": batch_size, "size": size, "augment": augment, "last": LAST}
    with ExitStack() as at_end, ProgressBar("ray_decode", "turn") as bar:
        meter = at_end.enter_context(cluster(address, nodes, workers))
        sources = {}
        for engine in found:
            reading = loaders.Reading(engine=engine, workers=workers)
            loader = at_end.enter_context(loaders.build(path, reading=reading, **settings))
            sources[engine] = (batch for batch, _ in endless(loader))
            for _ in islice(sources[engine], len(loader)):  # compares checksums; into the page cache
                pass
        for number in range(repeats * len(found)):
            engine = ("local", "ray")[number % 2]
            ahead = 2 * workers + _KEPT_AHEAD
            found[engine].append(measure(sources[engine], ahead, batches, meter))
            bar(number + 1, repeats * len(found))
    machine = describe_machine(torch.device("cpu"))
    print("\n".join(table(found, nodes)))
    print(
        f"{path}: batch {batch_size} of {size}x{size}, {size * size * 3 / 1024:.1f} KiB a picture, augment "
        f"{augment}; {workers} workers on {nodes} nodes {'of this machine' if address is None else address}; "
        f"medians of {repeats} turns of {batches} batches (lowest-highest), page cache warm; "
        f"{', '.join(versions_of(machine, ('torch',)))}, ray {version_of('ray')}, {' '.join(os.uname()[::2])}"
    )


def table(found: dict[str, list[Turn]], nodes: int) -> list[str]:
    """A head, and a line for each way."""
    head = ("", "images/s", "of local", "a node", "rank's CPU, ms a picture", "received, KiB a picture")
    wide = (8, 24, 20, 10, 28, 0)
    lines = ["".join(f"{title:{width}}" for title, width in zip(head, wide, strict=True))]
    local = [turn.images_per_s for turn in found["local"]]
    for name, turns in found.items():
        rates = [turn.images_per_s for turn in turns]
        cells = (
            name,
            _shown(estimate(rates), ",.0f"),
            _shown(ratio(rates, local), ".2f"),
            f"{estimate(rates).median / (1 if name == 'local' else nodes):,.0f}",
            _shown(estimate([turn.rank_ms for turn in turns]), ".3f"),
            _shown(estimate([turn.received_kib for turn in turns]), ".1f"),
        )
        lines.append("".join(f"{cell:{width}}" for cell, width in zip(cells, wide, strict=True)))
    return lines


def _shown(value: Estimate, form: str) -> str:
    return f"{value.median:{form}} ({value.low:{form}}-{value.high:{form}})"


if __name__ == "__main__":
    ray_decode()
