"""Who converts into a URL: an object, made and renewed on the condition that nobody else did so.

A holder that is gone is known by its process, on the same machine; on another one by an object that stays as
it is for a while, watched by the own clock. Who finds that its lock is another's stops.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from precache.console.notices import warn
from precache.errors import DatasetError, StorageError
from precache.storage.objects import ObjectInfo, ObjectStore
from precache.storage.retries import ObjectNotFoundError, Patience
from precache.storage.urls import Url

LOCK_NAME = "journal/lock.json"
RENEWED_S = 10.0
"""So often it is renewed."""
DEAD_AFTER_S = 60.0
"""A holder that does not renew it for so long is taken for dead."""
_REQUEST_S = 15.0  # a renewal that takes longer is as good as none, and nobody waits for it at the end
_held: set[str] = set()  # tokens of this process
_LONG_AGO_S = 3600.0  # no storage takes requests of a clock that is so wrong


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock, as its object says.

    Attributes:
        machine: its boot and its container, where the system tells; else empty.
        started: of the process, in ticks of the machine; it tells its number from another's.
        token: of this one time.
    """

    host: str
    pid: int
    machine: str = ""
    started: str = ""
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    @classmethod
    def me(cls) -> "Holder":
        """This process."""
        return cls(socket.gethostname(), os.getpid(), _machine(), _started(os.getpid()))

    @classmethod
    def parse(cls, content: bytes) -> "Holder | None":
        """What an object holds; None if it is none of ours."""
        try:
            values = json.loads(content)
            names = ("host", "pid", "machine", "started", "token")
            return cls(**{name: values[name] for name in names}) if values["lock"] == "precache" else None
        except (ValueError, LookupError, TypeError):
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def encode(self) -> bytes:
        """The object's content, another one at each call."""
        values = {name: getattr(self, name) for name in ("host", "pid", "machine", "started", "token")}
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return json.dumps(
            {"lock": "precache", **values, "renewed": now, "nonce": secrets.token_hex(8)}
        ).encode()

    def is_alive(self) -> bool | None:
        """Whether the process is there; None where this machine cannot know."""
        if not self.machine or self.machine != _machine():
            return None
        if self.pid == os.getpid():  # a lock that this process could not remove any more is no lock
            return self.token in _held
        return self.started != "" and _started(self.pid) == self.started


class _ReleasedError(Exception):
    """Nobody waits for the renewal any more."""


class UrlLock:
    """A lock that is held, and renewed by a thread until it is released."""

    def __init__(self, url: Url, me: Holder, there: ObjectInfo) -> None:
        patience = Patience.of_environment()
        total_s = min(_REQUEST_S, patience.total_s)
        short_s = min(5.0, total_s)
        self._store = ObjectStore(url, replace(patience, total_s=total_s, stall_s=short_s))
        self._last = ObjectStore(url, Patience(total_s=short_s, stall_s=short_s, connect_s=short_s))
        self._me, self._there = me, there
        self._lost = ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="precache-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise DatasetError if it is held no more."""
        if self._lost:
            raise DatasetError(f"{self._store.url}: {self._lost}; run the same command again to go on")

    def release(self) -> None:
        """Let others in; a storage that does not answer is waited for a few seconds."""
        self._end.set()
        self._thread.join()
        with suppress(StorageError):
            if not self._lost:
                self._last.delete([LOCK_NAME])

    def _renew(self) -> None:
        renewed_s = time.monotonic()
        while not self._end.wait(RENEWED_S):
            try:
                content = self._me.encode()
                there = self._store.put_if(LOCK_NAME, content, self._there, self._check_wanted)
                there = there or _found(self._store, content)
            except _ReleasedError:
                return
            except StorageError as error:
                if time.monotonic() - renewed_s > DEAD_AFTER_S - RENEWED_S:
                    self._lost = f"could not be locked any more ({error})"
                    return
                continue
            if there is None:
                self._lost = "is locked by another process, which took this one for dead"
                return
            self._there, renewed_s = there, time.monotonic()

    def _check_wanted(self) -> None:
        if self._end.is_set():
            raise _ReleasedError


@contextmanager
def hold_lock(url: Url) -> Iterator[UrlLock]:
    """Keep other conversions out of `url` for the duration of the block.

    Raises:
        DatasetError: another process holds the lock.
        StorageError: the storage does not answer.
    """
    store, me = ObjectStore(url), Holder.me()
    lock = UrlLock(url, me, _acquire(store, me))
    _held.add(me.token)
    try:
        yield lock
    finally:
        lock.release()
        _held.discard(me.token)


def check_unlocked(store: ObjectStore) -> Holder | None:
    """Who holds the lock and is dead; None if nobody holds it.

    Raises:
        DatasetError: the holder lives, or may live.
    """
    found = _read(store)
    if found is None:
        return None
    holder, there = found
    if holder is not None:
        _check_dead(store, holder, there)
    return holder or Holder("an unknown host", 0)


def _acquire(store: ObjectStore, me: Holder) -> ObjectInfo:
    """The lock's object, which is now this process's."""
    there: ObjectInfo | None = None
    while True:
        content = me.encode()
        got = store.put_if(LOCK_NAME, content, there) or _found(store, content)
        if got is not None:
            return got
        found = _read(store)
        there = None
        if found is not None:
            holder, there = found
            if holder is None:
                raise DatasetError(
                    f"{store.url / LOCK_NAME}: is no lock of this project; choose another DST, or remove it"
                )
            _check_dead(store, holder, there)


def _check_dead(store: ObjectStore, holder: Holder, there: ObjectInfo) -> None:
    """Raise DatasetError unless the holder is known to be gone; that may take a while."""
    age_s = time.time() - there.modified_ns / 1e9
    alive = holder.is_alive()
    if alive is None and age_s < _LONG_AGO_S:
        warn(
            f"{store.url}: was being written to by {holder}, {max(age_s, 0):.0f} s ago; waiting up to "
            f"{DEAD_AFTER_S:.0f} s for a sign of life"
        )
        alive = _shows_life(store, there)
    if alive:
        raise DatasetError(f"{store.url}: is being written to by {holder}; wait for it, or stop it")


def _shows_life(store: ObjectStore, there: ObjectInfo) -> bool:
    """Whether the object changes within the time in which a holder renews it, several times."""
    end_s = time.monotonic() + DEAD_AFTER_S
    while (left_s := end_s - time.monotonic()) > 0:
        time.sleep(min(left_s, RENEWED_S / 4))
        found = store.find(LOCK_NAME)
        if found is None:
            return False
        if found.etag != there.etag:
            return True
    return False


def _read(store: ObjectStore) -> tuple[Holder | None, ObjectInfo] | None:
    """Who holds the lock, or None where that is unreadable, and its object. None: nobody."""
    try:
        content, info = store.get_as_found(LOCK_NAME)
    except ObjectNotFoundError:
        return None
    return Holder.parse(content), info


def _found(store: ObjectStore, content: bytes) -> ObjectInfo | None:
    """The lock's object if it holds just this: the answer to a request that wrote it may be lost."""
    try:
        there, info = store.get_as_found(LOCK_NAME)
    except ObjectNotFoundError:
        return None
    return info if there == content else None


def _machine() -> str:
    """What tells this boot of this machine, and this container, from all others; empty off Linux."""
    if sys.platform != "linux":
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When the process began; empty if there is none, or it is dead and not yet waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
