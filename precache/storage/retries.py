"""The loop that tries again what fails for a moment; and requests to a storage, with their errors in words.

obstore repeats what may pass by itself, with waits that double and are drawn at random: refused connections,
answers of 5xx and 429, a GET that breaks off or stalls. It does not repeat a list that breaks off, an answer
that is shorter than was asked for, and, where the connection breaks, a request that is not the same the
second time: a deletion, a put on a condition. Those are asked again here.
"""

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from precache.errors import SettingError, StorageError
from precache.storage.urls import Url

Item = TypeVar("Item")
T = TypeVar("T")
Check: TypeAlias = Callable[[], None]
"""Raises if the request is no longer needed."""
FETCHES = 3
"""How often bytes are fetched that come wrong."""
IS_IT_WHOLE = "check the URL, and that the upload was finished"
REPLACED = "was replaced by another object while it was read"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_CHECK_S = 0.25
_END_S = 2.0  # for threads whose work is no longer needed, and has no effect
_GRACE_S = 1.0  # for a request left behind: one that is answered while the program ends can abort it
_KIND = re.compile(r"^Generic \w+ error: ")
_STATUS = re.compile(r"status code: (\d{3})")
_TOLD = re.compile(r"<Code>(.*?)</Code>(?:.*?<Message>(.*?)</Message>)?", re.DOTALL)
_BROKEN = re.compile("HTTP error|Got invalid")  # as obstore says it of connections, and of answers
_LATER = (408, 429)  # of the 4xx, what obstore has repeated
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_TOO_SLOW = "RequestTimeout"  # S3 says 400 of a body that came too slowly
PATIENCE_VARIABLE = "PRECACHE_STORAGE_PATIENCE_S"
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
        """The default, or as PRECACHE_STORAGE_PATIENCE_S says; SettingError if that is not a number."""
        text = os.environ.get(PATIENCE_VARIABLE)
        if not text:
            return cls()
        try:
            total_s = float(text)
        except ValueError:
            total_s = 0.0
        if not 0 < total_s < 86_400:
            raise SettingError(f"{PATIENCE_VARIABLE} must be seconds above 0, got {text!r}")
        return cls(
            total_s=total_s, stall_s=min(cls().stall_s, total_s), connect_s=min(cls().connect_s, total_s)
        )


def unchecked() -> None:
    """The `Check` that never raises."""


class ObjectNotFoundError(StorageError):
    """There is no such object."""


class WrongBytesError(StorageError):
    """An object came with other bytes than were written."""


class ShortError(Exception):
    """An answer had fewer bytes than were asked for, or more."""


def check_length(got: int, expected: int) -> None:
    """Raise ShortError unless all bytes came."""
    if got != expected:
        raise ShortError(f"sent {got:,} bytes instead of {expected:,}")


def with_retries(
    call: Callable[[], T], pauses_s: Iterable[float], is_temporary: Callable[[Exception], bool]
) -> T:
    """Return what `call` returns; it is called again after each of the pauses while its errors are temporary.

    Raises:
        Exception: the last error of `call`: it is not temporary, or no pause is left.
    """
    pauses = iter(pauses_s)
    while True:
        try:
            return call()
        except Exception as error:
            pause_s = next(pauses, None) if is_temporary(error) else None
            if pause_s is None:
                raise
        time.sleep(pause_s)


def fetch_right_bytes(fetch: Callable[[], T]) -> T:
    """Return what `fetch` returns; it is called up to three times while it raises WrongBytesError."""
    return with_retries(fetch, [0.0] * (FETCHES - 1), lambda error: isinstance(error, WrongBytesError))


