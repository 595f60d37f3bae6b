"""What goes out to S3, Google Cloud Storage and Azure: to which bucket, which key, under which condition."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from precache import open_dataset
from precache.sharing.push_pull import pull, push
from precache.storage import objects
from precache.storage.objects import PART_BYTES, ObjectStore
from precache.storage.retries import ObjectNotFoundError
from precache.storage.urls import Url, locate
from tests.cloud.storages import Storage, storing

obstore = pytest.importorskip("obstore")

PLACES = {"s3": "s3://bucket/", "gs": "gs://bucket/", "az": "az://account/bucket/"}
SIGNED_BY = {"s3": "AWS4-HMAC-SHA256 Credential=somebody/", "gs": "Bearer secret", "az": "SharedKey account:"}
PREFIX = "sets/a b/100%/ä+=&"


@pytest.fixture(params=PLACES)
def storage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    with storing(request.param) as storage:
        for name, value in storage.environment().items():
            monkeypatch.setenv(name, value)
        yield storage


@pytest.fixture
def place(storage: Storage) -> Url:
    """A folder in it, whose name has what needs quoting."""
    found = locate(PLACES[storage.scheme] + PREFIX)
    assert isinstance(found, Url)
    return found


def test_every_request_is_for_the_bucket_and_the_key_of_the_url(
    storage: Storage, place: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_SINGLE_PUT_BYTES", PART_BYTES)  # the rest goes up in parts
    store = ObjectStore(place)
    content = np.random.default_rng(3).bytes(3 * PART_BYTES + 5)
    (tmp_path / "large").write_bytes(content)
    store.upload(tmp_path / "large", "sub/large", crc32c="0badc0de")
    store.put("empty", b"", crc32c="00000000")
    store.put("c d", content[:10])
    assert {key: len(stored.content) for key, stored in storage.objects.items()} == {
        ("bucket", f"{PREFIX}/sub/large"): len(content),
        ("bucket", f"{PREFIX}/empty"): 0,
        ("bucket", f"{PREFIX}/c d"): 10,
    }
    assert [(one.name, one.bytes) for one in store.list()] == [
        ("c d", 10),
        ("empty", 0),
        ("sub/large", len(content)),
    ]
    assert [store.crc32c_of(name) for name in ("sub/large", "empty", "c d", "none")] == [
        "0badc0de",
        "00000000",
        None,
        None,
    ]
    assert store.get("c d") == content[:10]
    assert store.get_range("c d", 2, 3) == content[2:5]
    with open(tmp_path / "back", "wb") as file:
        store.download("sub/large", file.fileno(), len(content))
    assert (tmp_path / "back").read_bytes() == content
    store.delete(["c d", "never-there", "sub/large"])
    assert [one.name for one in store.list()] == ["empty"]
    with pytest.raises(ObjectNotFoundError):
        store.get("c d")
    for request in storage.requests:
        assert request.container == "bucket", request
        assert (request.key or request.query.get("prefix") or PREFIX).startswith(PREFIX), request
        assert request.headers["authorization"].startswith(SIGNED_BY[storage.scheme]), request


def test_without_an_endpoint_a_container_is_asked_for_at_its_account(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    store = ObjectStore(Url("az://account/container", "sets/a"))
    signed = obstore.sign(store._store, "GET", "n", timedelta(seconds=5))
    assert signed.startswith("https://account.blob.core.windows.net/container/sets/a/n?")


def test_an_object_is_written_only_in_the_place_of_the_one_that_was_seen(
    storage: Storage, place: Url
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
    assert storage.objects == {}


def test_a_dataset_goes_there_is_read_there_and_comes_back(
    converted: dict[str, Path], place: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECACHE_CACHE_DIR", str(tmp_path / "cache"))
    push(converted["shards"], place)
    assert open_dataset(place).manifest.samples == open_dataset(converted["shards"]).manifest.samples
    pull(place, tmp_path / "copy")
    for path in converted["shards"].iterdir():
        assert (tmp_path / "copy" / path.name).read_bytes() == path.read_bytes()
