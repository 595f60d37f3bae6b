"""Columns of labels, targets and fields: a number, a list of numbers or a text for each of n samples.

    int      int64 [n]                        one integer each
    float    float64 [n]                      one number each
    vector   int64 or float64 [n, k]          k numbers each
    ragged   int64 or float64 [t] or [t, k]   any number of numbers each, or of rows of k
    text     uint8 [t]                        UTF-8, one text behind the other

The values of the last two lie one behind the other, t of all samples together, and come with `ends`, int64
[n]: the position behind the last value of each sample.

TARGETS are the kinds of labels that samples may have:

    class     one class: its index is the label
    classes   any number of classes: their indices, a `ragged` column
    number    a number or a vector of numbers to be predicted: a `float` or `vector` column
    none      no label

Samples of the last three have label -1.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Meta

Ints: TypeAlias = npt.NDArray[np.int64]
Rows: TypeAlias = Ints | range
"""Row numbers: int64 [m], or a range of step 1, which takes no memory."""

Kind: TypeAlias = Literal["int", "float", "vector", "ragged", "text"]
TARGETS = ("class", "classes", "number", "none")
Target: TypeAlias = Annotated[str, Meta(pattern=rf"\A({'|'.join(TARGETS)})\Z")]
_TEXT = np.dtype(np.uint8)
_ROWS_PER_GATHER = 1 << 10  # the position of each byte of text takes 8 bytes: gather a few rows at a time


class ValueOfRowError(ValueError):
    """A value does not fit its column.

    Attributes:
        row: number of the row, from 0.
        reason: what is wrong with the value, as a phrase.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"row {row}: {reason}")
        self.row, self.reason = row, reason


