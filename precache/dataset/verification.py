"""Is a converted dataset as it was written, and does another one hold the same samples?"""

import os
from collections.abc import Mapping, Sequence

import numpy as np

from precache.dataset.converted import open_dataset, open_unchecked
from precache.dataset.files import check_file, check_objects
from precache.dataset.index import REMEDY, VALUE, IndexFileError, SampleIndex
from precache.reporting import counted
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url


def verify(path: str | os.PathLike[str] | Url) -> list[str]:
    """Compare every file of the dataset in `path` with the manifest's sizes and checksums.

    The manifest itself carries one, too. Of a URL the storage's bytes are read, not those that are kept here.

    Returns:
        One line per damaged or missing file; empty if all are as they were written.

    Raises:
        DatasetError: `path` is not a converted dataset.
        StorageError: it is a URL, and the storage refuses or does not answer.
    """
    try:
        dataset, problem = open_unchecked(path)
    except IndexFileError as error:  # nothing else is known of the files then
        return [str(error).removesuffix(f"; {REMEDY}")]
    files, place = dataset.manifest.files, dataset.place
    if isinstance(place, Url):
        problems = check_objects(ObjectStore(place), files)
    else:
        problems = (check_file(place, file) for file in files)
    return [problem for problem in (problem, *problems) if problem is not None]


def verify_across(paths: Sequence[str | os.PathLike[str] | Url]) -> list[str]:
    """Compare ids, labels, targets, fields, splits and class names of several datasets with the first's.

    Returns:
        One line per difference; empty if all hold the same samples in the same splits.

    Raises:
        DatasetError: one of `paths` is not a converted dataset.
    """
    first, *others = (open_dataset(path) for path in paths)
    problems = []
    for other in others:
        names = f"{other.place} and {first.place}"
        if other.manifest.classes != first.manifest.classes:
            problems.append(f"{names}: their classes differ")
        kinds = [f"{one.manifest.target}: {_listed(one.manifest.fields)}" for one in (other, first)]
        if kinds[0] != kinds[1]:
            problems.append(f"{names}: their targets and fields differ ({kinds[0]}; {kinds[1]})")
            continue
        ours, theirs = first.manifest.samples_per_class, other.manifest.samples_per_class
        if ours.keys() != theirs.keys():
            problems.append(f"{names}: their splits differ ({', '.join(theirs)}; {', '.join(ours)})")
        for split in ours.keys() & theirs.keys():
            if different := _different(first.read_index(split), other.read_index(split)):
                problems.append(f"{names}: split {split} differs in {counted(different, 'sample')}")
    return problems


def _listed(fields: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in sorted(fields.items())) or "no fields"


def _different(one: SampleIndex, other: SampleIndex) -> int:
    """How many samples are in one of the two alone, or differ in label, target, fields or mask."""
    ids, mine, its = np.intersect1d(one.ids, other.ids, assume_unique=True, return_indices=True)
    alike = np.ones(len(ids), np.bool_)
    for name in {"labels", "targets", "mask_checksums"} | {f"{VALUE}{name}" for name in one.fields}:
        ours, theirs = one.columns.get(name), other.columns.get(name)
        if ours is None or theirs is None or ours.differs_in_kind(theirs):
            alike &= ours is theirs
        else:
            alike &= ours.select(mine).same(theirs.select(its))
    return len(one) + len(other) - 2 * len(ids) + int((~alike).sum())
