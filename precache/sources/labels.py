"""Labels of samples, parsed from the values in the rows of a table, a dataset or tars.

The values decide the target, unless the user names one:

    text, whole numbers                  class: classes are sorted, whole numbers by their size
    lists of them, text with separators  classes
    other numbers, lists of these        number

Lists of whole numbers that are no sets of classes, as a vector of -1 and 1 or landmarks, are refused until
the user names the target; values that leave a doubt get a note.

If a source has names of classes, whole numbers are indices of these names, and -1 or an empty value says that
a sample has no label. The cells of a CSV are text at first; `precache.sources.cells` parses them. A class has
the name that its cell has: 1, 1.0 and 1e0 are three classes.
"""

import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from precache.dataset.columns import Column, Ints, ValueOfRowError
from precache.errors import SettingError
from precache.reporting import quantity
from precache.sources.cells import NOT_A_LIST, NUMBER, is_list, looks_like_list, parse_cells, short_repr
from precache.sources.options import SourceOptions

# matches numbers as people write them, too: 007, +49, 1.
_ANY_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]{1,3})?")

_SEPARATORS = ("|", ";", ",", "/", "&", "+", " ")
"""What people write between several classes in one cell."""
_COMPARED_NAMES = 10_000  # names of classes that are searched for separators


@dataclass(frozen=True, slots=True)
class ParsedLabels:
    """Labels of rows, as classes or as numbers to predict.

    Attributes:
        target: kind of the labels, one of `precache.dataset.columns.TARGETS`.
        classes: names of the classes, which `labels` or `targets` index.
        labels: int64 [n], index of each row's class; -1 if the target is not one class.
        targets: class indices or numbers of each row, see `precache.sources.base.Samples`.
        notes: phrases on choices that the values left open, and on names that look wrong.
        rows: int64 [n], rows that have a label; None if all have.
    """

    target: str
    classes: tuple[str, ...]
    labels: Ints
    targets: Column | None = None
    notes: tuple[str, ...] = ()
    rows: Ints | None = None

    @classmethod
    def without_labels(cls, count: int, *notes: str) -> "ParsedLabels":
        """Make the labels of `count` rows that have none."""
        return cls("none", (), np.full(count, -1), None, notes)


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return `names` with its index behind each name that occurs twice: ImageNet has two cranes."""
    times = Counter(names)
    return tuple(f"{name} {index}" if times[name] > 1 else name for index, name in enumerate(names))


class LabelList:
    """List of labels that grows row by row while a source is scanned; each distinct text is stored once."""

    def __init__(self) -> None:
        self._codes = array("q")  # of each row, an index of `_values`
        self._values: list[Any] = []
        self._rows = array("q")  # first row of each of `_values`
        self._code_of: dict[str | int, int] = {}

    def add(self, value: Any) -> None:
        """Append the label of the next row; bool, None and NaN become the texts 'true', 'false' and ''."""
        if not isinstance(value, str):
            value = _plain_value(value)
        code = len(self._values)
        if isinstance(value, str | int):
            code = self._code_of.setdefault(value, code)
        if code == len(self._values):
            self._values.append(value)
            self._rows.append(len(self._codes))
        self._codes.append(code)

    def parse(
        self, options: SourceOptions, *, is_text: bool = False, class_names: tuple[str, ...] | None = None
    ) -> ParsedLabels:
        """Return the labels as classes or numbers.

        Args:
            options: options with the target and the separator that the user has named.
            is_text: whether the values are unparsed text, as the cells of a CSV are.
            class_names: names that the values are, or are indices of; then rows with -1 or an empty value
                have no label. None if the source has no such names.

        Raises:
            ValueOfRowError: a value is empty, unlike the others, or not what the target takes.
            SettingError: the target takes no separator.
        """
        count = len(self._codes)
        if options.target == "none":
            return ParsedLabels.without_labels(count)
        if class_names is None or options.target not in (None, "class"):
            return self._parse_all(options, is_text, class_names)
        rows = np.flatnonzero(~self._are_missing())
        if not len(rows) and options.target is None:
            return ParsedLabels.without_labels(count, "are all -1, so pictures get no labels")
        if len(rows) in (0, count):
            return self._parse_all(options, is_text, class_names)
        try:
            labels = self._select(rows)._parse_all(options, is_text, class_names)
        except ValueOfRowError as error:
            raise ValueOfRowError(int(rows[error.row]), error.reason) from None
        return replace(labels, rows=rows)

    def _are_missing(self) -> npt.NDArray[np.bool_]:
        """Return bool [n], whether each row's value is -1 or empty, if all values are whole numbers."""
        codes = np.frombuffer(self._codes, np.int64)
        if not all(isinstance(value, int) or value == "" for value in self._values):
            return np.zeros(len(codes), np.bool_)
        return np.array([value in (-1, "") for value in self._values], np.bool_)[codes]

    def _select(self, rows: Ints) -> "LabelList":
        """Return the list of the labels at these rows."""
        selection = LabelList()
        for row in rows.tolist():
            selection.add(self._values[self._codes[row]])
        return selection

    def _parse_all(
        self, options: SourceOptions, is_text: bool, class_names: tuple[str, ...] | None
    ) -> ParsedLabels:
        """Return the labels of all rows, none of which may be without one."""
        target, notes = options.target, list[str]()
        values: Sequence[Any]
        try:
            if options.separator is None:
                values = self._parse_values(target, is_text)
            else:
                values, target = _split_texts(self._values, options.separator, target), "classes"
            chosen = self._choose_target(values, target, class_names)
            if chosen != "number" and values is not self._values and _is_number(values[0]):
                # classes are named as the cells are written: 1.10 stays 1.10
                encoded = _ENCODERS[chosen]([_NumberText(cell) for cell in self._values])
            else:
                encoded = _ENCODERS[chosen](values)
            if class_names is None or chosen == "number":
                if target is None:
                    notes += self._notes_on_target(values, chosen, encoded.classes)
                if chosen == "class" and len(encoded.classes) == len(self._codes) > 2:
                    notes.append(
                        "differ in every row, so each row is a class of its own; is this the right column?"
                    )
                notes += _notes_on_similar_names(encoded.classes)
            else:
                encoded = _index_class_names(values, encoded, class_names)
        except ValueOfRowError as error:
            raise ValueOfRowError(self._rows[error.row], error.reason) from None
        # so far there is one label for each distinct value; the codes say which each row has
        codes = np.frombuffer(self._codes, np.int64)
        return ParsedLabels(
            target=chosen,
            classes=encoded.classes,
            labels=np.full(len(codes), -1) if encoded.labels is None else encoded.labels[codes],
            targets=None if encoded.targets is None else encoded.targets.select(codes),
            notes=tuple(notes),
        )

    def _parse_values(self, target: str | None, is_text: bool) -> Sequence[Any]:
        """Return the distinct values with their texts parsed: cells of a CSV, and lists in any text."""
        values: Sequence[Any] = self._values
        if not all(isinstance(value, str) for value in values):
            return values
        if _are_lists(values, target):
            return parse_cells(values)
        if not is_text:
            return values
        values = parse_cells(values)
        if target is None and values is self._values:
            # text beside fractions: one of the two is a mistake
            fractions = [value for value in values if NUMBER.fullmatch(value) and "." in value]
            text_row = next((row for row, value in enumerate(values) if not NUMBER.fullmatch(value)), None)
            if fractions and text_row is not None and values[text_row]:
                raise ValueOfRowError(
                    text_row,
                    f"{short_repr(values[text_row])} is not a number; other rows look like {fractions[0]}; "
                    f"correct it, or say that they are classes with --target class",
                )
        return values

    def _choose_target(
        self, values: Sequence[Any], target: str | None, class_names: tuple[str, ...] | None
    ) -> str:
        """Return `target`, or the one that fits the values; ValueOfRowError if they are of several kinds."""
        kinds = [_kind_name(row, value) for row, value in enumerate(values)]
        _check_filled(values, may_be_blank=target == "classes")
        first_kind = "text"
        for kind, value in zip(kinds, values, strict=True):
            if value != "":
                first_kind = kind
                break
        for row, kind in enumerate(kinds):
            if kind != first_kind and values[row] != "":
                reason = f"{short_repr(values[row])} is {kind}, other rows have {first_kind}"
                raise ValueOfRowError(row, f"{reason}; write all in one way")
        if target is not None:
            return target
        are_lists = first_kind == "a list"
        parts = [part for value in values for part in value] if are_lists else values
        if any(isinstance(part, float) and not part.is_integer() for part in parts):
            return "number"
        if are_lists and all(_is_number(part) for part in parts):
            _check_are_sets(values, are_indices=class_names is not None)
        return "classes" if are_lists else "class"

    def _notes_on_target(self, values: Sequence[Any], chosen: str, classes: Sequence[str]) -> Iterable[str]:
        """Yield notes on a target that was chosen by the values, and how to pass another one."""
        if chosen == "number":
            yield "are read as numbers to predict; to make each a class, pass --target class"
        elif chosen == "class" and not isinstance(values[0], str):
            if "-1" in classes:
                yield "have the class -1, as data sets write it where there is no label; leave these rows out"
            number = quantity(len(classes), "class", "classes")
            yield f"are read as {number}; to predict them as numbers, pass --target number"
        elif chosen == "class":
            yield from _notes_on_several_classes(classes)
        elif all(map(_is_number, values[0])) and len({*map(len, values)}) == 1:
            number = quantity(len(classes), "class", "classes")
            yield f"are read as sets of {number}; to predict the vectors of numbers, pass --target number"


