"""A Ray cluster of several nodes on this machine, one for all tests of a session."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.building import build_loader

STORE_BYTES = 150_000_000  # of each node's object store; no more than 2 nodes are there at a time
ON_RAY = "ray-"
"""In front of a backend's name: on the cluster."""


@contextmanager
def cluster_of_one_node() -> Iterator[Any]:
    """A head without CPUs, so that nothing decodes there, and a node with some."""
    from ray.cluster_utils import Cluster

    quietly = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.update(quietly)
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=8, object_store_memory=STORE_BYTES)
        yield cluster
    finally:
        import ray

        ray.shutdown()
        cluster.shutdown()


@contextmanager
def kept_workers(path: Path, cluster: Any) -> Iterator[None]:
    """Loaders of 1 and of 2 workers that stay, so that those of the tests need not start theirs."""
    import ray

    ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
    kept = [build_loader(path, engine="ray", workers=workers, size=32) for workers in (1, 2)]
    try:
        yield
    finally:
        for loader in kept:
            loader.close()


def decoders() -> list[psutil.Process]:
    """Processes of actors of ours, of any cluster on this machine that tests have started."""
    found = []
    for process in psutil.process_iter():
        try:
            if "ray::Decoder" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def eventually(holds: Callable[[], bool], most_s: float = 20) -> bool:
    """Whether it does within so long."""
    deadline_s = time.monotonic() + most_s
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return holds()
