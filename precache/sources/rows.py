"""The rows of a table file: CSV, TSV, JSON lines or Parquet.

    labels.csv, labels.tsv    UTF-8, with a header; cells are text, quoted as RFC 4180 has it
    labels.jsonl              UTF-8, an object a line; its keys are the columns
    labels.parquet            as pyarrow reads it

A line is counted as an editor shows it: from 1, the header's included. Blank lines are no rows.
"""

import codecs
import csv
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from precache.errors import MissingDependencyError, SourceError, did_you_mean
from precache.packages import install_extra
from precache.storage import open_regular

Row: TypeAlias = tuple[int, Sequence[Any]]
"""The line that it begins in, 0 where there are none, and its values."""

_LINE_BYTES = 64 << 20  # a longer line is no line of a table
_BATCH_ROWS = 65_536
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_OTHERS = {
    ".gz": "unpack it first, with: gunzip -k",
    ".zip": "unpack it first",
    ".xz": "unpack it first, with: unxz -k",
    ".zst": "unpack it first, with: unzstd",
    ".xls": "save it as CSV, in UTF-8",
    ".xlsx": "save it as CSV, in UTF-8",
    ".ods": "save it as CSV, in UTF-8",
    ".json": "write an object a line into a .jsonl",
    ".ndjson": "rename it to .jsonl",
    ".feather": "write it as Parquet",
    ".arrow": "write it as Parquet",
}


def is_table(path: Path) -> bool:
    """Whether the file's name is that of a table which is read here."""
    return path.suffix.lower() in _READERS


def why_no_table(path: Path) -> str | None:
    """What to do with a table that is not read here, as its name says; None for any other file."""
    suffix, inner = path.suffix.lower(), Path(path.stem).suffix.lower()
    packed = suffix in (".gz", ".xz", ".zst", ".zip")
    return None if packed and inner not in _READERS else _OTHERS.get(suffix)


def is_typed(path: Path) -> bool:
    """Whether its values have types; the cells of CSV and TSV are text."""
    return path.suffix.lower() not in _DELIMITERS


def columns_of(path: Path) -> list[str]:
    """The names of the columns of the table at `path`; of JSON lines, those of the first row.

    Raises:
        SourceError: it cannot be read, or is empty.
        MissingDependencyError: Parquet, without pyarrow.
    """
    with _opened(path) as file:
        return _READERS[path.suffix.lower()][0](path, file)