def _are_lists(texts: Sequence[str], target: str | None) -> bool:
    """Return whether all labels are texts of lists.

    Raises:
        ValueOfRowError: some are lists and others are not, or all look like lists and none can be read;
            not for the target `class`, which takes any text for a name.
    """
    looks = [looks_like_list(text) for text in texts if text]
    list_rows = [row for row, text in enumerate(texts) if text and looks_like_list(text) and is_list(text)]
    if target != "class" and list_rows and not all(looks):
        raise ValueOfRowError(
            list_rows[0],
            f"{short_repr(texts[list_rows[0]])} is a list, other rows have text; write all in one way, or "
            f"say that each is the name of one class with --target class",
        )
    if target != "class" and looks and all(looks) and not list_rows:
        row = next(row for row, text in enumerate(texts) if text)
        raise ValueOfRowError(
            row,
            f"{short_repr(texts[row])} {NOT_A_LIST}; write it so, or say that each is the name of one class "
            f"with --target class",
        )
    return bool(list_rows) and all(looks)


def _check_are_sets(values: Sequence[Any], *, are_indices: bool) -> None:
    """Raise ValueOfRowError if the lists of whole numbers look like vectors, not like sets of classes.

    Args:
        are_indices: whether the source says that the numbers are classes; then one may stand twice in a list.
    """
    width = len(values[0])
    are_zeros_and_ones = all(len(parts) == width and {0, 1} >= {*parts} for parts in values)
    for row, parts in enumerate(values):
        reason = ""
        if are_zeros_and_ones and len(parts) > 1 and list(parts) != sorted({*parts}):
            reason = "looks like a 0 or a 1 for each class; list the indices or names of its classes, or"
        elif not are_indices and len({*parts}) < len(parts):
            reason = "has a number twice, so it is no set of classes;"
        elif not are_indices and min(parts, default=0) < 0:
            reason = "has a number below 0, which is no index of a class;"
        if reason:
            raise ValueOfRowError(
                row,
                f"{short_repr(parts)} {reason} pass --target number to predict the vector (--target classes: "
                f"each number is a class)",
            )


