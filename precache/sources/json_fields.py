"""Fields in files of JSON and text, one beside each picture."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from precache.console.notices import some
from precache.dataset.columns import Column, ValueOfRowError
from precache.errors import SourceError

FIELDS, TEXT = "json", "txt"
"""Extensions of the files; all of a text is one field, called as its extension."""


class JsonFields:
    """Columns of what samples have besides, `wanted` of them or all that every sample has."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self._wanted = wanted
        self._values: dict[str, list[Any]] = {name: [] for name in wanted}
        self._left_out: dict[str, None] = {}
        self._rows = 0

    def add(self, values: dict[str, Any], where: str) -> None:
        """Those of the next sample; SourceError if one that is wanted is missing."""
        if self._rows == 0 and not self._wanted:
            self._values = {name: [] for name in values}
        for name in list(self._values):
            if name in values:
                self._values[name].append(values[name])
            elif self._wanted:
                raise SourceError(f"{where} has no {name!r} for --field; it has {named(values)}")
            else:
                self._left_out[name] = None
                del self._values[name]
        if not self._wanted:
            self._left_out.update(dict.fromkeys(name for name in values if name not in self._values))
        self._rows += 1

    def columns(self, where: Callable[[int], str]) -> tuple[dict[str, Column], list[str]]:
        """The columns, and warnings of what is left out; `where` is what messages call a row."""
        columns, warnings = {}, []
        if self._left_out:
            names = some([repr(name) for name in self._left_out])
            warnings.append(f"fields that some samples have and others have not are left out: {names}")
        for name, values in self._values.items():
            try:
                columns[name] = Column.of(values)
            except ValueOfRowError as error:
                what = f"{where(error.row)}, field {name!r}: {error.reason}"
                if self._wanted:
                    raise SourceError(what) from None
                warnings.append(f"a field is left out, {what}")
        return columns, warnings


def values_of(parts: dict[str, bytes], where: str) -> dict[str, Any]:
    """What the .json and the .txt of a sample say; SourceError if they are none."""
    values: dict[str, Any] = {}
    if FIELDS in parts:
        try:
            found = json.loads(parts[FIELDS])
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{where}.{FIELDS} is no JSON ({error}); correct it") from error
        if not isinstance(found, dict):
            raise SourceError(f'{where}.{FIELDS} is no JSON object; expected one, as {{"width": 640}}')
        values = found
    if TEXT in parts:
        values[TEXT] = text_of(parts[TEXT], f"{where}.{TEXT}")
    return values


def text_of(content: bytes, where: str) -> str:
    """Text in UTF-8; SourceError if it is not."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise SourceError(f"{where} is not UTF-8 (byte {error.start + 1:,}); save it as UTF-8") from error


def named(values: Iterable[str]) -> str:
    """A few of the names, in a message."""
    return some([repr(name) for name in sorted(values)]) or "no field"
