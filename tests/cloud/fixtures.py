"""Fixtures: a bucket of a test in a storage of its own, and that storage."""

import itertools
import os
from collections.abc import Iterator

import pytest

from precache.storage.urls import Url
from tests.cloud.storages import Storage, run_storage

_numbers = itertools.count()


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    """An S3 endpoint which the environment leads to, and a cache folder of the test's own."""
    pytest.importorskip("obstore")
    if "PRECACHE_CACHE_DIR" not in os.environ:  # a test may have one of its own
        monkeypatch.setenv("PRECACHE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    with run_storage("s3") as storage:
        local = filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1"))
        for name, value in {**storage.environment(), "NO_PROXY": ",".join(local)}.items():
            monkeypatch.setenv(name, value)
        yield storage


@pytest.fixture
def bucket(storage: Storage) -> Url:
    """A bucket of the test's own."""
    url = Url(f"s3://bucket-{next(_numbers)}")
    storage.buckets.add(url.name)
    return url
