"""Samples that are listed with labels and fields from their rows, and the columns these stand in."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from precache.dataset.columns import Column, Ints, ValueOfRowError
from precache.errors import SettingError, SourceError
from precache.recipe import SPLIT_NAME
from precache.reporting import quantity
from precache.sources.base import IgnoredPath, SampleList, Samples, Scan, Source, scan_digest
from precache.sources.cells import parse_cells
from precache.sources.labels import LabelList, ParsedLabels
from precache.sources.options import SourceOptions

LABEL_NAMES = ("label", "labels", "class", "class_name", "target", "category")
"""Usual names of the column of labels."""
_SPLIT_NAMES = ("split", "subset", "partition")

_MAX_NAMES = 20  # columns that a message names


@dataclass(frozen=True, slots=True)
class ColumnRoles:
    """Names of the columns of pictures, labels, splits and fields.

    Attributes:
        image: column of the pictures, or of their paths.
        label: column of the labels; None if the samples get none.
        split: column of the names of splits; None if there is none.
        fields: columns that are kept as fields.
        class_names: names that labels are indices of; None if the source has no such names.
        notes: phrases for warnings on columns that the user did not name, the one on the labels first.
    """

    image: str = ""
    label: str | None = None
    split: str | None = None
    fields: tuple[str, ...] = ()
    class_names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The columns of labels, splits and fields, each once."""
        names = [name for name in (self.label, self.split, *self.fields) if name is not None]
        return list(dict.fromkeys(names))

    @classmethod
    def from_options(
        cls, source_name: str, names: Sequence[str], images: Sequence[str], options: SourceOptions
    ) -> "ColumnRoles":
        """Choose the columns that the options name, or else those with usual names.

        Args:
            source_name: name of the table or dataset in messages.
            names: names of all columns.
            images: columns that may be the pictures if the options name none.

        Raises:
            SettingError: a column is missing, or several columns fit.
        """
        if options.image is None and len(images) != 1:
            candidates = "several columns" if images else "no column"
            raise SettingError(
                f"{candidates} may be the pictures",
                path=source_name,
                remedy=f"name theirs with --image; there are {_list_names(names)}",
            )
        image = images[0] if options.image is None else options.image
        fields = tuple(dict.fromkeys(options.fields))
        label, note = _choose_label(source_name, names, options, (image, options.split, *fields))
        names_of_flags = [("image", image), ("label", label), ("split", options.split)]
        names_of_flags += [("field", field) for field in fields]
        for flag, name in names_of_flags:
            if name is not None and names.count(name) != 1:
                number = "no column" if name not in names else "several columns"
                raise SettingError(
                    f"has {number} {name!r}, as --{flag} asks; has {_list_names(names)}", path=source_name
                )
        notes = [note] if note else []
        unused = [name for name in names if name.lower() in _SPLIT_NAMES and name not in (label, *fields)]
        if unused and options.split is None:
            notes.append(
                f"the column {unused[0]!r} is not used; for the splits that it names pass --split {unused[0]}"
            )
        return cls(image, label, options.split, fields, notes=tuple(notes))


