"""Labels: what the values in the rows of a table, a dataset or tars say that samples are labelled with.

    text, whole numbers                  class: the names are sorted, whole numbers by their size
    lists of them, text with separators  classes
    other numbers, lists of these        number

That is what the values say; a `target` that is asked for goes before. Where a source has names of classes,
whole numbers are indices of these, and -1 or nothing says that a sample has no label. The cells of a CSV are
text at first, and `precache.sources.cells` says what they hold; a class is called as its cell is written: 1,
1.0 or 1e0.
"""

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from precache.dataset.columns import Column, Ints, ValueOfRowError
from precache.errors import SettingError
from precache.reporting import quantity
from precache.sources.cells import NO_LIST, NUMBER, is_list, looks_like_list, shown, typed
from precache.sources.options import SourceOptions

# As people write numbers, too.
_ANY_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class Labelled:
    """What rows are labelled with.

    Attributes:
        target: one of `precache.dataset.columns.TARGETS`.
        classes: names; `labels` and `targets` index them.
        labels: int64 [n]; -1 where the target is not one class.
        targets: see `precache.sources.base.Samples`.
        notes: what was chosen where the values leave a choice, and what looks wrong; phrases.
        rows: int64 [n], the rows that are labelled so; None: every row.
    """

    target: str
    classes: tuple[str, ...]
    labels: Ints
    targets: Column | None = None
    notes: tuple[str, ...] = ()
    rows: Ints | None = None

    @classmethod
    def with_nothing(cls, count: int, *notes: str) -> "Labelled":
        """What so many rows without labels are labelled with."""
        return cls("none", (), np.full(count, -1), None, notes)


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """`names`, those that are there twice followed by their index: ImageNet has two cranes."""
    times = Counter(names)
    return tuple(f"{name} {index}" if times[name] > 1 else name for index, name in enumerate(names))