class _NumberText(str):
    """Text of a number that sorts by its value: 1.1 and 1.10 are two names, and so are 2 and 2.0."""

    __slots__ = ()

    def __lt__(self, other: str) -> bool:
        return (Decimal(self), str(self)) < (Decimal(other), str(other))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _plain_value(value: Any) -> Any:
    """Return NumPy's values as Python's; bool, None and NaN as the texts 'true', 'false' and ''."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return value


def _kind_name(row: int, value: Any) -> str:
    """Return the name of a label's kind in messages; ValueOfRowError if labels cannot be of this type."""
    if isinstance(value, str):
        return "text"
    if _is_number(value):
        return "a number"
    if isinstance(value, list | tuple):
        return "a list"
    raise ValueOfRowError(
        row, f"{short_repr(value)} is {type(value).__name__}; expected text, numbers or lists of them"
    )


def _check_filled(values: Sequence[Any], *, may_be_blank: bool) -> None:
    """Raise ValueOfRowError if a value is NaN, or blank text that may not be so."""
    for row, value in enumerate(values):
        is_blank = isinstance(value, str) and not value.strip()
        if (is_blank and not may_be_blank) or (isinstance(value, float) and math.isnan(value)):
            raise ValueOfRowError(row, "is empty; fill it in or remove the row")


