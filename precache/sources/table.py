"""A table of pictures: one row per picture, with the path of its file and its label.

    path,species,fold,width
    photos/0001.jpg,heron,train,640

    labels.csv, labels.tsv    UTF-8, with a header; cells are text, quoted as RFC 4180 has it
    labels.jsonl              UTF-8, one object per line; its keys are the columns
    labels.parquet            as pyarrow reads it

Paths are relative to the folder of the table, or to the folder that --root names; they may be absolute, and
may contain `..`: a table is trusted to name its files. They are stored in their shortest form.
A row without a file is rejected when it is converted. Ids are the numbers of the rows, from 0. A line is
counted as an editor shows it: from 1, the header's included. Blank lines are not rows.
`precache.sources.labels` turns the labels into classes or numbers.
"""

import codecs
import csv
import errno
import json
import os
import stat
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import xxhash

from precache.dataset.columns import Column, ValueOfRowError
from precache.errors import ImageError, MissingDependencyError, SettingError, SourceError, did_you_mean
from precache.packages import install_extra
from precache.pictures.reading import read_picture, steadily
from precache.recipe import SPLIT_NAME
from precache.reporting import counted
from precache.sources.base import SampleRef, Samples, Scan
from precache.sources.labels import Columns, Labelled, Labels, typed
from precache.sources.options import TABLE_SUFFIXES, SourceOptions
from precache.sources.tree import ObjectTree, read_object
from precache.storage import open_regular
from precache.storage.objects import ObjectInfo, ObjectStore
from precache.storage.urls import Location, Url, locate

Row: TypeAlias = tuple[int, Sequence[Any]]
"""The line that the row begins in, 0 where the format has no lines, and its values."""
Rows: TypeAlias = Callable[[Sequence[str]], Iterator[Row]]
"""What a reader of a table gives beside the names of the columns: the rows, of the columns that are asked."""

_LINE_BYTES = 64 << 20  # a longer line is not a line of a table
_BATCH_ROWS = 65_536
_PATH_BYTES = 4096  # no system takes longer ones
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
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
        with _opened(self.root, self.file) as (names, rows):
            columns = Columns.of(self.root, names, self.options)
            if self.options.root is not None and not self.url and not os.path.isdir(self.options.root):
                raise SettingError(f"--root {self.options.root}: no such folder; name that of the pictures")
            found = _TableRows(self.root, None if self.url else os.path.abspath(self.folder), columns)
            found.read(rows)
        found.check_twice()
        sizes, modified_ns, warnings = found.stat(self.folder)
        labelled = found.labelled(self.options)
        split_names, splits = found.splits()
        samples = Samples(
            ids=np.arange(len(found)),
            labels=labelled.labels,
            file_bytes=sizes,
            modified_ns=modified_ns,
            splits=splits,
            split_names=split_names,
            paths=bytes(found.paths),
            path_ends=np.frombuffer(found.path_ends, np.int64),
            places=np.frombuffer(found.lines, np.int64),
            fields={name: found.field(name) for name in columns.fields},
        )
        warnings += [f"{self.root}: {columns.note}"] if columns.note else []
        return labelled.scan(self, samples, (), warnings, columns.label or "")

    def read(self, ref: SampleRef, max_pixels: int) -> bytes:
        """The content of the file that the row names."""
        path = os.path.join(self.folder, ref.path)
        if ref.bytes < 0:
            reason = "is a folder" if os.path.isdir(path) else "is not a file"
            raise ImageError(self.where(ref), f"{reason}; named in {_place_of(self.root, ref.place, ref.id)}")
        if self.url:
            scanned = (ref.bytes, ref.modified_ns)
            return read_object(self.url, ref.path, ref.bytes, max_pixels, lambda it: _as_found(it) == scanned)
        return read_picture(path, max_pixels, (ref.bytes, ref.modified_ns))

    def where(self, ref: SampleRef) -> str:
        """Its row, and the path of its file."""
        return f"{_place_of(self.root, ref.place, ref.id)}: {os.path.join(self.folder, ref.path)}"


