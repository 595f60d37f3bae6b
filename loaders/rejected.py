"""Which pictures of a raw tree are left out: those that the list of `precache check` names."""

import logging

import numpy as np

from loaders.batch import Positions
from precache.errors import SourceError, printable, shell_command
from precache.rejects import default_list, read_list, rejected_rows
from precache.sources.base import Scan

_LOGGER = logging.getLogger("loaders.dataset")


def find_rejected(scan: Scan, rows: Positions) -> Positions:
    """Those of `rows` that the list beside the tree names; SourceError if it is all of them."""
    path = default_list(scan.root)
    if not path.exists():
        return np.empty(0, np.int64)
    rejected = np.intersect1d(rows, rejected_rows(scan.samples, read_list(path)))
    if len(rejected) == len(rows):
        raise SourceError(
            f"{path}: lists all {len(rows):,} pictures of the split; mend them and run again: "
            f"{shell_command('precache check', scan.root)}"
        )
    if len(rejected):
        _LOGGER.warning(
            "%s: %d of %d pictures are left out, see %s",
            *(printable(str(scan.root)), len(rejected), len(rows), printable(str(path))),
        )
    return rejected
