"""Download one file over connections that break: it is continued where it broke, and given up after a minute.

What has arrived is beside the file, in `NAME.partial`; a later call continues it. That name can be
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
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, InvalidURL
from pathlib import Path

from precache.errors import DownloadError
from precache.reporting import Progress
from precache.storage import TEMPORARY_SUFFIX, open_append, open_new

_TIMEOUT_S = 30
_READ_BYTES = 1 << 20
# After so many tries in a row that brought less than this it is given up. The waits between them double, and
# are 1 minute in all.
_HEADWAY_BYTES = 1 << 20
_TRIES = 8
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_BUSY = (408, 425, 429, 500, 502, 503, 504)  # of HTTP: another try may help
_COUNT = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"bytes ([0-9]{1,18})-")
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
    partial = path.with_name(path.name + TEMPORARY_SUFFIX)
    tries, arrived = 0, False
    while True:
        start = _size(partial)
        try:
            _download_rest(url, partial, start, on_progress)
            break
        except _BrokenError as error:
            broken = error.reason
        gained = _size(partial) - start
        arrived = arrived or gained > 0
        tries = 0 if gained >= _HEADWAY_BYTES else tries + 1
        if tries == _TRIES or _is_final(broken, arrived):
            reason = broken.reason if type(broken) is urllib.error.URLError else str(broken)
            continues = f", which continues at byte {_size(partial):,}" if _size(partial) else ""
            raise DownloadError(
                f"{url}: cannot be downloaded ({reason or type(broken).__name__}); check the network and run "
                f"the same command again{continues}, or download it elsewhere and put it at {path}"
            ) from broken
        wait_s = min(_FIRST_WAIT_S * 2 ** max(0, tries - 1), _LONGEST_WAIT_S)
        time.sleep(wait_s * random.uniform(0.5, 1))  # not in step with all others that were cut off
    os.replace(partial, path)


class _BrokenError(Exception):
    """The network or the server ended a try."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(reason)
        self.reason = reason


def _size(partial: Path) -> int:
    """Bytes that have arrived; DownloadError if something else has the name."""
    try:
        status = partial.lstat()
    except FileNotFoundError:
        return 0
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise DownloadError(
            f"{partial}: is not a partial download (it is a link, or no file); move it elsewhere, "
            f"then run the same command again"
        )
    return status.st_size


def _download_rest(url: str, partial: Path, start: int, on_progress: Progress) -> None:
    for position, total, data in _received(url, start):
        with _explained(partial):
            if position == 0:  # also where the server sends everything again
                partial.unlink(missing_ok=True)
            with open(open_append(partial) if position else open_new(partial), "ab") as file:
                file.write(data)
        on_progress(position + len(data), max(total, position + len(data)))


def _received(url: str, start: int) -> Iterator[tuple[int, int, bytes]]:
    """(first byte, bytes in all, content) of each part of the file, from `start` on or from 0.

    Raises:
        _BrokenError: not all came.
    """
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            position = start if response.status == 206 else 0
            first = _RANGE.match(response.headers.get("Content-Range", ""))
            is_another_part = position > 0 and first is not None and int(first[1]) != position
            if not is_another_part:
                length = response.headers.get("Content-Length", "")  # may be wrong: the checksum tells
                total = position + (int(length) if _COUNT.fullmatch(length) else 0)
                # read1 gives what there is: nothing that came is lost when the connection breaks
                while data := bytes(response.read1(_READ_BYTES)):
                    yield position, total, data
                    position += len(data)
                if position < total:
                    raise ConnectionError(f"the connection broke at {position:,} of {total:,} bytes")
    except (OSError, HTTPException, ValueError) as error:
        if start and getattr(error, "code", 0) == 416:  # nothing is left to send; the checksum tells
            return
        raise _BrokenError(error) from error
    if is_another_part:
        yield from _received(url, 0)


@contextmanager
def _explained(partial: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = full_disk(error) or f"cannot be written ({error.strerror})"
        raise DownloadError(
            f"{partial}: {reason}; make room, or choose a DST on another disk, then run the same "
            f"command again: it continues where it stopped"
        ) from error


def _is_final(broken: Exception, arrived: bool) -> bool:
    """Whether another try cannot help: the server refuses, or it was never reached."""
    if isinstance(broken, urllib.error.HTTPError):
        return broken.code not in _BUSY
    return isinstance(broken, (urllib.error.URLError, ValueError, InvalidURL)) and not arrived
