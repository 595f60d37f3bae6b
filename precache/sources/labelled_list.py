"""Which columns of rows hold what, and the samples that rows with labels and fields are."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from precache.dataset.columns import Column, Ints, ValueOfRowError
from precache.errors import SettingError, SourceError
from precache.recipe import SPLIT_NAME
from precache.reporting import quantity
from precache.sources.base import IgnoredPath, SampleList, Samples, Scan, Source, digest_of
from precache.sources.cells import typed
from precache.sources.labels import Labelled, Labels
from precache.sources.options import SourceOptions

LABEL_NAMES = ("label", "labels", "class", "class_name", "target", "category")
"""What the column of the labels is called more often than not."""

_NAMED = 20  # columns that a message names


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns hold what.

    Attributes:
        class_names: those that labels are indices of; None: labels speak for themselves.
        note: a phrase for a warning on what was taken for the labels.
    """

    image: str = ""
    label: str | None = None
    split: str | None = None
    fields: tuple[str, ...] = ()
    class_names: tuple[str, ...] | None = None
    note: str = ""

    @property
    def names(self) -> list[str]:
        """The columns of labels, splits and fields, each once."""
        every = (self.label, self.split, *self.fields)
        return list(dict.fromkeys(name for name in every if name is not None))

    @classmethod
    def of(cls, where: str, names: Sequence[str], images: Sequence[str], options: SourceOptions) -> "Columns":
        """The columns of what messages call `where`: those that the options name, or whose names say it.

        Args:
            names: those of the columns that there are.
            images: those of the columns that may be the pictures, where the options name none.

        Raises:
            SettingError: a column is not there, or several may be meant.
        """
        if options.image is None and len(images) != 1:
            which = "several columns" if images else "no column"
            raise SettingError(
                f"{where}: {which} may be the pictures; name theirs with --image; there are {_listed(names)}"
            )
        image = images[0] if options.image is None else options.image
        fields = tuple(dict.fromkeys(options.fields))
        label, note = _find_label(where, names, options, (image, options.split, *fields))
        flags = [("image", image), ("label", label), ("split", options.split)]
        for flag, name in [*flags, *(("field", field) for field in fields)]:
            if name is not None and names.count(name) != 1:
                number = "no column" if name not in names else "several columns"
                raise SettingError(f"{where}: has {number} {name!r}, as --{flag} asks; has {_listed(names)}")
        return cls(image, label, options.split, fields, note=note)


