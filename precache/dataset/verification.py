"""Is a converted dataset as it was written, and does another one hold the same samples?"""

import os
from collections.abc import Mapping, Sequence

from precache.dataset import columns
from precache.dataset.converted import ConvertedDataset, open_dataset, open_unchecked
from precache.dataset.files import check_file, check_objects
from precache.dataset.index import REMEDY, IndexFileError, SampleIndex
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
        ours, theirs = _samples_by_split(first), _samples_by_split(other)
        if ours.keys() != theirs.keys():
            problems.append(f"{names}: their splits differ ({', '.join(theirs)}; {', '.join(ours)})")
        for split in ours.keys() & theirs.keys():
            if ours[split] != theirs[split]:
                different = {sample for sample, _, _ in ours[split] ^ theirs[split]}
                problems.append(f"{names}: split {split} differs in {counted(len(different), 'sample')}")
    return problems


def _listed(fields: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in sorted(fields.items())) or "no fields"


def _samples_by_split(dataset: ConvertedDataset) -> dict[str, set[tuple[int, int, str]]]:
    """Split -> (id, label, target, fields and the mask's checksum as text) of its samples."""
    splits = {split: dataset.read_index(split) for split in dataset.manifest.samples_per_class}
    return {
        split: set(zip(index.ids.tolist(), index.labels.tolist(), _labelled(index), strict=True))
        for split, index in splits.items()
    }


def _labelled(index: SampleIndex) -> list[str]:
    """Target, fields and the mask's checksum of each sample; empty where there are none."""
    if index.targets is None and not index.fields and index.mask_checksums is None:
        return [""] * len(index)
    checksums = [None] * len(index) if index.mask_checksums is None else index.mask_checksums.tolist()
    return [
        repr((*columns.labelled(index.targets, index.fields, row), checksum))
        for row, checksum in enumerate(checksums)
    ]