def rows_of(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The values of `columns` in each row; None where JSON lines or Parquet have none.

    Raises:
        SourceError: it cannot be read, or a row of it is none.
    """
    with _opened(path) as file:
        yield from _READERS[path.suffix.lower()][1](path, file, columns)


def place_of(path: Path, line: int, row: int) -> str:
    """How messages call a row."""
    return f"{path}, line {line:,} (id {row})" if line else f"{path}, row with id {row}"


def shortest(folder: str | None, path: str) -> tuple[str, str]:
    """A path in a row without `.`, `..` and double slashes, and the same from the root of the disk on.

    As it is written where a link makes `..` lead elsewhere, or nothing is there.

    Args:
        folder: that it is relative to, absolute; None: that is a URL.
    """
    short = os.path.normpath(path.replace("//", "/"))  # normpath leaves two slashes at the start
    if folder is None:
        return short, short
    if ".." in path.split("/"):
        written = os.path.join(folder, path)
        try:
            straight = os.path.samefile(written, os.path.normpath(written))
        except OSError:
            straight = False
        if not straight:
            return path, written
    return short, os.path.normpath(os.path.join(folder, short))


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open(open_regular(path), "rb") as file:
            yield file
    except OSError as error:
        raise SourceError(
            f"{path}: the table cannot be read ({error.strerror or error})"
            f"{did_you_mean(path) or '; check its name and permissions'}"
        ) from error


def _lines(path: Path, file: BinaryIO) -> Iterator[str]:
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


def _records(path: Path, file: BinaryIO) -> Iterator[tuple[int, list[str]]]:
    """(line that it begins in, cells) of each row of a CSV, the header's too."""
    delimiter = _DELIMITERS[path.suffix.lower()]
    reader = csv.reader(_lines(path, file), delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise SourceError(
                f"{path}, line {line:,}: not CSV ({error}); close every quote, double those within "
                f"quotes, and write cells of over {csv.field_size_limit():,} characters as JSON lines"
            ) from error
        if cells:
            yield line, cells


def _header(path: Path, records: Iterator[tuple[int, list[str]]]) -> list[str]:
    _, names = next(records, (0, []))
    if not names:
        raise SourceError(f"{path}: is empty; expected a first line with the names of its columns")
    return names


def _csv_columns(path: Path, file: BinaryIO) -> list[str]:
    return _header(path, _records(path, file))


def _csv_rows(path: Path, file: BinaryIO, columns: Sequence[str]) -> Iterator[Row]:
    records = _records(path, file)
    names = _header(path, records)
    wanted = [names.index(name) for name in columns]
    for row, (line, cells) in enumerate(records):
        if len(cells) != len(names):
            raise SourceError(
                f"{place_of(path, line, row)}: expected {len(names)} cells as in the header, got "
                f"{len(cells)}; put quotes around a cell with a {_shown_delimiter(path)} or a line break"
            )
        yield line, [cells[column] for column in wanted]


def _shown_delimiter(path: Path) -> str:
    return "tab" if _DELIMITERS[path.suffix.lower()] == "\t" else "comma"


def _objects(path: Path, file: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in enumerate(_lines(path, file), 1):
        if text.isspace():
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SourceError(
                f"{path}, line {line:,}: not JSON ({error}); expected an object a line"
            ) from error
        if not isinstance(value, dict):
            raise SourceError(
                f'{path}, line {line:,}: is no JSON object; expected one a line, as {{"path": "a.jpg"}}'
            )
        yield line, value


def _json_columns(path: Path, file: BinaryIO) -> list[str]:
    first = next(_objects(path, file), None)
    if first is None:
        raise SourceError(f"{path}: is empty; expected a JSON object a line")
    return list(first[1])


def _json_rows(path: Path, file: BinaryIO, columns: Sequence[str]) -> Iterator[Row]:
    for line, value in _objects(path, file):
        yield line, [value.get(name) for name in columns]


@contextmanager
def _parquet(path: Path, file: BinaryIO) -> Iterator[Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependencyError(
            f"{path}: Parquet needs the extra 'table' ({error}); run: {install_extra('table')}"
        ) from error
    try:
        yield parquet.ParquetFile(file, pre_buffer=False, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        raise SourceError(
            f"{path}: not Parquet that can be read ({' '.join(str(error).split())[:200]}); write it again"
        ) from error


def _parquet_columns(path: Path, file: BinaryIO) -> list[str]:
    with _parquet(path, file) as table:
        return list(table.schema_arrow.names)


def _parquet_rows(path: Path, file: BinaryIO, columns: Sequence[str]) -> Iterator[Row]:
    with _parquet(path, file) as table:
        batches = table.iter_batches(_BATCH_ROWS, columns=list(columns), use_threads=False)
        while (batch := next(batches, None)) is not None:
            yield from _batch_rows(path, batch, columns)


def _batch_rows(path: Path, batch: Any, columns: Sequence[str]) -> Iterator[Row]:
    found = list(batch.schema.names)
    values = [batch.column(found.index(name)).to_pylist() for name in columns]
    for row in zip(*values, strict=True):
        yield 0, row


_READERS: dict[
    str,
    tuple[
        Callable[[Path, BinaryIO], list[str]],
        Callable[[Path, BinaryIO, Sequence[str]], Iterator[Row]],
    ],
] = {
    ".csv": (_csv_columns, _csv_rows),
    ".tsv": (_csv_columns, _csv_rows),
    ".jsonl": (_json_columns, _json_rows),
    ".parquet": (_parquet_columns, _parquet_rows),
}
