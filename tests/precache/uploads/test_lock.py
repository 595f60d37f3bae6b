"""Who may convert into a URL: one process at a time, and another once that one is dead."""

import os
import time
from dataclasses import replace

import pytest

from precache.errors import DatasetError
from precache.storage.objects import ObjectStore
from precache.storage.retries import PATIENCE
from precache.storage.urls import Url
from precache.uploads import lock
from precache.uploads.lock import LOCK_NAME, Holder, hold_lock
from tests.cloud.proxy import Proxy


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "RENEWED_S", 0.1)
    monkeypatch.setattr(lock, "DEAD_AFTER_S", 0.8)


def far_away(url: Url) -> Holder:
    """A holder on another machine, whose lock lies there."""
    holder = replace(Holder.me(), host="far-away", machine="another boot", pid=42)
    ObjectStore(url).put(LOCK_NAME, holder.encode())
    return holder


def test_a_second_writer_is_told_who_the_first_is(bucket: Url) -> None:
    with (
        hold_lock(bucket),
        pytest.raises(
            DatasetError, match=rf"is being written to by process {os.getpid()} on .*; wait for it"
        ),
        hold_lock(bucket),
    ):
        pass
    assert ObjectStore(bucket).find(LOCK_NAME) is None


def test_a_lock_that_could_not_be_removed_is_none(
    bucket: Url, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PATIENCE, "1")
    with hold_lock(bucket):
        proxy.plan = lambda seen: "500"
    proxy.plan = lambda seen: None
    assert ObjectStore(bucket).find(LOCK_NAME) is not None
    with hold_lock(bucket):
        pass


def test_a_dead_process_of_this_machine_is_known_at_once(bucket: Url) -> None:
    dead = replace(Holder.me(), pid=os.getppid(), started="1")  # its number is another process's now
    ObjectStore(bucket).put(LOCK_NAME, dead.encode())
    begin_s = time.monotonic()
    with hold_lock(bucket):
        assert time.monotonic() - begin_s < 5


@pytest.mark.usefixtures("hurried")
def test_a_silent_process_of_another_machine_is_dead_after_a_while(
    bucket: Url, caplog: pytest.LogCaptureFixture
) -> None:
    far_away(bucket)
    with hold_lock(bucket):
        pass
    assert "by process 42 on far-away" in caplog.text


@pytest.mark.usefixtures("hurried")
def test_a_process_of_another_machine_that_renews_its_lock_is_alive(
    bucket: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Holder, "is_alive", lambda self: None)
    with (
        hold_lock(bucket),
        pytest.raises(DatasetError, match="is being written to by process"),
        hold_lock(bucket),
    ):
        pass


@pytest.mark.usefixtures("hurried")
def test_who_was_taken_for_dead_stops(bucket: Url) -> None:
    with hold_lock(bucket) as held:
        held.check()
        far_away(bucket)
        time.sleep(0.5)
        with pytest.raises(DatasetError, match="another process, which took this one for dead"):
            held.check()
    assert ObjectStore(bucket).find(LOCK_NAME) is not None  # it is the other one's


@pytest.mark.usefixtures("hurried")
def test_a_lost_answer_loses_no_lock(bucket: Url, proxy: Proxy) -> None:
    """The object was written, and the request is made again: it finds its own object."""
    proxy.plan = lambda seen: "broken" if seen.method == "PUT" and seen.number % 2 == 0 else None
    with hold_lock(bucket) as held:
        time.sleep(0.5)
        held.check()
    assert proxy.faults["broken"] > 1


def test_a_lock_of_somebody_else_is_left_alone(bucket: Url) -> None:
    store = ObjectStore(bucket)
    store.put(LOCK_NAME, b"mine")
    with pytest.raises(DatasetError, match="is no lock of this project"), hold_lock(bucket):
        pass
    assert store.get(LOCK_NAME) == b"mine"
