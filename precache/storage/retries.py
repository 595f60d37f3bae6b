"""Retries of calls that fail for a moment, and of requests to an object storage, whose errors get messages.

obstore itself repeats refused connections, answers of 5xx and 429, and a GET that breaks off or stalls, with
random pauses of doubling length. It does not repeat a list that breaks off, an answer that is too short, and,
where the connection breaks, requests that are not idempotent: deletions, and puts on a condition. These are
repeated here.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import TypeAlias, TypeVar

from precache.errors import SettingError, StorageError, thread_errors
from precache.storage.urls import Url

Item = TypeVar("Item")
T = TypeVar("T")
Check: TypeAlias = Callable[[], None]
"""Function that raises if a request is no longer needed."""
FETCHES = 3
"""Number of times that an object with wrong bytes is fetched."""
CHECK_UPLOAD = "check the URL, and that the upload was finished"
REPLACED = "was replaced by another object while it was read"
_PATIENCE_S = 120.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_CHECK_INTERVAL_S = 0.25
_JOIN_S = 2.0  # wait for threads whose work is no longer needed, and has no effect
_GRACE_S = 1.0  # wait for an abandoned request: one that is answered while the program ends can abort it
_OBSTORE_PREFIX = re.compile(r"^Generic \w+ error: ")
_STATUS = re.compile(r"status code: (\d{3})")
_XML_ERROR = re.compile(r"<Code>(.*?)</Code>(?:.*?<Message>(.*?)</Message>)?", re.DOTALL)
_BROKEN = re.compile("HTTP error|Got invalid")  # in obstore's messages of broken connections, and answers
_TEMPORARY_STATUSES = (408, 429)  # statuses below 500 that obstore repeats
_RANGE_BEHIND_END = 416  # status of a range that begins behind the end, as of any in an empty object
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_TOO_SLOW = "RequestTimeout"  # S3 answers 400 with this code to a body that came too slowly
PATIENCE_VARIABLE = "PRECACHE_STORAGE_PATIENCE_S"
"""Name of the environment variable with the number of seconds for which a request is repeated."""


def storage_patience_s() -> float:
    """Seconds for which a request is repeated, from PRECACHE_STORAGE_PATIENCE_S; 120 if it is not set.

    Raises:
        SettingError: it is not above 0.
    """
    text = os.environ.get(PATIENCE_VARIABLE)
    if not text:
        return _PATIENCE_S
    try:
        patience_s = float(text)
    except ValueError:
        patience_s = 0.0
    if not 0 < patience_s < 86_400:
        raise SettingError(f"{PATIENCE_VARIABLE} must be seconds above 0, got {text!r}")
    return patience_s


def no_check() -> None:
    """`Check` that never raises."""


class ObjectNotFoundError(StorageError):
    """An object does not exist."""


class WrongBytesError(StorageError):
    """An object has other bytes than were written."""


class WrongLengthError(Exception):
    """An answer has fewer bytes than were requested, or more."""


def check_length(length: int, expected: int) -> None:
    """Raise WrongLengthError unless an answer of `length` bytes is complete."""
    if length != expected:
        raise WrongLengthError(f"sent {length:,} bytes instead of {expected:,}")


def with_retries(
    call: Callable[[], T], pauses_s: Iterable[float], is_temporary: Callable[[Exception], bool]
) -> T:
    """Call `call`, again after each pause while it raises temporary errors, and return its result.

    Raises:
        Exception: the last error of `call`, which is not temporary, or after which no pause is left.
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


def fetch_right_bytes(fetch: Callable[[], T], errors: tuple[type[Exception], ...] = (WrongBytesError,)) -> T:
    """Call `fetch`, up to three times while it raises one of `errors`, and return its result."""
    return with_retries(fetch, [0.0] * (FETCHES - 1), lambda error: isinstance(error, errors))


def doubling_pauses(until_s: float) -> Iterator[float]:
    """Yield pauses of doubling length that end before `until_s` of `time.monotonic()`."""
    pause_s = _FIRST_PAUSE_S
    while time.monotonic() + pause_s <= until_s:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def request_with_retries(url: Url, patience_s: float, request: Callable[[], T], check: Check = no_check) -> T:
    """Make a request, again while its errors are temporary and time is left, and return its result.

    Args:
        url: URL of the request, for messages.
        patience_s: seconds after which no other try is started.
        request: makes the request once.
        check: called before each try, and repeatedly while it runs; an error of it ends the request.

    Raises:
        StorageError: the request failed.
        ObjectNotFoundError: there is no such object.
    """

    def checked_request() -> T:
        check()
        return _request_interruptibly(request, check)

    begin_s = time.monotonic()
    try:
        return with_retries(checked_request, doubling_pauses(begin_s + patience_s), _is_temporary)
    except Exception as error:
        if not is_of_storage(error):
            raise
        problem, status = describe_error(error), _status(error)
        if isinstance(error, FileNotFoundError) or status == 404:
            if any(code in problem for code in _NO_BUCKET):
                raise StorageError(problem, path=url, remedy=f"check the name {url.root}") from error
            raise ObjectNotFoundError(problem, path=url, remedy=CHECK_UPLOAD) from error
        if status == _RANGE_BEHIND_END:
            raise StorageError(
                "ends before the bytes that are needed", path=url, remedy=CHECK_UPLOAD
            ) from error
        if status is None or status >= 500 or status in _TEMPORARY_STATUSES:
            seconds = time.monotonic() - begin_s
            raise StorageError(
                f"{problem}, for {seconds:.0f} s",
                path=url,
                remedy="check the network and the storage, then run the same command again",
            ) from error
        raise StorageError(problem, path=url, remedy=remedy_for(problem)) from error


