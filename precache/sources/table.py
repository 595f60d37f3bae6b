"""A table of pictures: one row per picture, with the path of its file and its label.

    path,species,fold,width
    photos/0001.jpg,heron,train,640

    labels.csv, labels.tsv    UTF-8, with a header; cells are text, quoted as RFC 4180 has it. If there is
                              a space behind a comma of the header, none in front of a cell is part of it
    labels.jsonl              UTF-8, one object per line; the keys of all of them are the columns
    labels.parquet            as pyarrow reads it

Paths are relative to the folder of the table, or to the folder that --root names; they may be absolute, and
may contain `..`: a table is trusted to name its files. They are stored in their shortest form.
A row without a file is rejected when it is converted. Ids are the numbers of the rows, from 0. A line is
counted as an editor shows it: from 1, the header's included. Blank lines are not rows.
`precache.sources.labels` turns the labels into classes or numbers.
"""

import codecs
import csv
import json
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import xxhash

from precache.errors import ImageError, SettingError, SourceError, did_you_mean
from precache.pictures.reading import read_picture, status_of
from precache.reporting import counted
from precache.sources import parquet
from precache.sources.base import SampleRef, Scan
from precache.sources.labels import Columns, Rows
from precache.sources.options import TABLE_SUFFIXES, SourceOptions
from precache.sources.tree import ObjectTree, read_object
from precache.storage import open_regular
from precache.storage.objects import ObjectStore
from precache.storage.urls import Location, Url, locate

Row: TypeAlias = tuple[int, Sequence[Any]]
"""The line that the row begins in, 0 where the format has no lines, and its values."""
Lines: TypeAlias = Callable[[Sequence[str]], Iterator[Row]]
"""What a reader of a table gives beside the names of the columns: the rows, of the columns that are asked."""

