"""The folder DST: what it may be, whether a finished one fits the command, how `--overwrite` replaces it.

    .NAME.0123456789abcdef.new.precache    beside DST: the new dataset, until it is finished
    .NAME.0123456789abcdef.old.precache    the old one, until it is removed

A long NAME is replaced by a digest of it. Nobody else uses such names. Only those files of an old dataset
are removed that its manifest lists, one by one, index and manifest last. The next run completes, or undoes,
a swap that was killed:

    old    DST    new         what was done                       what is left to do
    -      old    unfinished  nothing                             go on converting, if asked to overwrite
    -      old    finished    nothing                             move old away, move new to DST
    old    -      finished    old was moved away                  move new to DST
    old    -      -           old was moved away, new is gone     move old back
    old    new    -           both were moved                     remove old
"""

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

import numpy as np

from precache.conversion.journal import Target, own_names, read_header
from precache.dataset.converted import ConvertedDataset, is_converted, open_dataset
from precache.dataset.files import first_problem
from precache.dataset.index import INDEX_NAME
from precache.dataset.manifest import MANIFEST_NAME, Manifest
from precache.dataset.unfinished import JOURNAL_NAME
from precache.errors import DatasetError
from precache.pictures.kinds import is_decodable_now
from precache.reporting import abridge, quantity, warn
from precache.sources import SourceOptions
from precache.sources.base import Scan, changed_pictures
from precache.storage import fsync_folder, remove_leftovers
from precache.storage.locks import hidden_name, is_mount_point, lock_path


def resolve(destination: Path) -> Path:
    """Return the folder that `destination` stands for: the target of a link, and '.' by its own name.

    Raises:
        DatasetError: it is a file, or a link that leads to itself.
    """
    if destination.is_symlink() or destination.name in ("", ".."):
        destination = Path(os.path.realpath(destination))
        if destination.is_symlink():
            raise DatasetError("is a link to itself", path=destination, remedy="choose a folder as DST")
    if destination.exists() and not destination.is_dir():
        raise DatasetError("is a file", path=destination, remedy="choose a folder as DST")
    return destination


def check_finished(
    destination: Path, scan: Scan, target: Target, options: SourceOptions, limit: int
) -> Manifest:
    """Return the manifest of the finished dataset; DatasetError unless it is what this command would make."""
    again = "pass --overwrite to convert again"
    dataset = open_dataset(destination)
    manifest = dataset.manifest
    if problem := first_problem(destination, manifest.files):
        raise DatasetError(problem, remedy=f"the dataset is damaged: {again}")
    finished_target = {"recipe": manifest.recipe.to_json(), "source_digest": manifest.source_digest}
    changes = "" if manifest.source_digest == scan.digest else _describe_changes(scan, dataset)
    target.check_same(destination, finished_target, is_finished=True, changes=changes)
    decodable = [picture.path for picture in manifest.rejected if is_decodable_now(picture.reason)]
    if decodable:
        raise DatasetError(
            f"lacks {quantity(len(decodable), 'picture')} for want of a decoder that is installed now "
            f"(first: {decodable[0]})",
            path=destination,
            remedy=again,
        )
    if len(manifest.rejected) > limit:
        raise DatasetError(
            f"is finished, but {describe_rejects(len(manifest.rejected), limit)}",
            path=destination,
            remedy=f"repair or remove them, and {again}",
        )
    changed = _changed_pictures(scan, dataset)
    if changed:
        raise DatasetError(
            f"{quantity(len(changed), 'source picture')} changed since the conversion, at the same size "
            f"(first: {changed[0]})",
            path=destination,
            remedy=again,
        )
    return manifest


def is_settled(destination: Path) -> bool:
    """Whether DST is finished, and nothing of a conversion that runs, or was killed, is in or beside it."""
    return (
        is_converted(destination)
        and not os.path.lexists(destination / JOURNAL_NAME)
        and not os.path.lexists(lock_path(destination))
        and not folders_beside(destination, "new")
        and not folders_beside(destination, "old")
    )


