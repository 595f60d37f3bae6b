"""Fixtures: a storage of the test's own, and a bucket in it."""

import itertools
import os
from collections.abc import Iterator

import pytest

from precache.storage.urls import Url
from tests.cloud.storages import Storage, run_storage

_numbers = itertools.count()


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    """An S3 endpoint that the environment variables name; the cache folder is the test's own, too."""
    pytest.importorskip("obstore")
    if "PRECACHE_CACHE_DIR" not in os.environ:  # unless another fixture has set one
        monkeypatch.setenv("PRECACHE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    with run_storage("s3") as storage:
        no_proxy = ",".join(host for host in (os.environ.get("NO_PROXY"), "127.0.0.1") if host)
        for name, value in {**storage.environment(), "NO_PROXY": no_proxy}.items():
            monkeypatch.setenv(name, value)
        yield storage


@pytest.fixture
def bucket(storage: Storage) -> Url:
    """URL of an empty bucket."""
    url = Url(f"s3://bucket-{next(_numbers)}")
    storage.buckets.add(url.name)
    return url
