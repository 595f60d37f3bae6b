"""Fixtures: a server of a test session, a bucket of a test, a proxy before it."""

import itertools
import os
from collections.abc import Iterator

import pytest

from precache.storage.urls import Url
from tests.cloud.proxy import Proxy, proxying
from tests.cloud.server import Server, environment, serving

_numbers = itertools.count()


@pytest.fixture(scope="session")
def storage_server() -> Iterator[Server]:
    """An S3 endpoint."""
    pytest.importorskip("moto")
    pytest.importorskip("obstore")
    with serving() as server:
        yield server


@pytest.fixture
def bucket(
    storage_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Url:
    """A bucket of the test's own, which the environment leads to, and a cache folder of its own."""
    if "PRECACHE_CACHE_DIR" not in os.environ:  # a test may have one of its own
        monkeypatch.setenv("PRECACHE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    for name, value in environment(storage_server.endpoint).items():
        monkeypatch.setenv(name, value)
    url = Url(f"s3://bucket-{next(_numbers)}")
    storage_server.make_bucket(url.name)
    return url


@pytest.fixture
def proxy(storage_server: Server, bucket: Url, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy which the environment leads to; `bucket` is behind it."""
    with proxying(storage_server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy
