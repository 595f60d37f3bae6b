"""CSV, TSV and JSON lines as rows, one per picture, with the path of its file and its label.

    path,species,fold,width
    photos/0001.jpg,heron,train,640

    labels.csv, labels.tsv    with a header; cells are text, quoted as in RFC 4180. If the header has a space
                              behind a comma, spaces in front of cells are no part of them. If it has no
                              comma (a TSV: no tab), semicolons, tabs or bars separate the cells
    labels.jsonl              one object per line; the columns are the keys of all objects

Tables are UTF-8, or UTF-16 with a byte order mark, and their lines end as on any system. Paths are relative
to the folder of the table, or to the folder that --root names; they may be absolute, and may contain `..`,
since a table is trusted to name its files. They are stored in their shortest form. A row whose file is
missing is rejected when it is converted. Lines are counted as in an editor: from 1, with the header and blank
lines, which are no rows.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from precache.errors import SourceError, did_you_mean, os_reason
from precache.sources.rows import Row, TableColumn
from precache.sources.text_files import encoding_of, find_delimiter, utf_8_remedy
from precache.storage import open_regular

DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_LINES = ".jsonl"

_MAX_LINE_LENGTH = 64 << 20  # characters; a file with longer lines is no table


@dataclass(frozen=True, slots=True)
class CsvReader:
    """Reader of the rows of a CSV or TSV, see `RowReader`.

    Attributes:
        name: path of the table.
    """

    name: str

    counts_lines = True
    is_text = True

    def columns(self) -> list[TableColumn]:
        return [TableColumn(name) for name in self._read_header()]

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        header = self._read_header()
        columns = [header.index(name) for name in names]
        with open_table(self.name) as file:
            for row, (line, cells) in enumerate(self._read_records(file)):
                if row == 0:
                    continue  # the header
                if len(cells) != len(header):
                    raise SourceError(
                        f"expected {len(header)} cells as in the header, got {len(cells)}",
                        path=f"{self.name}, line {line:,} (id {row - 1})",
                        remedy="put quotes around a cell that has the separator or a line break in it",
                    )
                yield Row(line, [cells[column] for column in columns])

    def _read_header(self) -> list[str]:
        with open_table(self.name) as file:
            _, names = next(self._read_records(file), (0, []))
        if not names:
            raise SourceError("is empty; expected a first line with the names of its columns", path=self.name)
        return [name.strip() for name in names]

    def _read_records(self, file: BinaryIO) -> Iterator[tuple[int, list[str]]]:
        """Yield header and rows: the line that each begins in, and its cells."""
        lines = _read_lines(self.name, file)
        first_line = next(lines, "")
        delimiter = find_delimiter(first_line, DELIMITERS[Path(self.name).suffix.lower()])
        reader = csv.reader(
            chain([first_line], lines),
            delimiter=delimiter,
            skipinitialspace=f"{delimiter} " in first_line,
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
                    f"not CSV ({error})",
                    path=f"{self.name}, line {line:,}",
                    remedy=(
                        f"close every quote, double those within quotes, and write cells of over "
                        f"{csv.field_size_limit():,} characters as JSON lines"
                    ),
                ) from error
            if cells:
                yield line, cells


@dataclass(frozen=True, slots=True)
class JsonLinesReader:
    """Reader of the rows of JSON lines, see `RowReader`; the attributes are those of `CsvReader`."""

    name: str

    counts_lines = True
    is_text = False

    def columns(self) -> list[TableColumn]:
        # all lines are read, since any may have a key that no line before it has
        names = list(dict.fromkeys(name for _, values in self._read_objects() for name in values))
        if not names:
            raise SourceError("is empty; expected one JSON object per line", path=self.name)
        return [TableColumn(name) for name in names]

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        for line, values in self._read_objects():
            yield Row(line, [values.get(name) for name in names])

    def _read_objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield number and object of each line that is not blank."""
        with open_table(self.name) as file:
            for line, text in enumerate(_read_lines(self.name, file), 1):
                if text.isspace():
                    continue
                where = f"{self.name}, line {line:,}"
                try:
                    value = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise SourceError(
                        f"not JSON ({error}); expected one object per line", path=where
                    ) from error
                if not isinstance(value, dict):
                    raise SourceError(
                        'is not a JSON object; expected one per line: {"path": "a.jpg"}', path=where
                    )
                yield line, value


@contextmanager
def open_table(path: str) -> Iterator[BinaryIO]:
    """Open the file of a table; SourceError if it cannot be opened, or cannot be read in the block."""
    try:
        with BufferedReader(open_regular(path)) as file:
            yield file
    except OSError as error:
        hint = did_you_mean(path)
        raise SourceError(
            f"the table cannot be read ({os_reason(error)}){hint}",
            path=path,
            remedy="" if hint else "check its name and permissions",
        ) from error


def _read_lines(name: str, file: BinaryIO) -> Iterator[str]:
    """Yield the lines of a table; SourceError for one that is not UTF-8, or too long."""
    encoding = encoding_of(file.read(2))
    file.seek(0)
    # newline="": a line ends with LF, CR LF, or CR alone, and keeps that, for it may be in a quoted cell
    text = TextIOWrapper(file, encoding, "strict" if encoding == "utf-16" else "surrogateescape", newline="")
    number = 0
    while line := _read_line(name, text):
        number += 1
        where = f"{name}, line {number:,}"
        if len(line) > _MAX_LINE_LENGTH:
            raise SourceError(
                f"is longer than {_MAX_LINE_LENGTH:,} characters", path=where, remedy="is this a table?"
            )
        if "\0" in line:
            raise SourceError(
                "has a NUL byte, expected text in UTF-8", path=where, remedy="save the table again as UTF-8"
            )
        try:
            line.encode()
        except UnicodeEncodeError as error:
            place = len(line[: error.start].encode()) + 1
            raise SourceError(
                f"byte {place:,} is not UTF-8", path=where, remedy=utf_8_remedy(name)
            ) from error
        yield line


def _read_line(name: str, text: TextIOWrapper) -> str:
    """Read the next line, or its start if it is too long; SourceError if UTF-16 breaks off."""
    try:
        return text.readline(_MAX_LINE_LENGTH + 1)
    except UnicodeDecodeError as error:
        raise SourceError(
            f"is damaged UTF-16 ({error.reason})", path=name, remedy="save it again, as UTF-8"
        ) from error