def _split_texts(values: Sequence[Any], separator: str, target: str | None) -> list[list[str]]:
    """Split each text at the separator into the names of its classes."""
    if target not in (None, "classes"):
        raise SettingError(
            f"--separator is for --target classes, not {target}", remedy="leave one of them out"
        )
    names: list[list[str]] = []
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise ValueOfRowError(row, f"{short_repr(value)} is not text that can be split at {separator!r}")
        names.append([part.strip() for part in value.split(separator) if part.strip()])
    return names


class _EncodedLabels(NamedTuple):
    """Labels as indices of classes, or as numbers.

    Attributes:
        classes: names of the classes; empty for numbers.
        labels: int64 [n], index of each one's class; None if the target is not one class.
        targets: class indices or numbers; None if the target is one class.
    """

    classes: tuple[str, ...]
    labels: Ints | None
    targets: Column | None


def _encode_class(values: Sequence[Any]) -> _EncodedLabels:
    """Encode labels that are one class each."""
    for row, value in enumerate(values):
        if isinstance(value, list | tuple):
            raise ValueOfRowError(
                row, f"{short_repr(value)} is a list; --target classes takes several classes"
            )
    names, index_of = _sorted_classes(values)
    return _EncodedLabels(names, np.array([index_of[value] for value in values], np.int64), None)


def _encode_classes(values: Sequence[Any]) -> _EncodedLabels:
    """Encode labels that are any number of classes each."""
    lists = [_label_parts(value) for value in values]
    for row, parts in enumerate(lists):
        is_mixed = len({isinstance(part, str) for part in parts}) > 1
        if is_mixed or not all(_is_class(part) for part in parts):
            raise ValueOfRowError(
                row, f"{short_repr(parts)} is not a list of classes: text alone, or numbers"
            )
    all_parts = [part for parts in lists for part in parts]
    if not all_parts:
        raise ValueOfRowError(0, "is empty, and so are all others; expected classes")
    for row, parts in enumerate(lists):
        if parts and isinstance(parts[0], str) != isinstance(all_parts[0], str):
            raise ValueOfRowError(
                row,
                f"mixed label types: {short_repr(parts)} and {short_repr([all_parts[0]])}; write all in one "
                f"way",
            )
    names, index_of = _sorted_classes(all_parts)
    indices = [sorted({index_of[part] for part in parts}) for parts in lists]
    ends = np.cumsum([len(row_indices) for row_indices in indices], dtype=np.int64)
    flat = np.array([index for row_indices in indices for index in row_indices], np.int64)
    return _EncodedLabels(names, None, Column(flat, ends))


def _encode_numbers(values: Sequence[Any]) -> _EncodedLabels:
    """Encode labels that are a number, or a vector of as many numbers, each."""
    for row, value in enumerate(values):
        if isinstance(value, str):
            raise ValueOfRowError(row, f"{short_repr(value)} is not a number")
    column = Column.from_values(values)
    if column.kind == "ragged":
        row = next((row for row, value in enumerate(values) if len(value) != len(values[0])), 0)
        reason = f"{short_repr(values[row])} is not like {short_repr(values[0])}"
        raise ValueOfRowError(row, f"{reason}; expected flat lists of one length")
    numbers = column.values.astype(np.float64)
    infinite_rows = np.flatnonzero(~np.isfinite(numbers.reshape(len(numbers), -1)).all(1))
    if len(infinite_rows):
        row = int(infinite_rows[0])
        raise ValueOfRowError(row, f"{short_repr(values[row])} is not finite; correct it or remove the row")
    with np.errstate(invalid="ignore"):  # 2**63, to which the largest are rounded, is no int64
        is_rounded = numbers.astype(column.dtype) != column.values
    rounded_rows = np.flatnonzero(is_rounded.reshape(len(numbers), -1).any(1))
    if len(rounded_rows):
        row = int(rounded_rows[0])
        raise ValueOfRowError(
            row,
            f"{short_repr(values[row])} is larger than float64 holds exactly; subtract a constant from all",
        )
    return _EncodedLabels((), None, Column(numbers))


_ENCODERS: dict[str, Callable[[Sequence[Any]], _EncodedLabels]] = {
    "class": _encode_class,
    "classes": _encode_classes,
    "number": _encode_numbers,
}
"""Function that encodes the labels of each target."""


