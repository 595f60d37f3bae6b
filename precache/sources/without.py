"""Leave out of a scan what other converted datasets hold: a source that grew is converted beside them."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from precache.dataset.converted import open_dataset
from precache.errors import SettingError
from precache.reporting import warn
from precache.sources.base import Paths, Scan


def leave_out(scan: Scan, datasets: Sequence[str]) -> Scan:
    """Return the scan of those pictures whose paths are in none of the converted `datasets`.

    An id becomes the rank among these pictures. Classes stay those of the whole source, so that a label means
    the same in all datasets; splits without a picture go.

    Raises:
        DatasetError: one of `datasets` is no converted dataset, or is damaged.
        SettingError: they hold all pictures.
    """
    samples = scan.samples
    is_new = np.ones(len(samples), np.bool_)
    for name in datasets:
        column = open_dataset(name).read_index()["paths"]
        assert column.ends is not None
        stored_paths = set(Paths(column.values.tobytes(), column.ends))
        is_held = np.fromiter((path in stored_paths for path in samples.list_paths()), np.bool_, len(samples))
        if not is_held.any():
            warn(f"{name}: holds no picture of {scan.root}, so nothing is left out for it")
        is_new &= ~is_held
    rows = np.flatnonzero(is_new)
    if not len(rows):
        places = ", ".join(datasets)
        raise SettingError(
            f"all {len(samples):,} pictures of {scan.root} are in {places}; nothing to convert"
        )
    splits, split_of = np.unique(samples.splits[rows], return_inverse=True)
    split_names = [samples.split_names[split] for split in splits.tolist()]
    new = samples.select(rows, split_of.astype(np.int64), split_names)
    new.ids = np.arange(len(rows))
    return replace(
        scan,
        samples=new,
        scanned=scan.scanned - len(samples) + len(rows),
        digest=hashlib.sha256(scan.digest.encode() + rows.tobytes()).hexdigest(),
    )