class Labels:
    """Labels as they are read, row by row; each text and each integer is kept once."""

    def __init__(self) -> None:
        self._codes = array("q")  # of each row, an index of `_values`
        self._values: list[Any] = []
        self._rows = array("q")  # where each value was first met
        self._code_of: dict[str | int, int] = {}

    def add(self, value: Any) -> None:
        """Note the label of the next row; bool, None and NaN stand for the texts 'true', 'false' and ''."""
        if not isinstance(value, str):
            value = _plain(value)
        code = len(self._values)
        if isinstance(value, str | int):
            code = self._code_of.setdefault(value, code)
        if code == len(self._values):
            self._values.append(value)
            self._rows.append(len(self._codes))
        self._codes.append(code)

    def labelled(
        self, options: SourceOptions, *, is_text: bool = False, class_names: tuple[str, ...] | None = None
    ) -> Labelled:
        """The labels as a target: classes or numbers.

        Args:
            options: their target and separator.
            is_text: whether they are text that says what it holds, as the cells of a CSV are.
            class_names: names that they are, or are indices of; rows with -1 or nothing have no label then.
                None: they speak for themselves.

        Raises:
            ValueOfRowError: one is empty, or unlike the others, or not what the target takes.
            SettingError: the target takes no separator.
        """
        count = len(self._codes)
        if options.target == "none":
            return Labelled.with_nothing(count)
        if class_names is None or options.target not in (None, "class"):
            return self._labelled(options, is_text, class_names)
        rows = np.flatnonzero(~self._are_missing())
        if not len(rows) and options.target is None:
            return Labelled.with_nothing(count, "are all -1, so pictures get no labels")
        if len(rows) in (0, count):
            return self._labelled(options, is_text, class_names)
        try:
            labelled = self._select(rows)._labelled(options, is_text, class_names)
        except ValueOfRowError as error:
            raise ValueOfRowError(int(rows[error.row]), error.reason) from None
        return replace(labelled, rows=rows)

    def _are_missing(self) -> npt.NDArray[np.bool_]:
        """bool [n]: whether the label of each row is -1, or there is none, where all are whole numbers."""
        codes = np.frombuffer(self._codes, np.int64)
        if not all(isinstance(value, int) or value == "" for value in self._values):
            return np.zeros(len(codes), np.bool_)
        return np.array([value in (-1, "") for value in self._values], np.bool_)[codes]

    def _select(self, rows: Ints) -> "Labels":
        """The labels of these rows."""
        chosen = Labels()
        for row in rows.tolist():
            chosen.add(self._values[self._codes[row]])
        return chosen

    def _labelled(
        self, options: SourceOptions, is_text: bool, class_names: tuple[str, ...] | None
    ) -> Labelled:
        """The labels of all rows, of which each has one."""
        target, notes = options.target, list[str]()
        values: Sequence[Any]
        try:
            if options.separator is None:
                values = self._typed(target, is_text)
            else:
                values, target = _separated(self._values, options.separator, target), "classes"
            chosen = self._chosen(values, target)
            if chosen != "number" and values is not self._values and _is_number(values[0]):
                written = [_WrittenNumber(cell) for cell in self._values]
                found, labels, targets = _MAKERS[chosen](written)
            else:
                found, labels, targets = _MAKERS[chosen](values)
            if class_names is None or chosen == "number":
                notes += self._choice(values, target, chosen, found)
                notes += _alike(found)
            else:
                labels, targets = _as_indices(values, found, labels, targets, class_names)
                found = class_names
        except ValueOfRowError as error:
            raise ValueOfRowError(self._rows[error.row], error.reason) from None
        codes = np.frombuffer(self._codes, np.int64)
        return Labelled(
            target=chosen,
            classes=found,
            labels=np.full(len(codes), -1) if labels is None else labels[codes],
            targets=None if targets is None else targets.select(codes),
            notes=tuple(notes),
        )

    def _typed(self, target: str | None, is_text: bool) -> Sequence[Any]:
        """The values that texts stand for: those of cells, and lists in any text."""
        values: Sequence[Any] = self._values
        if not all(isinstance(value, str) for value in values):
            return values
        if _hold_lists(values, target):
            return typed(values)
        if not is_text:
            return values
        values = typed(values)
        if target is None and values is self._values:
            broken = [value for value in values if NUMBER.fullmatch(value) and "." in value]
            row = next((r for r, value in enumerate(values) if not NUMBER.fullmatch(value)), None)
            if broken and row is not None and values[row]:
                raise ValueOfRowError(
                    row,
                    f"{shown(values[row])} is not a number; other rows look like {broken[0]}; correct it, "
                    f"or say that they are classes with --target class",
                )
        return values

    def _chosen(self, values: Sequence[Any], target: str | None) -> str:
        """The target; every value is of a kind that fits the others."""
        kinds = [_kind(row, value) for row, value in enumerate(values)]
        if target != "classes":
            _check_filled(values)
        filled = [kind for kind, value in zip(kinds, values, strict=True) if value != ""]
        first = filled[0] if filled else "text"
        for row, kind in enumerate(kinds):
            if kind != first and values[row] != "":
                raise ValueOfRowError(
                    row, f"{shown(values[row])} is {kind}, other rows have {first}; write all in one way"
                )
        if target is not None:
            return target
        parts = [part for value in values for part in value] if first == "a list" else values
        if any(isinstance(part, float) and not part.is_integer() for part in parts):
            return "number"
        if first == "a list" and all(map(_is_number, parts)):
            _check_not_multi_hot(values)
        return "classes" if first == "a list" else "class"

    def _choice(
        self, values: Sequence[Any], asked: str | None, chosen: str, classes: Sequence[str]
    ) -> Iterable[str]:
        if asked is None and chosen == "number":
            yield "are read as numbers to predict; to make each a class, pass --target class"
        elif asked is None and chosen == "class" and not isinstance(values[0], str):
            if "-1" in classes:
                yield "have the class -1, as data sets write it where there is no label; leave these rows out"
            number = quantity(len(classes), "class", "classes")
            yield f"are read as {number}; to predict them as numbers, pass --target number"
        if chosen == "class" and len(classes) == len(self._codes) > 2:
            yield "differ in every row, so each row is a class of its own; is this the right column?"