def _request_interruptibly(request: Callable[[], T], check: Check) -> T:
    """Make a request that ends early if `check` raises, or Ctrl-C interrupts this thread.

    A thread that waits inside the library cannot be interrupted until the storage answers. So another thread
    makes the request. It is abandoned if it does not end soon, and ends with its request or with the process.
    """
    if check is no_check and threading.current_thread() is not threading.main_thread():
        return request()  # neither can end this request, so it needs no thread
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(request())
        except BaseException as error:
            future.set_exception(error)

    with thread_errors():
        threading.Thread(target=run, name="precache-request", daemon=True).start()
    try:
        while not future.done():
            check()
            wait((future,), _CHECK_INTERVAL_S)
    except BaseException:
        wait((future,), _GRACE_S)
        raise
    return future.result()


class _UnneededError(Exception):
    """Ctrl-C has interrupted `call_for_each`, which no longer needs the result."""


@thread_errors()
def call_for_each(
    function: Callable[[Item, Check], T], items: Sequence[Item], threads: int, check: Check = no_check
) -> list[T]:
    """Call `function` for each item, several at a time, and return the results in the order of the items.

    After an error no more calls are started, and those that run are waited for. The threads are daemons,
    unlike those of an executor, so that the program can end while the storage does not answer.

    Args:
        function: called with an item, and a `Check` that raises after Ctrl-C, or as `check` does.
        items: items to call it for.
        threads: maximal number of calls at a time.
        check: its error ends all calls.

    Raises:
        Exception: of the calls that failed, the error of the first item.
    """
    numbers, lock = iter(range(len(items))), threading.Lock()
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    is_over = threading.Event()

    def check_needed() -> None:
        check()
        if is_over.is_set():
            raise _UnneededError

    def work() -> None:
        while not errors and not is_over.is_set():
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                results[number] = function(items[number], check_needed)
            except BaseException as error:
                errors[number] = error

    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(threads, len(items)))]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        is_over.set()
        until_s = time.monotonic() + _JOIN_S
        for worker in workers:
            if worker.is_alive():
                worker.join(max(0.0, until_s - time.monotonic()))
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in sorted(results)]


def is_of_storage(error: Exception) -> bool:
    """Whether the storage has caused an error, rather than a bug in this program."""
    return isinstance(error, (WrongLengthError, OSError)) or type(error).__module__.startswith("obstore")


def _status(error: BaseException) -> int | None:
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def _is_temporary(error: Exception) -> bool:
    """Whether the same request may succeed at another try, which obstore has not made."""
    if not is_of_storage(error) or isinstance(error, FileNotFoundError):
        return False
    if isinstance(error, WrongLengthError) or _TOO_SLOW in str(error):
        return True
    return _status(error) is None and _BROKEN.search(str(error)) is not None


def describe_error(error: BaseException) -> str:
    """Describe an error of a request in one short line."""
    text = str(error).partition("Debug source:")[0]
    if type(error).__name__ == "PreconditionError":
        return REPLACED
    if match := _XML_ERROR.search(text):
        code, message = match[1], (match[2] or "").strip()
        return f"the storage says {code} ({message})" if message else f"the storage says {code}"
    if status := _status(error):
        return f"the storage answers {status}"
    if isinstance(error, WrongLengthError):
        return f"the storage {error}"
    if isinstance(error, FileNotFoundError):
        return "is not there"
    cause = _OBSTORE_PREFIX.sub("", text.rpartition(" - ")[2])
    return " ".join(cause.split())[:200] or type(error).__name__


def remedy_for(problem: str) -> str:
    """Remedy for a problem that `describe_error` has described."""
    if "Skew" in problem:
        return "set this machine's clock"
    if "replaced" in problem:
        return "nothing may write there meanwhile; run the same command again"
    if "Expired" in problem:
        return "renew the credentials"
    return "check the URL and the credentials (AWS_..., GOOGLE_..., AZURE_... in the environment)"