def doubling_pauses(until_s: float) -> Iterator[float]:
    """Yield pauses that double, for `with_retries`; none that ends after `until_s` of `time.monotonic()`."""
    pause_s = _FIRST_PAUSE_S
    while time.monotonic() + pause_s <= until_s:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def request_with_retries(
    where: Url, patience: Patience, request: Callable[[], T], check: Check = unchecked
) -> T:
    """Return what `request`, to `where`, returns; it is made again while that may help and patience lasts.

    Args:
        check: called before each request, and while it is waited for; what it raises ends that.

    Raises:
        StorageError: it failed; ObjectNotFoundError: there is no such object.
    """

    def checked_request() -> T:
        check()
        return _answered(request, check)

    begin_s = time.monotonic()
    try:
        return with_retries(checked_request, doubling_pauses(begin_s + patience.total_s), _may_pass)
    except Exception as error:
        if not is_of_storage(error):
            raise
        problem, status = in_words(error), _status(error)
        if isinstance(error, FileNotFoundError) or status == 404:
            if any(code in problem for code in _NO_BUCKET):
                raise StorageError(f"{where}: {problem}; check the name {where.root}") from error
            raise ObjectNotFoundError(f"{where}: {problem}; {IS_IT_WHOLE}") from error
        if status is None or status >= 500 or status in _LATER:
            took_s = time.monotonic() - begin_s
            raise StorageError(
                f"{where}: {problem}, for {took_s:.0f} s; check the network and the storage, then run the "
                f"same command again"
            ) from error
        raise StorageError(f"{where}: {problem}; {remedy(problem)}") from error


def _answered(request: Callable[[], T], check: Check) -> T:
    """What `request` returns; given up where `check` raises, or Ctrl-C interrupts this thread.

    A thread that waits inside the library is deaf until the storage answers. So another one does, and is left
    behind if that takes longer than a moment; it ends with its request, or with the process.
    """
    if check is unchecked and threading.current_thread() is not threading.main_thread():
        return request()  # nothing would end it: spare the thread
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


class _UnneededError(Exception):
    """Ctrl-C came, and nobody waits for this work any more."""


def call_for_each(function: Callable[[Item, Check], T], items: Iterable[Item], threads: int) -> list[T]:
    """Call `function` for each of the items, several at a time; what it returns, in their order.

    After the first error no more are started. Ctrl-C is waited for by no request: the threads are daemons.

    Args:
        function: gets an item, and a `Check` that raises after Ctrl-C.
    """
    waiting, end = deque(enumerate(items)), threading.Event()
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def check() -> None:
        if end.is_set():
            raise _UnneededError

    def work() -> None:
        try:
            while not errors and not end.is_set():
                try:
                    number, item = waiting.popleft()
                except IndexError:  # none is left
                    return
                results[number] = function(item, check)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(threads, len(waiting)))]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        end.set()
        until_s = time.monotonic() + _END_S
        for worker in workers:
            if worker.is_alive():
                worker.join(max(0.0, until_s - time.monotonic()))
    if errors:
        raise errors[0]
    return [results[number] for number in sorted(results)]


def is_of_storage(error: Exception) -> bool:
    """Whether the storage caused the error, not a bug in this program."""
    return isinstance(error, (ShortError, OSError)) or type(error).__module__.startswith("obstore")


def _status(error: BaseException) -> int | None:
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def _may_pass(error: Exception) -> bool:
    """Whether the same request may succeed, and obstore has not repeated it."""
    if not is_of_storage(error) or isinstance(error, FileNotFoundError):
        return False
    if isinstance(error, ShortError) or _TOO_SLOW in str(error):
        return True
    return _status(error) is None and _BROKEN.search(str(error)) is not None


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
    return " ".join(_KIND.sub("", text.rpartition(" - ")[2]).split())[:200] or type(error).__name__


def remedy(problem: str) -> str:
    """What the user can do about what `in_words` says."""
    if "Skew" in problem:
        return "set this machine's clock"
    if "replaced" in problem:
        return "nothing may write there meanwhile; run the same command again"
    if "Expired" in problem:
        return "renew the credentials"
    return "check the URL and the credentials (AWS_..., GOOGLE_..., AZURE_... in the environment)"
