"""Objects of S3, Google Cloud Storage and Azure: to which bucket, which key, under which condition they go.

And of a storage that breaks what it is told to break.
"""

import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from precache.errors import StorageError
from precache.storage import objects
from precache.storage.objects import PART_BYTES, ObjectStore
from precache.storage.retries import ObjectNotFoundError, Patience
from precache.storage.urls import Url, locate
from tests.cloud.storages import Storage, storing

obstore = pytest.importorskip("obstore")

PLACES = {"s3": "s3://bucket/", "gs": "gs://bucket/", "az": "az://account/bucket/"}
SIGNED_BY = {"s3": "AWS4-HMAC-SHA256 Credential=somebody/", "gs": "Bearer secret", "az": "SharedKey account:"}
PREFIX = "sets/a b/100%/ä+=&"
QUICK = Patience(total_s=3, stall_s=0.5, connect_s=1)
CONTENT = np.random.default_rng(5).bytes(300_000)


@pytest.fixture(params=PLACES)
def any_storage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    with storing(request.param) as storage:
        storage.buckets.add("bucket")
        storage.page_objects = 2
        for name, value in storage.environment().items():
            monkeypatch.setenv(name, value)
        yield storage


@pytest.fixture
def place(any_storage: Storage) -> Url:
    """A folder in it, whose name has what needs quoting."""
    found = locate(PLACES[any_storage.scheme] + PREFIX)
    assert isinstance(found, Url)
    return found


def test_every_request_is_for_the_bucket_and_the_key_of_the_url(
    any_storage: Storage, place: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_SINGLE_PUT_BYTES", PART_BYTES)  # the rest goes up in parts
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
    assert [(one.name, one.bytes) for one in store.list()] == [*expected.items()]
    found = [store.find(name) for name in ("sub/large", "empty", "c d")]
    assert [one and (one.bytes, one.crc32c) for one in found] == [
        (len(content), "0badc0de"), (0, "00000000"), (10, None),
    ]  # fmt: skip
    assert store.get_range("c d", 2, 3) == store.get("c d")[2:5] == content[2:5]
    with open(tmp_path / "back", "wb") as file:
        store.download("sub/large", file.fileno(), len(content))
        with pytest.raises(StorageError, match="expected 5 bytes"):
            store.download("sub/large", file.fileno(), 5)
    assert (tmp_path / "back").read_bytes() == content
    store.delete(["c d", "never-there", "sub/large"])
    assert [one.name for one in store.list()] == ["empty"]
    assert store.find("c d") is None
    with pytest.raises(ObjectNotFoundError):
        store.get("c d")
    for request in any_storage.seen:
        assert request.container == "bucket", request
        assert (request.key or request.query.get("prefix") or PREFIX).startswith(PREFIX), request
        assert request.headers["authorization"].startswith(SIGNED_BY[any_storage.scheme]), request


def test_an_object_is_written_only_in_the_place_of_the_one_that_was_seen(
    any_storage: Storage, place: Url
) -> None:
    store = ObjectStore(place)
    first = store.put_if("lock", b"first")
    assert first is not None
    assert store.put_if("lock", b"second") is None
    second = store.put_if("lock", b"second", first)
    assert second is not None
    assert store.put_if("lock", b"third", first) is None
    found = store.get_with_info("lock")
    assert (found[0], store.put_if("lock", b"third", found[1]) is None) == (b"second", False)
    store.delete(["lock"])
    assert store.put_if("lock", b"fourth", second) is None
    assert any_storage.objects == {}


# Faults.


@pytest.mark.parametrize(
    ("fault", "mention", "at_once"),
    [("expired", "credentials", True), ("skew", "clock", True), ("gone", "check the URL", True),
     ("503", r"for \d s; check the network", False), ("stall", r"for \d s; check the network", False)],
)  # fmt: skip
def test_what_does_not_pass_is_an_error_at_once_or_in_time(
    fault: str, mention: str, at_once: bool, bucket: Url, storage: Storage
) -> None:
    storage.plan = lambda seen: fault
    begin_s = time.monotonic()
    with pytest.raises(StorageError, match=f"^{bucket}/a: .*{mention}"):
        ObjectStore(bucket, Patience(total_s=1, stall_s=0.5, connect_s=1)).get("a")
    assert time.monotonic() - begin_s < 3
    assert (len(storage.seen) == 1) == at_once