_LINE_BYTES = 64 << 20  # a longer line is not a line of a table
_BATCH_ROWS = 65_536
_PATH_BYTES = 4096  # no system takes longer ones
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True, slots=True)
class TableSource:
    """A table as a `Source`.

    Attributes:
        file: that is read: `root`, or what was fetched from there.
    """

    root: Location
    file: Path
    options: SourceOptions

    @property
    def paths(self) -> tuple[Location, ...]:
        """The table, and the folder that its paths are relative to where it is named.

        Not the folder of the table: a dataset may well be put beside it.
        """
        return (self.root,) if self.options.root is None else (self.root, locate(self.options.root))

    @property
    def folder(self) -> str:
        """The folder that paths are relative to."""
        return str(self.root.parent) if self.options.root is None else self.options.root

    @property
    def url(self) -> Url | None:
        """The folder, where that is a URL."""
        place = locate(self.folder)
        return place if isinstance(place, Url) else None

    @property
    def reads_at_a_time(self) -> int:
        """How many pictures are asked for at a time."""
        return ObjectTree.reads_at_a_time if self.url else 0

    def scan(self) -> Scan:
        with _opened(self.root, self.file) as (names, lines):
            columns = Columns.of(self.root, names, self.options)
            if self.options.root is not None and not self.url and not os.path.isdir(self.options.root):
                raise SettingError(f"--root {self.options.root}: no such folder; name that of the pictures")
            rows = Rows(lambda row: _place_of(self.root, rows.places[row], row), columns)
            rows.text_labels = rows.text_fields = self.root.suffix.lower() in _DELIMITERS
            self._read(rows, columns, lines)
        missing = self._find(rows)
        note = [f"{self.root}: {columns.note}"] if columns.note else []
        return rows.scan(self, self.options, (), [*missing, *note], self._class_names(columns))

    def read(self, ref: SampleRef, max_pixels: int) -> bytes:
        """The content of the file that the row names."""
        path = os.path.join(self.folder, ref.path)
        if ref.bytes < 0:
            reason = "is a folder" if os.path.isdir(path) else "is not a file"
            raise ImageError(self.where(ref), f"{reason}; named in {_place_of(self.root, ref.place, ref.id)}")
        if self.url:
            scanned = (ref.bytes, ref.modified_ns)
            return read_object(
                self.url, ref.path, ref.bytes, max_pixels, lambda it: (it.bytes, it.modified_ns) == scanned
            )
        return read_picture(path, max_pixels, (ref.bytes, ref.modified_ns))

    def where(self, ref: SampleRef) -> str:
        """Its row, and the path of its file."""
        return f"{_place_of(self.root, ref.place, ref.id)}: {os.path.join(self.folder, ref.path)}"

    def _read(self, rows: Rows, columns: Columns, lines: Lines) -> None:
        """Add the rows of the table; SourceError where two name one picture."""
        folder = None if self.url else os.path.abspath(self.folder)
        names = list(dict.fromkeys((columns.image, *columns.names)))
        at = {name: place for place, name in enumerate(names)}
        fields, hashes = [(at[name], values) for name, values in rows.values.items()], array("Q")
        for line, cells in lines(names):
            path = cells[at[columns.image]]
            if reason := _why_no_path(path):
                where = _place_of(self.root, line, len(rows))
                raise SourceError(f"{where}: {columns.image!r}: {path!r:.60} {reason}")
            short, place = _shortest(folder, path)
            hashes.append(xxhash.xxh3_64_intdigest(os.fsencode(place)))
            rows.add(short, place=line, split=cells[at[columns.split]] if columns.split else "")
            if columns.label is not None:
                rows.labels.add(cells[at[columns.label]])
            for number, values in fields:
                values.append(cells[number])
        if not len(rows):
            raise SourceError(f"{self.root}: has no rows; expected one for each picture")
        found = np.frombuffer(hashes, np.uint64)
        order = np.argsort(found, kind="stable")
        for at_first in np.flatnonzero(found[order][1:] == found[order][:-1]).tolist():
            first, second = order[at_first : at_first + 2].tolist()
            other = f"line {rows.places[first]:,} (id {first})" if rows.places[first] else f"row {first}"
            raise rows.error(
                second,
                columns.image,
                f"{rows.path(second)!r} is in {other}, too; remove one of them, or write all its labels into "
                f"one cell (--separator)",
            )

    def _class_names(self, columns: Columns) -> tuple[str, ...] | None:
        """The names that whole numbers among the labels are indices of, where Parquet has some."""
        if columns.label is None or self.root.suffix.lower() != parquet.SUFFIX:
            return None
        return parquet.class_names(parquet.schema_of(self.root, self.file), columns.label)

    def _find(self, rows: Rows) -> list[str]:
        """Note size, -1 where there is no file, and time of the last write of each picture; and a warning.

        Raises:
            SourceError: there is none of them, or one cannot be looked at.
        """
        prefix, find, absent = self.folder, status_of, []
        if self.url:
            objects = {info.name: (info.bytes, info.modified_ns) for info in ObjectStore(self.url).list()}
            prefix, find = "", lambda path: objects.get(os.path.normpath(path))
        for row in range(len(rows)):
            status = find(os.path.join(prefix, rows.path(row)))
            rows.file_bytes[row], rows.modified_ns[row] = status or (-1, 0)
            if status is None:
                absent.append(row)
        if not absent:
            return []
        path = os.path.join(self.folder, rows.path(absent[0]))
        where = _place_of(self.root, rows.places[absent[0]], absent[0])
        if len(absent) == len(rows):
            held = ""
            if self.options.image is None and self.root.suffix.lower() == parquet.SUFFIX:
                schema = parquet.schema_of(self.root, self.file)
                columns = parquet.picture_columns(schema, may_be_paths=False)
                held = "".join(f"; or take the bytes in {name!r}: --image {name}" for name in columns)
            raise SourceError(
                f"{where}: there is no picture {path!r}, nor one for any other row; paths are relative "
                f"to the table, or to the folder that --root names, and have the same extension as the "
                f"files{held}"
            )
        missing = f"{counted(len(absent), 'row')} of {len(rows):,} without a picture"
        return [f"{self.root}: {missing}; the first is {where}: {path!r}"]


def _why_no_path(path: Any) -> str | None:
    """What is wrong with what a row has for the path of its picture; None where it is one."""
    if not isinstance(path, str) or not path:
        return "is no path of a picture; fill it in"
    if "://" in path:
        return "is a URL; download the pictures first"
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "is not a valid file name; correct it"
    if len(encoded) > _PATH_BYTES:
        return f"has {len(encoded):,} bytes, so it cannot be a path; correct it"
    return "has a NUL in it, so it cannot be a path; correct it" if b"\0" in encoded else None


