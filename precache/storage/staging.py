"""A folder of this machine for what is on its way to an object storage, comes from it, or is measured.

    TMPDIR/precache-staging-XXXXXXXX/    for its user alone
        .precache-staging                locked (flock) by the process whose folder it is

Each process has its own, and one for each `temporary_folder`. What one that was killed has left is known by
the lock that nobody holds, and is removed by the next that makes such a folder.
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
_own: dict[int, Path] = {}  # by process: a fork must not use its parent's


def folder() -> Path:
    """The folder of this process, made at the first call and removed at its end."""
    with _lock:
        if os.getpid() not in _own:
            _own[os.getpid()], _ = _make(Path(tempfile.gettempdir()))  # locked as long as the process lives
            atexit.register(_remove_own, os.getpid())
        return _own[os.getpid()]


@contextmanager
def temporary_folder(place: Path | None = None) -> Iterator[Path]:
    """A folder in `place` (default TMPDIR) for the time of the block; StorageError if none can be made."""
    try:
        path, descriptor = _make(Path(tempfile.gettempdir()) if place is None else place)
        inner = path / "files"
        inner.mkdir()
    except OSError as error:
        raise StorageError(
            f"{error.filename or 'temporary folder'}: cannot be made ({os_reason(error)}); make room "
            f"there, or {'set TMPDIR to' if place is None else 'name'} a folder on another disk"
        ) from error
    try:
        yield inner
    finally:
        remove(path)
        os.close(descriptor)


def remove_abandoned(place: Path | None = None) -> list[Path]:
    """Remove the folders of processes that are gone from `place` (default TMPDIR); their paths."""
    found = [*abandoned_folders(place)]
    for path in found:
        remove(path)
    return found


def abandoned_folders(place: Path | None = None) -> Iterator[Path]:
    """The folders in `place` (default TMPDIR) of processes that are gone."""
    place = Path(tempfile.gettempdir()) if place is None else place
    for path in sorted(place.glob(f"{_PREFIX}*")):
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


def remove(path: Path) -> None:
    """Remove such a folder; its mark last, so that what cannot be removed now is found the next time."""
    with suppress(OSError):
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _MARK:
                os.unlink(entry)
        if os.listdir(path) == [_MARK]:
            os.unlink(path / _MARK)
            os.rmdir(path)


def _make(place: Path) -> tuple[Path, int]:
    """A folder in `place`, and the descriptor that locks it while it is open; first, sweeps."""
    remove_abandoned(place)
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    descriptor = os.open(path / f"{_MARK}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    lock(descriptor)
    os.rename(path / f"{_MARK}.new", path / _MARK)  # nobody sees it unlocked
    return path, descriptor


def _remove_own(process: int) -> None:
    if os.getpid() == process and (path := _own.pop(process, None)) is not None:
        remove(path)
