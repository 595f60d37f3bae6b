"""A Ray cluster on this machine, for all tests that need one: one node, and the nodes that a test adds."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.command import ROOT


@pytest.fixture(scope="package")
def cluster() -> Iterator[Any]:
    """A cluster with a node of one CPU, to which this process is connected."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)  # which the workers inherit
    # Ray notices within seconds that a node was killed
    health = {
        "health_check_initial_delay_ms": 1000,
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 3,
    }
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": health}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


@pytest.fixture
def add_node(cluster: Any) -> Iterator[Callable[..., Any]]:
    """Function that adds a node of one CPU until the end of the test."""
    added: list[Any] = []

    def add(**environment: str) -> Any:
        added.append(cluster.add_node(num_cpus=1, env_vars=environment))
        return added[-1]

    yield add
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)
    wait_until(lambda: count_live_nodes() == 1)


def count_live_nodes() -> int:
    import ray

    return sum(node["Alive"] for node in ray.nodes())


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until `condition` returns something true; AssertionError if that takes too long."""
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
