"""Serve several datasets as one: their samples one behind the other, their classes united.

A list of paths is one longer split, with one order, one state and one numbering of the samples. Shards come
one behind the other, too, so that backends read it like any split. Columns of the index are joined in memory
when they are first used.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain, combinations
from typing import Any

import numpy as np

from loaders.dataset import RAW, SplitData, depth_flags
from precache.dataset.columns import Column
from precache.dataset.index import VALUE, SampleIndex
from precache.dataset.statistics import ChannelStatistics
from precache.errors import SettingError, shell_command
from precache.pictures.images import sides
from precache.storage.urls import Url


class JoinedColumns(Mapping[str, Column]):
    """Columns that all of several indexes have, one behind the other; each is joined when first used."""

    def __init__(self, parts: Sequence[SampleIndex]) -> None:
        self._parts = parts
        self._joined: dict[str, Column] = {}

    def __reduce__(self) -> Any:
        return JoinedColumns, (self._parts,)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._parts[0].names if all(name in part for part in self._parts))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in tuple(self)

    def __getitem__(self, name: str) -> Column:
        if name not in self._joined:
            self._joined[name] = Column.concatenate([part[name] for part in self._parts])
        return self._joined[name]


def concatenate(parts: Sequence[SplitData]) -> SplitData:
    """Return the samples of all `parts` as one split.

    Ids of each part begin after the highest one of the dataset before, as positions do in torch's
    ConcatDataset. Labels are those of the first part's classes, then of what the next ones add.

    Raises:
        SettingError: the parts have different formats, or their samples cannot be in one batch.
    """
    _check_formats(parts)
    _check_batches(parts)
    whole = _join([part.whole for part in parts])
    classes = tuple(dict.fromkeys(name for part in parts for name in part.classes))
    number_of = {name: label for label, name in enumerate(classes)}
    first_id, ids, labels = 0, [], []
    for part in parts:
        ids.append(part.whole.ids[:] + first_id)
        first_id += part.datasets[0].highest_id + 1
        new_labels = np.array([*map(number_of.__getitem__, part.classes), -1], np.int64)
        labels.append(new_labels[part.whole.labels[:]])  # label -1 stays
    columns = {"ids": Column(np.concatenate(ids)), "labels": Column(np.concatenate(labels))}
    data = replace(whole, classes=classes, index=whole.index.with_columns(columns), parent=whole)
    if all(part.chosen is None for part in parts):
        return data
    start, chosen = 0, []
    for part in parts:
        chosen.append(start + part.positions_in_whole(slice(None)))
        start += len(part.whole)
    return data.select(np.concatenate(chosen))


def _join(parts: Sequence[SplitData]) -> SplitData:
    """Return splits as they are stored as one, with ids and labels as the shards hold them."""
    index = SampleIndex(JoinedColumns([part.index for part in parts]))
    sizes = {part.size if part.shapes is None else None for part in parts}
    if len(sizes) > 1:  # then each picture has its own size
        shapes = np.concatenate([part.shapes_at(slice(None)) for part in parts])
        index = index.with_columns({"shapes": Column(shapes.astype(np.int32))})
    statistics = [part.statistics for part in parts]
    return replace(
        parts[0],
        datasets=tuple(chain.from_iterable(part.datasets for part in parts)),
        index=index,
        shard_samples=np.concatenate([part.shard_samples for part in parts]),
        files=tuple(chain.from_iterable(part.files for part in parts)),
        shard_bytes=np.concatenate([part.shard_bytes for part in parts]),
        size=min((part.size for part in parts), key=lambda size: min(sides(size))),
        statistics=reduce(_combine, statistics),
        digest=hashlib.sha256(" ".join(part.digest for part in parts).encode()).hexdigest(),
    )


def _combine(first: ChannelStatistics | None, second: ChannelStatistics | None) -> ChannelStatistics | None:
    return None if first is None or second is None else first.combine(second)


def _check_formats(parts: Sequence[SplitData]) -> None:
    """Raise SettingError, with the command that converts one of them, if the parts have several formats."""
    converted = [part for part in parts if part.kind != RAW]
    at_urls = [part for part in converted if isinstance(part.path, Url)]
    first = [*at_urls, *converted, parts[0]][0]
    others = [part for part in parts if part.kind != first.kind]
    if not others:
        return
    other = others[0].datasets[0]
    if isinstance(other.path, Url):
        remedy = f"run: {shell_command('precache pull', other.path, 'FOLDER')}, and convert that"
    else:
        flags = (*depth_flags(other.class_depth), "--format", first.kind)
        command = shell_command("precache convert", other.path, f"{other.path}-{first.kind}", *flags)
        remedy = f"run: {command}, and give {other.path}-{first.kind} in the place of {other.path}"
    kinds = [
        f"{part.path} holds {'pictures' if part.kind == RAW else part.kind}" for part in (first, others[0])
    ]
    raise SettingError(f"datasets of a list must have one format: {', '.join(kinds)}", remedy=remedy)


def _check_batches(parts: Sequence[SplitData]) -> None:
    """Raise SettingError if samples of the parts cannot be in one batch."""
    targets = [part.index.targets for part in parts if part.index.targets is not None]
    kinds = {(bool(part.classes), part.index.targets is None) for part in parts}
    has_other_classes = bool(targets) and len({part.classes for part in parts}) > 1
    if len(kinds) > 1 or has_other_classes or _differ_in_kind(targets):
        raise SettingError(
            "datasets of a list must have the same kind of labels: one class each, or the same targets"
        )
    if len({part.channels for part in parts}) > 1:
        channels = ", ".join(f"{part.path} has {part.channels}" for part in parts)
        raise SettingError(
            f"datasets of a list must have the same channels: {channels}",
            remedy="convert with --channels rgb",
        )
    for name in JoinedColumns([part.index for part in parts]):
        columns = [part.index[name] for part in parts] if name.startswith(VALUE) else []
        if _differ_in_kind(columns):
            kinds_of_field = ", ".join(
                f"{column.kind} {[*column.row_shape]} in {part.path}"
                for part, column in zip(parts, columns, strict=True)
            )
            raise SettingError(
                f"field {name.removeprefix(VALUE)} must be of one kind in all datasets of a list: "
                f"{kinds_of_field}",
                remedy="convert without this field, or with values of one kind",
            )


def _differ_in_kind(columns: Sequence[Column]) -> bool:
    """Return whether the columns cannot be joined to one; int and float can be."""
    return any(first.differs_in_kind(second) for first, second in combinations(columns, 2))
