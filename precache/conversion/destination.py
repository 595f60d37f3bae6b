"""What DST may be, whether a finished one holds what is asked for, and how `--overwrite` replaces it.

    .NAME.0123456789abcdef.new.precache    beside DST: the new dataset, until it is finished
    .NAME.0123456789abcdef.old.precache    the old one, until it is removed

As of temporary files, nobody else has such names. Of an old dataset only the files that its manifest lists
are removed, one by one, index and manifest last. A swap that is killed is completed, or undone, by the next
run:

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

from precache.conversion.journal import (
    JOURNAL_NAME,
    Target,
    own_names,
    read_header,
    unfinished_names,
)
from precache.conversion.update import compare
from precache.dataset.converted import ConvertedDataset, is_converted, open_dataset
from precache.dataset.files import first_problem
from precache.dataset.manifest import MANIFEST_NAME, Manifest
from precache.errors import DatasetError
from precache.reporting import abridge, quantity, warn
from precache.sources import SourceOptions
from precache.sources.base import Scan, changed_pictures
from precache.storage import fsync_folder, remove_leftovers
from precache.storage.locks import is_mount_point
from precache.storage.objects import ObjectStore
from precache.storage.urls import Location, Url

AUTO_NAME = "precache-auto.json"
"""What `precache auto` predicted of the dataset beside it, and what came; the dataset is whole without."""


def resolve(destination: Path) -> Path:
    """The folder that `destination` stands for: what a link leads to, and '.' by its own name.

    Raises:
        DatasetError: it is a file, or links that lead in a circle.
    """
    if destination.is_symlink() or destination.name in ("", ".."):
        destination = Path(os.path.realpath(destination))
        if destination.is_symlink():
            raise DatasetError(f"{destination}: is a link to itself; choose a folder as DST")
    if destination.exists() and not destination.is_dir():
        raise DatasetError(f"{destination}: is a file; choose a folder as DST")
    return destination


def is_untouched(folder: Path) -> bool:
    """Whether nothing was converted in `folder`, so that a conversion into it reads every picture."""
    return not any(os.path.lexists(folder / name) for name in (MANIFEST_NAME, JOURNAL_NAME))


def check_finished(
    destination: Location, scan: Scan, target: Target, options: SourceOptions, limit: int
) -> Manifest:
    """The manifest of the finished dataset; DatasetError if it is not what is asked for."""
    again = "choose another DST" if isinstance(destination, Url) else "pass --overwrite to convert again"
    dataset = open_dataset(destination)
    manifest = dataset.manifest
    check_files(dataset)
    found = {"recipe": manifest.recipe.to_json(), "source_digest": manifest.source_digest}
    target.check_same(destination, found, finished=True)
    if manifest.source_options.get("boxes") != options.boxes:
        raise DatasetError(
            f"{destination}: is finished with boxes {manifest.source_options.get('boxes')!r}, "
            f"asked for {options.boxes!r}; {again}"
        )
    if len(manifest.rejected) > limit:
        raise DatasetError(
            f"{destination}: is finished, but {too_many_rejected(len(manifest.rejected), limit)}; "
            f"repair or remove them, and {again}"
        )
    changed = _changed(scan, dataset)
    if changed:
        follow = "" if isinstance(destination, Url) else "pass --update to follow the source, or "
        raise DatasetError(
            f"{destination}: {quantity(len(changed), 'source picture')} changed since the conversion, "
            f"at the same size (first: {changed[0]}); {follow}{again}"
        )
    return manifest


def check_files(dataset: ConvertedDataset) -> None:
    """Raise DatasetError unless all files of the dataset are there, with their sizes."""
    place, files = dataset.place, dataset.manifest.files
    if isinstance(place, Path):
        if problem := first_problem(place, files):
            raise DatasetError(f"{problem}; the dataset is damaged: pass --overwrite to convert again")
        return
    sizes = {found.name: found.bytes for found in ObjectStore(place).list()}
    if lost := [file.name for file in files if sizes.get(file.name) != file.bytes]:
        raise DatasetError(
            f"{place / lost[0]}: missing or truncated; the dataset is damaged: choose another DST"
        )


def remove_rest(folder: Path) -> None:
    """Remove what a conversion that was killed after its manifest has left in the finished `folder`."""
    try:
        manifest = open_dataset(folder).manifest
    except DatasetError:  # the next to open it reports it
        return
    remove_leftovers(folder, [*_own_names(manifest), JOURNAL_NAME])
    header = read_header(folder / JOURNAL_NAME)
    if own_names(header) and header and header["update"] == len(manifest.updates):
        (folder / JOURNAL_NAME).unlink()
        fsync_folder(folder)


def check_may_be_replaced(destination: Path) -> None:
    """Raise DatasetError unless `--overwrite` may replace the finished dataset.

    It may not where the folder holds files that are not ours, is a mount point or the working folder, or
    where the manifest is damaged.
    """
    if is_mount_point(destination):
        raise DatasetError(
            f"{destination}: is a mount point, which cannot be replaced; empty it yourself and convert "
            f"without --overwrite, or choose another DST"
        )
    if _is_working_folder(destination):
        raise DatasetError(
            f"{destination}: is the working folder, and --overwrite replaces the folder; run the command "
            f"from another one"
        )
    remedy = f"remove {destination} yourself, or choose another DST"
    try:
        manifest = open_dataset(destination).manifest
    except DatasetError as error:
        problem = str(error).rpartition("; ")[0] or error
        raise DatasetError(f"{problem}; so it is unknown which files are the dataset's: {remedy}") from error
    ours = (*_own_names(manifest), *unfinished_names(destination))
    others = sorted(
        path.name
        for path in destination.iterdir()
        if path.name not in ours or (path.is_dir() and not path.is_symlink())
    )
    if others:
        raise DatasetError(
            f"{destination}: holds files that are not part of the dataset ({abridge(others)}); "
            f"move them elsewhere, then convert with --overwrite again"
        )


def build_folder(destination: Path) -> Path:
    """The folder for the dataset that will replace the finished one; an unfinished one is continued."""
    unfinished = folders_beside(destination, "new")
    name = f".{destination.name}.{secrets.token_hex(8)}.new.precache"
    return unfinished[0] if unfinished else destination.with_name(name)


def folders_beside(destination: Path, kind: str) -> list[Path]:
    """The folders beside DST that are `new` or `old` ones of a swap."""
    ours = re.compile(rf"\.{re.escape(destination.name)}\.[0-9a-f]{{16}}\.{kind}\.precache")
    try:
        names = sorted(filter(ours.fullmatch, os.listdir(destination.parent)))
    except (FileNotFoundError, PermissionError):  # without one, or where none of ours can be made
        return []
    found = (destination.with_name(name) for name in names)
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def swap_in(destination: Path, new: Path) -> None:
    """Replace DST by the finished dataset in the folder `new` beside it."""
    old = _twin(new, "old")
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
        new = _twin(old, "new")
        whole = [folder for folder in (new, old) if is_converted(folder)]
        if whole and not destination.exists():
            os.rename(whole[0], destination)
            fsync_folder(destination.parent)
        elif new.exists():
            raise DatasetError(
                f"{destination}: was created while --overwrite was about to put {new} there; the old "
                f"dataset is now {old}; move {destination} elsewhere, then run the same command again"
            )
        _remove_old(destination, old)
    for new in folders_beside(destination, "new"):
        if is_converted(new):
            remove_rest(new)
            swap_in(destination, new)


def warn_of_build(destination: Path) -> None:
    """Warn that an unfinished `--overwrite` takes space, where it is not continued."""
    for new in folders_beside(destination, "new"):
        warn(
            f"{destination}: an unfinished --overwrite takes space in {new}; finish it by the same command "
            f"with --overwrite, or remove that folder"
        )


def _remove_old(destination: Path, old: Path) -> None:
    """Remove the old dataset's files, and its folder; warn of what stays, which the next run tries again."""
    if not old.is_dir():
        return
    ours, last = set[str](), [MANIFEST_NAME]
    try:
        manifest = open_dataset(old).manifest
        unfinished = unfinished_names(old)
        # without them nobody knows the others
        last = [*({JOURNAL_NAME} & unfinished), manifest.index.name, MANIFEST_NAME]
        ours = {*_own_names(manifest), *unfinished} - {*last}
    except DatasetError:  # its index is removed already, or cannot be read now
        last = [] if any(old.glob("*.index")) else last
    for names in (ours, *({name} for name in last)):
        for name in names:
            with suppress(OSError):
                (old / name).unlink()
        if any(os.path.lexists(old / name) for name in names):
            break
    with suppress(OSError):
        old.rmdir()
    if os.path.lexists(old):
        left = sorted(path.name for path in old.iterdir())
        warn(
            f"{destination}: the new dataset is in place, but the old one could not be removed completely "
            f"({abridge(left) if left else 'the folder itself'}); the rest is in {old}"
        )


def _twin(folder: Path, kind: str) -> Path:
    """The `new` folder of the swap that has an `old` one, or the other way round."""
    return folder.with_suffix("").with_suffix(f".{kind}.precache")


def too_many_rejected(number: int, limit: int) -> str:
    """The part of a message that says that more than `limit` pictures are rejected."""
    are = "picture is" if number == 1 else "pictures are"
    return f"{number:,} {are} rejected and at most {limit:,} may be"


def _changed(scan: Scan, dataset: ConvertedDataset) -> list[str]:
    """The pictures of `scan`, where paths and sizes are those of `dataset`, that hold something else."""
    if dataset.manifest.updates:
        difference = compare(dataset, scan)
        return [scan.source.where(difference.scan.samples[row]) for row in difference.new.tolist()]
    state = dataset.read_source_state()
    rows = np.arange(len(scan.samples))
    if len(state) != len(rows):
        return []
    return list(changed_pictures(scan, rows, state.modified_ns, state.checksums))


def _own_names(manifest: Manifest) -> tuple[str, ...]:
    return (*manifest.own_names, AUTO_NAME, MANIFEST_NAME)


def _is_working_folder(folder: Path) -> bool:
    try:
        return folder.samefile(".")
    except OSError:  # it was removed
        return False
