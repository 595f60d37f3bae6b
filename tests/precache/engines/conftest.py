"""A Ray cluster on this machine, for all tests that need one: a node, and those that a test adds."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.command import ROOT


@pytest.fixture(scope="package")
def cluster() -> Iterator[Any]:
    """This process is connected to it."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)  # of the workers
    # so that a node which was killed is seen to be dead within seconds
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
    """Adds a node of one CPU, for the duration of the test."""
    added: list[Any] = []

    def add(**environment: str) -> Any:
        added.append(cluster.add_node(num_cpus=1, env_vars=environment))
        return added[-1]

    yield add
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)
    until(lambda: living() == 1)


def living() -> int:
    import ray

    return sum(node["Alive"] for node in ray.nodes())


def until(true: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until it is true."""
    deadline_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
