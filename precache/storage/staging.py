"""Temporary folders for copies of pictures, and for measurements.

    TMPDIR/precache-staging-XXXXXXXX/    readable by its user alone
        .precache-staging                locked (flock) by the process that uses the folder

Each process has one such folder, and one more for each `temporary_folder`. If a process is killed, nobody
holds the lock of its folder any more; the next process that makes such a folder removes it.
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

from precache.errors import StorageError, os_reason
from precache.storage.locks import lock

_PREFIX, _MARK = "precache-staging-", ".precache-staging"
_lock = threading.Lock()
_own: dict[int, Path] = {}  # process id -> its folder: a fork must not use its parent's


def folder() -> Path:
    """Temporary folder of this process, which is made at the first call and removed when the process ends."""
    with _lock:
        if os.getpid() not in _own:
            # the descriptor stays open, and the folder locked, as long as the process lives
            _own[os.getpid()], _ = _make_folder(Path(tempfile.gettempdir()))
            atexit.register(_remove_own, os.getpid())
        return _own[os.getpid()]


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder in `parent` (default TMPDIR), which is removed at the end of the block.

    Raises:
        StorageError: the folder cannot be made.
    """
    try:
        path, descriptor = _make_folder(Path(tempfile.gettempdir()) if parent is None else parent)
        inner = path / "files"
        inner.mkdir()
    except OSError as error:
        raise StorageError(
            f"cannot be made ({os_reason(error)})",
            path=error.filename or "temporary folder",
            remedy=f"make room there, or {'set TMPDIR to' if parent is None else 'name'} a folder on another "
            f"disk",
        ) from error
    try:
        yield inner
    finally:
        _remove(path)
        os.close(descriptor)


def remove_abandoned(parent: Path | None = None) -> list[Path]:
    """Remove the folders of killed processes from `parent` (default TMPDIR), and return their paths."""
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    removed = []
    for path in sorted(parent.glob(f"{_PREFIX}*")):
        with suppress(OSError):
            status = os.lstat(path)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            descriptor = os.open(path / _MARK, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                is_abandoned = lock(descriptor)
            finally:
                os.close(descriptor)
            if is_abandoned:
                _remove(path)
                removed.append(path)
    return removed


def _remove(path: Path) -> None:
    """Remove a folder of this module; its mark last, to find it again if a file cannot be removed now."""
    with suppress(OSError):
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _MARK:
                os.unlink(entry)
        if os.listdir(path) == [_MARK]:
            os.unlink(path / _MARK)
            os.rmdir(path)


def _make_folder(parent: Path) -> tuple[Path, int]:
    """Remove abandoned folders, make a new one in `parent`, and return it with the descriptor of its lock."""
    remove_abandoned(parent)
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    descriptor = os.open(path / f"{_MARK}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    lock(descriptor)
    os.rename(path / f"{_MARK}.new", path / _MARK)  # after it was locked, or others would remove the folder
    return path, descriptor


def _remove_own(process: int) -> None:
    if os.getpid() == process and (path := _own.pop(process, None)) is not None:
        _remove(path)
