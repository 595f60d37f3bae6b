"""Columns of an index that are read when rows of them are needed, a shard at a time.

So opening a set takes neither time nor memory for each of its samples.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from precache.dataset.columns import VALUES, Column
from precache.dataset.index import Ints, SampleIndex, ends_of
from precache.dataset.index_file import Array, IndexFile

_BLOCK_SAMPLES = 1 << 20
_ARRAYS = ("ids", "labels", "source_sizes", "checksums", "source_checksums", "shapes", "mask_checksums")


class LazyArray:
    """A column of the index, of one value, or k, for each sample: `[positions]` gives an array, as of one.

    Positions are an int, a slice, int64 [m], or bool [n]. As a whole, by `np.asarray`, it takes the memory of
    all samples; `blocks` go through them.

    Args:
        rows: int64 [n], which samples of the split; None: all.
        names: int64, what is served for each value; None: the value.
    """

    def __init__(
        self, file: IndexFile, name: str, rows: Ints | None = None, names: Ints | None = None
    ) -> None:
        self._file, self._name, self._rows, self._names = file, name, rows, names

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the values."""
        return self._file.places[self._name].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """As of an array."""
        return (len(self), *self._file.places[self._name].shape[1:])

    def __len__(self) -> int:
        return int(self._file.starts[-1]) if self._rows is None else len(self._rows)

    def __getitem__(self, positions: Any) -> Any:
        if isinstance(positions, slice):
            return self._of(np.arange(*positions.indices(len(self))))
        asked = np.asarray(positions)
        if asked.dtype == np.bool_:
            asked = np.flatnonzero(asked)
        found = self._of(normal(asked.reshape(-1), len(self)))
        return found[0] if asked.ndim == 0 else found

    def __iter__(self) -> Iterator[Any]:
        for _, block in self.blocks():
            yield from block

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        whole = np.concatenate([block for _, block in self.blocks()] or [self[:0]])
        return whole if dtype is None else whole.astype(dtype)

    def tolist(self) -> list[Any]:
        """As of an array."""
        listed: list[Any] = np.asarray(self).tolist()
        return listed

    def blocks(self) -> Iterator[tuple[int, Array]]:
        """All values, so many at a time, each with the position of its first."""
        for start in range(0, len(self), _BLOCK_SAMPLES):
            yield start, self[start : start + _BLOCK_SAMPLES]

    def at(self, rows: Ints) -> "LazyArray":
        """Of the samples at these positions alone."""
        return LazyArray(
            self._file, self._name, rows if self._rows is None else self._rows[rows], self._names
        )

    def renamed(self, names: Ints) -> "LazyArray":
        """Of the same samples, `names[value]` for each value."""
        return LazyArray(
            self._file, self._name, self._rows, names if self._names is None else names[self._names]
        )

    def _of(self, positions: Ints) -> Array:
        places = positions if self._rows is None else self._rows[positions]
        out = np.empty((len(places), *self.shape[1:]), self.dtype)
        for shard, of_shard, within in by_shard(self._file.starts, places):
            out[of_shard] = self._file.rows(self._name, shard)[within]
        return out if self._names is None else self._names[out]


class LazyColumn:
    """A field or the targets of an index, read as `LazyArray`; else as `precache.dataset.columns.Column`."""

    def __init__(self, file: IndexFile, name: str, rows: Ints | None = None) -> None:
        self._file, self._name, self._rows = file, name, rows
        place, has_ends = file.places[name], ends_of(name) in file.places
        none = np.empty((0, *place.shape[1:]), place.dtype)
        self._empty = Column(none, np.empty(0, np.int64) if has_ends else None)

    @property
    def kind(self) -> str:
        """As of `Column`."""
        return self._empty.kind

    @property
    def row_shape(self) -> tuple[int, ...]:
        """As of `Column`."""
        return self._empty.row_shape

    def __len__(self) -> int:
        return int(self._file.starts[-1]) if self._rows is None else len(self._rows)

    def select(self, rows: Array) -> Column:
        """As of `Column`."""
        positions = np.flatnonzero(rows) if rows.dtype == np.bool_ else normal(rows, len(self))
        places = positions if self._rows is None else self._rows[positions]
        found, order = self._empty, list[Any]()
        for shard, of_shard, within in by_shard(self._file.starts, places):
            known = self._file.values if self._empty.ends is not None else self._file.rows
            read = known(self._name, shard)
            part = Column(*read) if isinstance(read, tuple) else Column(read)
            found = found.join(part.select(within)) if order else part.select(within)
            order.append(np.arange(len(places))[of_shard])
        if not order:
            return found
        return found.select(np.argsort(np.concatenate(order), kind="stable"))

    def array(self, row: int) -> Array:
        """As of `Column`."""
        return self.select(np.array([row])).array(0)

    def value(self, row: int) -> Any:
        """As of `Column`."""
        return self.select(np.array([row])).value(0)

    def at(self, rows: Ints) -> "LazyColumn":
        """Of the samples at these positions alone."""
        return LazyColumn(self._file, self._name, rows if self._rows is None else self._rows[rows])