class _TableRows:
    """The rows of a table, in columns; some 100 bytes a row where there are no fields.

    Args:
        folder: that paths are relative to, absolute; None: that is a URL.
    """

    def __init__(self, table: Location, folder: str | None, columns: Columns) -> None:
        self.table, self._folder, self._columns = table, folder, columns
        self.paths, self.path_ends = bytearray(), array("q")
        self.lines = array("q")
        self._hashes = array("Q")
        self._labels = Labels()
        self._split_of: dict[str, int] = {}
        self._splits = array("q")
        self._fields: dict[str, list[Any]] = {name: [] for name in columns.fields}
        self._is_text = table.suffix.lower() in _DELIMITERS

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, rows: Rows) -> None:
        """Read all rows."""
        columns = self._columns
        names = list(dict.fromkeys((columns.image, *columns.names)))
        at = {name: place for place, name in enumerate(names)}
        image, fields = at[columns.image], [(at[name], values) for name, values in self._fields.items()]
        label = None if columns.label is None else at[columns.label]
        split = None if columns.split is None else at[columns.split]
        for line, values in rows(names):
            self.lines.append(line)
            self._add_path(values[image])
            if label is not None:
                self._labels.add(values[label])
            if split is not None:
                self._add_split(values[split])
            for place, column in fields:
                column.append(values[place])
        if not self.lines:
            raise SourceError(f"{self.table}: has no rows; expected one for each picture")

    def _error(self, row: int, column: str | None, reason: str) -> SourceError:
        return SourceError(f"{_place_of(self.table, self.lines[row], row)}: {column!r}: {reason}")

    def _add_path(self, path: Any) -> None:
        row, column = len(self.lines) - 1, self._columns.image
        if not isinstance(path, str) or not path:
            raise self._error(row, column, f"expected the path of a picture, got {path!r:.60}; fill it in")
        if "://" in path:
            raise self._error(row, column, f"{path!r:.60} is a URL; download the pictures first")
        try:
            encoded = os.fsencode(path)
        except UnicodeEncodeError:
            reason = f"{path!r:.60} is not a valid file name; correct it"
            raise self._error(row, column, reason) from None
        if b"\0" in encoded or len(encoded) > _PATH_BYTES:
            what = f"has {len(encoded):,} bytes" if len(encoded) > _PATH_BYTES else "has a NUL in it"
            raise self._error(row, column, f"{path!r:.60} {what}, so it cannot be a path; correct it")
        short, place = _shortest(self._folder, path)
        self.paths += os.fsencode(short)
        self.path_ends.append(len(self.paths))
        self._hashes.append(xxhash.xxh3_64_intdigest(os.fsencode(place)))

    def _add_split(self, value: Any) -> None:
        column = self._columns.split or ""
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str) and value.isdecimal():
            value = column + value  # folds are numbers more often than not
        if not isinstance(value, str) or not SPLIT_NAME.fullmatch(value):
            reason = f"{value!r:.60} is not a valid split name; write one such as train"
            raise self._error(len(self.lines) - 1, column, reason)
        self._splits.append(self._split_of.setdefault(value, len(self._split_of)))

    def _path(self, row: int) -> str:
        return os.fsdecode(bytes(self.paths[self.path_ends[row - 1] if row else 0 : self.path_ends[row]]))

    def check_twice(self) -> None:
        """Raise SourceError where two rows name one picture."""
        hashes = np.frombuffer(self._hashes, np.uint64)
        order = np.argsort(hashes, kind="stable")
        for at in np.flatnonzero(hashes[order][1:] == hashes[order][:-1]).tolist():
            first, second = int(order[at]), int(order[at + 1])
            paths = [self._path(row) for row in (first, second)]
            if len({_shortest(self._folder, path)[1] for path in paths}) == 1:  # not their hashes alone
                other = f"line {self.lines[first]:,} (id {first})" if self.lines[first] else f"row {first}"
                raise self._error(
                    second,
                    self._columns.image,
                    f"{paths[1]!r} is in {other}, too; remove one of them, or write all its labels into one "
                    f"cell (--separator)",
                )

    def stat(self, folder: str) -> tuple[Any, Any, list[str]]:
        """Size, -1 where there is no file, and time of the last write of each picture; and a warning.

        Raises:
            SourceError: there is none of them, or one cannot be looked at.
        """
        sizes, modified_ns = np.full(len(self), -1), np.zeros(len(self), np.int64)
        prefix, find = folder, _status_on_disk
        if isinstance(url := locate(folder), Url):
            objects = {info.name: _as_found(info) for info in ObjectStore(url).list()}
            prefix, find = "", lambda path: objects.get(os.path.normpath(path))
        for row in range(len(self)):
            status = find(os.path.join(prefix, self._path(row)))
            if status is not None:
                sizes[row], modified_ns[row] = status
        absent = np.flatnonzero(sizes < 0)
        if not len(absent):
            return sizes, modified_ns, []
        first = int(absent[0])
        path = os.path.join(folder, self._path(first))
        where = _place_of(self.table, self.lines[first], first)
        if len(absent) == len(self):
            raise SourceError(
                f"{where}: there is no picture {path!r}, nor one for any other row; paths are relative "
                f"to the table, or to the folder that --root names, and have the same extension as the files"
            )
        missing = f"{counted(len(absent), 'row')} of {len(self):,} without a picture"
        return sizes, modified_ns, [f"{self.table}: {missing}; the first is {where}: {path!r}"]

    def labelled(self, options: SourceOptions) -> Labelled:
        """What the rows are labelled with."""
        if self._columns.label is None:
            return Labelled.with_nothing(len(self))
        try:
            return self._labels.labelled(options.target, options.separator, cells=self._is_text)
        except ValueOfRowError as error:
            raise self._error(error.row, self._columns.label, error.reason) from error

    def splits(self) -> tuple[tuple[str, ...], Any]:
        """Their names, sorted as the folders of a tree are, and int64 [n] of indices."""
        if not self._split_of:
            return ("",), np.zeros(len(self), np.int64)
        names = sorted(self._split_of)
        rank = np.empty(len(names), np.int64)
        rank[[self._split_of[name] for name in names]] = np.arange(len(names))
        return tuple(names), rank[np.frombuffer(self._splits, np.int64)]

    def field(self, name: str) -> Column:
        """A field; the values that were read are let go."""
        values = self._fields.pop(name)
        if None in values:
            raise self._error(values.index(None), name, "is empty; fill it in, or leave the column out")
        try:
            return Column.of(typed(values) if self._is_text else values)
        except ValueOfRowError as error:
            raise self._error(error.row, name, error.reason) from error


