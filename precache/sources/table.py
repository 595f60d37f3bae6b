"""Tables as text, one row per picture, with the path of its file and its label.

    path,species,fold,width
    photos/0001.jpg,heron,train,640

    labels.csv, labels.tsv    UTF-8, with a header; cells are text, quoted as RFC 4180 has it. If there is
                              a space behind a comma of the header, none in front of a cell is part of it
    labels.jsonl              UTF-8, one object per line; the keys of all of them are the columns

Paths are relative to the folder of the table, or to the folder that --root names; they may be absolute, and
may contain `..`: a table is trusted to name its files. They are stored in their shortest form.
A row without a file is rejected when it is converted. A line is counted as an editor shows it: from 1, the
header's included. Blank lines are not rows.
"""

import codecs
import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from precache.errors import SourceError, did_you_mean, os_reason
from precache.sources.rows import Row, TableColumn
from precache.storage import open_regular

DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_LINES = ".jsonl"

_LINE_BYTES = 64 << 20  # a longer line is not a line of a table
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, slots=True)
class CsvReader:
    """The rows of a CSV or TSV.

    Attributes:
        file: what is read: the file of this name, or what was fetched from there.
    """

    name: str
    file: Path

    counts_lines = True
    is_text = True

    def columns(self) -> list[TableColumn]:
        return [TableColumn(name) for name in self._names()]

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        header = self._names()
        wanted = [header.index(name) for name in names]
        with open_table(self.name, self.file) as file:
            for row, (line, cells) in enumerate(self._records(file)):
                if row == 0:
                    continue  # the header
                if len(cells) != len(header):
                    raise SourceError(
                        f"{self.name}, line {line:,} (id {row - 1}): expected {len(header)} cells as in the "
                        f"header, got {len(cells)}; put quotes around a cell with a "
                        f"{'tab' if self._delimiter != ',' else 'comma'} or a line break"
                    )
                yield Row(line, [cells[column] for column in wanted])

    def _names(self) -> list[str]:
        with open_table(self.name, self.file) as file:
            _, names = next(self._records(file), (0, []))
        if not names:
            raise SourceError(f"{self.name}: is empty; expected a first line with the names of its columns")
        return [name.strip() for name in names]

    @property
    def _delimiter(self) -> str:
        return DELIMITERS[self.file.suffix.lower()]

    def _records(self, file: BinaryIO) -> Iterator[tuple[int, list[str]]]:
        """The line that each row begins in, and its cells; the header is the first."""
        lines = _lines(self.name, file)
        first = next(lines, "")
        reader = csv.reader(
            chain([first], lines),
            delimiter=self._delimiter,
            skipinitialspace=f"{self._delimiter} " in first,
            strict=True,
        )
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise SourceError(
                    f"{self.name}, line {line:,}: not CSV ({error}); close every quote, double those within "
                    f"quotes, and write cells of over {csv.field_size_limit():,} characters as JSON lines"
                ) from error
            if cells:
                yield line, cells


@dataclass(frozen=True, slots=True)
class JsonLinesReader:
    """The rows of JSON lines; see `CsvReader` for the attributes."""

    name: str
    file: Path

    counts_lines = True
    is_text = False

    def columns(self) -> list[TableColumn]:
        # any line may be the first one with a key
        names = list(dict.fromkeys(name for _, values in self._objects() for name in values))
        if not names:
            raise SourceError(f"{self.name}: is empty; expected one JSON object per line")
        return [TableColumn(name) for name in names]

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        for line, values in self._objects():
            yield Row(line, [values.get(name) for name in names])

    def _objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The object of each line that is not blank, and the line's number."""
        with open_table(self.name, self.file) as file:
            for line, text in enumerate(_lines(self.name, file), 1):
                if text.isspace():
                    continue
                try:
                    value = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise SourceError(
                        f"{self.name}, line {line:,}: not JSON ({error}); expected one object per line"
                    ) from error
                if not isinstance(value, dict):
                    raise SourceError(
                        f"{self.name}, line {line:,}: is not a JSON object; expected one per line: "
                        f'{{"path": "a.jpg"}}'
                    )
                yield line, value


@contextmanager
def open_table(table: str, path: Path) -> Iterator[BinaryIO]:
    """The file of a table, open; SourceError where it cannot be opened or read in the block."""
    try:
        with BufferedReader(open_regular(path)) as file:
            yield file
    except OSError as error:
        raise SourceError(
            f"{table}: the table cannot be read ({os_reason(error)})"
            f"{did_you_mean(path) or '; check its name and permissions'}"
        ) from error


def _lines(path: str, file: BinaryIO) -> Iterator[str]:
    number = 0
    while line := file.readline(_LINE_BYTES + 1):
        number += 1
        where = f"{path}, line {number:,}"
        if number == 1:
            if line.startswith(_UTF_16):
                raise SourceError(f"{path}: is UTF-16, expected UTF-8; save it as UTF-8")
            line = line.removeprefix(codecs.BOM_UTF8)  # which Excel writes
        if len(line) > _LINE_BYTES:
            raise SourceError(f"{where}: is longer than {_LINE_BYTES:,} bytes; is this a table?")
        if b"\0" in line:
            raise SourceError(
                f"{where}: has a NUL byte, expected text in UTF-8; save the table again as UTF-8"
            )
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{where}: byte {error.start + 1:,} is not UTF-8; save the table as UTF-8"
            ) from error
