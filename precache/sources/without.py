"""Leave out of a scan what other converted datasets hold: a source that grew is converted beside them."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from precache.dataset.columns import Ints
from precache.dataset.converted import ConvertedDataset, open_dataset
from precache.errors import SettingError
from precache.reporting import warn
from precache.sources.base import Paths, Samples, Scan
from precache.sources.webdataset import WebDatasetSource, is_tar


def leave_out(scan: Scan, datasets: Sequence[str]) -> Scan:
    """Return the scan of those pictures whose paths are in none of the converted `datasets`.

    An id becomes the rank among these pictures. Classes stay those of the whole source, so that a label means
    the same in all datasets; splits without a picture go.

    Raises:
        DatasetError: one of `datasets` is no converted dataset, or is damaged.
        SettingError: they hold all pictures; or one has paths without the names of tars, needed now.
    """
    samples = scan.samples
    is_new = np.ones(len(samples), np.bool_)
    for name in datasets:
        stored_paths = _stored_paths(open_dataset(name))
        is_held = _is_among(samples, stored_paths)
        if not is_held.any():
            if _have_lost_tars(scan, stored_paths):
                raise SettingError(
                    f"{name}: its pictures are known by their keys alone, and now several tars of "
                    f"{scan.root} have the same keys",
                    remedy="write the new tars with other keys, or convert all tars without --without",
                )
            warn(f"{name}: holds no picture of {scan.root}, so nothing is left out for it")
        is_new &= ~is_held
    rows = np.flatnonzero(is_new)
    if not len(rows):
        names = ", ".join(datasets)
        raise SettingError(f"all {len(samples):,} pictures of {scan.root} are in {names}; nothing to convert")
    return _renumber(scan, rows)


def take_converted(scan: Scan, dataset: ConvertedDataset) -> Scan:
    """Return the scan of those pictures that `dataset` holds or rejected, as `leave_out` returned it.

    A list of splits may have left out others, which only the dataset can say.
    """
    paths = _stored_paths(dataset).union(rejected.path for rejected in dataset.manifest.rejected)
    return _renumber(scan, np.flatnonzero(_is_among(scan.samples, paths)))


def _stored_paths(dataset: ConvertedDataset) -> set[str]:
    column = dataset.read_index()["paths"]
    assert column.ends is not None
    return set(Paths(column.values.tobytes(), column.ends))


def _is_among(samples: Samples, paths: set[str]) -> npt.NDArray[np.bool_]:
    """Return bool [n], whether the path of each sample is one of `paths`."""
    return np.fromiter((path in paths for path in samples.list_paths()), np.bool_, len(samples))


def _have_lost_tars(scan: Scan, stored_paths: set[str]) -> bool:
    """Return whether stored paths are those of the scan, but for the names of tars."""
    if not isinstance(scan.source, WebDatasetSource) or not scan.source.has_tar_in_paths:
        return False
    for path in scan.samples.list_paths():
        folders = path.split("/")
        tar = next(number for number, folder in enumerate(folders) if is_tar(folder))
        if "/".join(folders[tar + 1 :]) in stored_paths:
            return True
    return False


def _renumber(scan: Scan, rows: Ints) -> Scan:
    """Return the scan of the samples at `rows`, whose ids become their ranks."""
    samples = scan.samples
    splits, split_of = np.unique(samples.splits[rows], return_inverse=True)
    split_names = [samples.split_names[split] for split in splits.tolist()]
    new = samples.select(rows, split_of.astype(np.int64), split_names)
    new.ids = np.arange(len(rows))
    return replace(
        scan,
        samples=new,
        scanned=scan.scanned - len(samples) + len(rows),
        digest=hashlib.sha256(scan.digest.encode() + samples.ids[rows].tobytes()).hexdigest(),
    )
