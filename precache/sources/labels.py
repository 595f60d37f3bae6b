"""What the rows of a table, the samples of a dataset or of tars say: paths, splits, fields, and labels.

    text, whole numbers                  class: the names are sorted, whole numbers by their size
    lists of them, text with separators  classes
    other numbers, lists of these        number

That is what the values of the labels say; a `target` that is asked for goes before. The cells of a CSV are
text at first, and `typed` says what they hold; a class is called as its cell is written: 1, 1.0 or 1e0.
Lists in text are read as JSON, Python and numpy write them, see `parse_list`.
"""

import ast
import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from precache.dataset.columns import Column, Ints, ValueOfRowError
from precache.errors import SettingError, SourceError
from precache.recipe import SPLIT_NAME
from precache.reporting import counted
from precache.sources.base import IgnoredPath, SampleList, Samples, Scan, Source, digest_of
from precache.sources.options import SourceOptions

IMAGE_NAMES = ("image", "img", "picture", "path", "file", "filename", "file_name")
"""What the column of the pictures, or of their paths, is called more often than not."""
LABEL_NAMES = ("label", "labels", "class", "class_name", "target", "category")
"""What the column of the labels is called more often than not."""

# As a program writes numbers: 007, +49 and numbers of 19 digits are names. 18 digits fit into 64 bits.
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")
_NUMBER = re.compile(r"-?((0|[1-9][0-9]{0,17})(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?|nan|NaN|-?inf")
# As people write them, too.
_ANY_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]{1,3})?")
_SHOWN = 60
_NAMED = 20  # columns that a message names

_CALLED = re.compile(
    r"(?:(?:np|numpy|torch)\.)?(?:array|tensor|list|tuple|set|frozenset|bool_?|u?int[0-9]+|float[0-9]+|str_)"
)
_LIST = re.compile(rf"\s*(\[.*\]|\(.*\)|\{{.*\}}|{_CALLED.pattern}\(.*\))\s*", re.DOTALL)
_ESCAPE = r"\\(?:[\\'\"abfnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})"
_TOKEN = re.compile(
    rf"""\s*('(?:[^'\\\n]|{_ESCAPE})*'|"(?:[^"\\\n]|{_ESCAPE})*"|[\[\](){{}},]|[^\s,\[\](){{}}'"]+)\s*"""
)
_NO_LIST = 'is not a list as JSON has it, ["a", "b"] or [1, 2]'


