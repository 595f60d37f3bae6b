"""One file from the network, over connections that break: continued where it broke, waited for, bounded.

What has arrived lies beside the file as `NAME.partial`; a later call goes on from there. That name can be
guessed, so it is never written through a link.
"""

import errno
import os
import random
import re
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException, InvalidURL
from pathlib import Path
from typing import Any

from precache.console.progress import Progress
from precache.errors import DownloadError
from precache.storage import TEMPORARY_SUFFIX, open_append, open_new

_TIMEOUT_S = 30
_READ_BYTES = 1 << 20
# A try that brought less than this made no headway; after so many in a row it is given up. The waits
# between them double, and are 1 minute in all.
_HEADWAY_BYTES = 1 << 20
_TRIES = 8
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_LATER = (408, 425, 429, 500, 502, 503, 504)  # HTTP says so itself: try again
_COUNT = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"bytes ([0-9]{1,18})-")
_WHOLE = re.compile(r"bytes \*/([0-9]{1,18})")
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


def full_disk(error: BaseException) -> str:
    """That the disk is full, in words, if that is what `error` says; or ''."""
    return _FULL.get(error.errno or 0, "") if isinstance(error, OSError) else ""


def download(url: str, path: Path, on_progress: Progress) -> None:
    """Download to the new file `path`; `on_progress` gets (bytes downloaded, bytes in all).

    Raises:
        DownloadError: no network, a server that does not have it, connections that break again and
            again, or a disk that is full.
    """
    partial = _Partial(path.with_name(path.name + TEMPORARY_SUFFIX))
    tries, arrived = 0, False
    while True:
        start = partial.size()
        try:
            _download_rest(url, partial, on_progress)
            break
        except _Lost as lost:
            broke = lost.reason
        gained = partial.size() - start
        arrived = arrived or gained > 0
        tries = 0 if gained >= _HEADWAY_BYTES else tries + 1
        if tries == _TRIES or _is_final(broke, arrived):
            kept = f", which continues at byte {partial.size():,}" if partial.size() else ""
            raise DownloadError(
                f"{url}: cannot be downloaded ({_reason(broke)}); check the network and run the same command "
                f"again{kept}, or download it elsewhere and put it at {path}"
            ) from broke
        wait_s = min(_FIRST_WAIT_S * 2 ** max(0, tries - 1), _LONGEST_WAIT_S)
        time.sleep(wait_s * random.uniform(0.5, 1))  # not in step with all others that were cut off
    os.replace(partial.path, path)


class _Lost(Exception):
    """A try that the network, or the server, ended."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(reason)
        self.reason = reason


class _Partial:
    """What has arrived so far: a file of ours, or none yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def size(self) -> int:
        """Its bytes; DownloadError if something else has its name."""
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            return 0
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise DownloadError(
                f"{self.path}: is not a partial download (it is a link, or no file); move it elsewhere, "
                f"then run the same command again"
            )
        return status.st_size

    def clear(self) -> None:
        """Begin anew."""
        self.path.unlink(missing_ok=True)

    @contextmanager
    def append(self) -> Iterator[Callable[[bytes], None]]:
        """A function that appends what it is given."""
        with self._explained():
            descriptor = open_append(self.path) if self.path.exists() else open_new(self.path)
        with open(descriptor, "ab", buffering=0) as file:

            def write(data: bytes) -> None:
                rest = memoryview(data)
                while rest:
                    with self._explained():
                        rest = rest[file.write(rest) :]

            yield write

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = full_disk(error) or f"cannot be written ({error.strerror})"
            raise DownloadError(
                f"{self.path}: {reason}; make room, or choose a DST on another disk, then run the same "
                f"command again: it continues where it stopped"
            ) from error


def _download_rest(url: str, partial: _Partial, on_progress: Progress) -> None:
    """Append what is missing to `partial`; `_Lost` if not all of it came."""
    start = partial.size()
    response = _open(url, partial, start)
    if response is None:
        return
    with response:
        if start and response.status != 206:  # the server sends everything again
            partial.clear()
            start = 0
        length = response.headers.get("Content-Length", "")  # may lie: the checksum tells
        total = start + (int(length) if _COUNT.fullmatch(length) else 0)
        done = start
        with partial.append() as write:
            while data := _read(response):
                write(data)
                done += len(data)
                on_progress(done, max(total, done))
    if done < total:
        raise _Lost(ConnectionError(f"the connection broke at {done:,} of {total:,} bytes"))


def _open(url: str, partial: _Partial, start: int) -> Any:
    """The server's answer; None if nothing is left to send."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except (OSError, HTTPException, ValueError) as error:
        if not start or getattr(error, "code", 0) != 416:
            raise _Lost(error) from error
        headers: Any = error.headers if isinstance(error, urllib.error.HTTPError) else {}
        whole = _WHOLE.fullmatch(headers.get("Content-Range", ""))
        if whole is None or int(whole[1]) == start:  # the part is the whole, its checksum will tell
            return None
        partial.clear()
        raise _Lost(ConnectionError(f"{start:,} bytes lay there of {int(whole[1]):,}")) from error
    first = _RANGE.match(response.headers.get("Content-Range", ""))
    if response.status == 206 and first is not None and int(first[1]) != start:
        response.close()
        partial.clear()
        raise _Lost(ConnectionError(f"asked for what follows {start:,} bytes, got another part"))
    return response


def _read(response: Any) -> bytes:
    try:
        return bytes(response.read1(_READ_BYTES))  # what there is: nothing that came is lost in a break
    except (OSError, HTTPException, ValueError) as error:
        raise _Lost(error) from error


def _is_final(broke: Exception, arrived: bool) -> bool:
    """Whether another try cannot help: the server refuses, or there is no way to it from the start."""
    if isinstance(broke, urllib.error.HTTPError):
        return broke.code not in _LATER
    return isinstance(broke, (urllib.error.URLError, ValueError, InvalidURL)) and not arrived


def _reason(broke: Exception) -> object:
    return broke.reason if type(broke) is urllib.error.URLError else str(broke) or type(broke).__name__
