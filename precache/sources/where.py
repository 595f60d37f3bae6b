"""Which samples of a converted dataset are taken.

    label in (cat, dog)
    id not in ids.txt
    split in (val)

In brackets stand values with commas between them, `"in quotes"` where they hold a comma; a file has a value a
line. Values of `label` are names of classes; a sample of several classes is taken for any of them.
"""

import csv
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from precache.console.notices import counted
from precache.dataset.columns import Column, Ints
from precache.errors import SettingError
from precache.storage import read_regular

_FORM = re.compile(r"\s*(label|id|split)\s+(not\s+)?in\s+(\(.*\)|[^(].*?)\s*", re.DOTALL)
_NAMED = 10  # choices that a message names


@dataclass(frozen=True, slots=True)
class Where:
    """A parsed condition.

    Attributes:
        column: `label`, `id` or `split`.
        values: as they are written.
        negated: whether it is `not in`.
    """

    column: str
    values: tuple[str, ...]
    negated: bool

    @classmethod
    def parse(cls, text: str) -> "Where":
        """What `text` says; SettingError if it is no condition, or its file cannot be read."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise SettingError(
                f"where {text!r}: no condition; write 'label in (cat, dog)', 'id in ids.txt' or "
                f"'split not in (val)'"
            )
        column, negated, listed = match[1], match[2] is not None, match[3]
        values = _in_brackets(listed[1:-1]) if listed.startswith("(") else _in_file(listed)
        if not values:
            raise SettingError(f"where {text!r}: lists nothing; name one {column} or more")
        return cls(column, tuple(values), negated)

    def rows(
        self,
        ids: Ints,
        labels: Ints,
        targets: Column | None,
        classes: Sequence[str],
        split_of: Ints,
        splits: Sequence[str],
    ) -> Ints:
        """Rows of the samples that are taken, int64 [m], ascending.

        Raises:
            SettingError: no sample has one of the values, or none is taken.
        """
        if self.column == "id":
            taken = np.isin(ids, self._ids(ids))
        elif self.column == "split":
            taken = np.isin(split_of, self._indices(splits))
        else:
            if not classes:
                raise SettingError("where 'label ...': the samples have no classes; choose by id or split")
            taken = _labelled(labels, targets, self._indices(classes))
        rows = np.flatnonzero(taken != self.negated)
        if not len(rows):
            raise SettingError(f"where: no sample is taken of {len(ids):,}; name others")
        return rows

    def _ids(self, ids: Ints) -> Ints:
        strange = [value for value in self.values if not re.fullmatch("[0-9]{1,18}", value)]
        if strange:
            raise SettingError(f"where 'id ...': {strange[0]!r:.60} is no id; ids are whole numbers")
        wanted = np.array(list(map(int, self.values)), np.int64)
        absent = np.setdiff1d(wanted, ids)
        if len(absent):
            raise SettingError(
                f"where 'id ...': {counted(len(absent), 'id')} of {len(wanted):,} are not there (first: "
                f"{absent[0]}); name samples that the dataset has"
            )
        return wanted

    def _indices(self, names: Sequence[str]) -> Ints:
        index_of = {name: index for index, name in enumerate(names)}
        for value in self.values:
            if value not in index_of:
                more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
                choices = ", ".join(names[:_NAMED])
                raise SettingError(
                    f"where: there is no {self.column} {value!r}; choose from: {choices}{more}"
                )
        return np.array([index_of[value] for value in self.values], np.int64)


def _labelled(labels: Ints, targets: Column | None, wanted: Ints) -> npt.NDArray[np.bool_]:
    if targets is None or targets.ends is None:
        return np.isin(labels, wanted)
    taken = np.zeros(len(labels), np.bool_)
    of = np.repeat(np.arange(len(labels)), np.diff(targets.ends, prepend=0))
    taken[of[np.isin(targets.values, wanted)]] = True
    return taken


def _in_brackets(text: str) -> list[str]:
    (values,) = csv.reader([text.replace("\n", " ")], skipinitialspace=True)
    return [value.strip() for value in values if value.strip()]


def _in_file(path: str) -> list[str]:
    try:
        text = os.fsdecode(read_regular(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingError(
            f"where: {path!r} cannot be read ({reason}); name a file with a value a line, or values as in "
            f"(cat, dog)"
        ) from error
    return [line.strip() for line in text.splitlines() if line.strip()]
