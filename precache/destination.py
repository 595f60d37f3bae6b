"""Who may write a destination, and how a new dataset takes the place of an old one.

DST.lock    host and process that convert into DST, while they do
DST.new     what takes the place of DST once it is finished (--overwrite)
DST.old     what it takes the place of, for a moment
"""

import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from precache.converted import is_converted, open_dataset
from precache.errors import DatasetError
from precache.journal import JOURNAL_NAME
from precache.manifest import MANIFEST_NAME, REJECTED_NAME
from precache.storage import fsync_folder


def beside(destination: Path, suffix: str) -> Path:
    """The path `destination` + `suffix`."""
    return destination.with_name(destination.name + suffix)


@contextmanager
def hold_lock(destination: Path) -> Iterator[None]:
    """Keep other conversions out of `destination` for the duration of the block.

    Raises:
        DatasetError: another process, that lives or is on another host, holds the lock.
    """
    path = beside(destination, ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    ours = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())})
    while True:
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            _remove_stale(path, destination)
            continue
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(ours)
        break
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def check_nothing_else(destination: Path) -> None:
    """Raise DatasetError if the finished dataset's folder holds files of somebody else."""
    ours = {file.name for file in open_dataset(destination).manifest.files}
    ours |= {MANIFEST_NAME, REJECTED_NAME}
    others = sorted(path.name for path in destination.iterdir() if path.name not in ours)
    if others:
        raise DatasetError(
            f"{destination}: holds what is not part of its dataset ({', '.join(others[:3])}); "
            f"move that elsewhere, then convert with --overwrite again"
        )


def swap_in(destination: Path) -> None:
    """Let the finished `DST.new` take the place of `destination`."""
    old, new = beside(destination, ".old"), beside(destination, ".new")
    if destination.exists():
        os.replace(destination, old)
    os.replace(new, destination)
    fsync_folder(destination.parent)
    shutil.rmtree(old, ignore_errors=True)


def finish_swap(destination: Path) -> None:
    """Complete a `swap_in` that was killed: afterwards DST is the old dataset or the new one."""
    old, new = beside(destination, ".old"), beside(destination, ".new")
    if is_converted(new):
        (new / JOURNAL_NAME).unlink(missing_ok=True)
        swap_in(destination)
    elif old.exists() and not destination.exists():
        os.replace(old, destination)
        fsync_folder(destination.parent)
    elif old.exists():
        shutil.rmtree(old)


def _remove_stale(path: Path, destination: Path) -> None:
    """Remove a lock whose process is gone; DatasetError if it may still live."""
    try:
        holder: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except ValueError:
        holder = {}  # being written, or cut off by a crash
    host, pid = holder.get("host", "unknown"), holder.get("pid", 0)
    if host == socket.gethostname() and _started(pid) != holder.get("started"):
        path.unlink(missing_ok=True)
        return
    raise DatasetError(
        f"{destination}: being converted by process {pid} on {host}; "
        f"wait for it, or remove {path} if it does not run any more"
    )


def _started(pid: int) -> float | None:
    """When the process was started; tells it from a later one with the same number."""
    import psutil  # for the process that converts; its workers need not load it

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None
