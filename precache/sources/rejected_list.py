"""Lists of a raw tree's pictures that cannot be decoded; `precache check` writes them, loaders read them.

    path,reason,bytes,modified_ns
    002.bear/002_0007.jpg,cannot be decoded (the file is empty),0,1763724000000000000

The list lies beside the tree, never in it: data/raw.rejected.csv for data/raw. An entry is valid while its
file has the same size in bytes and the same time of the last write, in ns, so that a repaired file is a
sample again.
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
from precache.sources.text_files import decode_list, find_delimiter
from precache.storage import atomic_write, read_regular

SUFFIX = ".rejected.csv"
_HEADER = ["path", "reason", "bytes", "modified_ns"]


def default_list_path(tree: Path) -> Path:
    """Return the usual path of the list of `tree`, with links resolved: a tree has one list."""
    real_path = Path(os.path.realpath(tree))
    return real_path.parent / f"{real_path.name}{SUFFIX}"


def check_writable(path: Path, tree: Path) -> None:
    """Raise unless a list of `tree` may be written to `path`.

    Raises:
        SettingError: `path` lies in the tree, or cannot be written.
        SourceError: there is another file at `path`, which is no such list.
    """
    folder, root = Path(os.path.realpath(path.parent)), Path(os.path.realpath(tree))
    if folder == root or root in folder.parents:
        raise SettingError(
            f"lies inside the tree {tree}", path=path, remedy="choose a list file beside it with --list"
        )
    if path.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        reason = "is a folder" if path.is_dir() else f"{folder} does not exist or cannot be written to"
        raise SettingError(
            f"no list can be written there, {reason}", path=path, remedy="choose another with --list"
        )
    if path.exists():
        read_list(path)


def write_list(path: Path, rejected: Sequence[Rejected]) -> None:
    """Write `rejected` to `path`, and replace the list there; an empty list is its header alone."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_HEADER)
    writer.writerows((r.path, r.reason, r.bytes, r.modified_ns) for r in rejected)
    with atomic_write(path) as file:
        file.write(os.fsencode(text.getvalue()))


def read_list(path: Path) -> tuple[Rejected, ...]:
    """Read the entries of the list at `path`.

    Raises:
        SourceError: there is no file, or it is not such a list.
    """
    with os_errors_as(
        SourceError,
        "the list of rejected pictures cannot be read",
        "make it with 'precache check'",
        path=path,
    ):
        content = decode_list(read_regular(path))
    try:
        delimiter = find_delimiter(content.partition("\n")[0])  # Excel may have saved it again
        lines = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter)
        if next(lines, None) != _HEADER:
            raise ValueError(f"its first line is not {','.join(_HEADER)!r}")
        return tuple(
            Rejected(picture, reason, bytes=_parse_int64(size), modified_ns=_parse_int64(modified_ns))
            for picture, reason, size, modified_ns in lines
        )
    except (ValueError, csv.Error) as error:
        raise SourceError(
            f"not a list of rejected pictures ({error})",
            path=path,
            remedy="remove it and make it again with 'precache check'",
        ) from error


def _parse_int64(text: str) -> int:
    """Return the number in `text`; ValueError if it is none, or does not fit into 64 bits."""
    number = int(text)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{number:,} is out of range")
    return number


def rejected_rows(scan: Scan, rejected: Sequence[Rejected]) -> Ints:
    """Return the rows of a tree's samples that have a valid entry in the list, int64 [n], ascending.

    Raises:
        SourceError: the size of a listed file cannot be read.
    """
    entries = {(picture.path, picture.bytes, picture.modified_ns) for picture in rejected}
    listed_paths = {picture.path for picture in rejected}
    candidates = [(row, path) for row, path in enumerate(scan.samples.list_paths()) if path in listed_paths]
    sizes, times = sizes_and_times([f"{scan.root}/{path}" for _, path in candidates])
    rows = []
    for (row, path), size, modified_ns in zip(candidates, sizes.tolist(), times.tolist(), strict=True):
        if (path, size, modified_ns) in entries:
            rows.append(row)
    return np.array(rows, np.int64)