@dataclass(frozen=True, slots=True, eq=False)
class LazyIndex(SampleIndex):
    """An index whose columns are `LazyArray` and `LazyColumn`; `removed` alone, a byte each, is an array.

    Its paths are `texts`; `paths` is empty.
    """

    texts: LazyColumn | None = None

    def select(self, rows: npt.NDArray[np.bool_]) -> "LazyIndex":
        """The samples of the rows that are True: 8 bytes of memory for each of these."""
        return self.at(np.flatnonzero(rows))

    def at(self, rows: Ints) -> "LazyIndex":
        """As `select`, of the samples of these rows."""
        arrays = {name: cast("LazyArray | None", getattr(self, name)) for name in _ARRAYS}
        columns = cast("Mapping[str, LazyColumn]", self.fields)
        changes: dict[str, Any] = {name: a.at(rows) for name, a in arrays.items() if a is not None}
        changes["fields"] = {name: column.at(rows) for name, column in columns.items()}
        changes["texts"] = None if self.texts is None else self.texts.at(rows)
        changes["targets"] = None if self.targets is None else cast("LazyColumn", self.targets).at(rows)
        changes["removed"] = None if self.removed is None else self.removed[rows]
        return replace(self, **changes)

    def path(self, row: int) -> str:
        """As of `SampleIndex`."""
        assert self.texts is not None
        return os.fsdecode(self.texts.array(row).tobytes())


def read_lazily(file: IndexFile) -> LazyIndex:
    """The index of the shards of `file`."""
    lazy: dict[str, Any] = {name: LazyArray(file, name) for name in _ARRAYS if name in file.places}
    names = [name for name in file.places if name.startswith(VALUES)]
    lazy["fields"] = {name.removeprefix(VALUES): LazyColumn(file, name) for name in names}
    if "targets" in file.places:
        lazy["targets"] = LazyColumn(file, "targets")
    if "removed" in file.places:
        lazy["removed"] = np.asarray(LazyArray(file, "removed"), np.bool_)
    lazy |= {"paths": b"", "path_ends": np.empty(0, np.int64), "texts": LazyColumn(file, "paths")}
    return LazyIndex(**lazy)


def by_shard(starts: Ints, positions: Ints) -> Iterator[tuple[int, Any, Ints]]:
    """Of each shard that some of `positions` lie in: its number, which these are, and their rows there.

    Args:
        starts: int64 [shards + 1], the position of each shard's first sample.
    """
    shards = np.searchsorted(starts, positions, side="right") - 1
    if not len(shards):
        return
    if shards[0] == shards[-1] and (shards == shards[0]).all():
        yield int(shards[0]), slice(None), positions - starts[shards[0]]
        return
    order = np.argsort(shards, kind="stable")
    ranked = shards[order]
    cuts = np.flatnonzero(ranked[1:] != ranked[:-1]) + 1
    for part in np.split(order, cuts):
        shard = int(shards[part[0]])
        yield shard, part, positions[part] - starts[shard]


def normal(positions: Array, count: int) -> Ints:
    """`positions` from 0 on; IndexError if one of them is none of `count`."""
    positions = positions.astype(np.int64, copy=False)
    if len(positions) and (positions.min() < -count or positions.max() >= count):
        raise IndexError(f"positions from {positions.min()} to {positions.max()} of {count:,} samples")
    return np.where(positions < 0, positions + count, positions)