def _label_parts(value: Any) -> list[Any]:
    """Return the classes of one label: the items of a list, or the value itself; none if it is empty."""
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value == "" else [value]


def _index_class_names(
    values: Sequence[Any], encoded: _EncodedLabels, class_names: tuple[str, ...]
) -> _EncodedLabels:
    """Return labels that index `class_names`, the names that the source has, in the place of `encoded`.

    Raises:
        ValueOfRowError: a label is neither one of the names nor an index of one.
    """
    index_of_name = {name: index for index, name in enumerate(class_names)}
    has_text = any(isinstance(part, str) and part for value in values for part in _label_parts(value))
    if not has_text:  # numbers are indices
        index_of_name |= {str(index): index for index in range(len(class_names))}
    new_indices = np.array([index_of_name.get(name, -1) for name in encoded.classes], np.int64)
    labels, targets = encoded.labels, encoded.targets
    unknown = int(np.argmin(new_indices))
    if new_indices[unknown] < 0:
        row = int(np.argmax(labels == unknown)) if labels is not None else 0
        if targets is not None and targets.ends is not None:
            row = int(np.searchsorted(targets.ends, np.argmax(targets.values == unknown), side="right"))
        raise ValueOfRowError(
            row,
            f"{encoded.classes[unknown]} is not a class; expected 0 to {len(class_names) - 1}, or one of "
            f"{', '.join(class_names)[:80]} (a dataset without labels is converted with target='none')",
        )
    if targets is not None:
        return _EncodedLabels(class_names, None, Column(new_indices[targets.values], targets.ends))
    return _EncodedLabels(class_names, new_indices[labels], None)


def _is_class(part: Any) -> bool:
    """Return whether a part of a label can be a class: text that is not blank, or a finite number."""
    if isinstance(part, str):
        return bool(part.strip())
    return isinstance(part, int | float) and math.isfinite(part)


def _sorted_classes(values: Iterable[Any]) -> tuple[tuple[str, ...], dict[Any, int]]:
    """Return the distinct classes in their order, as text, and the index of each; 1.0 and 1 are one."""
    classes = sorted(set(values))
    names = [
        str(int(value) if isinstance(value, float) and value.is_integer() else value) for value in classes
    ]
    return tuple(names), {value: index for index, value in enumerate(classes)}


def _notes_on_several_classes(classes: Sequence[str]) -> Iterable[str]:
    """Yield a note if names of classes look like several classes, or several numbers, in one cell.

    No name has a bar or a semicolon in it. Another separator may stand in names such as 'black bear', unless
    it splits most of these into other names, or all into fewer parts than there are names.
    """
    names = set(classes[:_COMPARED_NAMES])
    for separator in _SEPARATORS:
        joined_names = [name for name in names if separator in name]
        parts_of = {name: [part.strip() for part in name.split(separator)] for name in joined_names}
        several = sorted(name for name, parts in parts_of.items() if all(parts))
        if not several:
            continue
        distinct = {part for name in several for part in parts_of[name]}
        example = short_repr(several[0])
        if len(several) == len(names) and all(map(_ANY_NUMBER.fullmatch, distinct)):
            yield (
                f"look like several numbers in one cell, as {example}; to predict them, write lists, [1, 2], "
                f"and decimal points"
            )
            return
        made_of_others = sum(names.issuperset(parts_of[name]) for name in several)
        has_fewer_parts = len(distinct | names.difference(several)) < len(names)
        if separator in "|;" or 2 * made_of_others > len(several) or has_fewer_parts:
            yield (
                f"look like several classes in one cell, as {example}; for these pass --separator "
                f"{separator!r}, to keep each cell as one class --target class"
            )
            return


def _notes_on_similar_names(classes: Sequence[str]) -> Iterable[str]:
    """Yield notes on names with outer spaces, and on two that differ in spaces or case, or are one number."""
    if spaced := next((name for name in classes if name != name.strip()), None):
        yield f"have the class {spaced!r}, with a space at its end or its beginning"
    first_names: dict[Any, str] = {}
    for name in classes:
        text = " ".join(name.split()).casefold()
        is_number = _ANY_NUMBER.fullmatch(text) is not None
        first = first_names.setdefault(Decimal(text) if is_number else text, name)
        if first != name:
            relation = "are one number" if is_number else "differ only in spaces or in case"
            yield f"have classes {first!r} and {name!r}, which {relation}"
            return
