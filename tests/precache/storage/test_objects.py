"""Objects of a real S3 endpoint, behind a proxy that breaks what it is told to break."""

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from precache.errors import StorageError
from precache.storage.objects import PART_BYTES, ObjectStore
from precache.storage.retries import ObjectNotFoundError, Patience
from precache.storage.urls import Url
from tests.cloud.proxy import Proxy, Seen

QUICK = Patience(total_s=3, stall_s=0.5, connect_s=1)
CONTENT = np.random.default_rng(5).bytes(300_000)


def first(count: int, fault: str, method: str = "GET") -> Callable[[Seen], str | None]:
    """That fault for the first so many requests of that method."""
    left = [count]

    def plan(seen: Seen) -> str | None:
        if seen.method != method or left[0] == 0:
            return None
        left[0] -= 1
        return fault

    return plan


def test_what_is_put_comes_back(bucket: Url, tmp_path: Path) -> None:
    store = ObjectStore(bucket / "some/folder")
    store.put("a.bin", CONTENT)
    (tmp_path / "b").write_bytes(CONTENT[:10])
    store.upload(tmp_path / "b", "sub/b.bin")
    assert store.get("a.bin") == CONTENT
    assert store.get_range("a.bin", 1000, 50) == CONTENT[1000:1050]
    assert [(one.name, one.bytes) for one in store.list()] == [("a.bin", len(CONTENT)), ("sub/b.bin", 10)]
    assert [one.name for one in ObjectStore(bucket / "some/folder/sub").list()] == ["b.bin"]
    store.delete(["a.bin", "never-there"])
    assert store.find("a.bin") is None
    with pytest.raises(ObjectNotFoundError, match=r"s3://bucket-.*/some/folder/a\.bin"):
        store.get("a.bin")


def test_large_files_go_up_and_come_down_in_parts(bucket: Url, tmp_path: Path) -> None:
    content = np.random.default_rng(6).bytes(9 * PART_BYTES + 7)  # more than one put takes
    (tmp_path / "large").write_bytes(content)
    store = pickle.loads(pickle.dumps(ObjectStore(bucket)))
    store.upload(tmp_path / "large", "large")
    assert store.find("large").bytes == len(content)
    with open(tmp_path / "back", "wb") as file:
        store.download("large", file.fileno(), len(content))
    assert (tmp_path / "back").read_bytes() == content
    with (
        open(tmp_path / "back", "wb") as file,
        pytest.raises(StorageError, match="expected 5 bytes, got 75,"),
    ):
        store.download("large", file.fileno(), 5)


@pytest.mark.parametrize("fault", ["reset", "broken", "500", "503", "stall", "short"])
def test_what_passes_is_asked_again(fault: str, bucket: Url, proxy: Proxy) -> None:
    store = ObjectStore(bucket, QUICK)
    store.put("a", CONTENT)
    proxy.plan = first(2, fault)
    assert store.get_range("a", 5, 100_000) == CONTENT[5:100_005]
    assert proxy.faults[fault] == 2
    if fault != "short":  # of all of an object nobody knows the length but the storage
        proxy.plan = first(2, fault)
        assert store.get("a") == CONTENT


@pytest.mark.parametrize("fault", ["reset", "500", "503"])
def test_what_is_written_is_written_again(fault: str, bucket: Url, proxy: Proxy) -> None:
    store = ObjectStore(bucket, QUICK)
    proxy.plan = first(2, fault, "PUT")
    store.put("a", CONTENT)
    assert store.get("a") == CONTENT


@pytest.mark.parametrize(
    ("fault", "mention"),
    [
        ("expired", "renew the credentials"),
        ("skew", "set this machine's clock"),
        ("gone", "check the URL"),
    ],
)
def test_what_cannot_pass_is_an_error_at_once(fault: str, mention: str, bucket: Url, proxy: Proxy) -> None:
    store = ObjectStore(bucket, QUICK)
    proxy.plan = lambda seen: fault
    with pytest.raises(StorageError) as caught:
        store.get("a")
    assert mention in str(caught.value)
    assert str(bucket / "a") in str(caught.value)
    assert len(proxy.seen) == 1


def test_a_bucket_that_is_not_there_is_named(bucket: Url) -> None:
    missing = ObjectStore(Url(f"{bucket.root}-that-nobody-made", "photos"), QUICK)
    for act in (lambda: missing.get("a"), lambda: list(missing.list()), lambda: missing.put("a", CONTENT)):
        with pytest.raises(StorageError, match=f"NoSuchBucket.*; check the name {missing.url.root}$"):
            act()


@pytest.mark.parametrize("fault", ["503", "stall"])
def test_a_storage_that_never_answers_is_given_up_in_time(fault: str, bucket: Url, proxy: Proxy) -> None:
    patience = Patience(total_s=1, stall_s=0.5, connect_s=1)
    store = ObjectStore(bucket, patience)
    store.put("a", CONTENT)
    proxy.plan = lambda seen: fault
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
