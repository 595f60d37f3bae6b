"""What the columns of a table, a dataset or tars mean: which holds what, and what its values say.

The way of a cell to a label: `scan_rows` gets the cells of all rows as `RowValues.label_cells`, and
`read_labels` does the work for each distinct value among them; its number is its code (`_distinct_values`).
`_parse_labels` makes numbers and lists of texts if all are such, `_choose_target` says whether these are
classes or numbers to predict, and `_class_labels` sorts the classes and gives each value the index of its
own; `_number_labels` has the numbers. If the source has names of classes, `_index_class_names` turns these
indices into those of the names. In the end each row gets the label of its value.

The values of the labels decide the target, unless the user names one:

    text, whole numbers, true and false           class: classes are sorted, whole numbers by their size
    lists of these, and text with a separator     classes
    other numbers, lists of these                 number

The cells of a CSV are text. A column of them is numbers if every cell is one as a program writes it (007 is
text, and so are 19 digits), and lists if every cell is one in JSON. A class has the name that its cell has:
1, 1.0 and 1e0 are three classes. What Python or NumPy prints for a list, ['a'] or [1 2], is an error.

Lists of whole numbers that are no sets of classes, as a vector of -1 and 1 or landmarks, are refused until
the user names the target; values that leave a doubt get a note.

If a source has names of classes, whole numbers are indices of these names, and -1 or an empty value says that
a sample has no label.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from precache.dataset.columns import Column, Ints, ValueOfRowError
from precache.errors import SettingError, SourceError
from precache.recipe import SPLIT_NAME
from precache.reporting import quantity
from precache.sources.base import IgnoredPath, SampleList, Samples, Scan, Source, scan_digest
from precache.sources.options import SourceOptions

IMAGE_NAMES = ("image", "img", "picture", "path", "file", "filename", "file_name")
"""Usual names of the column of pictures, or of their paths."""
LABEL_NAMES = ("label", "labels", "class", "class_name", "target", "category")
"""Usual names of the column of labels."""
_SPLIT_NAMES = ("split", "subset", "partition")
_MAX_NAMES = 20  # columns that a message names
_MAX_LENGTH = 60  # characters of a value in a message

# Only what a program writes is a number: 007 and +49 are names, and so are 19 digits, which may not fit into
# 64 bits.
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")
_NUMBER = re.compile(r"-?((0|[1-9][0-9]{0,17})(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?|nan|NaN|-?inf")
# matches numbers as people write them, too: 007, +49, 1.
_ANY_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]{1,3})?")
_BRACKETS = re.compile(r"\s*(\[.*\]|\(.*\)|\{.*\}|(\w+\.)?(array|tensor|list|tuple|set)\(.*\))\s*", re.DOTALL)
# what Python and NumPy print: ['a'], [1. 2.], [ True False], [np.str_('a')], array([1]), ('a', 'b'), (1, 2)
_PRINTED = re.compile(
    r"""\s*((\w+\.)?\w*\(?\[\s*(\[|[-+.\d'"]|True|False|None|nan|np\.)|[({]\s*(['"]|np\.|[-+.\d]+,)).*[\])}]\s*""",
    re.DOTALL,
)
_NOT_JSON = (
    'is not a list as JSON has it, ["a", "b"] or [1, 2]; write it so, or the whole table as JSON lines or '
    "Parquet"
)
_SEPARATORS = ("|", ";", ",", "/", "&", "+", " ")
"""What people write between several classes in one cell."""
_COMPARED_NAMES = 10_000  # names of classes that are searched for separators


# --- which column holds what ---


class ColumnInfo(NamedTuple):
    """Column of a table or dataset.

    Attributes:
        class_names: names of classes that whole numbers in the column are indices of; None without names.
        has_pictures: whether the column may hold pictures; if not, perhaps their paths.
    """

    name: str
    class_names: tuple[str, ...] | None = None
    has_pictures: bool = False


@dataclass(frozen=True, slots=True)
class Roles:
    """Columns of pictures, labels, splits and fields.

    Attributes:
        image: column of the pictures, or of their paths.
        label: name of the column of the labels; None if the samples get none.
        split: name of the column of the splits; None if there is none.
        fields: names of the columns that are kept as fields.
        class_names: names that labels are indices of; None if the source has no such names.
        notes: phrases for warnings on columns that the user did not name.
    """

    image: ColumnInfo
    label: str | None
    split: str | None
    fields: tuple[str, ...]
    class_names: tuple[str, ...] | None
    notes: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The columns of labels, splits and fields, each once."""
        names = [name for name in (self.label, self.split, *self.fields) if name is not None]
        return list(dict.fromkeys(names))


def choose_roles(
    source_name: str,
    columns: Sequence[ColumnInfo],
    options: SourceOptions,
    *,
    may_be_paths: bool,
    is_dataset: bool,
) -> Roles:
    """Choose the columns that the options name, or else those with usual names.

    Args:
        source_name: name of the table or dataset in messages.
        may_be_paths: whether a column may hold the paths of pictures.
        is_dataset: whether the rows come from a dataset; these, and tables with pictures, have a column
            `label` by convention, so that its choice needs no note.

    Raises:
        SettingError: a column is missing, or several columns fit.
        SourceError: no column has pictures.
    """
    names = [column.name for column in columns]
    image = _choose_image(source_name, columns, options.image, may_be_paths=may_be_paths)
    fields = tuple(dict.fromkeys(options.fields))
    label, note = _choose_label(source_name, names, options, (image.name, options.split, *fields))
    flags = [("image", image.name), ("label", label), ("split", options.split)]
    for flag, name in [*flags, *(("field", name) for name in fields)]:
        if name is not None and names.count(name) != 1:
            number = "no column" if name not in names else "several columns"
            raise SettingError(
                f"has {number} {name!r}, as --{flag} asks; has {_list_names(names)}", path=source_name
            )
    is_convention = label == "label" and (image.has_pictures or is_dataset)
    notes = [note] if note and not is_convention else []
    unused = [name for name in names if name.lower() in _SPLIT_NAMES and name not in (label, *fields)]
    if unused and options.split is None:
        notes.append(
            f"the column {unused[0]!r} is not used; for the splits that it names pass --split {unused[0]}"
        )
    class_names = next((column.class_names for column in columns if column.name == label), None)
    return Roles(image, label, options.split, fields, class_names, tuple(notes))


def _choose_image(
    source_name: str, columns: Sequence[ColumnInfo], name: str | None, *, may_be_paths: bool
) -> ColumnInfo:
    """Return the column of the pictures: that of this name, or the only one with a usual name, or bytes."""
    usual = [column for column in columns if column.name in IMAGE_NAMES]
    candidates = [column for column in usual if column.has_pictures]
    if not candidates and may_be_paths:
        candidates = usual
    if not candidates:
        candidates = [column for column in columns if column.has_pictures]
    if name is not None:
        candidates = [column for column in columns if column.name == name] or [ColumnInfo(name, None, True)]
    if not may_be_paths and not any(column.has_pictures for column in candidates):
        raise SourceError(
            "has no column of pictures, as bytes",
            path=source_name,
            remedy="where it has their paths, name one file, not the folder, and --image",
        )
    if name is None and len(candidates) != 1:
        number = "several columns" if candidates else "no column"
        raise SettingError(
            f"{number} may be the pictures",
            path=source_name,
            remedy=f"name theirs with --image; there are {_list_names([column.name for column in columns])}",
        )
    return candidates[0]


def _choose_label(
    source_name: str, names: Sequence[str], options: SourceOptions, other_roles: Collection[str | None]
) -> tuple[str | None, str]:
    """Return the column of the labels, or None, and a note on how it was chosen.

    Args:
        other_roles: columns of pictures, splits and fields.
    """
    if options.target == "none":
        return None, ""
    if options.label is not None:
        return options.label, ""
    other_columns = [name for name in names if name not in other_roles]
    labels = [name for name in other_columns if name in LABEL_NAMES]
    if len(labels) > 1:
        raise SettingError(
            f"several columns may be the labels: {', '.join(map(repr, labels))}",
            path=source_name,
            remedy="say which with --label, or leave all out with --target none",
        )
    if labels:
        label = labels[0]
        return label, f"labels are taken from {label!r}; --label names others, --target none takes none"
    if options.target is not None or options.separator is not None:
        flag = f"--target {options.target}" if options.separator is None else "--separator"
        raise SettingError(f"{flag} needs labels", path=source_name, remedy="name their column with --label")
    if not other_columns:
        return None, ""
    usual_names = ", ".join(LABEL_NAMES)
    return None, f"pictures get no labels, as no column is named {usual_names}; name theirs with --label"


def _list_names(names: Sequence[str]) -> str:
    """Return names of columns for a message."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(f"{name!r:.60}" for name in names[:_MAX_NAMES]) + more


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return `names` with its index behind each name that occurs twice: ImageNet has two cranes."""
    times = Counter(names)
    return tuple(f"{name} {index}" if times[name] > 1 else name for index, name in enumerate(names))


# --- what a column says ---


@dataclass(slots=True)
class RowValues:
    """Values in the rows of a source, and their names in messages.

    Attributes:
        row_name: function that returns the name of a row in messages.
        label: name of the column of labels; None if the samples get none.
        label_cells: value of this column in each row; empty without labels.
        class_names: names that labels are, or are indices of; None if the source has no such names.
        fields: values of each field by its name, one for each row; `scan_rows` takes them out.
        labels_are_text, fields_are_text: whether values are unparsed text, as the cells of a CSV are.
        fields_are_optional: whether a field with values of several kinds is left out with a warning; else it
            is an error.
    """

    row_name: Callable[[int], str]
    label: str | None = None
    label_cells: list[Any] = field(default_factory=list)
    class_names: tuple[str, ...] | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    labels_are_text: bool = False
    fields_are_text: bool = False
    fields_are_optional: bool = False

    def error(self, row: int, column: str, reason: str) -> SourceError:
        """Return the error for a value of a row; `reason` says what is wrong with it."""
        return SourceError(f"{column!r}: {reason}", path=self.row_name(row))


def scan_rows(
    source: Source,
    rows: SampleList,
    values: RowValues,
    options: SourceOptions,
    ignored: Sequence[IgnoredPath] = (),
    warnings: Sequence[str] = (),
) -> Scan:
    """Return the scan of `source`, to which these rows and their values belong.

    Rows without a label are left out, with a warning.

    Raises:
        SourceError: a value does not fit the others; the error names its row.
        SettingError: the target takes no separator.
    """
    ignored = list(ignored)
    labels = Labels.none(len(rows))
    if values.label is not None:
        try:
            labels = read_labels(values, options)
        except ValueOfRowError as error:
            raise values.error(error.row, values.label, error.reason) from error
        values.label_cells.clear()  # frees memory for the fields
    fields, notes = _field_columns(values)
    notes += [f"the labels in {values.label!r} {note}" for note in labels.notes]
    samples = rows.samples(labels.labels, labels.targets, fields)
    if labels.rows is not None:
        unlabelled_rows = np.setdiff1d(np.arange(len(samples)), labels.rows)
        ignored += [IgnoredPath(samples[row].path, "has no label") for row in unlabelled_rows]
        labelled_samples = _select(samples, labels.rows)
        notes.append(_note_on_unlabelled(samples, labelled_samples))
        samples = labelled_samples
    return Scan(
        source=source,
        classes=labels.classes,
        samples=samples,
        ignored=tuple(ignored),
        scanned=len(samples) + len(ignored),
        digest=scan_digest(samples, labels.classes),
        warnings=(*warnings, *(f"{source.root}: {note}" for note in notes)),
        target=labels.target,
    )


def split_name(column: str, value: Any) -> str:
    """Return the split that a value says, as `fold0` for 0 in the column `fold`.

    Raises:
        ValueError: the value is no name of a split; the message is a phrase.
    """
    text = f"{column}{value}" if str(value).isdecimal() else str(value)
    is_name = isinstance(value, str) or type(value) is int  # not isinstance: a bool is an int, too
    if not is_name or not SPLIT_NAME.fullmatch(text):
        raise ValueError(f"{value!r:.60} is not a valid split name; write one such as train")
    return text


def _field_columns(values: RowValues) -> tuple[dict[str, Column], list[str]]:
    """Return the columns of the fields, and notes on those that are left out."""
    columns, notes = {}, []
    for name in list(values.fields):
        cells = values.fields.pop(name)  # frees them: a column takes a fraction of a list's memory
        try:
            columns[name] = _field_column(cells, are_text=values.fields_are_text)
        except ValueOfRowError as error:
            problem = values.error(error.row, name, error.reason)
            if not values.fields_are_optional:
                raise problem from error
            notes.append(f"a field is left out, {problem}")
    return columns, notes


def _field_column(values: Sequence[Any], *, are_text: bool) -> Column:
    """Return the column of a field's values; ValueOfRowError if one is missing or unlike the others."""
    for row, value in enumerate(values):
        if value is None:
            raise ValueOfRowError(row, "is empty; fill it in, or leave the column out")
    return Column.from_values(_parse_texts(values, _is_list_or_printed) if are_text else values)


def _select(samples: Samples, rows: Ints) -> Samples:
    """Return the samples at `rows`, with those of the splits that any of them is in."""
    numbers, splits = np.unique(samples.splits[rows], return_inverse=True)
    names = [samples.split_names[number] for number in numbers]
    return samples.select(rows, splits.astype(np.int64), names)


def _note_on_unlabelled(samples: Samples, labelled_samples: Samples) -> str:
    """Return a note on the samples that are left out because they have no label."""
    count = quantity(len(samples) - len(labelled_samples), "sample")
    empty_splits = [name for name in samples.split_names if name not in labelled_samples.split_names]
    splits = f", with the whole of split {', '.join(empty_splits)}" if empty_splits else ""
    remedy = "--target none takes all samples, without labels"
    return f"left out: {count} of {len(samples):,} without a label (-1){splits}; {remedy}"


# --- texts as numbers and lists ---


def _parse_texts(
    texts: Sequence[str], looks_like_list: Callable[[str], bool], *, are_cells: bool = True
) -> Sequence[Any]:
    """Parse texts, if all are whole numbers, numbers or lists; else return them as they are.

    Whole numbers beside fractions stay text if float64 cannot hold them: two ids would become equal.

    Args:
        looks_like_list: whether a text in brackets is meant as a list, and with it all others.
        are_cells: whether numbers are parsed, too, as the cells of a CSV.

    Raises:
        ValueOfRowError: a text is empty where the others are numbers, or no list in JSON where others are.
    """
    filled = [text for text in texts if text]
    parse: Callable[[str], Any]
    if filled and all(map(_BRACKETS.fullmatch, filled)) and any(map(looks_like_list, filled)):
        parse = _json_list
    elif are_cells and filled and all(map(_WHOLE.fullmatch, filled)):
        parse = int
    elif are_cells and filled and all(_NUMBER.fullmatch(text) and _fits_float(text) for text in filled):
        parse = float
    else:
        return texts
    values = []
    for row, text in enumerate(texts):
        if not text:
            reason = f"is empty (a list of nothing is []); other rows look like {short_repr(filled[0])}"
            raise ValueOfRowError(row, reason)
        value = parse(text)
        if value is None:
            raise ValueOfRowError(row, f"{short_repr(text)} {_NOT_JSON}")
        values.append(value)
    return values


def _fits_float(cell: str) -> bool:
    """Return whether float64 holds the number in a cell exactly, if it is a whole number."""
    return _WHOLE.fullmatch(cell) is None or int(float(cell)) == int(cell)


def _json_list(text: str) -> list[Any] | None:
    """Return the list in a text; None if it is none in JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else None


def _is_list(text: str) -> bool:
    return _json_list(text) is not None


def _is_list_or_printed(text: str) -> bool:
    return _PRINTED.fullmatch(text) is not None or _is_list(text)


def short_repr(value: Any) -> str:
    """Return the `repr` of a value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."


# --- labels ---


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of rows, as classes or as numbers to predict.

    Attributes:
        target: kind of the labels, one of `precache.dataset.columns.TARGETS`.
        classes: names of the classes, which `labels` or `targets` index; empty for numbers.
        labels: int64 [n], index of each row's class; -1 if the row has no label, or not one class.
        targets: class indices or numbers of each row; None if the target is one class or none.
        notes: phrases on choices that the values left open, and on names that look wrong.
        rows: int64 [m], rows that have a label; None if all have.
    """

    target: str
    classes: tuple[str, ...]
    labels: Ints
    targets: Column | None = None
    notes: tuple[str, ...] = ()
    rows: Ints | None = None

    @classmethod
    def none(cls, count: int, *notes: str) -> "Labels":
        """Make the labels of `count` rows that have none."""
        return cls("none", (), np.full(count, -1), None, notes)


class _ValueLabels(NamedTuple):
    """What distinct values mean as labels.

    Attributes:
        target, classes: see `Labels`.
        column: index of the class of each value, or its class indices, or its numbers.
    """

    target: str
    classes: tuple[str, ...]
    column: Column


def read_labels(values: RowValues, options: SourceOptions) -> Labels:
    """Return the labels of the rows as classes or numbers.

    Rows with -1 or an empty value have no label if the source has names of classes.

    Raises:
        ValueOfRowError: a value is empty, unlike the others, or not what the target takes.
        SettingError: the target takes no separator.
    """
    distinct, codes = _distinct_values(values.label_cells)
    labels = np.full(len(codes), -1)
    rows = np.arange(len(codes))
    may_be_missing = values.class_names is not None and options.target in (None, "class")
    if may_be_missing and all(isinstance(value, int) or value == "" for value in distinct):
        has_label = np.array([value not in (-1, "") for value in distinct], np.bool_)[codes]
        if not has_label.any() and options.target is None:
            return Labels.none(len(codes), "are all -1, so pictures get no labels")
        if has_label.any():
            rows = np.flatnonzero(has_label)
    kept_codes, codes = np.unique(codes[rows], return_inverse=True)
    distinct = [distinct[code] for code in kept_codes.tolist()]
    try:
        (target, classes, column), notes = _read_distinct(distinct, len(rows), values, options)
    except ValueOfRowError as error:  # its row is a code
        first_row = int(rows[np.argmax(codes == error.row)])
        raise ValueOfRowError(first_row, error.reason) from None
    column = column.select(codes)
    if target != "class":
        return Labels(target, classes, labels, column, notes)
    labels[rows] = column.values
    return Labels(target, classes, labels, None, notes, rows if len(rows) < len(labels) else None)


def _distinct_values(column: Sequence[Any]) -> tuple[list[Any], Ints]:
    """Return the distinct values in a column in their order, and the number of each row's: int64 [n].

    A list is distinct from any other. Null and NaN become the text '', booleans 'true' and 'false'.
    """
    code_of: dict[str | int, int] = {}
    values, codes = list[Any](), list[int]()
    for value in map(_plain_value, column):
        code = len(values)
        if isinstance(value, str | int):
            code = code_of.setdefault(value, code)
        if code == len(values):
            values.append(value)
        codes.append(code)
    return values, np.array(codes, np.int64)


def _plain_value(value: Any) -> Any:
    """Return NumPy's values as Python's; bool, None and NaN as the texts 'true', 'false' and ''."""
    if isinstance(value, str):
        return value
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return value


def _read_distinct(
    cells: Sequence[Any], row_count: int, values: RowValues, options: SourceOptions
) -> tuple[_ValueLabels, tuple[str, ...]]:
    """Return the labels of distinct cells, in `row_count` rows which all must have one, and notes."""
    target, class_names = options.target, values.class_names
    if options.separator is None:
        parsed = _parse_labels(cells, target, are_cells=values.labels_are_text)
    else:
        parsed, target = _split_texts(cells, options.separator, target), "classes"
    chosen = _choose_target(parsed, target, class_names)
    if chosen == "number":
        labels = _number_labels(parsed)
    elif parsed is not cells and _is_number(parsed[0]):
        # classes are named as the cells are written: 1.10 stays 1.10
        labels = _class_labels([_NumberText(cell) for cell in cells], chosen)
    else:
        labels = _class_labels(parsed, chosen)
    if class_names is not None and chosen != "number":
        return _index_class_names(parsed, labels, class_names), ()
    notes = list(_notes_on_target(parsed, labels)) if target is None else []
    if chosen == "class" and len(labels.classes) == row_count > 2:
        notes.append("differ in every row, so each row is a class of its own; is this the right column?")
    notes += _notes_on_similar_names(labels.classes)
    return labels, tuple(notes)


def _parse_labels(cells: Sequence[Any], target: str | None, *, are_cells: bool) -> Sequence[Any]:
    """Return the cells, of which texts are parsed: numbers if they are of a CSV, and lists in any text.

    Raises:
        ValueOfRowError: some texts are lists, numbers with a fraction, or look like lists, and others do not;
            not for the target `class`, which takes any text for a name.
    """
    if not all(isinstance(cell, str) for cell in cells):
        return cells
    if target != "class":
        _check_lists(cells)
    parsed = _parse_texts(cells, _is_list, are_cells=are_cells)
    if are_cells and target is None and parsed is cells:
        # text beside fractions: one of the two is a mistake
        fractions = [cell for cell in cells if _NUMBER.fullmatch(cell) and "." in cell]
        text_code = next((code for code, cell in enumerate(cells) if not _NUMBER.fullmatch(cell)), None)
        if fractions and text_code is not None and cells[text_code]:
            raise ValueOfRowError(
                text_code,
                f"{short_repr(cells[text_code])} is not a number; other rows look like {fractions[0]}; "
                f"correct it, or say that they are classes with --target class",
            )
    return parsed


def _check_lists(texts: Sequence[str]) -> None:
    """Raise ValueOfRowError if only some texts are lists, or one that looks like a list is none in JSON."""
    codes = [code for code, text in enumerate(texts) if _BRACKETS.fullmatch(text)]
    are_lists = len(codes) == sum(map(bool, texts))
    for code in codes:
        text, reason = texts[code], ""
        if not _is_list(text) and (are_lists or _PRINTED.fullmatch(text)):
            reason = _NOT_JSON
        elif _is_list(text) and not are_lists:
            reason = "is a list, other rows have text; write all in one way"
        if reason:
            raise ValueOfRowError(
                code,
                f"{short_repr(text)} {reason}, or say that each is the name of one class with --target class",
            )


def _choose_target(values: Sequence[Any], target: str | None, class_names: tuple[str, ...] | None) -> str:
    """Return `target`, or the one that fits the values; ValueOfRowError if they are of several kinds."""
    kinds = [_kind_name(code, value) for code, value in enumerate(values)]
    for code, value in enumerate(values):
        is_blank = isinstance(value, str) and not value.strip() and target != "classes"
        if is_blank or (isinstance(value, float) and math.isnan(value)):
            raise ValueOfRowError(code, "is empty; fill it in or remove the row")
    first_kind = next((kind for kind, value in zip(kinds, values, strict=True) if value != ""), "text")
    for code, kind in enumerate(kinds):
        if kind != first_kind and values[code] != "":
            reason = f"{short_repr(values[code])} is {kind}, other rows have {first_kind}"
            raise ValueOfRowError(code, f"{reason}; write all in one way")
    if target is not None:
        return target
    are_lists = first_kind == "a list"
    parts = [part for value in values for part in value] if are_lists else values
    if any(isinstance(part, float) and not part.is_integer() for part in parts):
        return "number"
    if are_lists and all(map(_is_number, parts)):
        _check_are_sets(values, are_indices=class_names is not None)
    return "classes" if are_lists else "class"


def _kind_name(code: int, value: Any) -> str:
    """Return the name of a label's kind in messages; ValueOfRowError if labels cannot be of this type."""
    if isinstance(value, str):
        return "text"
    if _is_number(value):
        return "a number"
    if isinstance(value, list | tuple):
        return "a list"
    raise ValueOfRowError(
        code, f"{short_repr(value)} is {type(value).__name__}; expected text, numbers or lists of them"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _check_are_sets(values: Sequence[Any], *, are_indices: bool) -> None:
    """Raise ValueOfRowError if the lists of whole numbers look like vectors, not like sets of classes.

    Args:
        are_indices: whether the source says that the numbers are classes; then one may stand twice in a list.
    """
    width = len(values[0])
    are_zeros_and_ones = all(len(parts) == width and {0, 1} >= {*parts} for parts in values)
    for code, parts in enumerate(values):
        reason = ""
        if are_zeros_and_ones and len(parts) > 1 and list(parts) != sorted({*parts}):
            reason = "looks like a 0 or a 1 for each class; list the indices or names of its classes, or"
        elif not are_indices and len({*parts}) < len(parts):
            reason = "has a number twice, so it is no set of classes;"
        elif not are_indices and min(parts, default=0) < 0:
            reason = "has a number below 0, which is no index of a class;"
        if reason:
            raise ValueOfRowError(
                code,
                f"{short_repr(parts)} {reason} pass --target number to predict the vector (--target classes: "
                f"each number is a class)",
            )


def _split_texts(values: Sequence[Any], separator: str, target: str | None) -> list[list[str]]:
    """Split each text at the separator into the names of its classes."""
    if target not in (None, "classes"):
        raise SettingError(
            f"--separator is for --target classes, not {target}", remedy="leave one of them out"
        )
    names: list[list[str]] = []
    for code, value in enumerate(values):
        if not isinstance(value, str):
            raise ValueOfRowError(code, f"{short_repr(value)} is not text that can be split at {separator!r}")
        names.append([part.strip() for part in value.split(separator) if part.strip()])
    return names


class _NumberText(str):
    """Text of a number that sorts by its value: 1.1 and 1.10 are two names, and so are 2 and 2.0."""

    __slots__ = ()

    def __lt__(self, other: str) -> bool:
        return (Decimal(self), str(self)) < (Decimal(other), str(other))


def _class_labels(values: Sequence[Any], target: str) -> _ValueLabels:
    """Return labels that are one class each, or any number of classes."""
    lists = [_label_parts(value) for value in values]
    first = next((parts[0] for parts in lists if parts), "")
    for code, (value, parts) in enumerate(zip(values, lists, strict=True)):
        if target == "class" and isinstance(value, list | tuple):
            raise ValueOfRowError(
                code, f"{short_repr(value)} is a list; --target classes takes several classes"
            )
        if not all(map(_is_class, parts)) or len({isinstance(part, str) for part in parts}) > 1:
            raise ValueOfRowError(
                code, f"{short_repr(value)} is not a list of classes: text alone, or numbers"
            )
        if parts and isinstance(parts[0], str) != isinstance(first, str):
            examples = f"{short_repr(value)} and {short_repr(first)}"
            raise ValueOfRowError(code, f"mixed label types: {examples}; write all in one way")
    if not any(lists):
        raise ValueOfRowError(0, "is empty, and so are all others; expected classes")
    classes = sorted({part for parts in lists for part in parts})
    index_of = {value: index for index, value in enumerate(classes)}  # 1.0 and 1 are one
    indices = [sorted({index_of[part] for part in parts}) for parts in lists]
    flat = np.array([index for value_indices in indices for index in value_indices], np.int64)
    names = tuple(
        str(int(value) if isinstance(value, float) and value.is_integer() else value) for value in classes
    )
    if target == "class":
        return _ValueLabels(target, names, Column(flat))
    ends = np.cumsum([len(value_indices) for value_indices in indices], dtype=np.int64)
    return _ValueLabels(target, names, Column(flat, ends))


def _number_labels(values: Sequence[Any]) -> _ValueLabels:
    """Return labels that are a number, or a vector of as many numbers, each."""
    for code, value in enumerate(values):
        if isinstance(value, str):
            raise ValueOfRowError(code, f"{short_repr(value)} is not a number")
    column = Column.from_values(values)
    if column.kind == "ragged":
        code = next((code for code, value in enumerate(values) if len(value) != len(values[0])), 0)
        reason = f"{short_repr(values[code])} is not like {short_repr(values[0])}"
        raise ValueOfRowError(code, f"{reason}; expected flat lists of one length")
    numbers = column.values.astype(np.float64)
    infinite_codes = np.flatnonzero(~np.isfinite(numbers.reshape(len(numbers), -1)).all(1))
    if len(infinite_codes):
        code = int(infinite_codes[0])
        raise ValueOfRowError(code, f"{short_repr(values[code])} is not finite; correct it or remove the row")
    with np.errstate(invalid="ignore"):  # 2**63, to which the largest are rounded, is no int64
        is_rounded = numbers.astype(column.dtype) != column.values
    rounded_codes = np.flatnonzero(is_rounded.reshape(len(numbers), -1).any(1))
    if len(rounded_codes):
        code = int(rounded_codes[0])
        raise ValueOfRowError(
            code,
            f"{short_repr(values[code])} is larger than float64 holds exactly; subtract a constant from all",
        )
    return _ValueLabels("number", (), Column(numbers))


def _label_parts(value: Any) -> list[Any]:
    """Return the classes of one label: the items of a list, or the value itself; none if it is empty."""
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value == "" else [value]


def _is_class(part: Any) -> bool:
    """Return whether a part of a label can be a class: text that is not blank, or a finite number."""
    if isinstance(part, str):
        return bool(part.strip())
    return isinstance(part, int | float) and math.isfinite(part)


def _index_class_names(
    values: Sequence[Any], labels: _ValueLabels, class_names: tuple[str, ...]
) -> _ValueLabels:
    """Return labels that index `class_names`, the names that the source has.

    Raises:
        ValueOfRowError: a label is neither one of the names nor an index of one.
    """
    column, index_of_name = labels.column, {name: index for index, name in enumerate(class_names)}
    has_text = any(isinstance(part, str) and part for value in values for part in _label_parts(value))
    if not has_text:  # numbers are indices
        index_of_name |= {str(index): index for index in range(len(class_names))}
    new_indices = np.array([index_of_name.get(name, -1) for name in labels.classes], np.int64)
    unknown = int(np.argmin(new_indices))
    if new_indices[unknown] < 0:
        code = int(np.argmax(column.values == unknown))
        if column.ends is not None:
            code = int(np.searchsorted(column.ends, code, side="right"))
        raise ValueOfRowError(
            code,
            f"{labels.classes[unknown]} is not a class; expected 0 to {len(class_names) - 1}, or one of "
            f"{', '.join(class_names)[:80]} (a dataset without labels is converted with target='none')",
        )
    return _ValueLabels(labels.target, class_names, Column(new_indices[column.values], column.ends))


# --- notes on labels that look wrong ---


def _notes_on_target(values: Sequence[Any], labels: _ValueLabels) -> Iterable[str]:
    """Yield notes on a target that was chosen by the values, and how to pass another one."""
    number = quantity(len(labels.classes), "class", "classes")
    if labels.target == "number":
        yield "are read as numbers to predict; to make each a class, pass --target class"
    elif labels.target == "class" and not isinstance(values[0], str):
        if "-1" in labels.classes:
            yield "have the class -1, as data sets write it where there is no label; leave these rows out"
        yield f"are read as {number}; to predict them as numbers, pass --target number"
    elif labels.target == "class":
        yield from _notes_on_several_classes(labels.classes)
    elif all(map(_is_number, values[0])) and len({*map(len, values)}) == 1:
        yield f"are read as sets of {number}; to predict the vectors of numbers, pass --target number"


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
