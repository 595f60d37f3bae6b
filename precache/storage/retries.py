"""Asking a storage again: what may succeed is asked again after a wait that doubles, until `Patience` ends.

The waits are drawn at random, so that many readers do not come back at the same moment:
https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
"""

import os
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from precache.errors import SettingError, StorageError
from precache.storage.urls import Url

T = TypeVar("T")
Check: TypeAlias = Callable[[], None]
"""Raises where what is being done is not wanted any more."""
IS_IT_WHOLE = "is the URL right, and was the upload finished?"
REPLACED = "was replaced by another object while it was read"
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 8.0
_CHECK_S = 0.25
_GRACE_S = 1.0  # for a request left behind: one that is answered while the program ends can abort it
_STATUS = re.compile(r"status code: (\d{3})")
_TOLD = re.compile(r"<Code>(.*?)</Code>(?:.*?<Message>(.*?)</Message>)?", re.DOTALL)
_MAY_PASS = (408, 425, 429)  # of the 4xx
PATIENCE = "PRECACHE_STORAGE_PATIENCE_S"
"""Environment variable: how long a request is repeated, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long is waited for a storage, in seconds.

    Attributes:
        total_s: from the first request until it is given up; one that runs then is waited for.
        stall_s: for the next bytes of an answer.
        connect_s: for a connection.
    """

    total_s: float = 120.0
    stall_s: float = 20.0
    connect_s: float = 10.0

    @classmethod
    def of_environment(cls) -> "Patience":
        """The default, or as PRECACHE_STORAGE_PATIENCE_S says; SettingError if that is no number."""
        text = os.environ.get(PATIENCE)
        if not text:
            return cls()
        try:
            total_s = float(text)
        except ValueError:
            total_s = 0.0
        if not 0 < total_s < 86_400:
            raise SettingError(f"{PATIENCE} must be seconds above 0, got {text!r}")
        return cls(
            total_s=total_s, stall_s=min(cls().stall_s, total_s), connect_s=min(cls().connect_s, total_s)
        )


def unchecked() -> None:
    """The `Check` that never raises."""


class ObjectNotFoundError(StorageError):
    """There is no such object."""


class ShortError(Exception):
    """An answer had fewer bytes than were asked for, or more."""


def check_length(got: int, expected: int) -> None:
    """Raise ShortError unless all bytes came."""
    if got != expected:
        raise ShortError(f"sent {got:,} bytes instead of {expected:,}")


def retried(where: Url, patience: Patience, once: Callable[[], T], check: Check = unchecked) -> T:
    """What `once`, a request to `where`, returns; called until it succeeds, cannot succeed, or patience ends.

    Args:
        check: called before each request, and while the next one is waited for.

    Raises:
        StorageError: it failed; ObjectNotFoundError: there is no such object.
    """
    begin_s, wait_s, tries = time.monotonic(), _FIRST_WAIT_S, 0
    while True:
        tries += 1
        check()
        try:
            return once()
        except Exception as error:
            if not is_of_storage(error):
                raise
            problem = in_words(error)
            if isinstance(error, FileNotFoundError) or _is_missing(error):
                raise ObjectNotFoundError(f"{where}: {problem}; {IS_IT_WHOLE}") from error
            if _is_final(error):
                raise StorageError(f"{where}: {problem}; {remedy(problem)}") from error
            took_s = time.monotonic() - begin_s
            if took_s + wait_s > patience.total_s:
                raise StorageError(
                    f"{where}: {problem}, {tries} times in {took_s:.0f} s; check the network and the "
                    f"storage, then run the same command again"
                ) from error
        until_s = time.monotonic() + random.uniform(wait_s / 2, wait_s)
        while (left_s := until_s - time.monotonic()) > 0:
            check()
            time.sleep(min(left_s, _CHECK_S))
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def answered(request: Callable[[], T], check: Check = unchecked) -> T:
    """What `request` returns; given up where `check` raises, or Ctrl-C interrupts this thread.

    A thread that waits inside the library is deaf until the storage answers. So another one does, and is left
    behind if that takes longer than a moment; it ends with its request, or with the process.
    """
    future: Future[T] = Future()

    def ask() -> None:
        try:
            future.set_result(request())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=ask, name="precache-request", daemon=True).start()
    try:
        while not future.done():
            check()
            wait((future,), _CHECK_S)
    except BaseException:
        wait((future,), _GRACE_S)
        raise
    return future.result()


def is_of_storage(error: Exception) -> bool:
    """Whether a request raised it, not a mistake in this program."""
    return isinstance(error, (ShortError, OSError)) or type(error).__module__.startswith("obstore")


def _status(error: BaseException) -> int | None:
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def _is_missing(error: BaseException) -> bool:
    return type(error).__name__ == "NotFoundError" or _status(error) == 404


def _is_final(error: BaseException) -> bool:
    """Whether the same request cannot succeed."""
    names = ("PermissionDeniedError", "UnauthenticatedError", "PreconditionError", "InvalidPathError")
    if isinstance(error, PermissionError) or type(error).__name__ in (*names, "NotSupportedError"):
        return True
    status = _status(error)
    if status is not None and 400 <= status < 500 and status not in _MAY_PASS:
        return "RequestTimeout" not in str(error)  # S3 says 400 of a body that came too slowly
    return False


def in_words(error: BaseException) -> str:
    """What went wrong, in one line of a few words."""
    text = str(error).partition("Debug source:")[0]
    if type(error).__name__ == "PreconditionError":
        return REPLACED
    if told := _TOLD.search(text):
        code, message = told[1], (told[2] or "").strip()
        return f"the storage says {code}{f' ({message})' if message else ''}"
    if status := _status(error):
        return f"the storage answers {status}"
    if isinstance(error, ShortError):
        return f"the storage {error}"
    if isinstance(error, FileNotFoundError):
        return "is not there"
    return " ".join(text.rpartition(" - ")[2].split())[:200] or type(error).__name__


def remedy(problem: str) -> str:
    """What the user can do about what `in_words` says."""
    if "Skew" in problem:
        return "set this machine's clock"
    if "replaced" in problem:
        return "nothing may write there meanwhile; run the same command again"
    if "Expired" in problem:
        return "renew the credentials"
    return "check the URL and the credentials (AWS_..., GOOGLE_..., AZURE_... in the environment)"