@dataclass(frozen=True, slots=True)
class Labelled:
    """What rows are labelled with.

    Attributes:
        target: one of `precache.dataset.columns.TARGETS`.
        classes: names; `labels` and `targets` index them.
        labels: int64 [n]; -1 where the target is not one class.
        targets: see `precache.sources.base.Samples`.
        notes: what was chosen where the values leave a choice, and what looks wrong; phrases.
    """

    target: str
    classes: tuple[str, ...]
    labels: Ints
    targets: Column | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def with_nothing(cls, count: int) -> "Labelled":
        """What so many rows without labels are labelled with."""
        return cls("none", (), np.full(count, -1))


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of a table, or keys of a sample, hold what.

    Attributes:
        image: of a sample that is the picture itself, None.
        note: a phrase for a warning on what was taken for the labels.
    """

    image: Any = None
    label: Any = None
    split: str | None = None
    fields: tuple[str, ...] = ()
    note: str = ""

    @property
    def names(self) -> list[Any]:
        """All of them but that of the pictures, each once."""
        every = (self.label, self.split, *self.fields)
        return list(dict.fromkeys(name for name in every if name is not None))

    @classmethod
    def of(
        cls,
        where: object,
        names: Sequence[str],
        options: SourceOptions,
        pictures: Sequence[str] = (),
        usual: str = "",
    ) -> "Columns":
        """Those of a table, or a dataset, called `where` in messages, with columns `names`.

        Args:
            pictures: names of columns that hold pictures, if that is known.
            usual: the column of the labels that goes without saying.

        Raises:
            SettingError: a column is not there, or several may be meant.
        """
        found = pictures or [name for name in names if name in IMAGE_NAMES]
        if options.image is None and len(found) != 1:
            which = "several columns" if found else "no column"
            raise SettingError(
                f"{where}: {which} may be the pictures; name theirs with --image; there are {_listed(names)}"
            )
        image = found[0] if options.image is None else options.image
        fields = tuple(dict.fromkeys(options.fields))
        label, note = _find_label(where, names, options, (image, options.split, *fields), usual)
        flags = [("image", image), ("label", label), ("split", options.split)]
        for flag, name in [*flags, *(("field", field) for field in fields)]:
            if name is not None and names.count(name) != 1:
                number = "no column" if name not in names else "several columns"
                raise SettingError(f"{where}: has {number} {name!r}, as --{flag} asks; has {_listed(names)}")
        return cls(image, label, options.split, fields, note)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    hint = ""
    if len(names) == 1 and (other := next((sign for sign in ";\t|" if sign in names[0]), None)):
        hint = f" (are its columns separated by {other!r}? expected as the name of the file says: , or tab)"
    return ", ".join(f"{name!r:.60}" for name in names[:_NAMED]) + more + hint


def _find_label(
    where: object, names: Sequence[str], options: SourceOptions, taken: Collection[str | None], usual: str
) -> tuple[str | None, str]:
    """Which column has the labels, or None; and a note on what was assumed."""
    if options.target == "none" or options.label is not None:
        return (None if options.target == "none" else options.label), ""
    left = [name for name in names if name not in taken]
    found = [name for name in left if name in LABEL_NAMES]
    if len(found) > 1:
        raise SettingError(
            f"{where}: several columns may be the labels: {', '.join(map(repr, found))}; say which with "
            f"--label, or leave all out with --target none"
        )
    if found:
        note = f"labels are taken from {found[0]!r}; --label names others, --target none takes none"
        return found[0], "" if found[0] == usual else note
    if options.target is not None or options.separator is not None:
        flag = f"--target {options.target}" if options.separator is None else "--separator"
        raise SettingError(f"{where}: {flag} needs labels; name their column with --label")
    none = f"pictures get no labels, as no column is named {', '.join(LABEL_NAMES)}; name theirs with --label"
    return None, none if left else ""


def typed(cells: Sequence[str]) -> Sequence[Any]:
    """What the cells of a CSV column hold: integers, numbers or lists, all of them; else text as it is.

    Whole numbers that float64 cannot hold, among others that are not whole, are text: ids would become equal.

    Raises:
        ValueOfRowError: one is empty where the others are numbers, or no list where the others are.
    """
    filled = [cell for cell in cells if cell]
    parse: Any = None
    if filled and all(map(_WHOLE.fullmatch, filled)):
        parse = int
    elif filled and all(map(_NUMBER.fullmatch, filled)) and all(map(_fits_float, filled)):
        parse = float
    elif filled and all(map(_LIST.fullmatch, filled)) and any(map(_is_list, filled)):
        parse = parse_list
    if parse is None:
        return cells
    values = []
    for row, cell in enumerate(cells):
        try:
            values.append(parse(cell))
        except ValueError as error:
            what = f"{_shown(cell)} {error}" if cell else "is empty (a list of nothing is [])"
            like = next(other for other in filled if parse is not parse_list or _is_list(other))
            raise ValueOfRowError(row, f"{what}; other rows look like {_shown(like)}") from None
    return values


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """`names`, those that are there twice followed by their index: ImageNet has two cranes."""
    times = Counter(names)
    return tuple(f"{name} {index}" if times[name] > 1 else name for index, name in enumerate(names))


def _fits_float(cell: str) -> bool:
    return _WHOLE.fullmatch(cell) is None or int(float(cell)) == int(cell)


def _is_list(cell: str) -> bool:
    """Whether it is one that can be read, or one that numpy has cut short, which must not pass for text."""
    try:
        parse_list(cell)
    except _CutShortError:
        return True
    except ValueError:
        return False
    return True


class _CutShortError(ValueError):
    """numpy prints three dots for most of a long array."""


def parse_list(cell: str) -> list[Any]:
    """The list that a text holds, as JSON, Python or numpy writes it; tuples and sets are lists, too.

        ["cat", "dog"]  ['cat', 'dog']  ['cat' 'dog']  ('cat', 'dog')  {'cat'}  [np.str_('cat')]
        [1, 0, 0]       [1. 0. 0.]      [ True False]  array([1, 0])   tensor([1, 0])

    Raises:
        ValueError: it holds none; a phrase.
    """
    try:
        value = json.loads(cell)
    except (ValueError, RecursionError):
        value = _printed(cell)
    if not isinstance(value, list):
        raise ValueError(_NO_LIST)
    return value


def _printed(cell: str) -> Any:
    """The value that Python or numpy prints so."""
    tokens: list[str] = []
    at = 0
    while at < len(cell):
        token = _TOKEN.match(cell, at)
        if token is None:
            raise ValueError(_NO_LIST)
        ends_value = bool(tokens) and tokens[-1][-1] not in "[({,="
        is_call = token[1] == "(" and bool(tokens) and _CALLED.fullmatch(tokens[-1]) is not None
        if ends_value and token[1] not in "])}," and not is_call:
            tokens.append(",")  # numpy writes none: [1. 0.], ['a' 'b']
        tokens.append(token[1])
        at = token.end()
    try:
        return _evaluate(ast.parse("".join(tokens), mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        raise ValueError(_NO_LIST) from None


def _evaluate(node: ast.expr) -> Any:
    """The value of a literal; that of a call, as in array([1, 0], dtype=int8), is its first argument."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_evaluate(part) for part in node.elts]
    if isinstance(node, ast.Call) and _CALLED.fullmatch(ast.unparse(node.func)):
        return _evaluate(node.args[0]) if node.args else []
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.Attribute) and ast.unparse(node) in ("np.True_", "np.False_"):
        return node.attr == "True_"
    if isinstance(node, ast.Constant) and node.value is ...:
        raise _CutShortError("was cut short by numpy ('...'); write the whole list, as JSON")
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    raise ValueError(_NO_LIST)


