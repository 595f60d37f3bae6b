"""A folder of this machine for what is on its way to an object storage, or comes from it.

    TMPDIR/precache-staging-XXXXXXXX/    for its user alone
        .precache-staging                locked (flock) by the process whose folder it is

Each process has its own. What one that was killed has left is known by the lock that nobody holds, and is
removed by the next that makes such a folder, by the end of a conversion, and by `precache clean`.
"""

import atexit
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from precache.errors import StorageError
from precache.storage.locks import lock

_PREFIX, _MARK = "precache-staging-", ".precache-staging"
_lock = threading.Lock()
_own: dict[int, Path] = {}  # by process: a fork must not use its parent's


def folder() -> Path:
    """The folder of this process, made at the first call and removed at its end."""
    with _lock:
        if os.getpid() not in _own:
            sweep()
            _own[os.getpid()] = _make()
            atexit.register(_remove, os.getpid())
        return _own[os.getpid()]


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder in that of this process, for the time of the block; StorageError if none can be made."""
    try:
        path = Path(tempfile.mkdtemp(dir=folder()))
    except OSError as error:
        raise StorageError(
            f"{error.filename or 'temporary folder'}: cannot be made ({error.strerror}); make room there, or "
            f"set TMPDIR to a folder on another disk"
        ) from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sweep() -> list[Path]:
    """Remove the folders of processes that are gone; their paths."""
    found = [*left()]
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return found


def left() -> Iterator[Path]:
    """The folders of processes that are gone."""
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")):
        with suppress(OSError):
            status = os.lstat(path)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            descriptor = os.open(path / _MARK, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                gone = lock(descriptor)
            finally:
                os.close(descriptor)
            if gone:
                yield path


def _make() -> Path:
    path = Path(tempfile.mkdtemp(prefix=_PREFIX))
    descriptor = os.open(path / f"{_MARK}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    lock(descriptor)  # stays open as long as the process lives
    os.rename(path / f"{_MARK}.new", path / _MARK)  # nobody sees it unlocked
    return path


def _remove(process: int) -> None:
    if os.getpid() == process and (path := _own.pop(process, None)) is not None:
        shutil.rmtree(path, ignore_errors=True)