def remove_conversion_leftovers(folder: Path) -> None:
    """Remove from a finished dataset the leftovers of a conversion that was killed after its manifest."""
    try:
        manifest = open_dataset(folder).manifest
    except DatasetError:  # reported when the dataset is opened next
        return
    remove_leftovers(folder, [*_own_names(manifest), JOURNAL_NAME])
    if own_names(read_header(folder / JOURNAL_NAME)):
        (folder / JOURNAL_NAME).unlink()
        fsync_folder(folder)


def check_may_be_replaced(destination: Path) -> None:
    """Raise DatasetError unless `--overwrite` may replace the finished dataset.

    It may not replace a folder that holds files of others, a mount point, the working folder, or a dataset
    whose manifest is damaged.
    """
    if is_mount_point(destination):
        raise DatasetError(
            "is a mount point, which cannot be replaced",
            path=destination,
            remedy="empty it yourself and convert without --overwrite, or choose another DST",
        )
    if _is_working_folder(destination):
        raise DatasetError(
            "is the working folder, and --overwrite replaces the folder",
            path=destination,
            remedy="run the command from another one",
        )
    try:
        manifest = open_dataset(destination).manifest
    except DatasetError as error:
        problem = str(error).rpartition("; ")[0] or str(error)
        raise DatasetError(
            problem,
            remedy=f"so it is unknown which files are the dataset's: remove {destination} yourself, or "
            f"choose another DST",
        ) from error
    own_names = _own_names(manifest)
    others = sorted(
        path.name
        for path in destination.iterdir()
        if path.name not in own_names or (path.is_dir() and not path.is_symlink())
    )
    if others:
        raise DatasetError(
            f"holds files that are not part of the dataset ({abridge(others)})",
            path=destination,
            remedy="move them elsewhere, then convert with --overwrite again",
        )


def build_folder(destination: Path) -> Path:
    """Return the folder for the dataset that will replace DST: an unfinished one, or a new name."""
    unfinished = folders_beside(destination, "new")
    if unfinished:
        return unfinished[0]
    return destination.with_name(f".{hidden_name(destination)}.{secrets.token_hex(8)}.new.precache")


def folders_beside(destination: Path, kind: str) -> list[Path]:
    """Return the folders beside DST that are the `new` or the `old` one of a swap."""
    pattern = re.compile(rf"\.{re.escape(hidden_name(destination))}\.[0-9a-f]{{16}}\.{kind}\.precache")
    try:
        names = sorted(filter(pattern.fullmatch, os.listdir(destination.parent)))
    except (FileNotFoundError, PermissionError):  # no swap was begun there
        return []
    paths = [destination.with_name(name) for name in names]
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def swap_in(destination: Path, new: Path) -> None:
    """Replace DST by the finished dataset in the folder `new` beside it."""
    old = _partner(new, "old")
    if destination.is_dir() and any(destination.iterdir()):
        check_may_be_replaced(destination)
        os.rename(destination, old)
    try:
        os.rename(new, destination)
    except BaseException:
        if not os.path.lexists(destination) and old.exists():
            os.rename(old, destination)
        raise
    fsync_folder(destination.parent)
    _remove_old(destination, old)


def finish_swap(destination: Path) -> None:
    """Complete, or undo, a `swap_in` that was killed: afterwards DST is the old dataset or the new one.

    Raises:
        DatasetError: another folder has taken the place of DST meanwhile.
    """
    for old in folders_beside(destination, "old"):
        new = _partner(old, "new")
        finished = [folder for folder in (new, old) if is_converted(folder)]
        if finished and not destination.exists():
            os.rename(finished[0], destination)
            fsync_folder(destination.parent)
        elif new.exists():
            raise DatasetError(
                f"was created while --overwrite was about to put {new} there; the old dataset is now {old}",
                path=destination,
                remedy=f"move {destination} elsewhere, then run the same command again",
            )
        _remove_old(destination, old)
    for new in folders_beside(destination, "new"):
        if is_converted(new):
            remove_conversion_leftovers(new)
            swap_in(destination, new)


