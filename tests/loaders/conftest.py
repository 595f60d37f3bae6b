from collections.abc import Iterator
from typing import Any

import pytest

from tests.loaders import ray_nodes

_OTHERS = ("keep-", "rectangle-", "grey-")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked `of_squares` is `slow` of pictures of another shape."""
    for item in items:
        if item.get_closest_marker("of_squares") and any(other in item.name for other in _OTHERS):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` that this process is connected to.

    It ends with the tests of this package: those of `precache` have another one, and a process one at a time.
    """
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'precache[ray]'")
    with ray_nodes.cluster_of_one_node() as cluster:
        yield cluster
