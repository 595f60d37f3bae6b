"""Requests to S3, Google Cloud Storage and Azure, and errors of a storage that fails on purpose."""

import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from precache.errors import StorageError
from precache.storage import objects
from precache.storage.objects import PART_BYTES, ObjectStore
from precache.storage.retries import CHECK_UPLOAD, ObjectNotFoundError
from precache.storage.urls import Url, locate
from tests.cloud.storages import Storage, run_storage

obstore = pytest.importorskip("obstore")

PLACES = {"s3": "s3://bucket/", "gs": "gs://bucket/", "az": "az://account/bucket/"}
SIGNED_BY = {"s3": "AWS4-HMAC-SHA256 Credential=somebody/", "gs": "Bearer secret", "az": "SharedKey account:"}
PREFIX = "sets/a b/100%/ä+=&"
CONTENT = np.random.default_rng(5).bytes(300_000)


@pytest.fixture(params=PLACES)
def any_storage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    with run_storage(request.param) as storage:
        storage.buckets.add("bucket")
        storage.page_objects = 2
        for name, value in storage.environment().items():
            monkeypatch.setenv(name, value)
        yield storage


@pytest.fixture
def place(any_storage: Storage) -> Url:
    """URL of a folder whose name has characters that need quoting."""
    url = locate(PLACES[any_storage.scheme] + PREFIX)
    assert isinstance(url, Url)
    return url


def test_object_store_writes_reads_lists_and_deletes_below_its_url(
    any_storage: Storage, place: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_SINGLE_PUT_BYTES", PART_BYTES)  # larger objects are uploaded in parts
    store = pickle.loads(pickle.dumps(ObjectStore(place)))
    content = np.random.default_rng(3).bytes(2 * PART_BYTES + 5)
    (tmp_path / "large").write_bytes(content)
    store.upload(tmp_path / "large", "sub/large", crc32c="0badc0de")
    store.put("empty", b"", crc32c="00000000")
    store.put("c d", content[:10])
    expected = {"c d": 10, "empty": 0, "sub/large": len(content)}
    assert {key: len(stored.content) for key, stored in any_storage.objects.items()} == {
        ("bucket", f"{PREFIX}/{name}"): size for name, size in expected.items()
    }
    assert [(info.name, info.bytes) for info in store.list()] == [*expected.items()]
    infos = [store.find(name) for name in ("sub/large", "empty", "c d")]
    assert [info and (info.bytes, info.crc32c) for info in infos] == [
        (len(content), "0badc0de"), (0, "00000000"), (10, None),
    ]  # fmt: skip
    assert store.get_range("c d", 2, 3) == store.get("c d")[2:5] == content[2:5]
    with open(tmp_path / "back", "wb") as file:
        store.download("sub/large", file.fileno(), len(content))
        with pytest.raises(StorageError, match="expected 5 bytes"):
            store.download("sub/large", file.fileno(), 5)
        with pytest.raises(StorageError, match="ends before") as raised:
            store.download("empty", file.fileno(), 5)
    assert (raised.value.path, raised.value.remedy) == (place / "empty", CHECK_UPLOAD)
    (tmp_path / "nothing").touch()
    store.download_checked("empty", tmp_path / "nothing", 0, "00000000")
    assert (tmp_path / "nothing").read_bytes() == b""
    assert (tmp_path / "back").read_bytes() == content
    store.delete(["c d", "never-there", "sub/large"])
    assert [info.name for info in store.list()] == ["empty"]
    assert store.find("c d") is None
    with pytest.raises(ObjectNotFoundError):
        store.get("c d")
    for request in any_storage.seen:
        assert request.container == "bucket", request
        assert (request.key or request.query.get("prefix") or PREFIX).startswith(PREFIX), request
        assert request.headers["authorization"].startswith(SIGNED_BY[any_storage.scheme]), request


def test_put_if_replaces_only_the_expected_object(any_storage: Storage, place: Url) -> None:
    store = ObjectStore(place)
    first = store.put_if("lock", b"first")
    assert first is not None
    assert store.put_if("lock", b"second") is None
    second = store.put_if("lock", b"second", first)
    assert second is not None
    assert store.put_if("lock", b"third", first) is None
    content, info = store.get_with_info("lock")
    assert content == b"second"
    assert store.put_if("lock", b"third", info) is not None
    store.delete(["lock"])
    assert store.put_if("lock", b"fourth", second) is None
    assert any_storage.objects == {}


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [("expired", "renew the credentials"), ("skew", "clock"), ("gone", "check the URL")],
)
def test_permanent_error_is_raised_after_one_request(
    fault: str, remedy: str, bucket: Url, storage: Storage
) -> None:
    storage.plan = lambda seen: fault
    with pytest.raises(StorageError) as raised:
        ObjectStore(bucket, patience_s=1).get("a")
    assert raised.value.path == bucket / "a"
    assert remedy in raised.value.remedy
    assert len(storage.seen) == 1


@pytest.mark.parametrize("fault", ["503", "stall"])
def test_temporary_error_that_lasts_is_raised_when_patience_ends(
    fault: str, bucket: Url, storage: Storage
) -> None:
    storage.plan = lambda seen: fault
    begin_s = time.monotonic()
    with pytest.raises(StorageError) as raised:
        ObjectStore(bucket, patience_s=1).get("a")
    assert time.monotonic() - begin_s < 3
    assert raised.value.path == bucket / "a"
    assert "check the network" in raised.value.remedy
    assert len(storage.seen) > 1


_ABANDON = """
import os, sys, threading, time
from precache.storage.objects import ObjectStore
from precache.storage.urls import locate
store, descriptor = ObjectStore(locate(sys.argv[1])), os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
arguments = "large", descriptor, int(sys.argv[3])
threading.Thread(target=store.download, args=arguments, daemon=True).start()
time.sleep(1)
sys.exit(7)
"""


def test_the_program_ends_during_a_download_in_parts(bucket: Url, storage: Storage, tmp_path: Path) -> None:
    object_bytes = 2 * PART_BYTES + 1
    ObjectStore(bucket).put("large", bytes(object_bytes))
    storage.plan = lambda seen: "stall"
    arguments = [str(bucket), str(tmp_path / "file"), str(object_bytes)]
    done = subprocess.run([sys.executable, "-c", _ABANDON, *arguments], timeout=20, check=False)
    assert done.returncode == 7  # patience is 120 s
    assert storage.faults["stall"] == 3