def _status_on_disk(path: str) -> tuple[int, int] | None:
    """Size and time of a file; None where there is none."""
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        status = steadily(lambda: os.stat(path), path)
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def _as_found(info: ObjectInfo) -> tuple[int, int]:
    return info.bytes, info.modified_ns


def why_no_table(path: Path) -> str | None:
    """What to do with a table that is not read here, as its name says; None for any other file."""
    suffix, inner = path.suffix.lower(), Path(path.stem).suffix.lower()
    packed = suffix in (".gz", ".xz", ".zst", ".zip")
    return None if packed and inner not in TABLE_SUFFIXES else _OTHERS.get(suffix)


def columns_of(path: Path) -> list[str]:
    """The names of the columns of the table at `path`; of JSON lines, those of the first row.

    Raises:
        SourceError: it cannot be read, or is empty.
        MissingDependencyError: Parquet, without pyarrow.
    """
    with _opened(path, path) as (names, _):
        return names


@contextmanager
def _opened(table: Location, path: Path) -> Iterator[tuple[list[str], Rows]]:
    """The names of its columns, and its rows; None where JSON lines or Parquet have no value."""
    try:
        with open(open_regular(path), "rb") as file:
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


def _read_csv(path: Location, file: BinaryIO) -> tuple[list[str], Rows]:
    delimiter = _DELIMITERS[path.suffix.lower()]
    reader = csv.reader(_lines(path, file), delimiter=delimiter, strict=True)

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
    if not names:
        raise SourceError(f"{path}: is empty; expected a first line with the names of its columns")
    return names, rows


def _read_json_lines(path: Location, file: BinaryIO) -> tuple[list[str], Rows]:
    def objects() -> Iterator[tuple[int, dict[str, Any]]]:
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

    found = objects()
    first = next(found, None)
    if first is None:
        raise SourceError(f"{path}: is empty; expected one JSON object per line")

    def rows(columns: Sequence[str]) -> Iterator[Row]:
        for line, value in chain([first], found):
            yield line, [value.get(name) for name in columns]

    return list(first[1]), rows


def _read_parquet(path: Location, file: BinaryIO) -> tuple[list[str], Rows]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependencyError(
            f"{path}: Parquet needs the extra 'table' ({error}); run: {install_extra('table')}"
        ) from error

    @contextmanager
    def told() -> Iterator[None]:
        try:
            yield
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
            reason = " ".join(str(error).split())[:200]
            raise SourceError(f"{path}: not Parquet that can be read ({reason}); write it again") from error

    def rows(columns: Sequence[str]) -> Iterator[Row]:
        with told():
            batches = table.iter_batches(_BATCH_ROWS, columns=list(columns), use_threads=False)
            while (batch := next(batches, None)) is not None:
                found = list(batch.schema.names)
                values = [batch.column(found.index(name)).to_pylist() for name in columns]
                yield from ((0, row) for row in zip(*values, strict=True))

    with told():
        table = parquet.ParquetFile(file, pre_buffer=False, page_checksum_verification=True)
        return list(table.schema_arrow.names), rows


_READERS: dict[str, Callable[[Location, BinaryIO], tuple[list[str], Rows]]] = dict(
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
