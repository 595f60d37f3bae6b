"""Do several converted datasets hold the same samples?"""

import os
from collections.abc import Mapping, Sequence

from precache.checks import described
from precache.console.notices import counted
from precache.dataset.converted import ConvertedDataset, open_dataset
from precache.storage.urls import Url


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
        kinds = [f"{known.manifest.target}: {_in_words(known.manifest.fields)}" for known in (other, first)]
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


def _in_words(fields: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in sorted(fields.items())) or "no fields"


def _samples_by_split(dataset: ConvertedDataset) -> dict[str, set[tuple[int, int, str]]]:
    """Split -> (id, label, target, fields and the mask's checksum in words) of its samples."""
    splits = {split: dataset.read_index(split) for split in dataset.manifest.samples_per_class}
    return {
        split: set(zip(index.ids.tolist(), index.labels.tolist(), described.in_words(index), strict=True))
        for split, index in splits.items()
    }
