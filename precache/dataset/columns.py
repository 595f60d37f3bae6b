"""Columns: each holds one thing that is known of every sample, a number, a list of numbers, or text.

    int      int64 [n]                      one integer each
    float    float64 [n]                    one number each
    vector   int64 or float64 [n, k]        k numbers each
    ragged   int64 or float64 [sum, ...]    any number of them each, or of rows of k, such as boxes
    text     uint8 [sum]                    UTF-8, one behind the other

The last two come with `ends`, int64 [n]: where the values of each sample end.

What samples are labelled with is one of TARGETS:

    class     one class: its index is the label
    classes   any number of classes: their indices, `ragged`
    number    a number or a vector of them, to be predicted: `float` or `vector`
    none      nothing

Samples of the last three have label -1.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]

KINDS = ("int", "float", "vector", "ragged", "text")
TARGETS = ("class", "classes", "number", "none")
_TEXT = np.dtype(np.uint8)
_GATHERED = 1 << 10  # rows at once: where a value lies takes 8 bytes, and one of text is a single byte
_BLOCK_SAMPLES = 1 << 20


class ValueOfRowError(ValueError):
    """A value that does not fit the column.

    Attributes:
        row: its number, from 0.
        reason: what is wrong with it; a phrase.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"row {row}: {reason}")
        self.row, self.reason = row, reason


@dataclass(frozen=True, slots=True)
class Pieces:
    """Where the values of a column come from that is not in memory.

    Attributes:
        starts: int64 [pieces + 1], the row of each piece's first value, and behind the last one.
        read: gives the piece of this number, a column in memory.
        rows: int64 [n], which rows of the pieces the column has; None: all.
        names: int64, what stands for each value; None: the value itself.
    """

    starts: Ints
    read: "Callable[[int], Column]"
    rows: Ints | None = None
    names: Ints | None = None

    def __len__(self) -> int:
        return int(self.starts[-1]) if self.rows is None else len(self.rows)

    def places(self, positions: npt.NDArray[Any] | slice) -> Ints:
        """Rows of the pieces at these positions of the column; IndexError if it has no such."""
        if isinstance(positions, slice):
            positions = np.arange(*positions.indices(len(self)))
        positions = from_zero(positions, len(self))
        return positions if self.rows is None else self.rows[positions]