def _listed(names: Sequence[str]) -> str:
    """The names of columns for a message, and a hint where a wrong separator made them one."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    hint = ""
    if len(names) == 1 and (other := next((sign for sign in ";\t|" if sign in str(names[0])), None)):
        hint = f" (are its columns separated by {other!r}? expected as the name of the file says: , or tab)"
    return ", ".join(f"{name!r:.60}" for name in names[:_NAMED]) + more + hint


def _find_label(
    where: str, names: Sequence[str], options: SourceOptions, taken: Collection[str | None]
) -> tuple[str | None, str]:
    """The column of the labels, or None; and a note on what was assumed."""
    if options.target == "none":
        return None, ""
    if options.label is not None:
        return options.label, ""
    left = [name for name in names if name not in taken]
    found = [name for name in left if name in LABEL_NAMES]
    if len(found) > 1:
        raise SettingError(
            f"{where}: several columns may be the labels: {', '.join(map(repr, found))}; say which with "
            f"--label, or leave all out with --target none"
        )
    if found:
        return found[0], f"labels are taken from {found[0]!r}; --label names others, --target none takes none"
    if options.target is not None or options.separator is not None:
        flag = f"--target {options.target}" if options.separator is None else "--separator"
        raise SettingError(f"{where}: {flag} needs labels; name their column with --label")
    none = f"pictures get no labels, as no column is named {', '.join(LABEL_NAMES)}; name theirs with --label"
    return None, none if left else ""


class LabelledList(SampleList):
    """Samples whose labels and fields stand in their rows, while a source lists them.

    Args:
        where: gives what messages call a row.
        columns: what the rows have.
        is_text: whether labels and fields are text that says what it holds, as the cells of a CSV are.

    Attributes:
        labels: those of the rows so far.
        values: those of each field, a list each.
        text_labels, text_fields: see `is_text`.
        optional_fields: whether a field that is no column is left out with a warning.
    """

    def __init__(self, where: Callable[[int], str], columns: Columns, *, is_text: bool = False) -> None:
        super().__init__()
        self.where, self._columns = where, columns
        self.text_labels = self.text_fields = is_text
        self.optional_fields = False
        self.labels = Labels()
        self.values: dict[str, list[Any]] = {name: [] for name in columns.fields}

    def error(self, row: int, column: str, reason: str) -> SourceError:
        """An error to raise: what is wrong with the value of a row."""
        return SourceError(f"{self.where(row)}: {column!r}: {reason}")

    def add_row(
        self,
        values: Mapping[str, Any],
        split: str,
        path: str,
        file_bytes: int,
        modified_ns: int,
        place: int,
    ) -> None:
        """Add a sample with the values of its row.

        Args:
            split: the split, where the rows have no column of them.

        Raises:
            SourceError: a value is no name of a split.
        """
        columns = self._columns
        if columns.split is not None:
            split = _split_name(columns.split, values[columns.split])
        self.add(path, file_bytes, modified_ns, place, split)
        if columns.split is not None and not SPLIT_NAME.fullmatch(split):
            value = values[columns.split]
            reason = f"{value!r:.60} is not a valid split name; write one such as train"
            raise self.error(len(self) - 1, columns.split, reason)
        if columns.label is not None:
            self.labels.add(values[columns.label])
        for name in columns.fields:
            self.values[name].append(values[name])

    def scan(
        self,
        source: Source,
        options: SourceOptions,
        ignored: Sequence[IgnoredPath] = (),
        warnings: Sequence[str] = (),
    ) -> Scan:
        """The scan of `source`, which has these rows; those without a label are left out, with a warning.

        Raises:
            SourceError: a value does not fit the others; names its row.
        """
        label, ignored = self._columns.label, list(ignored)
        labelled = Labelled.with_nothing(len(self))
        if label is not None:
            try:
                labelled = self.labels.labelled(
                    options, is_text=self.text_labels, class_names=self._columns.class_names
                )
            except ValueOfRowError as error:
                raise self.error(error.row, label, error.reason) from error
        fields, problems = self._fields()
        notes = [f"a field is left out, {problem}" for problem in problems]
        notes += [f"the labels in {label!r} {note}" for note in labelled.notes]
        samples = self.samples(np.full(len(self), -1), None, fields)
        if labelled.rows is not None:
            without = np.setdiff1d(np.arange(len(samples)), labelled.rows)
            ignored += [IgnoredPath(samples[row].path, "has no label") for row in without]
            labelled_samples = _select(samples, labelled.rows)
            notes.append(_left_out(samples, labelled_samples))
            samples = labelled_samples
        samples.labels, samples.targets = labelled.labels, labelled.targets
        return Scan(
            source=source,
            classes=labelled.classes,
            samples=samples,
            ignored=tuple(ignored),
            scanned=len(samples) + len(ignored),
            digest=digest_of(samples, labelled.classes),
            warnings=(*warnings, *(f"{source.root}: {note}" for note in notes)),
            target=labelled.target,
        )

    def _fields(self) -> tuple[dict[str, Column], list[SourceError]]:
        """The columns of the fields, and what is wrong with those that are left out; values are let go."""
        fields, problems = {}, []
        for name in list(self.values):
            values = self.values.pop(name)
            try:
                fields[name] = _column_of(values, is_text=self.text_fields)
            except ValueOfRowError as error:
                problem = self.error(error.row, name, error.reason)
                if not self.optional_fields:
                    raise problem from error
                problems.append(problem)
        return fields, problems


def _split_name(column: str, value: Any) -> str:
    """The name of the split that a value says: 0 in the column `fold` is `fold0`; "" for what is no name."""
    if not isinstance(value, str) and type(value) is not int:  # a bool is an int, too
        return ""
    return f"{column}{value}" if str(value).isdecimal() else str(value)


def _column_of(values: Sequence[Any], *, is_text: bool) -> Column:
    for row, value in enumerate(values):
        if value is None:
            raise ValueOfRowError(row, "is empty; fill it in, or leave the column out")
    return Column.from_values(typed(values) if is_text else values)


def _select(samples: Samples, rows: Ints) -> Samples:
    """The samples at `rows`; what is no split of any of them is no split any more."""
    numbers, splits = np.unique(samples.splits[rows], return_inverse=True)
    names = [samples.split_names[number] for number in numbers]
    return samples.select(rows, splits.astype(np.int64), names)


def _left_out(samples: Samples, labelled: Samples) -> str:
    """A note on the samples that are not among the labelled ones."""
    count = quantity(len(samples) - len(labelled), "sample")
    empty = [name for name in samples.split_names if name not in labelled.split_names]
    whole = f", with the whole of split {', '.join(empty)}" if empty else ""
    remedy = "--target none takes all samples, without labels"
    return f"left out: {count} of {len(samples):,} without a label (-1){whole}; {remedy}"
