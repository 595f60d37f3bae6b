"""What is known of every sample beside its picture, a column each: numbers, lists of them, text.

    int      int64 [n]                      one integer each
    float    float64 [n]                    one number each
    vector   int64 or float64 [n, k]        k numbers each
    ragged   int64 or float64 [sum, ...]    any number of them each, or of rows of k, such as boxes
    text     uint8 [sum]                    UTF-8, one behind the other

The last two have `ends`, int64 [n]: where each sample's values end.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]

VALUES, ENDS = "value:", "ends:"
"""Before the names of columns in files."""
KINDS = ("int", "float", "vector", "ragged", "text")
_NUMBERS = (np.dtype(np.int64), np.dtype(np.float64))
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


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """A value for each of n samples; see the module for `values` and `ends`.

    Raises:
        ValueError: the arrays are no such column.
    """

    values: npt.NDArray[Any]
    ends: Ints | None = None

    def __post_init__(self) -> None:
        values, ends = self.values, self.ends
        if values.dtype not in _NUMBERS and not (values.dtype == _TEXT and ends is not None):
            raise ValueError(f"values of dtype {values.dtype}")
        most = 2 if values.dtype != _TEXT else 1
        if not 1 <= values.ndim <= most:
            raise ValueError(f"values of shape {values.shape}")
        if ends is None:
            return
        adds_up = (ends[-1] if len(ends) else 0) == len(values)
        if ends.dtype != np.int64 or ends.ndim != 1 or np.any(np.diff(ends, prepend=0) < 0) or not adds_up:
            raise ValueError("ends that do not add up")

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
            raise ValueOfRowError(row, "is no text that UTF-8 can hold") from None
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
                raise ValueOfRowError(row, f"{_shown(value)} is no list of numbers") from None
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
    def kind(self) -> str:
        """One of KINDS."""
        if self.ends is not None:
            return "text" if self.values.dtype == _TEXT else "ragged"
        if self.values.ndim == 2:
            return "vector"
        return "int" if self.values.dtype == np.int64 else "float"

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Of one value, or of each of the values of a sample that has several."""
        return self.values.shape[1:]

    def __len__(self) -> int:
        return len(self.values if self.ends is None else self.ends)

    def select(self, rows: npt.NDArray[Any]) -> "Column":
        """The values of these rows: int64 [m], or bool [n]."""
        if self.ends is None:
            return Column(self.values[rows])
        rows = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        lengths = np.diff(self.ends, prepend=0)[rows]
        starts, ends = self.ends[rows] - lengths, np.cumsum(lengths, dtype=np.int64)
        values = np.empty((ends[-1] if len(ends) else 0, *self.values.shape[1:]), self.values.dtype)
        for first in range(0, len(rows), _GATHERED):
            part = slice(first, first + _GATHERED)
            begin = int(ends[first] - lengths[first])
            places = np.arange(begin, ends[part][-1])  # in the new values, then in ours
            places += np.repeat(starts[part] - (ends[part] - lengths[part]), lengths[part])
            values[begin : ends[part][-1]] = self.values[places]
        return Column(values, ends)

    def array(self, row: int) -> npt.NDArray[Any]:
        """The numbers of one row: of shape [], [k] or [m, ...]; of text, its bytes."""
        if self.ends is None:
            return np.asarray(self.values[row])
        return self.values[int(self.ends[row - 1]) if row else 0 : int(self.ends[row])]

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

    def join(self, other: "Column") -> "Column":
        """Its values, then those of `other`, which does not differ in kind."""
        parts = [column.values for column in (self, other)]
        if self.ends is None or other.ends is None:
            return Column(np.concatenate(parts))
        values = np.concatenate([part for part in parts if len(part)] or parts[:1])
        return Column(values, np.concatenate((self.ends, other.ends + len(self.values))))

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


def to_arrays(name: str, column: Column) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a column for a safetensors file; `name` may be anything."""
    arrays = {f"{VALUES}{name}": column.values}
    return arrays if column.ends is None else {**arrays, f"{ENDS}{name}": column.ends}


def from_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Column]:
    """The columns among the arrays of a safetensors file, by name.

    Raises:
        ValueError: one of them is none.
    """
    names = [key.removeprefix(VALUES) for key in arrays if key.startswith(VALUES)]
    return {name: Column(arrays[VALUES + name], arrays.get(ENDS + name)) for name in names}


def select(columns: Mapping[str, Column], rows: npt.NDArray[Any]) -> dict[str, Column]:
    """These rows of each column, as `Column.select`."""
    return {name: column.select(rows) for name, column in columns.items()}


def values_of(columns: Mapping[str, Column], row: int) -> dict[str, Any]:
    """The value of each column in one row, as `Column.value`, by name: what is written of them is sorted."""
    return {name: columns[name].value(row) for name in sorted(columns)}


def labelled(targets: Column | None, fields: Mapping[str, Column], row: int) -> tuple[Any, dict[str, Any]]:
    """What one sample is labelled with beside its class, and its fields, as `Column.value`."""
    return (None if targets is None else targets.value(row)), values_of(fields, row)


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
    equal: npt.NDArray[np.bool_] = ~different.reshape(len(different), -1).any(axis=1)
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