class Column:
    """A value for each of n samples: in memory, or in pieces that are read when a value is asked for.

    Where each sample has one value, or k, a column can be indexed and compared like an array, and gives
    arrays; `same` compares any two. As a whole, by `values`, `ends` or `np.asarray`, one in pieces takes the
    memory of all samples.

    Args:
        values, ends: see the module; of a column in pieces an empty one of its kind.
    """

    __slots__ = ("_ends", "_pieces", "_values")

    def __init__(
        self, values: npt.NDArray[Any], ends: Ints | None = None, pieces: Pieces | None = None
    ) -> None:
        self._values, self._ends, self._pieces = values, ends, pieces

    @classmethod
    def of(cls, values: Sequence[Any]) -> "Column":
        """The column of these values: int, float, str, or lists or arrays of numbers or of rows of numbers.

        Lists of numbers that are all of one length are a `vector`; lists of rows are always `ragged`.

        Raises:
            ValueOfRowError: they are of different kinds, or of none that a column holds.
        """
        kinds = {type(value) for value in values}
        if kinds == {str}:
            return cls._of_text(values)
        if kinds and kinds <= {int, bool, float} | _NUMPY_NUMBERS:
            return cls._of_numbers(values)
        first = next((row for row, value in enumerate(values) if not _is_list(value)), None)
        if first is not None or not len(values):
            row = first or 0
            raise ValueOfRowError(row, _why_not(values, row))
        return cls._of_lists(values)

    @classmethod
    def _of_text(cls, values: Sequence[str]) -> "Column":
        try:
            encoded = [value.encode() for value in values]
        except UnicodeEncodeError:
            row = next(row for row, value in enumerate(values) if not _is_unicode(value))
            raise ValueOfRowError(row, "cannot be written as UTF-8") from None
        ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    @classmethod
    def _of_numbers(cls, values: Sequence[Any]) -> "Column":
        whole = [isinstance(value, int | np.integer | np.bool_) for value in values]
        try:
            array = np.array(values, np.int64 if all(whole) else np.float64)
        except OverflowError:
            row = next(row for row, value in enumerate(values) if not -(2**63) <= value < 2**63)
            raise ValueOfRowError(row, f"{values[row]} does not fit into 64 bits") from None
        if array.dtype == np.float64 and any(whole):  # ids of 19 digits would become equal
            other = values[whole.index(False)]
            for row, value in enumerate(values):
                if whole[row] and int(array[row]) != value:
                    raise ValueOfRowError(
                        row, f"{value} does not fit into 64 bits beside {other}; write all of them as text"
                    )
        return cls(array)

    @classmethod
    def _of_lists(cls, values: Sequence[Any]) -> "Column":
        rows = []
        for row, value in enumerate(values):
            try:
                rows.append(_numbers(value))
            except (ValueError, TypeError, OverflowError):
                raise ValueOfRowError(row, f"{_shown(value)} is not a list of numbers") from None
        filled = [array for array in rows if array.size]
        depth = max((array.ndim for array in filled), default=1)
        width = next((array.shape[1:] for array in filled), ())
        for row, array in enumerate(rows):
            if array.size and (array.ndim != depth or array.shape[1:] != width):
                raise ValueOfRowError(row, f"has shape {[*array.shape]}, others {['any', *width]}")
        dtype = np.float64 if any(array.dtype == np.float64 for array in filled) else np.int64
        lengths = [len(array) if array.size else 0 for array in rows]
        if depth == 1 and len(set(lengths)) == 1 and lengths[0]:
            return cls(np.stack(rows).astype(dtype))
        parts = [array.reshape(length, *width) for array, length in zip(rows, lengths, strict=True)]
        joined = np.concatenate(parts).astype(dtype)
        return cls(joined, np.cumsum(lengths, dtype=np.int64))

    @property
    def values(self) -> npt.NDArray[Any]:
        """See the module."""
        return self._whole()._values

    @property
    def ends(self) -> Ints | None:
        """See the module; None where each sample has one value, or k."""
        return None if self._ends is None else self._whole()._ends

    @property
    def in_pieces(self) -> bool:
        """Whether it is not in memory."""
        return self._pieces is not None

    @property
    def kind(self) -> str:
        """One of KINDS."""
        if self._ends is not None:
            return "text" if self._values.dtype == _TEXT else "ragged"
        if self._values.ndim == 2:
            return "vector"
        return "float" if self._values.dtype == np.float64 else "int"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the values."""
        return self._values.dtype

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Of one value, or of each of the values of a sample that has several."""
        return self._values.shape[1:]

    @property
    def memory_bytes(self) -> int:
        """What its arrays take."""
        return self._values.nbytes + (0 if self._ends is None else self._ends.nbytes)

    def __len__(self) -> int:
        if self._pieces is not None:
            return len(self._pieces)
        return len(self._values if self._ends is None else self._ends)

    def __getitem__(self, positions: Any) -> Any:
        if self._ends is not None:
            raise TypeError("samples of this column have any number of values; use select")
        if self._pieces is None:
            return self._values[positions]
        if not isinstance(positions, slice):
            positions = np.asarray(positions)
            if positions.ndim == 0:
                return self.select(positions[None])._values[0]
        return self.select(positions)._values

    def __eq__(self, other: object) -> npt.NDArray[np.bool_]:  # type: ignore[override]  # as arrays do
        return np.asarray(self[:] == (other[:] if isinstance(other, Column) else other))

    def __ne__(self, other: object) -> npt.NDArray[np.bool_]:  # type: ignore[override]
        return ~(self == other)

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        for _, block in self.blocks():
            yield from block

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self.values if dtype is None else self.values.astype(dtype)

    def tolist(self) -> list[Any]:
        """Of the values, as arrays have it."""
        listed: list[Any] = self.values.tolist()
        return listed

    def blocks(self, positions: Ints | None = None) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """The values at `positions`, default all, so many at a time; each with the number of its first."""
        count = len(self if positions is None else positions)
        for start in range(0, count, _BLOCK_SAMPLES):
            part = slice(start, start + _BLOCK_SAMPLES)
            yield start, self[part if positions is None else positions[part]]

    def at(self, rows: Ints) -> "Column":
        """The values of these rows, int64 [m]; in pieces, if it is: that takes 8 bytes for each."""
        if self._pieces is None:
            return self.select(rows)
        return Column(self._values, self._ends, replace(self._pieces, rows=self._pieces.places(rows)))

    def renamed(self, names: Ints) -> "Column":
        """`names[value]` for each value, an integer."""
        if self._pieces is None:
            return Column(names[self._values])
        known = self._pieces.names
        names = names if known is None else names[known]
        return Column(self._values, None, replace(self._pieces, names=names))

    def select(self, rows: npt.NDArray[Any] | slice) -> "Column":
        """The values of these rows, in memory: int64 [m], or bool [n]."""
        if self._pieces is not None:
            return self._from_pieces(self._pieces, rows)
        if self._ends is None:
            return Column(self._values[rows])
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        rows = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        lengths = np.diff(self._ends, prepend=0)[rows]
        starts, ends = self._ends[rows] - lengths, np.cumsum(lengths, dtype=np.int64)
        values = np.empty((ends[-1] if len(ends) else 0, *self.row_shape), self.dtype)
        for first in range(0, len(rows), _GATHERED):
            part = slice(first, first + _GATHERED)
            begin = int(ends[first] - lengths[first])
            places = np.arange(begin, ends[part][-1])  # in the new values, then in ours
            places += np.repeat(starts[part] - (ends[part] - lengths[part]), lengths[part])
            values[begin : ends[part][-1]] = self._values[places]
        return Column(values, ends)

    def _whole(self) -> "Column":
        return self if self._pieces is None else self._from_pieces(self._pieces, slice(None))

    def _from_pieces(self, pieces: Pieces, rows: npt.NDArray[Any] | slice) -> "Column":
        places = pieces.places(rows)
        parts, order = [], []
        for number, which, within in by_piece(pieces.starts, places):
            parts.append(pieces.read(number).select(within))
            order.append(which)
        if not parts:
            return Column(self._values, self._ends)
        found = (
            parts[0]
            if len(parts) == 1
            else Column.concatenate(parts).select(np.argsort(np.concatenate(order)))
        )
        return found if pieces.names is None else Column(pieces.names[found._values])

    def array(self, row: int) -> npt.NDArray[Any]:
        """The numbers of one row: of shape [], [k] or [m, ...]; of text, its bytes."""
        if self._pieces is not None:
            return self.select(np.array([row])).array(0)
        if self._ends is None:
            return np.asarray(self._values[row])
        return self._values[int(self._ends[row - 1]) if row else 0 : int(self._ends[row])]

    def value(self, row: int) -> Any:
        """The value of one row as JSON has it: int, float, str or lists."""
        array = self.array(row)
        return array.tobytes().decode() if self.kind == "text" else array.tolist()

    def differs_in_kind(self, other: "Column") -> bool:
        """Whether the two can be no parts of one column; whole numbers and others can."""
        mine, its = (
            (column.ends is None, column.values.dtype == _TEXT, column.values.shape[1:])
            for column in (self, other)
        )
        empty = self.ends is not None and not (len(self.values) and len(other.values))
        return mine[:2] != its[:2] or (mine[2] != its[2] and not empty)

    @classmethod
    def concatenate(cls, columns: "Sequence[Column]") -> "Column":
        """The values of each in turn; they do not differ in kind."""
        filled = [column.values for column in columns if len(column.values)]
        values = np.concatenate(filled or [columns[0].values])
        ends = [column.ends for column in columns]
        if ends[0] is None:
            return cls(values)
        before = np.cumsum([0, *(len(column.values) for column in columns[:-1])])
        moved = (of + start for of, start in zip(ends, before, strict=True) if of is not None)
        return cls(values, np.concatenate([*moved]))

    def same(self, other: "Column") -> npt.NDArray[np.bool_]:
        """bool [n]: whether the two, of as many values and one kind, have the same value in each row."""
        if self.ends is None or other.ends is None:
            return _equal(self.values, other.values)
        lengths = np.diff(self.ends, prepend=0)
        alike: npt.NDArray[np.bool_] = lengths == np.diff(other.ends, prepend=0)
        rows = np.flatnonzero(alike)
        mine, its = self.select(rows).values, other.select(rows).values
        if len(mine):
            owners = np.repeat(rows, lengths[rows])
            alike[owners[~_equal(mine, its)]] = False
        return alike

    def content(self) -> bytes:
        """All that it holds, to be hashed."""
        head = f"{self.values.dtype}{self.values.shape}".encode()
        ends = b"" if self.ends is None else np.ascontiguousarray(self.ends).tobytes()
        return head + np.ascontiguousarray(self.values).tobytes() + ends


