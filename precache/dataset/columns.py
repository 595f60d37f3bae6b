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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Rows: TypeAlias = Ints | range
"""Rows of arrays: a range has step 1, and costs no memory."""

KINDS = ("int", "float", "vector", "ragged", "text")
TARGETS = ("class", "classes", "number", "none")
_TEXT = np.dtype(np.uint8)
_GATHERED = 1 << 10  # rows at once: where a value lies takes 8 bytes, and one of text is a single byte


class ValueOfRowError(ValueError):
    """A value that does not fit the column.

    Attributes:
        row: its number, from 0.
        reason: what is wrong with it; a phrase.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"row {row}: {reason}")
        self.row, self.reason = row, reason


class Column:
    """A value for each of n samples, over arrays in memory or of a file that is mapped.

    Where each sample has one value, or k, a column can be indexed and compared like an array, and gives
    arrays; `same` compares any two.

    Args:
        values, ends: see the module.
        rows: which rows of these it has, in this order; None: all.
    """

    __slots__ = ("_ends", "_rows", "_values")

    def __init__(self, values: npt.NDArray[Any], ends: Ints | None = None, rows: Rows | None = None) -> None:
        self._values, self._ends, self._rows = values, ends, rows

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
        """See the module; a copy where it has some rows of its arrays, and these are no range."""
        return self._values if self._rows is None else self.select(slice(None))._values

    @property
    def ends(self) -> Ints | None:
        """See the module, likewise; None where each sample has one value, or k."""
        return self._ends if self._ends is None or self._rows is None else self.select(slice(None))._ends

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

    def __len__(self) -> int:
        if self._rows is not None:
            return len(self._rows)
        return len(self._values if self._ends is None else self._ends)

    def __getitem__(self, positions: Any) -> Any:
        if self._ends is not None:
            raise TypeError("samples of this column have any number of values; use select")
        return self._values[self._places(positions)]

    def __eq__(self, other: object) -> npt.NDArray[np.bool_]:  # type: ignore[override]  # as arrays do
        return np.asarray(self[:] == (other[:] if isinstance(other, Column) else other))

    def __ne__(self, other: object) -> npt.NDArray[np.bool_]:  # type: ignore[override]
        return ~(self == other)

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self.values if dtype is None else self.values.astype(dtype)

    def tolist(self) -> list[Any]:
        """Of the values, as arrays have it."""
        listed: list[Any] = self.values.tolist()
        return listed

    def at(self, rows: Rows) -> "Column":
        """The values of these rows, of the same arrays: nothing is read."""
        return Column(self._values, self._ends, rows_at(self._rows, rows))

    def select(self, rows: npt.NDArray[Any] | slice) -> "Column":
        """The values of these rows, int64 [m], bool [n] or a slice, in arrays of their own, or views."""
        places = self._places(rows)
        if self._ends is None:
            return Column(self._values[places])
        if isinstance(places, slice):
            places = np.arange(*places.indices(len(self._ends)))
        places = nonnegative_positions(places, len(self._ends))
        starts = np.where(places > 0, self._ends[places - 1], 0) if len(places) else places
        lengths = self._ends[places] - starts
        ends = np.cumsum(lengths, dtype=np.int64)
        values = np.empty((ends[-1] if len(ends) else 0, *self.row_shape), self.dtype)
        for first in range(0, len(places), _GATHERED):
            part = slice(first, first + _GATHERED)
            begin = int(ends[first] - lengths[first])
            within = np.arange(begin, ends[part][-1])  # in the new values, then in ours
            within += np.repeat(starts[part] - (ends[part] - lengths[part]), lengths[part])
            values[begin : ends[part][-1]] = self._values[within]
        return Column(values, ends)

    def _places(self, positions: Any) -> Any:
        """What of the arrays `positions` of the column are: an index of them of the same kind."""
        if self._rows is None:
            return positions
        if isinstance(positions, slice | int | np.integer):
            found = self._rows[positions]
            if isinstance(found, range):
                return slice(found.start, found.stop) if found.step == 1 else np.array(found, np.int64)
            return found
        return rows_at(self._rows, np.asarray(positions))

    def array(self, row: int) -> npt.NDArray[Any]:
        """The numbers of one row: of shape [], [k] or [m, ...]; of text, its bytes."""
        place = int(self._places(row))
        if self._ends is None:
            return np.asarray(self._values[place])
        return self._values[int(self._ends[place - 1]) if place else 0 : int(self._ends[place])]

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


def rows_at(rows: Rows | None, positions: npt.NDArray[Any] | range) -> Rows:
    """The rows at these positions of `rows`, default all of them; IndexError where there is no such."""
    if rows is None:
        return positions
    if isinstance(positions, range):
        return rows[positions.start : positions.stop]
    if isinstance(rows, range):
        found = nonnegative_positions(positions, len(rows))
        return found + rows.start if rows.start else found
    chosen: Ints = rows[positions]
    return chosen


def nonnegative_positions(positions: npt.NDArray[Any], count: int) -> Ints:
    """`positions`, bool [count] or integers, as integers from 0 on; IndexError: one is none of `count`."""
    if positions.dtype == np.bool_:
        return np.flatnonzero(positions)
    positions = positions.astype(np.int64, copy=False)
    if len(positions) and (positions.min() < -count or positions.max() >= count):
        raise IndexError(f"positions from {positions.min()} to {positions.max()} of {count:,} samples")
    if not len(positions) or positions.min() >= 0:
        return positions  # itself, of which there may be many
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
