"""The list of a raw tree's pictures that cannot be decoded; `precache check` writes it, loaders read it.

    path,reason,bytes,modified_ns
    002.bear/002_0007.jpg,cannot be decoded (the file is empty),0,1763724000000000000

It lies beside the tree, never in it: data/raw.rejected.csv for data/raw. An entry holds while its file
has that size in bytes and that time of the last write, in ns: a repaired file is a picture again.
"""

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from precache.dataset.columns import Ints
from precache.dataset.index import Rejected
from precache.errors import SettingError, SourceError, os_errors_as
from precache.pictures.reading import sizes_and_times
from precache.sources.base import Scan
from precache.storage import atomic_write, read_regular
from precache.storage.urls import Location

SUFFIX = ".rejected.csv"


_HEADER = ["path", "reason", "bytes", "modified_ns"]


def default_list_path(tree: Location) -> Path:
    """Where the list of `tree` lies; the same by whatever name, or link, the tree is called."""
    real = Path(os.path.realpath(str(tree)))
    return real.parent / f"{real.name}{SUFFIX}"


def check_writable(path: Path, tree: Location) -> None:
    """Raise unless a list of `tree` may be written to `path`.

    Raises:
        SettingError: `path` lies in the tree, or cannot be written.
        SourceError: there is a file that is no such list.
    """
    folder, root = (Path(os.path.realpath(str(place))) for place in (path.parent, tree))
    if folder == root or root in folder.parents:
        raise SettingError(f"{path}: lies inside the tree {tree}; choose a list file beside it with --list")
    if path.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        reason = "is a folder" if path.is_dir() else f"{folder} does not exist or cannot be written to"
        raise SettingError(f"{path}: no list can be written there, {reason}; choose another with --list")
    if path.exists():
        read_list(path)


def write_list(path: Path, rejected: Sequence[Rejected]) -> None:
    """Write `rejected` to `path`, in place of what is there; an empty list is a heading alone."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_HEADER)
    writer.writerows((r.path, r.reason, r.bytes, r.modified_ns) for r in rejected)
    with atomic_write(path) as file:
        file.write(os.fsencode(text.getvalue()))


def read_list(path: Path) -> tuple[Rejected, ...]:
    """The entries of the list at `path`.

    Raises:
        SourceError: there is none, or it is not such a list.
    """
    with os_errors_as(
        SourceError,
        f"{path}: the list of rejected pictures cannot be read",
        "make it with 'precache check'",
    ):
        content = os.fsdecode(read_regular(path))
    try:
        lines = csv.reader(io.StringIO(content, newline=""))
        if next(lines, None) != _HEADER:
            raise ValueError(f"its first line is not {','.join(_HEADER)!r}")
        return tuple(
            Rejected(picture, reason, bytes=_integer(size), modified_ns=_integer(modified_ns))
            for picture, reason, size, modified_ns in lines
        )
    except (ValueError, csv.Error) as error:
        raise SourceError(
            f"{path}: not a list of rejected pictures ({error}); "
            f"remove it and make it again with 'precache check'"
        ) from error


def _integer(text: str) -> int:
    """A number in the range of file systems; ValueError for anything else."""
    number = int(text)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{number:,} is out of range")
    return number


def rejected_rows(scan: Scan, rejected: Sequence[Rejected]) -> Ints:
    """Rows of the samples of a tree that an entry holds for, int64 [n], ascending.

    Raises:
        SourceError: a file that an entry names cannot be asked for its size.
    """
    known = {(picture.path, picture.bytes, picture.modified_ns) for picture in rejected}
    named = {picture.path for picture in rejected}
    paths = [(row, path) for row, path in enumerate(scan.samples.list_paths()) if path in named]
    sizes, times = sizes_and_times([f"{scan.root}/{path}" for _, path in paths])
    now = zip(paths, sizes.tolist(), times.tolist(), strict=True)
    return np.array([row for (row, path), *status in now if (path, *status) in known], np.int64)
