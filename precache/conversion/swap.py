"""How a new dataset replaces an old one (`--overwrite`).

    .NAME.0123456789abcdef.precache    beside DST: in one such folder the new dataset is made, to another the
                                       old one is moved, for a moment

Both names are on record (see `precache.conversion.lock`) before the folders exist. Nothing beside DST that is
not on record is touched, and of an old dataset only the files that its manifest lists are removed, one by
one. A swap that is killed is completed, or undone, by the next run:

    old    DST    build       what was done                       what is left to do
    -      old    unfinished  nothing                             go on converting, if asked to overwrite
    -      old    finished    nothing                             move old away, move build to DST
    old    -      finished    old was moved away                  move build to DST
    old    -      -           old was moved away, build is gone   move old back
    old    new    -           both were moved                     remove old
"""

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from precache.conversion.destination import check_may_be_replaced, tidy
from precache.conversion.lock import Lock, Swap
from precache.dataset.converted import is_converted
from precache.errors import DatasetError
from precache.reporting import some, warn
from precache.storage import fsync_folder


def build_folder(lock: Lock) -> Path:
    """Folder in which the dataset is built that will replace the finished one; its name is on record."""
    swap = lock.swap
    if swap is None or _folders(lock, swap)[1].exists():  # an old one that cannot be removed
        swap = lock.new_swap()
    return _folders(lock, swap)[0]


def swap_in(lock: Lock) -> None:
    """Replace DST by the finished dataset in `build_folder`."""
    assert lock.swap is not None
    destination = lock.destination
    build, old = _folders(lock, lock.swap)
    if destination.is_dir() and any(destination.iterdir()):
        swap = replace(lock.swap, files=check_may_be_replaced(destination))
        lock.note(swap)
        os.rename(destination, old)
    try:
        os.rename(build, destination)
    except BaseException:
        if not os.path.lexists(destination) and old.exists():
            os.rename(old, destination)
        raise
    fsync_folder(destination.parent)
    _remove_old(lock)


def finish_swap(lock: Lock) -> None:
    """Complete, or undo, a `swap_in` that was killed: afterwards DST is the old dataset or the new one.

    Raises:
        DatasetError: another folder has taken the place of DST meanwhile.
    """
    if lock.swap is None:
        return
    destination = lock.destination
    build, old = _folders(lock, lock.swap)
    if not old.exists():
        if is_converted(build):
            tidy(build)
            swap_in(lock)
        elif not build.exists():
            lock.note(None)
        return
    if not destination.exists():
        os.rename(build if is_converted(build) else old, destination)
        fsync_folder(destination.parent)
    elif build.exists():
        raise DatasetError(
            f"{destination}: was created while --overwrite was about to put {build} there; the old "
            f"dataset is now {old}; move {destination} elsewhere, then run the same command again"
        )
    _remove_old(lock)


def warn_of_build(lock: Lock) -> None:
    """Warn that an unfinished `--overwrite` takes space, where it is not continued."""
    if lock.swap is not None and (build := _folders(lock, lock.swap)[0]).exists():
        warn(
            f"{lock.destination}: an unfinished --overwrite takes space in {build}; finish it by the same "
            f"command with --overwrite, or remove that folder"
        )


def _remove_old(lock: Lock) -> None:
    """Remove the recorded files of the old dataset, and its folder; warn of what stays.

    The swap is over, unless the folder or files on record remain: the next run tries to remove them again.
    """
    assert lock.swap is not None
    _, old = _folders(lock, lock.swap)
    for name in lock.swap.files:
        with suppress(OSError):
            (old / name).unlink()
    with suppress(OSError):
        old.rmdir()
    if not os.path.lexists(old):
        lock.note(None)
        return
    left: list[str] = []
    with suppress(OSError):
        left = sorted(path.name for path in old.iterdir())
    what = some(left) if left else "the folder itself"
    warn(
        f"{lock.destination}: the new dataset is in place, but the old one could not be removed completely "
        f"({what}); the rest is in {old}"
    )
    if left and not set(left) & set(lock.swap.files):
        lock.note(None)  # the folder is no longer ours


def _folders(lock: Lock, swap: Swap) -> tuple[Path, Path]:
    return lock.destination.with_name(swap.build), lock.destination.with_name(swap.old)
