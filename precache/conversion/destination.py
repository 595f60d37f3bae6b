"""The folder DST: what it may be, whether a finished one fits the command, how `--overwrite` replaces it.

A conversion begins with `conversion.json` in its folder, see `precache.dataset.unfinished`: an empty folder
becomes ours with it, and only files that it, or a manifest, lists are ever removed.

`--overwrite` builds the new dataset in a hidden folder beside DST, and swaps once, when it is finished:

    .NAME.precache-overwrite/new    the new dataset
    .NAME.precache-overwrite/old    the old one, until its files are removed, one by one, its manifest last

A long NAME is replaced by a digest of it. What the next run finds after a kill, and what it does:

    DST    new           old    the next run
    old    unfinished    -      goes on converting, if asked to overwrite
    old    finished      -      moves DST to old and new to DST, removes old
    -      finished      old    moves new to DST, removes old
    new    -             old    removes old

Between the two renames there is no DST; both datasets are in the hidden folder. (Where somebody has removed
new by then, old is moved back.)
"""

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from precache.dataset.converted import ConvertedDataset, open_dataset
from precache.dataset.files import first_problem
from precache.dataset.index import INDEX_NAME
from precache.dataset.manifest import MANIFEST_NAME, Manifest, is_converted
from precache.dataset.unfinished import CONVERSION_NAME, Inputs, UnfinishedConversion, read_conversion
from precache.errors import DatasetError, shell_command
from precache.pictures.kinds import is_decodable_now
from precache.reporting import abridge, quantity, warn
from precache.sources.base import Scan, changed_pictures
from precache.storage import atomic_write, fsync_folder, remove_leftovers
from precache.storage.locks import foreign_names, hidden_name, is_mount_point, lock_path

_ANOTHER_SOURCE = "another source tree, or one that changed since"


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


def check_finished(destination: Path, scan: Scan, inputs: Inputs, limit: int) -> Manifest:
    """Return the manifest of the finished dataset; DatasetError unless it is what this command would make."""
    again = "pass --overwrite to convert again"
    dataset = open_dataset(destination)
    manifest = dataset.manifest
    if problem := first_problem(destination, manifest.files):
        raise DatasetError(problem, remedy=f"the dataset is damaged: {again}")
    differences = input_differences(inputs, Inputs(manifest.recipe, manifest.source_digest, inputs.made_by))
    if differences == [_ANOTHER_SOURCE]:
        remedy = f"convert what is new into another DST with --without {shell_command(destination)}"
    else:
        remedy = "choose another DST"
    if manifest.source_digest != scan.digest and (changes := _describe_changes(scan, dataset)):
        differences.append(changes)
    _raise_for_differences(destination, differences, remedy)
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
    leftovers = (destination / CONVERSION_NAME, lock_path(destination), _hidden_folder(destination))
    return is_converted(destination) and not any(map(os.path.lexists, leftovers))


def begin(folder: Path, description: UnfinishedConversion, *, overwrite: bool) -> UnfinishedConversion:
    """Begin a conversion in an empty or missing folder, or prepare to go on with an unfinished one.

    Args:
        description: description of this conversion.
        overwrite: remove an unfinished conversion of other inputs: only the files that it lists.

    Returns:
        The description that is now in the folder: with the inputs of the unfinished conversion, if there is
        one to go on with.

    Raises:
        DatasetError: the folder holds something else, or an unfinished conversion of other inputs.
    """
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        fsync_folder(folder.parent)
    before = read_conversion(folder)
    if before is None:
        check_empty(folder)
    elif differences := input_differences(description.inputs, before.inputs):
        if not overwrite:
            _raise_for_differences(folder, differences, "choose another DST")
        # temporary files first, so that a worker that outlives its parent cannot rename them
        remove_leftovers(folder, before.own_names)
        _remove_files(folder, before.own_names - {CONVERSION_NAME})
    else:
        description = replace(description, inputs=before.inputs)
    remove_leftovers(folder, description.own_names)
    with atomic_write(folder / CONVERSION_NAME) as file:
        file.write(description.to_json())
    return description


def check_empty(folder: Path) -> None:
    """Raise DatasetError if `folder` holds anything but a conversion of ours."""
    is_ours = any(os.path.lexists(folder / name) for name in (CONVERSION_NAME, MANIFEST_NAME))
    if is_ours or not folder.is_dir():
        return
    if others := foreign_names(folder, frozenset({CONVERSION_NAME})):
        raise DatasetError(
            f"is not empty, and not a folder that precache made ({abridge(others)})",
            path=folder,
            remedy="choose another DST, or empty it yourself",
        )


def remove_traces(folder: Path, description: UnfinishedConversion) -> None:
    """Remove from a finished dataset what its conversion needed until the manifest was written."""
    remove_leftovers(folder, description.own_names)  # of workers that died
    _remove_files(folder, description.sidecar_names)
    (folder / CONVERSION_NAME).unlink()
    fsync_folder(folder)


def remove_leftover_traces(folder: Path) -> None:
    """Remove from a finished dataset the traces of a conversion that was killed after its manifest."""
    try:
        description = read_conversion(folder)
    except DatasetError:  # a file of somebody else, or one that the next run may be able to read
        return
    if description is not None:
        remove_traces(folder, description)


def _remove_files(folder: Path, names: frozenset[str]) -> None:
    for name in names.intersection(os.listdir(folder)):
        (folder / name).unlink()