class Rows(SampleList):
    """Samples that say themselves what they are labelled with: the rows of a table, and the like.

    Args:
        where: what messages call a row.
        columns: what the rows have; the labels of pairs have no name, and are called `label`.

    Attributes:
        labels: of the rows so far.
        values: those of each field, a list each.
        text_labels, text_fields: whether they are text that says what it holds, as the cells of a CSV are.
        optional_fields: whether a field that is no column is left out with a warning.
    """

    def __init__(self, where: Callable[[int], str], columns: Columns) -> None:
        super().__init__()
        self._where, self._columns = where, columns
        self.text_labels = self.text_fields = self.optional_fields = False
        self.labels = Labels()
        self.values: dict[str, list[Any]] = {name: [] for name in columns.fields}

    def error(self, row: int, column: Any, reason: str) -> SourceError:
        """An error to raise: what is wrong with the value of a row."""
        name = column if isinstance(column, str) else "label"  # of a pair
        return SourceError(f"{self._where(row)}: {name!r}: {reason}")

    def add(
        self, path: str, file_bytes: int = 0, modified_ns: int = 0, place: int = 0, split: Any = ""
    ) -> None:
        """Add a row; SourceError for what is no name of a split. Fold 0 of the column `fold` is `fold0`."""
        column = self._columns.split
        if column is None:
            super().add(path, file_bytes, modified_ns, place, split)
            return
        name = str(split) if isinstance(split, str) or type(split) is int else ""
        name = f"{column}{name}" if name.isdecimal() else name
        super().add(path, file_bytes, modified_ns, place, name)
        if not SPLIT_NAME.fullmatch(name):
            reason = f"{split!r:.60} is not a valid split name; write one such as train"
            raise self.error(len(self) - 1, column, reason)

    def scan(
        self,
        source: Source,
        options: SourceOptions,
        ignored: Sequence[IgnoredPath] = (),
        warnings: Iterable[str] = (),
        classes: tuple[str, ...] | None = None,
    ) -> Scan:
        """The scan of `source`, which has these rows.

        Args:
            classes: names that whole numbers among the labels are indices of; -1 and None then say that a
                sample has no label, as in test splits of Hugging Face, and it is left out, with a warning.

        Raises:
            SourceError: a value does not fit the others; names its row.
        """
        label, warnings = self._columns.label, list(warnings)
        labels, labelled = self.labels, Labelled.with_nothing(len(self))
        rows = np.arange(len(self))  # that are samples
        if label is not None and classes is not None and options.target in (None, "class"):
            rows = np.flatnonzero(~self.labels.are_missing())
            if not len(rows):
                rows = np.arange(len(self))
                if options.target is None:
                    warnings.append(f"{source.root}: pictures get no labels, for all are -1")
                    label = None
            if len(rows) < len(self):
                labels = self.labels.select(rows)
        if label is not None:
            try:
                labelled = labels.labelled(options, cells=self.text_labels, classes=classes)
            except ValueOfRowError as error:
                raise self.error(int(rows[error.row]), label, error.reason) from error
        fields = {}
        for name in list(self.values):
            try:
                fields[name] = self._field(name)
            except ValueOfRowError as error:
                problem = self.error(error.row, name, error.reason)
                if not self.optional_fields:
                    raise problem from error
                warnings.append(f"{source.root}: a field is left out, {problem}")
        warnings += (f"{source.root}: the labels in {label!r} {note}" for note in labelled.notes)
        samples = self.samples(np.full(len(self), -1), None, fields)
        if len(rows) < len(samples):
            missing = np.setdiff1d(np.arange(len(samples)), rows)
            without_label = tuple(IgnoredPath(samples[row].path, "has no label") for row in missing)
            ignored = (*ignored, *without_label)
            samples, splits = _split_off(samples, rows)
            count = f"{counted(len(missing), 'sample')} of {len(self):,} without a label (-1)"
            whole = f", with the whole of split {', '.join(splits)}" if splits else ""
            remedy = "--target none takes all samples, without labels"
            warnings.append(f"{source.root}: left out: {count}{whole}; {remedy}")
        samples.labels, samples.targets = labelled.labels, labelled.targets
        return Scan(
            source=source,
            classes=labelled.classes,
            samples=samples,
            ignored=tuple(ignored),
            scanned=len(samples) + len(ignored),
            digest=digest_of(samples, labelled.classes),
            warnings=tuple(warnings),
            target=labelled.target,
        )

    def _field(self, name: str) -> Column:
        values = self.values.pop(name)  # and let go what was read
        for row, value in enumerate(values):
            if value is None:
                raise ValueOfRowError(row, "is empty; fill it in, or leave the column out")
        return Column.of(typed(values) if self.text_fields else values)