def _list_names(names: Sequence[str]) -> str:
    """Return names of columns for a message."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(f"{name!r:.60}" for name in names[:_MAX_NAMES]) + more


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


class LabelledList(SampleList):
    """List of samples with labels and fields, which a source appends to row by row while it is scanned.

    Args:
        row_name: function that returns the name of a row in messages.
        roles: columns of labels, splits and fields in the rows.
        is_text: whether labels and fields are unparsed text, as the cells of a CSV are.

    Attributes:
        labels: labels of the rows so far.
        values: values of each field so far, by the field's name.
        text_labels: whether labels are unparsed text.
        text_fields: whether fields are unparsed text.
        optional_fields: whether a field with values of several kinds is left out with a warning; else it is
            an error.
    """

    def __init__(self, row_name: Callable[[int], str], roles: ColumnRoles, *, is_text: bool = False) -> None:
        super().__init__()
        self.row_name, self._roles = row_name, roles
        self.text_labels = self.text_fields = is_text
        self.optional_fields = False
        self.labels = LabelList()
        self.values: dict[str, list[Any]] = {name: [] for name in roles.fields}

    def error(self, row: int, column: str, reason: str) -> SourceError:
        """Return the error for a value of a row; `reason` says what is wrong with it."""
        return SourceError(f"{column!r}: {reason}", path=self.row_name(row))

    def add_row(
        self,
        values: Mapping[str, Any],
        split: str,
        path: str,
        file_bytes: int,
        modified_ns: int,
        place: int,
    ) -> None:
        """Append a sample with the values of its row.

        Args:
            values: values of the row by the names of columns.
            split: split of the sample, unless the rows have a column of splits.
            path, file_bytes, modified_ns, place: see `SampleRef`.

        Raises:
            SourceError: the value in the column of splits is no name of a split.
        """
        roles = self._roles
        if roles.split is not None:
            split = _split_name(roles.split, values[roles.split])
        self.add(path, file_bytes, modified_ns, place, split)
        if roles.split is not None and not SPLIT_NAME.fullmatch(split):
            value = values[roles.split]
            reason = f"{value!r:.60} is not a valid split name; write one such as train"
            raise self.error(len(self) - 1, roles.split, reason)
        if roles.label is not None:
            self.labels.add(values[roles.label])
        for name in roles.fields:
            self.values[name].append(values[name])

    def scan(
        self,
        source: Source,
        options: SourceOptions,
        ignored: Sequence[IgnoredPath] = (),
        warnings: Sequence[str] = (),
    ) -> Scan:
        """Return the scan of `source`, to which these rows belong.

        Rows without a label are left out, with a warning.

        Raises:
            SourceError: a value does not fit the others; the error names its row.
        """
        label, ignored = self._roles.label, list(ignored)
        labels = ParsedLabels.without_labels(len(self))
        if label is not None:
            try:
                labels = self.labels.parse(
                    options, is_text=self.text_labels, class_names=self._roles.class_names
                )
            except ValueOfRowError as error:
                raise self.error(error.row, label, error.reason) from error
        fields, problems = self._field_columns()
        notes = [f"a field is left out, {problem}" for problem in problems]
        notes += [f"the labels in {label!r} {note}" for note in labels.notes]
        samples = self.samples(np.full(len(self), -1), None, fields)
        if labels.rows is not None:
            unlabelled_rows = np.setdiff1d(np.arange(len(samples)), labels.rows)
            ignored += [IgnoredPath(samples[row].path, "has no label") for row in unlabelled_rows]
            labelled_samples = _select(samples, labels.rows)
            notes.append(_note_on_unlabelled(samples, labelled_samples))
            samples = labelled_samples
        samples.labels, samples.targets = labels.labels, labels.targets
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

    def _field_columns(self) -> tuple[dict[str, Column], list[SourceError]]:
        """Return the columns of the fields, and the errors of fields that are left out."""
        fields, problems = {}, []
        for name in list(self.values):
            values = self.values.pop(name)  # frees them: a column takes a fraction of a list's memory
            try:
                fields[name] = _field_column(values, is_text=self.text_fields)
            except ValueOfRowError as error:
                problem = self.error(error.row, name, error.reason)
                if not self.optional_fields:
                    raise problem from error
                problems.append(problem)
        return fields, problems


def _split_name(column: str, value: Any) -> str:
    """Return the split that a value says, as `fold0` for 0 in the column `fold`; "" if it is no name."""
    if not isinstance(value, str) and type(value) is not int:  # not isinstance: a bool is an int, too
        return ""
    return f"{column}{value}" if str(value).isdecimal() else str(value)


def _field_column(values: Sequence[Any], *, is_text: bool) -> Column:
    """Return the column of a field's values; ValueOfRowError if one is missing or unlike the others."""
    for row, value in enumerate(values):
        if value is None:
            raise ValueOfRowError(row, "is empty; fill it in, or leave the column out")
    return Column.from_values(parse_cells(values) if is_text else values)


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