def _hold_lists(texts: Sequence[str], target: str | None) -> bool:
    """Whether each of the labels holds a list.

    Raises:
        ValueOfRowError: one does and another does not, or they look like lists that cannot be read; where it
            is not asked to take them for names.
    """
    looks = [looks_like_list(text) for text in texts if text]
    lists = [row for row, text in enumerate(texts) if text and looks_like_list(text) and is_list(text)]
    if target != "class" and lists and not all(looks):
        raise ValueOfRowError(
            lists[0],
            f"{shown(texts[lists[0]])} is a list, other rows have text; write all in one way, or say that "
            f"each is the name of one class with --target class",
        )
    if target != "class" and looks and all(looks) and not lists:
        row = next(row for row, text in enumerate(texts) if text)
        raise ValueOfRowError(
            row,
            f"{shown(texts[row])} {NO_LIST}; write it so, or say that each is the name of one class with "
            f"--target class",
        )
    return bool(lists) and all(looks)


def _check_not_multi_hot(values: Sequence[Any]) -> None:
    """Raise ValueOfRowError where the lists look like a 0 or a 1 for each class, not like classes."""
    row = next(
        (row for row, parts in enumerate(values) if len(parts) > 1 and list(parts) != sorted({*parts})), None
    )
    width = len(values[0])
    if row is None or not all(len(parts) == width and {0, 1} >= {*parts} for parts in values):
        return
    raise ValueOfRowError(
        row,
        f"{shown(values[row])} looks like a 0 or a 1 for each class; list the indices or names of its "
        f"classes instead, or pass --target number to predict the vector (--target classes: the classes 0 "
        f"and 1)",
    )


class _WrittenNumber(str):
    """A number as a cell has it, sorted by its size: 1.1 and 1.10 are two names, and so are 2 and 2.0."""

    __slots__ = ()

    def __lt__(self, other: str) -> bool:
        return (Decimal(self), str(self)) < (Decimal(other), str(other))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def _kind(row: int, value: Any) -> str:
    if isinstance(value, str):
        return "text"
    if _is_number(value):
        return "a number"
    if isinstance(value, list | tuple):
        return "a list"
    raise ValueOfRowError(
        row, f"{shown(value)} is {type(value).__name__}; expected text, numbers or lists of them"
    )


def _check_filled(values: Sequence[Any]) -> None:
    for row, value in enumerate(values):
        if (isinstance(value, str) and not value.strip()) or (isinstance(value, float) and math.isnan(value)):
            raise ValueOfRowError(row, "is empty; fill it in or remove the row")


def _separated(values: Sequence[Any], separator: str, target: str | None) -> list[Any]:
    """The lists of classes that the texts stand for."""
    if target not in (None, "classes"):
        raise SettingError(f"--separator is for --target classes, not {target}; leave one of them out")
    parted: list[Any] = []
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise ValueOfRowError(row, f"{shown(value)} is not text that can be split at {separator!r}")
        parted.append([part.strip() for part in value.split(separator) if part.strip()])
    return parted


def _one_class(values: Sequence[Any]) -> tuple[tuple[str, ...], Ints, None]:
    for row, value in enumerate(values):
        if isinstance(value, list | tuple):
            raise ValueOfRowError(row, f"{shown(value)} is a list; --target classes takes several classes")
    names, index_of = _class_names(values)
    return names, np.array([index_of[value] for value in values], np.int64), None


def _many_classes(values: Sequence[Any]) -> tuple[tuple[str, ...], None, Column]:
    lists = [_parts_of(value) for value in values]
    for row, parts in enumerate(lists):
        mixed = {isinstance(part, str) for part in parts}
        if len(mixed) > 1 or not all(_is_name(part) for part in parts):
            raise ValueOfRowError(row, f"{shown(parts)} is not a list of classes: text alone, or numbers")
    every = [part for parts in lists for part in parts]
    if not every:
        raise ValueOfRowError(0, "is empty, and so are all others; expected classes")
    for row, parts in enumerate(lists):
        if parts and isinstance(parts[0], str) != isinstance(every[0], str):
            raise ValueOfRowError(
                row, f"mixed label types: {shown(parts)} and {shown([every[0]])}; write all in one way"
            )
    names, index_of = _class_names(every)
    indices = [sorted({index_of[part] for part in parts}) for parts in lists]
    ends = np.cumsum([len(found) for found in indices], dtype=np.int64)
    return names, None, Column(np.array([i for found in indices for i in found], np.int64), ends)