_NUMPY_NUMBERS: set[type] = {
    *(np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
    *(np.bool_, np.float16, np.float32, np.float64),
}


def select(columns: Mapping[str, Column], rows: npt.NDArray[Any]) -> dict[str, Column]:
    """These rows of each column, as `Column.select`."""
    return {name: column.select(rows) for name, column in columns.items()}


def values_of(columns: Mapping[str, Column], row: int) -> dict[str, Any]:
    """The value of each column in one row, as `Column.value`, by name: what is written of them is sorted."""
    return {name: columns[name].value(row) for name in sorted(columns)}


def by_piece(starts: Ints, places: Ints) -> Iterator[tuple[int, Ints, Ints]]:
    """Of each piece that some of `places` lie in: its number, which these are, and their rows there.

    Args:
        starts: int64 [pieces + 1], the place of each piece's first row.
    """
    numbers = np.searchsorted(starts, places, side="right") - 1
    order = np.argsort(numbers, kind="stable")
    ranked = numbers[order]
    cuts = np.flatnonzero(ranked[1:] != ranked[:-1]) + 1
    for part in np.split(order, cuts) if len(order) else ():
        number = int(numbers[part[0]])
        yield number, part, places[part] - starts[number]


def from_zero(positions: npt.NDArray[Any], count: int) -> Ints:
    """`positions`, bool [count] or integers, as integers from 0 on; IndexError: one is none of `count`."""
    if positions.dtype == np.bool_:
        return np.flatnonzero(positions)
    positions = positions.astype(np.int64, copy=False)
    if len(positions) and (positions.min() < -count or positions.max() >= count):
        raise IndexError(f"positions from {positions.min()} to {positions.max()} of {count:,} samples")
    if not len(positions) or positions.min() >= 0:
        return positions  # itself: of columns in pieces, all that are chosen alike share it
    return np.where(positions < 0, positions + count, positions)


def _numbers(value: Any) -> npt.NDArray[Any]:
    array = np.asarray(value)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iufb" or array.ndim > 2:
        raise ValueError
    if array.dtype.kind == "f":
        return array.astype(np.float64)
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise ValueError
    return array.astype(np.int64)


def _equal(ours: npt.NDArray[Any], others: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """bool [n]: whether numbers, or rows of numbers, are equal; what is no number equals itself."""
    different = (ours != others) & ~(np.isnan(ours) & np.isnan(others))
    equal: npt.NDArray[np.bool_] = ~different.any(axis=tuple(range(1, different.ndim)))  # of none, too
    return equal


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _why_not(values: Sequence[Any], row: int) -> str:
    if not len(values):
        return "there is none"
    value = values[row]
    if value is None:
        return "is empty"
    others: Iterable[Any] = (other for other in values if type(other) is not type(value))
    other = next(iter(others), None)
    against = "" if other is None else f", and others like {_shown(other)}"
    return f"{_shown(value)} is {type(value).__name__}{against}; expected numbers, text or lists of numbers"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