class Column:
    """A value for each of n samples, over arrays in memory or in a mapped file.

    A column of kind `int`, `float` or `vector` can be indexed and compared like an array, which gives
    arrays.

    Args:
        values, ends: arrays of the column, see the module.
        rows: rows of these arrays that the column consists of, in this order; None for all.
    """

    __slots__ = ("_ends", "_rows", "_values")

    def __init__(self, values: npt.NDArray[Any], ends: Ints | None = None, rows: Rows | None = None) -> None:
        self._values, self._ends, self._rows = values, ends, rows

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> "Column":
        """Make a column of values: int, float, str, or lists or arrays of numbers or of rows of numbers.

        Lists of numbers that are all of one length become a `vector`; lists of rows are always `ragged`.

        Raises:
            ValueOfRowError: the values are of different kinds, or of a kind that no column holds.
        """
        kinds = {type(value) for value in values}
        if kinds == {str}:
            return cls._from_texts(values)
        if kinds and kinds <= {int, bool, float} | _NUMPY_NUMBERS:
            return cls._from_numbers(values)
        if not len(values):
            raise ValueOfRowError(0, "there is none")
        for row, value in enumerate(values):
            if not _is_list(value):
                raise ValueOfRowError(row, _kind_problem(values, row))
        return cls._from_lists(values)

    @classmethod
    def _from_texts(cls, values: Sequence[str]) -> "Column":
        content, ends = bytearray(), np.empty(len(values), np.int64)
        for row, value in enumerate(values):
            try:
                content += value.encode()
            except UnicodeEncodeError:
                raise ValueOfRowError(row, "cannot be written as UTF-8") from None
            ends[row] = len(content)
        return cls(np.frombuffer(content, np.uint8), ends)

    @classmethod
    def _from_numbers(cls, values: Sequence[Any]) -> "Column":
        are_whole = [isinstance(value, int | np.integer | np.bool_) for value in values]
        try:
            array = np.array(values, np.int64 if all(are_whole) else np.float64)
        except OverflowError:
            row = next(row for row, value in enumerate(values) if not -(2**63) <= value < 2**63)
            raise ValueOfRowError(row, f"{values[row]} does not fit into 64 bits") from None
        if array.dtype == np.float64 and any(are_whole):  # as floats, ids of 19 digits would become equal
            other = values[are_whole.index(False)]
            for row, value in enumerate(values):
                if are_whole[row] and int(array[row]) != value:
                    raise ValueOfRowError(
                        row, f"{value} does not fit into 64 bits beside {other}; write all of them as text"
                    )
        return cls(array)

    @classmethod
    def _from_lists(cls, values: Sequence[Any]) -> "Column":
        rows = []
        for row, value in enumerate(values):
            try:
                rows.append(_number_array(value))
            except (ValueError, TypeError, OverflowError):
                raise ValueOfRowError(row, f"{_short_repr(value)} is not a list of numbers") from None
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
        """Values of all samples, see the module; a column of some rows may copy them at each access."""
        return self._values if self._rows is None else self.select(slice(None))._values

    @property
    def ends(self) -> Ints | None:
        """End of each sample's values, see the module; None where each sample has one value, or k."""
        return self._ends if self._ends is None or self._rows is None else self.select(slice(None))._ends

    @property
    def kind(self) -> Kind:
        """Kind of the column."""
        if self._ends is not None:
            return "text" if self._values.dtype == _TEXT else "ragged"
        if self._values.ndim == 2:
            return "vector"
        return "float" if self._values.dtype == np.float64 else "int"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self._values.dtype

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row of `values`: `[k]` for a vector or a list of rows, empty for single numbers."""
        return self._values.shape[1:]

    def __len__(self) -> int:
        if self._rows is not None:
            return len(self._rows)
        return len(self._values if self._ends is None else self._ends)

    def __getitem__(self, positions: Any) -> Any:
        if self._ends is not None:
            raise TypeError("samples of this column have any number of values; use select")
        return self._values[self._array_index(positions)]

    def __eq__(self, other: object) -> npt.NDArray[np.bool_]:  # type: ignore[override]  # as arrays do
        return np.asarray(self[:] == (other[:] if isinstance(other, Column) else other))

    def __ne__(self, other: object) -> npt.NDArray[np.bool_]:  # type: ignore[override]
        return ~(self == other)

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        values = self.values
        array = values if dtype is None else values.astype(dtype, copy=False)
        is_view = np.may_share_memory(array, self._values)
        if copy is False and not is_view and array.size:
            raise ValueError("unable to avoid a copy: the rows have to be gathered, or to change their dtype")
        return np.array(array) if copy and is_view else array

    def tolist(self) -> list[Any]:
        """Convert the values to a list, as `numpy.ndarray.tolist` does."""
        values: list[Any] = self.values.tolist()
        return values

    def view_rows(self, rows: Rows) -> "Column":
        """Make a column of these rows over the same arrays; reads and copies nothing."""
        if isinstance(rows, range) and self._ends is None and self._rows is None:
            return Column(self._values[rows.start : rows.stop])
        return Column(self._values, self._ends, rows_at(self._rows, rows))

    def select(self, rows: npt.NDArray[Any] | slice) -> "Column":
        """Make a column of these rows, int64 [m], bool [n] or a slice; a slice of numbers is a view."""
        index = self._array_index(rows)
        if self._ends is None:
            return Column(self._values[index])
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self._ends)))
        index = nonnegative_positions(index, len(self._ends))
        starts = np.zeros(len(index), np.int64)
        behind_first = index > 0
        starts[behind_first] = self._ends[index[behind_first] - 1]
        lengths = self._ends[index] - starts
        ends = np.cumsum(lengths, dtype=np.int64)
        values = np.empty((ends[-1] if len(ends) else 0, *self.row_shape), self.dtype)
        for first in range(0, len(index), _ROWS_PER_GATHER):
            part = slice(first, first + _ROWS_PER_GATHER)
            begin, end = int(ends[first] - lengths[first]), int(ends[part][-1])
            shifts = starts[part] - (ends[part] - lengths[part])  # from the new position to the old one
            old_positions = np.arange(begin, end) + np.repeat(shifts, lengths[part])
            values[begin:end] = self._values[old_positions]
        return Column(values, ends)

    def _array_index(self, positions: Any) -> Any:
        """Convert positions in the column to an index, of the same type, of the arrays behind it."""
        if self._rows is None:
            return positions
        if not isinstance(positions, slice | int | np.integer):
            return rows_at(self._rows, np.asarray(positions))
        rows = self._rows[positions]
        if not isinstance(rows, range):
            return rows
        return slice(rows.start, rows.stop) if rows.step == 1 else np.array(rows, np.int64)

    def row_array(self, row: int) -> npt.NDArray[Any]:
        """Numbers of one row, of shape [], [k], [m] or [m, k]; the UTF-8 bytes of a text."""
        index = int(self._array_index(row))
        if self._ends is None:
            return np.asarray(self._values[index])
        start = int(self._ends[index - 1]) if index else 0
        return self._values[start : int(self._ends[index])]

    def row_value(self, row: int) -> Any:
        """Value of one row as JSON has it: int, float, str or lists."""
        array = self.row_array(row)
        return array.tobytes().decode() if self.kind == "text" else array.tolist()

    def ends_with(self, suffixes: Iterable[str]) -> npt.NDArray[np.bool_]:
        """Whether each text ends with any of these suffixes, in lower case or upper case."""
        assert self._ends is not None
        texts, ends, starts = self._values, self._ends, np.append(0, self._ends[:-1])
        if self._rows is not None:
            rows = self._array_index(slice(None))
            starts, ends = starts[rows], ends[rows]
        lengths = ends - starts
        result = np.zeros(len(ends), np.bool_)
        for suffix in suffixes:
            rows = np.flatnonzero(~result & (lengths >= len(suffix)))
            for offset, letter in enumerate(reversed(suffix.encode()), 1):
                # the bit makes a letter lower case
                rows = rows[(texts[ends[rows] - offset] | 0x20) == letter]
            result[rows] = True
        return result

    def differs_in_kind(self, other: "Column") -> bool:
        """Whether the two columns cannot be joined to one; int and float can be."""
        if (self._ends is None) != (other._ends is None):
            return True
        if (self.dtype == _TEXT) != (other.dtype == _TEXT):
            return True
        if self.row_shape == other.row_shape:
            return False
        # a ragged column without any number does not know how long its rows would be
        return self._ends is None or (len(self.values) > 0 and len(other.values) > 0)

    @classmethod
    def concatenate(cls, columns: "Sequence[Column]") -> "Column":
        """Join columns that do not differ in kind, one behind the other."""
        parts = [column.values for column in columns]
        filled = [values for values in parts if len(values)]
        joined = np.concatenate(filled or parts[:1])
        ends, values_before = [], 0
        for column, values in zip(columns, parts, strict=True):
            column_ends = column.ends
            if column_ends is None:
                return cls(joined)
            ends.append(column_ends + values_before)
            values_before += len(values)
        return cls(joined, np.concatenate(ends))

    def content(self) -> bytes:
        """Bytes that differ between columns of different content, to be hashed."""
        values, ends = self.values, self.ends
        head = f"{values.dtype}{values.shape}".encode()
        arrays = [values] if ends is None else [values, ends]
        return b"".join([head, *(np.ascontiguousarray(array).data for array in arrays)])


_NUMPY_INTEGERS: set[type] = {
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.uint8,
    np.uint16,
    np.uint32,
    np.uint64,
}
_NUMPY_NUMBERS = _NUMPY_INTEGERS | {np.bool_, np.float16, np.float32, np.float64}


def select_rows(columns: Mapping[str, Column], rows: npt.NDArray[Any]) -> dict[str, Column]:
    """Select rows of each column, as `Column.select` does."""
    return {name: column.select(rows) for name, column in columns.items()}


def row_values(columns: Mapping[str, Column], row: int) -> dict[str, Any]:
    """Value of each column in one row, as JSON has it, sorted by name so that written bytes do not vary."""
    return {name: columns[name].row_value(row) for name in sorted(columns)}


def rows_at(rows: Rows | None, positions: npt.NDArray[Any] | range) -> Rows:
    """Select the rows at these positions of `rows`, None for all; IndexError for a position outside of it."""
    if rows is None:
        return positions
    if isinstance(positions, range):
        return rows[positions.start : positions.stop]
    if isinstance(rows, range):
        offsets = nonnegative_positions(positions, len(rows))
        return offsets + rows.start if rows.start else offsets
    selected: Ints = rows[positions]
    return selected


def nonnegative_positions(positions: npt.NDArray[Any], count: int) -> Ints:
    """Convert positions, bool [count] or integers that may be negative, to integers from 0 on.

    Raises:
        IndexError: a position is outside of `count`.
    """
    if positions.dtype == np.bool_:
        return np.flatnonzero(positions)
    positions = positions.astype(np.int64, copy=False)
    if len(positions) and (positions.min() < -count or positions.max() >= count):
        raise IndexError(f"positions from {positions.min()} to {positions.max()} of {count:,} samples")
    if not len(positions) or positions.min() >= 0:
        return positions  # not a copy: there may be many
    return np.where(positions < 0, positions + count, positions)


def _number_array(value: Any) -> npt.NDArray[Any]:
    """Convert a list to int64 or float64, of shape [k] or [m, k]; ValueError where it is none of numbers."""
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


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _kind_problem(values: Sequence[Any], row: int) -> str:
    """Describe why the value of a row, with the others, makes no column."""
    value = values[row]
    if value is None:
        return "is empty"
    other = next((other for other in values if type(other) is not type(value)), None)
    contrast = "" if other is None else f", and others like {_short_repr(other)}"
    expected = "expected numbers, text or lists of numbers"
    return f"{_short_repr(value)} is {type(value).__name__}{contrast}; {expected}"


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
