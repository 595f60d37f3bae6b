"""Objects of S3, Google Cloud Storage and Azure: to which bucket, which key, under which condition they go.

And of a storage that breaks what it is told to break.
"""

import os
import pickle
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from precache import open_dataset
from precache.errors import StorageError
from precache.sharing.push_pull import pull, push
from precache.storage import objects
from precache.storage.objects import PART_BYTES, ObjectStore
from precache.storage.retries import ObjectNotFoundError, Patience
from precache.storage.urls import Url, locate
from tests.cloud.storages import Seen, Storage, storing

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
    kept = [store.crc32c_of(name) for name in ("sub/large", "empty", "c d", "none")]
    assert kept == ["0badc0de", "00000000", None, None]
    assert store.get("c d") == content[:10]
    assert store.get_range("c d", 2, 3) == content[2:5]
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


def test_without_an_endpoint_a_container_is_asked_for_at_its_account(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    store = ObjectStore(Url("az://account/container", "sets/a"))
    signed = obstore.sign(store._store, "GET", "n", timedelta(seconds=5))
    assert signed.startswith("https://account.blob.core.windows.net/container/sets/a/n?")


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
    found = store.get_as_found("lock")
    assert (found[0], store.put_if("lock", b"third", found[1]) is None) == (b"second", False)
    store.delete(["lock"])
    assert store.put_if("lock", b"fourth", second) is None
    assert any_storage.objects == {}


def test_a_dataset_goes_there_is_read_there_and_comes_back(
    converted: dict[str, Path], place: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECACHE_CACHE_DIR", str(tmp_path / "cache"))
    push(converted["shards"], place)
    assert open_dataset(place).manifest.samples == open_dataset(converted["shards"]).manifest.samples
    pull(place, tmp_path / "copy")
    for path in converted["shards"].iterdir():
        assert (tmp_path / "copy" / path.name).read_bytes() == path.read_bytes()


# Faults.


def first(count: int, fault: str, method: str) -> Callable[[Seen], str | None]:
    """That fault for the first so many requests of that method."""
    left = iter(range(count))
    return lambda seen: fault if seen.method == method and next(left, None) is not None else None


@pytest.mark.parametrize(
    ("method", "fault"),
    [*(("GET", fault) for fault in ("reset", "broken", "500", "503", "stall", "short")),
     *(("PUT", fault) for fault in ("reset", "500", "503"))],
)  # fmt: skip
def test_what_passes_is_asked_again(method: str, fault: str, bucket: Url, storage: Storage) -> None:
    store = ObjectStore(bucket, QUICK)
    if method == "GET":
        store.put("a", CONTENT)
    storage.plan = first(2, fault, method)
    if method == "PUT":
        store.put("a", CONTENT)
    assert store.get_range("a", 5, 100_000) == CONTENT[5:100_005]
    assert storage.faults[fault] == 2
    if fault != "short":  # of all of an object nobody knows the length but the storage
        storage.plan = first(2, fault, method)
        assert store.get("a") == CONTENT


@pytest.mark.parametrize(
    ("fault", "mention"), [("expired", "credentials"), ("skew", "clock"), ("gone", "check the URL")]
)
def test_what_cannot_pass_is_an_error_at_once(
    fault: str, mention: str, bucket: Url, storage: Storage
) -> None:
    storage.plan = lambda seen: fault
    with pytest.raises(StorageError, match=f"^{bucket}/a: .*{mention}"):
        ObjectStore(bucket, QUICK).get("a")
    assert len(storage.seen) == 1


def test_a_bucket_that_is_not_there_is_named(bucket: Url) -> None:
    missing = ObjectStore(Url(f"{bucket.root}-that-nobody-made", "photos"), QUICK)
    for act in (lambda: missing.get("a"), lambda: list(missing.list()), lambda: missing.put("a", CONTENT)):
        with pytest.raises(StorageError, match=f"NoSuchBucket.*; check the name {missing.url.root}$"):
            act()


@pytest.mark.parametrize("fault", ["503", "stall"])
def test_a_storage_that_never_answers_is_given_up_in_time(fault: str, bucket: Url, storage: Storage) -> None:
    patience = Patience(total_s=1, stall_s=0.5, connect_s=1)
    store = ObjectStore(bucket, patience)
    store.put("a", CONTENT)
    storage.plan = lambda seen: fault
    begin_s = time.monotonic()
    with pytest.raises(StorageError, match=r"s3://.*/a: .* for \d s; check the network"):
        store.get("a")
    assert time.monotonic() - begin_s < patience.total_s + 2


def test_an_object_that_is_replaced_midway_is_named(bucket: Url) -> None:
    store = ObjectStore(bucket, QUICK)
    store.put("a", CONTENT)
    known = store.find("a")
    assert known is not None
    store.put("a", CONTENT[::-1])
    with pytest.raises(StorageError, match="was replaced by another object"):
        store.get_range("a", 0, 10, known.etag)


def test_a_forked_process_is_told_to_open_its_own(bucket: Url) -> None:
    store = ObjectStore(bucket, QUICK)
    child = os.fork()
    if child == 0:
        try:
            store.get("a")
        except StorageError as error:
            os._exit(0 if "another process" in str(error) else 2)
        os._exit(3)
    assert os.waitpid(child, 0)[1] == 0
