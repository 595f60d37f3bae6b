"""Ray cluster of several nodes on this machine, one for all tests of a session."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STORE_BYTES = 150_000_000  # of each node's object store; there are at most 2 nodes at a time
NODE_CPUS = 3  # as many as readers; Ray starts a process for each at once


@contextmanager
def cluster_of_one_node() -> Iterator[Any]:
    """Start a cluster whose head has no CPUs, so that nothing decodes there, and one node that has some."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    os.environ["RAY_DEDUP_LOGS"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        import ray

        cluster.add_node(num_cpus=NODE_CPUS, object_store_memory=STORE_BYTES)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
