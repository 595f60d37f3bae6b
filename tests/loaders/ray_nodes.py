"""A Ray cluster of several nodes on this machine, one for all tests of a session."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
        import ray

        cluster.add_node(num_cpus=8, object_store_memory=STORE_BYTES)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def eventually(holds: Callable[[], bool], most_s: float = 20) -> bool:
    """Whether it does within so long."""
    deadline_s = time.monotonic() + most_s
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return holds()
