"""Which pictures of a raw tree are served: of a split, without what `precache check` has listed."""

import logging

import numpy as np

from loaders.batch import Positions
from precache.errors import SettingError, SourceError, printable, shell_command
from precache.sources.base import Scan
from precache.sources.rejected_list import default_list, read_list, rejected_rows

_LOGGER = logging.getLogger("loaders.dataset")


def rows_of_split(scan: Scan, split: str, *, skip_rejected: bool) -> tuple[Positions, str]:
    """Rows of the scan's samples, int64 [n], of `split`, and what identifies them.

    Raises:
        SettingError: it has no such split.
        SourceError: as `find_rejected`.
    """
    samples = scan.samples
    names = [name or "train" for name in samples.split_names]
    if split not in names:
        raise SettingError(f"unknown split {split!r}; choose from: {', '.join(names)}")
    rows = np.flatnonzero(samples.splits == names.index(split))
    identity = f"raw {scan.digest}"
    if skip_rejected and len(rejected := find_rejected(scan, rows)):
        rows = np.setdiff1d(rows, rejected)
        identity += f" without {samples.ids[rejected].tolist()}"
    return rows, identity


def find_rejected(scan: Scan, rows: Positions) -> Positions:
    """Those of `rows` that the list beside the tree names; SourceError if it is all of them."""
    path = default_list(scan.root)
    if not path.exists():
        return np.empty(0, np.int64)
    rejected = np.intersect1d(rows, rejected_rows(scan.samples, read_list(path)))
    if len(rejected) == len(rows):
        raise SourceError(
            f"{path}: lists all {len(rows):,} pictures of the split; repair them and run again: "
            f"{shell_command('precache check', scan.root)}"
        )
    if len(rejected):
        _LOGGER.warning(
            "%s: %d of %d pictures are left out, see %s",
            *(printable(str(scan.root)), len(rejected), len(rows), printable(str(path))),
        )
    return rejected
