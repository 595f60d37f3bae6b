"""Pictures of equal content in a dataset, found by the checksums in its index: no shard is read.

The stored pictures are compared, so a copy under another name or with other metadata is found, and one that
was compressed again or resized is not.
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
    """Groups of samples of equal content.

    Attributes:
        rows: int64 [k], rows of the index, group by group: first the groups that span several splits, then
            those with several labels, then the others; ascending within a group.
        groups: int64 [k], number of the group of each row, from 0 on.
        in_splits: number of groups that span several splits.
        in_labels: number of groups with several labels.
    """

    rows: Ints
    groups: Ints
    in_splits: int
    in_labels: int

    def __len__(self) -> int:
        return int(self.groups[-1]) + 1 if len(self.groups) else 0

    def __str__(self) -> str:
        """Text like '5 pictures are there more than once: 3 in several splits, 2 with several labels'."""
        total = f"{quantity(len(self), 'picture')} {'is' if len(self) == 1 else 'are'} there more than once"
        parts = []
        if self.in_splits:
            parts.append(f"{self.in_splits:,} in several splits")
        if self.in_labels:
            parts.append(f"{self.in_labels:,} with several labels")
        return f"{total}: {', '.join(parts)}" if parts else total


def find_duplicates(index: SampleIndex, split_of: Sizes) -> Duplicates:
    """Find the duplicates among the samples of an index.

    Args:
        index: index of n samples.
        split_of: int32 [n], number of the split of each sample.
    """
    checksums = index.checksums
    rows_by_checksum = np.argsort(checksums)
    sorted_checksums = checksums[rows_by_checksum]
    equals_next = sorted_checksums[1:] == sorted_checksums[:-1]
    rows = rows_by_checksum[np.append(equals_next, False) | np.append(False, equals_next)]
    keys = [checksums[rows]]
    if index.shapes is not None:  # the checksum is of the pixels alone: pictures of other shapes may share it
        heights, widths = index.shapes[rows].T
        keys += [heights, widths]
    by_content = np.lexsort((rows, *keys))
    rows, keys = rows[by_content], [key[by_content] for key in keys]
    differs_from_previous = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    groups = np.concatenate(([0], np.cumsum(differs_from_previous)))[: len(rows)]
    is_alone = np.bincount(groups)[groups] == 1  # shares its checksum, but not its shape
    rows, groups = rows[~is_alone], groups[~is_alone]
    if not len(rows):
        return Duplicates(rows, groups, 0, 0)
    starts = np.flatnonzero(np.diff(groups, prepend=-1))  # position in `rows` of each group's first
    in_splits, in_labels = (
        np.maximum.reduceat(values, starts) != np.minimum.reduceat(values, starts)
        for values in (split_of[rows], _label_numbers(index, rows))
    )
    groups_in_order = np.lexsort((rows[starts], ~in_labels, ~in_splits))
    new_numbers = np.argsort(groups_in_order)  # the number of each group is its rank in that order
    groups = np.repeat(new_numbers, np.diff(starts, append=len(rows)))
    by_group = np.argsort(groups, kind="stable")
    return Duplicates(rows[by_group], groups[by_group], int(in_splits.sum()), int(in_labels.sum()))


def _label_numbers(index: SampleIndex, rows: Ints) -> Ints:
    """Number the labels of these rows, int64 [k], equal labels alike; the order of classes is ignored."""
    if index.targets is None:
        return index.labels[rows]
    number_of: dict[bytes, int] = {}
    targets = index.targets.select(rows)
    numbers = []
    for position in range(len(rows)):
        target = targets.row_array(position)
        content = (target if targets.ends is None else np.unique(target)).tobytes()
        numbers.append(number_of.setdefault(content, len(number_of)))
    return np.array(numbers, np.int64)


def iter_duplicates(
    duplicates: Duplicates, index: SampleIndex, splits: Sequence[str], classes: Sequence[str]
) -> Iterator[tuple[int, str, str, str]]:
    """Yield group, split, label and path of each row of `duplicates`.

    Args:
        duplicates: as `find_duplicates` has found them in `index`.
        index: index of all samples.
        splits: name of the split of each of `duplicates.rows`.
        classes: names of the classes.
    """
    samples = index.select(duplicates.rows)
    for position, (group, split) in enumerate(zip(duplicates.groups.tolist(), splits, strict=True)):
        yield group, split, _label_text(samples, position, classes), samples.path(position)


def _label_text(index: SampleIndex, row: int, classes: Sequence[str]) -> str:
    """Label of a sample as text: its class, or classes or numbers with ';' between them, or nothing."""
    label, targets = int(index.labels[row]), index.targets
    if targets is None:
        return classes[label] if label >= 0 else ""
    values = np.ravel(targets.row_array(row)).tolist()
    return ";".join(str(value) if targets.ends is None else classes[value] for value in values)