def columns_of(path: Path) -> list[str]:
    """The names of the columns of the table at `path`.

    Raises:
        SourceError: it cannot be read, or is empty.
        MissingDependencyError: Parquet, without pyarrow.
    """
    with _opened(path, path) as (names, _):
        return names


@contextmanager
def _opened(table: Location, path: Path) -> Iterator[tuple[list[str], Lines]]:
    """The names of its columns, and its rows; None where JSON lines or Parquet have no value."""
    try:
        with BufferedReader(open_regular(path)) as file:
            yield _READERS[path.suffix.lower()](table, file)
    except OSError as error:
        raise SourceError(
            f"{table}: the table cannot be read ({error.strerror or error})"
            f"{did_you_mean(path) or '; check its name and permissions'}"
        ) from error


def _lines(path: Location, file: BinaryIO) -> Iterator[str]:
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


def _read_csv(path: Location, file: BinaryIO) -> tuple[list[str], Lines]:
    delimiter = _DELIMITERS[path.suffix.lower()]
    lines = _lines(path, file)
    header = next(lines, "")
    reader = csv.reader(
        chain([header] if header else [], lines),
        delimiter=delimiter,
        skipinitialspace=f"{delimiter} " in header,
        strict=True,
    )

    def records() -> Iterator[tuple[int, list[str]]]:
        """(line that it begins in, cells) of each row."""
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

    def rows(columns: Sequence[str]) -> Iterator[Row]:
        wanted = [names.index(name) for name in columns]
        for row, (line, cells) in enumerate(records()):
            if len(cells) != len(names):
                raise SourceError(
                    f"{_place_of(path, line, row)}: expected {len(names)} cells as in the header, got "
                    f"{len(cells)}; put quotes around a cell with a {'tab' if delimiter != ',' else 'comma'} "
                    f"or a line break"
                )
            yield line, [cells[column] for column in wanted]

    _, names = next(records(), (0, []))
    names = [name.strip() for name in names]
    if not names:
        raise SourceError(f"{path}: is empty; expected a first line with the names of its columns")
    return names, rows


def _read_json_lines(path: Location, file: BinaryIO) -> tuple[list[str], Lines]:
    def objects() -> Iterator[tuple[int, dict[str, Any]]]:
        file.seek(0)
        for line, text in enumerate(_lines(path, file), 1):
            if text.isspace():
                continue
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise SourceError(
                    f"{path}, line {line:,}: not JSON ({error}); expected one object per line"
                ) from error
            if not isinstance(value, dict):
                raise SourceError(
                    f'{path}, line {line:,}: is not a JSON object; expected one per line: {{"path": "a.jpg"}}'
                )
            yield line, value

    def rows(columns: Sequence[str]) -> Iterator[Row]:
        for line, value in objects():
            yield line, [value.get(name) for name in columns]

    # read twice: any line may be the first one with a key
    names = list(dict.fromkeys(name for _, value in objects() for name in value))
    if not names:
        raise SourceError(f"{path}: is empty; expected one JSON object per line")
    return names, rows


def _read_parquet(path: Location, file: BinaryIO) -> tuple[list[str], Lines]:
    def rows(columns: Sequence[str]) -> Iterator[Row]:
        with parquet.opened(path, file) as table:
            for batch in table.iter_batches(_BATCH_ROWS, columns=list(columns), use_threads=False):
                found = list(batch.schema.names)
                values = [batch.column(found.index(name)).to_pylist() for name in columns]
                yield from ((0, row) for row in zip(*values, strict=True))

    with parquet.opened(path, file) as table:
        return list(table.schema_arrow.names), rows


_READERS: dict[str, Callable[[Location, BinaryIO], tuple[list[str], Lines]]] = dict(
    zip(TABLE_SUFFIXES, (_read_csv, _read_csv, _read_json_lines, _read_parquet), strict=True)
)


def _place_of(path: Location, line: int, row: int) -> str:
    """The name of a row for messages."""
    return f"{path}, line {line:,} (id {row})" if line else f"{path}, row with id {row}"


def _shortest(folder: str | None, path: str) -> tuple[str, str]:
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