def _parts_of(value: Any) -> list[Any]:
    """The classes of one label: those of a list, or a single one; none where it is empty."""
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value == "" else [value]


def _as_indices(
    values: Sequence[Any],
    found: Sequence[str],
    labels: Ints | None,
    targets: Column | None,
    classes: Sequence[str],
) -> tuple[Ints | None, Column | None]:
    """`labels` and `targets`, which index the names `found`, as indices of `classes`."""
    by_name = {name: index for index, name in enumerate(classes)}
    parts = (part for value in values for part in _parts_of(value))
    if not any(isinstance(part, str) and part for part in parts):  # numbers are indices themselves
        by_name |= {str(index): index for index in range(len(classes))}
    index_of = np.array([by_name.get(name, -1) for name in found], np.int64)
    strange = int(np.argmin(index_of))
    if index_of[strange] < 0:
        row = int(np.argmax(labels == strange)) if labels is not None else 0
        if targets is not None and targets.ends is not None:
            row = int(np.searchsorted(targets.ends, np.argmax(targets.values == strange), side="right"))
        raise ValueOfRowError(
            row,
            f"{found[strange]} is not a class; expected 0 to {len(classes) - 1}, or one of "
            f"{', '.join(classes)[:80]} (a dataset without labels is converted with target='none')",
        )
    if targets is not None:
        return None, Column(index_of[targets.values], targets.ends)
    return index_of[labels], None


def _is_name(part: Any) -> bool:
    if isinstance(part, str):
        return bool(part.strip())
    return isinstance(part, int | float) and math.isfinite(part)


def _class_names(values: Iterable[Any]) -> tuple[tuple[str, ...], dict[Any, int]]:
    """Sorted, text as text and numbers as numbers; 1.0 and 1 are one class."""
    distinct = sorted(set(values))
    whole = (int(v) if isinstance(v, float) and v.is_integer() else v for v in distinct)
    return tuple(map(str, whole)), {value: index for index, value in enumerate(distinct)}


def _numbers(values: Sequence[Any]) -> tuple[tuple[str, ...], None, Column]:
    for row, value in enumerate(values):
        if isinstance(value, str):
            raise ValueOfRowError(row, f"{shown(value)} is not a number")
    column = Column.from_values(values)
    if column.kind == "ragged":
        row = next((r for r, value in enumerate(values) if len(value) != len(values[0])), 0)
        raise ValueOfRowError(
            row, f"{shown(values[row])} is not like {shown(values[0])}; expected flat lists of one length"
        )
    numbers = column.values.astype(np.float64)
    infinite = np.flatnonzero(~np.isfinite(numbers.reshape(len(numbers), -1)).all(1))
    if len(infinite):
        row = int(infinite[0])
        raise ValueOfRowError(row, f"{shown(values[row])} is not finite; correct it or remove the row")
    return (), None, Column(numbers)


def _alike(classes: Sequence[str]) -> Iterable[str]:
    """A note on names with spaces at an end, or that differ only in spaces or in case, or are one number."""
    if spaced := next((name for name in classes if name != name.strip()), None):
        yield f"have the class {spaced!r}, with a space at its end or its beginning"
    first_of: dict[Any, str] = {}
    for name in classes:
        text = " ".join(name.split()).casefold()
        number = _ANY_NUMBER.fullmatch(text)
        other = first_of.setdefault(Decimal(text) if number else text, name)
        if other != name:
            how = "are one number" if number else "differ only in spaces or in case"
            yield f"have classes {other!r} and {name!r}, which {how}"
            return


_MAKERS: dict[str, Any] = {"class": _one_class, "classes": _many_classes, "number": _numbers}