def _split_off(samples: Samples, rows: Ints) -> tuple[Samples, list[str]]:
    """The samples at `rows`, and the splits that have none of them and are no splits any more."""
    numbers, splits = np.unique(samples.splits[rows], return_inverse=True)
    names = [samples.split_names[number] for number in numbers]
    gone = [name for name in samples.split_names if name not in names]
    return samples.select(rows, splits.astype(np.int64), names), gone


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

    def are_missing(self) -> npt.NDArray[np.bool_]:
        """bool [n]: whether the label of each row is -1, or there is none, where all are whole numbers."""
        codes = np.frombuffer(self._codes, np.int64)
        if not all(isinstance(value, int) or value == "" for value in self._values):
            return np.zeros(len(codes), np.bool_)
        return np.array([value in (-1, "") for value in self._values], np.bool_)[codes]

    def select(self, rows: Ints) -> "Labels":
        """The labels of these rows."""
        chosen = Labels()
        for row in rows.tolist():
            chosen.add(self._values[self._codes[row]])
        return chosen

    def labelled(
        self, options: SourceOptions, *, cells: bool, classes: tuple[str, ...] | None = None
    ) -> Labelled:
        """The labels as a target: classes or numbers.

        Args:
            options: their target and separator.
            cells: whether they are cells of a CSV.
            classes: names that they are, or are indices of; None: they speak for themselves.

        Raises:
            ValueOfRowError: one is empty, or unlike the others, or not what the target takes.
            SettingError: the target takes no separator.
        """
        target, separator = options.target, options.separator
        if target == "none":
            return Labelled.with_nothing(len(self._codes))
        try:
            values = self._typed(target, cells) if separator is None else self._values
            if separator is not None:
                values = _separated(values, separator, target)
                target = "classes"
            chosen = self._chosen(values, target)
            named = values
            if values is not self._values and chosen in ("class", "classes") and _is_number(values[0]):
                named = [_WrittenNumber(cell) for cell in self._values]
            found, labels, targets = _MAKERS[chosen](named)
            notes = (*self._choice(values, target, chosen, found), *_alike(found))
            if classes is not None and chosen != "number":
                labels, targets = _as_indices(values, found, labels, targets, classes)
                found, notes = classes, ()
        except ValueOfRowError as error:
            raise ValueOfRowError(self._rows[error.row], error.reason) from None
        codes = np.frombuffer(self._codes, np.int64)
        every = np.full(len(codes), -1) if labels is None else labels[codes]
        return Labelled(chosen, found, every, None if targets is None else targets.select(codes), notes)

    def _typed(self, target: str | None, cells: bool) -> Sequence[Any]:
        """The values that texts stand for: those of cells, and lists in any text."""
        values: Sequence[Any] = self._values
        if not all(isinstance(value, str) for value in values):
            return values
        if _hold_lists(values, target):
            return typed(values)
        if not cells:
            return values
        values = typed(values)
        if target is None and values is self._values:
            broken = [value for value in values if _NUMBER.fullmatch(value) and "." in value]
            row = next((r for r, value in enumerate(values) if not _NUMBER.fullmatch(value)), None)
            if broken and row is not None and values[row]:
                raise ValueOfRowError(
                    row,
                    f"{_shown(values[row])} is not a number; other rows look like {broken[0]}; correct it, "
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
                    row, f"{_shown(values[row])} is {kind}, other rows have {first}; write all in one way"
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
            number = counted(len(classes), "class", "classes")
            yield f"are read as {number}; to predict them as numbers, pass --target number"
        if chosen == "class" and len(classes) == len(self._codes) > 2:
            yield "differ in every row, so each row is a class of its own; is this the right column?"


def _hold_lists(texts: Sequence[str], target: str | None) -> bool:
    """Whether each of the labels holds a list.

    Raises:
        ValueOfRowError: one does and another does not, or they look like lists that cannot be read; where it
            is not asked to take them for names.
    """
    looks = [bool(_LIST.fullmatch(text)) for text in texts if text]
    lists = [row for row, text in enumerate(texts) if text and _LIST.fullmatch(text) and _is_list(text)]
    if target != "class" and lists and not all(looks):
        raise ValueOfRowError(
            lists[0],
            f"{_shown(texts[lists[0]])} is a list, other rows have text; write all in one way, or say that "
            f"each is the name of one class with --target class",
        )
    if target != "class" and looks and all(looks) and not lists:
        row = next(row for row, text in enumerate(texts) if text)
        raise ValueOfRowError(
            row,
            f"{_shown(texts[row])} {_NO_LIST}; write it so, or say that each is the name of one class with "
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
        f"{_shown(values[row])} looks like a 0 or a 1 for each class; list the indices or names of its "
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
        row, f"{_shown(value)} is {type(value).__name__}; expected text, numbers or lists of them"
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
            raise ValueOfRowError(row, f"{_shown(value)} is not text that can be split at {separator!r}")
        parted.append([part.strip() for part in value.split(separator) if part.strip()])
    return parted


def _one_class(values: Sequence[Any]) -> tuple[tuple[str, ...], Ints, None]:
    for row, value in enumerate(values):
        if isinstance(value, list | tuple):
            raise ValueOfRowError(row, f"{_shown(value)} is a list; --target classes takes several classes")
    names, index_of = _class_names(values)
    return names, np.array([index_of[value] for value in values], np.int64), None


def _many_classes(values: Sequence[Any]) -> tuple[tuple[str, ...], None, Column]:
    lists = [list(value) if isinstance(value, list | tuple) else [value][: value != ""] for value in values]
    for row, parts in enumerate(lists):
        mixed = {isinstance(part, str) for part in parts}
        if len(mixed) > 1 or not all(_is_name(part) for part in parts):
            raise ValueOfRowError(row, f"{_shown(parts)} is not a list of classes: text alone, or numbers")
    every = [part for parts in lists for part in parts]
    if not every:
        raise ValueOfRowError(0, "is empty, and so are all others; expected classes")
    for row, parts in enumerate(lists):
        if parts and isinstance(parts[0], str) != isinstance(every[0], str):
            raise ValueOfRowError(
                row, f"mixed label types: {_shown(parts)} and {_shown([every[0]])}; write all in one way"
            )
    names, index_of = _class_names(every)
    indices = [sorted({index_of[part] for part in parts}) for parts in lists]
    ends = np.cumsum([len(found) for found in indices], dtype=np.int64)
    return names, None, Column(np.array([i for found in indices for i in found], np.int64), ends)


def _as_indices(
    values: Sequence[Any],
    found: Sequence[str],
    labels: Ints | None,
    targets: Column | None,
    classes: Sequence[str],
) -> tuple[Ints | None, Column | None]:
    """`labels` and `targets`, which index the names `found`, as indices of `classes`."""
    by_name = {name: index for index, name in enumerate(classes)}
    parts = (part for value in values for part in (value if isinstance(value, list | tuple) else [value]))
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
            raise ValueOfRowError(row, f"{_shown(value)} is not a number")
    column = Column.of(values)
    if column.kind == "ragged":
        row = next((r for r, value in enumerate(values) if len(value) != len(values[0])), 0)
        raise ValueOfRowError(
            row, f"{_shown(values[row])} is not like {_shown(values[0])}; expected flat lists of one length"
        )
    numbers = column.values.astype(np.float64)
    infinite = np.flatnonzero(~np.isfinite(numbers.reshape(len(numbers), -1)).all(1))
    if len(infinite):
        row = int(infinite[0])
        raise ValueOfRowError(row, f"{_shown(values[row])} is not finite; correct it or remove the row")
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


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


_MAKERS: dict[str, Any] = {"class": _one_class, "classes": _many_classes, "number": _numbers}