def warn_of_unfinished_overwrite(destination: Path) -> None:
    """Warn that an unfinished `--overwrite`, which this command does not continue, takes space."""
    for new in folders_beside(destination, "new"):
        warn(
            f"{destination}: an unfinished --overwrite takes space in {new}; finish it by the same command "
            f"with --overwrite, or remove that folder"
        )


def _remove_old(destination: Path, old: Path) -> None:
    """Remove the old dataset's files, and its folder; warn of what stays, which the next run tries again."""
    if not old.is_dir():
        return
    # names of files that are removed one after another: each group only if the one before is gone
    groups: list[set[str]] = []
    try:
        manifest = open_dataset(old).manifest
        last = (manifest.index.name, MANIFEST_NAME)  # they name the other files, so they go last
        groups = [{*_own_names(manifest)} - {*last}, *({name} for name in last)]
    except DatasetError:  # its index is removed already, or cannot be read now
        if not (old / INDEX_NAME).exists():
            groups = [{MANIFEST_NAME}]
    for names in groups:
        for name in names:
            with suppress(OSError):
                (old / name).unlink()
        if any(os.path.lexists(old / name) for name in names):
            break
    with suppress(OSError):
        old.rmdir()
    if os.path.lexists(old):
        rest = sorted(path.name for path in old.iterdir())
        warn(
            f"{destination}: the new dataset is in place, but the old one could not be removed completely "
            f"({abridge(rest) if rest else 'the folder itself'}); the rest is in {old}"
        )


def _partner(folder: Path, kind: str) -> Path:
    """Return the other folder of a swap: the `new` one for an `old` one, or the reverse."""
    return folder.with_suffix("").with_suffix(f".{kind}.precache")


def describe_rejects(number: int, limit: int) -> str:
    """Return the part of a message that says that more than `limit` pictures are rejected."""
    are = "picture is" if number == 1 else "pictures are"
    return f"{number:,} {are} rejected and at most {limit:,} may be"


def _describe_changes(scan: Scan, dataset: ConvertedDataset) -> str:
    """Say which pictures came, went or were written again since `dataset` was made of the source."""
    index, rejected = dataset.read_index(), dataset.manifest.rejected
    ids = np.concatenate((index.ids, np.array([picture.id for picture in rejected], np.int64)))
    paths = [*map(index.path, range(len(index))), *(picture.path for picture in rejected)]
    written_ns = dataset.read_source_state().modified_ns.tolist()  # in the order of the ids
    before = dict(zip((paths[row] for row in np.argsort(ids)), written_ns, strict=False))
    now = dict(zip(scan.samples.list_paths(), scan.samples.modified_ns.tolist(), strict=True))
    changes = {
        "new": sorted(now.keys() - before.keys()),
        "gone": sorted(before.keys() - now.keys()),
        "written again": [path for path in before if path in now and before[path] != now[path]],
    }
    return ", ".join(
        f"{len(paths):,} {change} (first: {paths[0]})" for change, paths in changes.items() if paths
    )


def _changed_pictures(scan: Scan, dataset: ConvertedDataset) -> list[str]:
    """Return the pictures whose content changed, for a `scan` that has the paths and sizes of `dataset`."""
    state = dataset.read_source_state()
    rows = np.arange(len(scan.samples))
    if len(state) != len(rows):
        return []
    return list(changed_pictures(scan, rows, state.modified_ns, state.checksums))


def _own_names(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of all files that this project writes for the dataset."""
    return (*manifest.own_names, MANIFEST_NAME)


def _is_working_folder(folder: Path) -> bool:
    try:
        return folder.samefile(".")
    except OSError:  # it was removed
        return False
