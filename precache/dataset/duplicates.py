"""Pictures of equal content in a dataset, as the checksums of its index know them: nothing else is read.

What is compared is what is stored, so that a copy under another name or with other metadata is found, and one
that was compressed anew or resized is not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from precache.dataset.index import SampleIndex, Sizes
from precache.reporting import quantity

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Duplicates:
    """Which of the samples that are served have the same content; a group of each content that several have.

    Attributes:
        rows: int64 [k], of the index, group by group: first those in several splits, then those of several
            labels; the first one of a group first.
        groups: int64 [k], the number of the group of each, from 0 on.
        in_splits: how many groups lie in several splits.
        in_labels: how many are labelled in several ways.
    """

    rows: Ints
    groups: Ints
    in_splits: int
    in_labels: int

    def __len__(self) -> int:
        return int(self.groups[-1]) + 1 if len(self.groups) else 0

    def __str__(self) -> str:
        """Say '5 pictures are there more than once: 3 in several splits, 2 with several labels'."""
        said = f"{quantity(len(self), 'picture')} {'is' if len(self) == 1 else 'are'} there more than once"
        parts = {"in several splits": self.in_splits, "with several labels": self.in_labels}
        told = ", ".join(f"{count:,} {what}" for what, count in parts.items() if count)
        return f"{said}: {told}" if told else said


def find_duplicates(index: SampleIndex, split_of: Sizes) -> Duplicates:
    """The duplicates in an index, of whose samples `split_of`, int32 [n], has the numbers of their splits."""
    rows, checksums = np.flatnonzero(index.served), index.checksums
    rows = rows[np.argsort(checksums[rows])]
    ranked = checksums[rows]
    like_next = ranked[1:] == ranked[:-1]
    rows = rows[np.append(like_next, False) | np.append(False, like_next)]
    content = [checksums[rows]]
    if index.shapes is not None:  # the checksum is that of the pixels alone
        content += [*index.shapes[rows].T]
    order = np.lexsort((rows, *content))
    rows = rows[order]
    differs = np.any([part[order][1:] != part[order][:-1] for part in content], axis=0)
    groups = np.concatenate(([0], np.cumsum(differs)))[: len(rows)]
    alone = np.bincount(groups)[groups] == 1  # of its checksum, but not of its shape
    rows, groups = rows[~alone], groups[~alone]
    if not len(rows):
        return Duplicates(rows, groups, 0, 0)
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    in_splits, in_labels = (
        np.maximum.reduceat(values, starts) != np.minimum.reduceat(values, starts)
        for values in (split_of[rows], _labels(index, rows))
    )
    rank = np.lexsort((rows[starts], ~in_labels, ~in_splits))
    place = np.argsort(rank)
    groups = np.repeat(place, np.diff(starts, append=len(rows)))
    order = np.argsort(groups, kind="stable")
    return Duplicates(rows[order], groups[order], int(in_splits.sum()), int(in_labels.sum()))


def _labels(index: SampleIndex, rows: Ints) -> Ints:
    """int64 [k], equal where samples are labelled alike: the order of several classes says nothing."""
    if index.targets is None:
        return index.labels[rows]
    numbers: dict[bytes, int] = {}
    chosen = index.targets.select(rows)
    contents = (
        (chosen.array(row) if chosen.ends is None else np.unique(chosen.array(row))).tobytes()
        for row in range(len(rows))
    )
    return np.array([numbers.setdefault(content, len(numbers)) for content in contents], np.int64)


def listed(
    found: Duplicates, index: SampleIndex, split_of: Sequence[str], classes: Sequence[str]
) -> Iterator[tuple[int, str, str, str]]:
    """The group, split, label and path of each; `split_of` has the split of each of `found.rows`."""
    chosen = index.select(found.rows)
    for row, (group, split) in enumerate(zip(found.groups.tolist(), split_of, strict=True)):
        yield group, split, _label(chosen, row, classes), chosen.path(row)


def _label(index: SampleIndex, row: int, classes: Sequence[str]) -> str:
    """A class, several with a ';' between them, numbers, or nothing."""
    label, targets = int(index.labels[row]), index.targets
    if targets is None:
        return classes[label] if label >= 0 else ""
    values = np.ravel(targets.array(row)).tolist()
    return ";".join(str(value) if targets.ends is None else classes[value] for value in values)