def check_may_be_replaced(destination: Path) -> None:
    """Raise DatasetError unless `--overwrite` may replace the finished dataset.

    It may not replace a folder that holds files of others, a mount point, the working folder, or a dataset
    whose manifest is damaged; nor where files of others lie in the place of the old dataset.
    """
    _, old = overwrite_folders(destination)
    if os.path.lexists(old):
        raise DatasetError(
            "holds files that were not part of a dataset that was replaced",
            path=old,
            remedy="move them elsewhere, then convert with --overwrite again",
        )
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
        raise DatasetError(
            error.without_remedy,
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


def overwrite_folders(destination: Path) -> tuple[Path, Path]:
    """Return the hidden folders of the dataset that will replace DST, and of the old one."""
    hidden = _hidden_folder(destination)
    return hidden / "new", hidden / "old"


def finish_overwrite(destination: Path) -> bool:
    """Swap in the new dataset if an earlier run has finished it; complete, or undo, a swap that was killed.

    Returns:
        Whether the new dataset was swapped in.

    Raises:
        DatasetError: another folder has taken the place of DST meanwhile; or DST, or the hidden folder, is
            not to be touched.
    """
    hidden = _hidden_folder(destination)
    if hidden.is_symlink() or (hidden.exists() and not hidden.is_dir()):
        raise DatasetError(
            "is in the way: --overwrite keeps datasets in a folder of this name",
            path=hidden,
            remedy="give it another name, then run the same command again",
        )
    new, old = overwrite_folders(destination)
    if is_converted(new):
        remove_leftover_traces(new)
        swap_in(destination)
        return True
    if is_converted(old) and not os.path.lexists(destination):
        os.rename(old, destination)
        fsync_folder(destination.parent)
    _remove_old(destination, old)
    return False


def swap_in(destination: Path) -> None:
    """Replace DST by the finished dataset in the hidden folder; raises as `finish_overwrite`."""
    new, old = overwrite_folders(destination)
    if destination.is_dir() and any(destination.iterdir()):
        if is_converted(old):
            raise DatasetError(
                f"was created while --overwrite was about to put {new} there; the old dataset is now {old}",
                path=destination,
                remedy=f"move {destination} elsewhere, then run the same command again",
            )
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


def warn_of_unfinished_overwrite(destination: Path) -> None:
    """Warn that an unfinished `--overwrite`, which this command does not continue, takes space."""
    new, _ = overwrite_folders(destination)
    if new.is_dir():
        warn(
            f"{destination}: an unfinished --overwrite takes space in {new}; finish it by the same command "
            f"with --overwrite, or remove that folder"
        )


def _hidden_folder(destination: Path) -> Path:
    return destination.with_name(f".{hidden_name(destination)}.precache-overwrite")


def _remove_old(destination: Path, old: Path) -> None:
    """Remove the old dataset and the hidden folder; warn of what stays, which the next run tries again."""
    if old.is_dir():
        index, manifest = frozenset({INDEX_NAME}), frozenset({MANIFEST_NAME})  # they name the other files
        try:
            steps = [_own_names(open_dataset(old).manifest) - index - manifest, index, manifest]
        except DatasetError:  # its index is removed already, or cannot be read now
            steps = [] if (old / INDEX_NAME).exists() else [manifest]
        with suppress(OSError):
            for names in steps:
                _remove_files(old, names)
            old.rmdir()
    with suppress(OSError):  # there is none, or it holds an unfinished dataset
        old.parent.rmdir()
    if os.path.lexists(old):
        rest = sorted(path.name for path in old.iterdir())
        warn(
            f"{destination}: the new dataset is in place, but the old one could not be removed completely "
            f"({abridge(rest) if rest else 'the folder itself'}); the rest is in {old}"
        )


def input_differences(inputs: Inputs, others: Inputs) -> list[str]:
    """Return a phrase for each difference between `others`, the inputs of a conversion, and `inputs`."""
    recipe = others.recipe.to_json()
    phrases = [
        f"{name} {_setting_text(recipe[name])}, asked for {_setting_text(value)}"
        for name, value in inputs.recipe.to_json().items()
        if recipe[name] != value
    ]
    if others.source_digest != inputs.source_digest:
        phrases.append(_ANOTHER_SOURCE)
    phrases += [
        f"{name} {others.made_by.get(name)}, here {value}"
        for name, value in inputs.made_by.items()
        if others.made_by.get(name) != value
    ]
    return phrases


def _setting_text(value: object) -> object:
    """Return a setting as it is typed: a list, which is a size [height, width], as WIDTHxHEIGHT."""
    return "x".join(map(str, reversed(value))) if isinstance(value, list) else value


def _raise_for_differences(destination: Path, differences: list[str], remedy: str) -> None:
    """Raise DatasetError if the conversion in `destination` has other inputs."""
    if differences:
        raise DatasetError(
            f"holds another conversion ({'; '.join(differences)})",
            path=destination,
            remedy=f"{remedy}, or pass --overwrite to replace it",
        )


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


def _own_names(manifest: Manifest) -> frozenset[str]:
    """Return the names of all files that this project writes for the dataset."""
    return manifest.own_names | {MANIFEST_NAME}


def _is_working_folder(folder: Path) -> bool:
    try:
        return folder.samefile(".")
    except OSError:  # it was removed
        return False
