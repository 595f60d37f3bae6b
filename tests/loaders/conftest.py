from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.loaders import ray_nodes


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[Any]:
    """Connect this process to a `ray.cluster_utils.Cluster`, and yield it.

    It ends with the tests of this package: those of `precache` start another one, and a process can be
    connected to one cluster at a time.
    """
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'precache[ray]'")
    with ray_nodes.cluster_of_one_node() as cluster:
        yield cluster


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return str(request.param)
