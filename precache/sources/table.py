"""Tables as a source: each row is a sample, and columns are pictures, labels, splits and fields.

    .csv .tsv          with a header; cells are text, quoted as in RFC 4180. If the header has a space behind
                       a comma, spaces in front of cells are no part of them. If it has no comma (a TSV: no
                       tab), semicolons, tabs or bars separate the cells
    .jsonl             one object per line; the columns are the keys of all objects
    .parquet           also a folder of files, whose names say the splits
    .feather .arrow    Arrow's own files
    state.json         in a folder that Hugging Face's `save_to_disk` wrote: it lists Arrow's files

A file is opened as `Rows`, whose columns are read as lists. `precache.sources.targets` says what they mean,
and `RowSource` makes samples of them; also of the rows of datasets in memory, see `precache.sources.memory`.
CSV and JSON lines need no further package, the others pyarrow.

A row is counted from 0 over all parts of a source, and is the id of its sample; its part row is counted in
its part. `SampleRef.offset` is the row; or of text, which has one part, the row's first line.

One column holds the pictures, or the paths of their files. Paths are relative to the folder of the table, or
to the folder that --root names; they may be absolute, and may contain `..`, since a table is trusted to name
its files. They are stored in their shortest form. A row whose file is missing is rejected when it is
converted.

Pictures are bytes, or structs with `bytes` or, if these are null, the `path` of a file. The path of such a
sample is its row in 8 digits, in a folder of files behind the path of its file:
data/train-00000-of-00002.parquet/00000042. Workers read a picture by its range of bytes, without Arrow.
But Parquet is compressed, in groups of many rows, and pictures are read in shuffled order. So its pictures
are copied first, batch by batch, to a file in the temporary folder of `precache.storage.staging`.

Text is UTF-8, or UTF-16 with a byte order mark, and its lines end as on any system. Lines are counted as in
an editor: from 1, with the header and blank lines, which are no rows.
"""

import codecs
import csv
import hashlib
import io
import json
import os
import re
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import msgspec
import numpy as np
from PIL import Image

from precache.dataset.columns import Ints
from precache.errors import (
    ImageError,
    MissingDependencyError,
    SourceError,
    did_you_mean,
    os_errors_as,
    os_reason,
)
from precache.packages import install_command
from precache.pictures.kinds import IMAGE_EXTENSIONS, extension
from precache.pictures.reading import check_bytes, read_part, read_picture, status_of
from precache.reporting import quantity
from precache.sources.base import ANY_SIZE, SampleList, SampleRef, Samples, Scan, picture_checksum
from precache.sources.options import SourceOptions
from precache.sources.targets import (
    ColumnInfo,
    Roles,
    RowValues,
    choose_roles,
    scan_rows,
    split_name,
    unique_names,
)
from precache.sources.text_files import encoding_of, find_delimiter, utf_8_remedy
from precache.storage import open_regular, staging

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
SAVED_DATASET, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Names of the files that a folder of `save_to_disk` has, of one dataset or of several splits."""
_ARROW_MAGIC = b"ARROW1"  # of a file with an index of its batches

_BATCH_PICTURES, _BATCH_ROWS = 32, 16_384
_TEXT_ROWS = 1024  # of a CSV read at a time: their cells stay in the CPU's cache
_BUFFER_BYTES = 1 << 20  # of Parquet read at a time, rather than a whole row group
_MAX_HEADER_BYTES = 1 << 20
_USUAL_EXTENSIONS = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG", ".webp", ".bmp", ".tif")
_EMPTY_OR_DOTS = re.compile(r"(^|/)\.{0,2}(/|$)")  # parts of a path that its shortest form has not
_MAX_PATH_BYTES = 4096  # no system takes longer paths
_PROBED_PICTURES = 8  # pictures that are read during the scan, so that the digest tells two datasets apart


# --- rows as a source ---


class StoredPictures(Protocol):
    """Pictures in a column; the only part of `Rows` that worker processes need."""

    @property
    def sizes(self) -> Ints | None:
        """Size of each picture in bytes, -1 if the row has none: int64 [n]; None if they are unknown."""

    def read(self, part_row: int, where: str, max_pixels: int) -> bytes | Image.Image:
        """Return the picture of a row, which messages call `where`; raises as `Source.read` does."""


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Successive rows, as `Rows.read` yields them.

    Attributes:
        columns: values of each column by its name, one for each row; None for a missing value.
        count: number of rows.
        lines: first line of each row, from 1, as in a text editor; None if rows are no lines.
        unread: positions in the batch of rows that cannot be read; they have the values of another row.
    """

    columns: Mapping[str, Sequence[Any]]
    count: int
    lines: Sequence[int] | None = None
    unread: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that have been opened: of a table, of one of its files, or of a split of a dataset.

    Attributes:
        name: name of the table or dataset in messages.
        columns: its columns.
        read: function of names of columns that yields these, batch by batch, also where it is given no name;
            raises SourceError for a damaged row.
        open_pictures: function of the name of a column that opens the pictures in it; None if there are none.
        is_text: whether values are unparsed text, as the cells of a CSV are.
        has_lines: whether rows are lines of a text.
        folder: folder that paths of pictures are relative to; None if the rows must hold pictures.
        split: split of the rows, unless they have a column of splits.
        prefix: text in front of the samples' paths.
        is_dataset: whether the rows come from a dataset object, not a table; then a file may occur in several
            rows.
    """

    name: str
    columns: Sequence[ColumnInfo]
    read: Callable[[Sequence[str]], Iterable[RowBatch]]
    open_pictures: Callable[[str], StoredPictures] | None = None
    is_text: bool = False
    has_lines: bool = False
    folder: str | None = None
    split: str = ""
    prefix: str = ""
    is_dataset: bool = False

    def choose_roles(self, options: SourceOptions) -> Roles:
        """Choose the columns of pictures, labels, splits and fields, see `choose_roles` of `targets`."""
        may_be_paths = self.folder is not None
        return choose_roles(
            self.name, self.columns, options, may_be_paths=may_be_paths, is_dataset=self.is_dataset
        )


@dataclass(frozen=True, slots=True)
class ScannedRows:
    """Rows after the scan, reduced to what worker processes need.

    Attributes:
        name: name of the table or dataset in messages.
        has_lines: whether `SampleRef.offset` is the first line of a row, not the row.
        folder: folder of the pictures' files; "" if the rows hold the pictures.
        prefix: see `Rows`.
        pictures: pictures that the rows hold; None if they are files in `folder`.
        first_row: the row whose part row is 0.
    """

    name: str
    has_lines: bool
    folder: str
    prefix: str
    pictures: StoredPictures | None
    first_row: int

    def row_name(self, offset: int, sample_id: int) -> str:
        """Return the name of the row at `offset` for messages."""
        if self.has_lines:
            return f"{self.name}, line {offset:,} (id {sample_id})"
        return f"{self.name}: row {offset - self.first_row}"

    def file_of(self, path: str) -> str:
        """Return the file of the sample with this path."""
        return os.path.join(self.folder, path.removeprefix(self.prefix))


@dataclass(frozen=True, slots=True)
class RowSource:
    """Tables and datasets as a `Source`.

    Attributes:
        root, paths: see `Source`.
        parts: functions that open the rows of each part: a table, its files, or splits of a dataset. They
            raise SourceError if rows cannot be read, and MissingDependencyError if a library is missing. A
            part whose rows are lines is the only one. Empty after the scan.
        options: options with the columns that the user has named.
        scanned: rows of each part, after the scan.
    """

    root: Path
    paths: tuple[Path, ...]
    parts: tuple[Callable[[], Rows], ...]
    options: SourceOptions
    scanned: tuple[ScannedRows, ...] = ()

    def scan(self) -> Scan:
        parts = [open_rows() for open_rows in self.parts]
        roles = parts[0].choose_roles(self.options)
        scanned = _RowList(roles, is_text=parts[0].is_text)
        for rows in parts:
            part_roles = rows.choose_roles(self.options)
            if difference := _difference(part_roles, roles):
                raise SourceError(
                    f"{difference} {parts[0].name}",
                    path=rows.name,
                    remedy="convert it alone, or write both with the same columns",
                )
            scanned.add_part(rows, part_roles)
        if not len(scanned.samples):
            raise SourceError("has no rows; expected one for each picture", path=self.root)
        source = replace(self, parts=(), scanned=tuple(scanned.parts))
        scan = scan_rows(source, scanned.samples, scanned.values, self.options, (), scanned.warnings)
        checksums = source._probe_checksums(scan.samples)
        if not checksums:
            return scan
        return replace(scan, digest=hashlib.sha256(f"{scan.digest}{checksums}".encode()).hexdigest())

    def read(self, ref: SampleRef, max_pixels: int) -> bytes | Image.Image:
        part, where = _part_at(self.scanned, ref.offset), self.where(ref)
        if part.pictures is None:
            return _read_file(part, ref, where, max_pixels)
        check_bytes(where, ref.bytes, max_pixels)
        picture = part.pictures.read(ref.offset - part.first_row, where, max_pixels)
        if ref.bytes < 0:
            raise ImageError(where, "could not be read when the dataset was listed")
        return picture

    def where(self, ref: SampleRef) -> str:
        """Return the name for messages: the row, and the path of the picture's file if it has one."""
        part = _part_at(self.scanned, ref.offset)
        row = part.row_name(ref.offset, ref.id)
        return row if part.pictures is not None else f"{row}: {part.file_of(ref.path)}"

    def _probe_checksums(self, samples: Samples) -> str:
        """Return checksums of a few pictures in rows, since labels alone do not tell two datasets apart.

        Raises:
            SourceError: a picture changes each time that it is read.
        """
        checksums = []
        positions = np.linspace(0, len(samples) - 1, _PROBED_PICTURES)
        for row in sorted({round(position) for position in positions}):
            ref = samples[row]
            if _part_at(self.scanned, ref.offset).pictures is None:
                continue  # the digest has the sizes of files
            try:
                checksum = picture_checksum(self.read(ref, ANY_SIZE))
                second_checksum = picture_checksum(self.read(ref, ANY_SIZE))
            except ImageError:
                continue  # the conversion will reject it, with the reason
            if checksum != second_checksum:
                raise SourceError(
                    "changes each time it is read",
                    path=self.where(ref),
                    remedy="leave out the random transform: loaders augment anew in each epoch",
                )
            checksums.append(f"{row}:{checksum}")
        return " ".join(checksums)


def _part_at(parts: Sequence[ScannedRows], offset: int) -> ScannedRows:
    """Return the part of the sample at `offset`."""
    return parts[bisect_right(parts, offset, key=lambda part: part.first_row) - 1]


def _difference(roles: Roles, first_roles: Roles) -> str:
    """Return a phrase on how a part's labels differ from the first part's, whose name must follow; or ""."""
    if roles.label != first_roles.label:
        return f"has {roles.label!r} for the label, not {first_roles.label!r} as"
    names, first_names = roles.class_names or (), first_roles.class_names or ()
    for name, first_name in zip(names, first_names, strict=False):
        if name != first_name:
            return f"has the class {name!r} where {first_name!r} is one in"
    if len(names) != len(first_names):
        return f"names {len(names):,} classes, not {len(first_names):,} as"
    return ""


class _RowList:
    """Rows of all parts of a source, as the scan lists them.

    Attributes:
        samples: the rows as samples.
        values: their labels and fields.
        parts: parts whose rows are among them.
        warnings: lines on columns that the user did not name, and on missing files.
    """

    def __init__(self, roles: Roles, *, is_text: bool) -> None:
        self.samples = SampleList()
        self._texts: dict[str, str] = {}
        self.parts: list[ScannedRows] = []
        self.warnings: list[str] = []
        self.values = RowValues(
            row_name=self.row_name,
            label=roles.label,
            class_names=roles.class_names,
            fields={name: [] for name in roles.fields},
            labels_are_text=is_text,
            fields_are_text=is_text,
        )

    def row_name(self, row: int) -> str:
        """Return the name of a row in messages."""
        offset = self.samples.offsets[row]
        return _part_at(self.parts, offset).row_name(offset, row)

    def add_part(self, rows: Rows, roles: Roles) -> None:
        """Append the rows of a part.

        Raises:
            SourceError: a row is damaged; two rows of a table name one picture, no file exists, or one cannot
                be examined.
        """
        image, first_row = roles.image.name, len(self.samples)
        pictures = rows.open_pictures(image) if roles.image.has_pictures and rows.open_pictures else None
        self.parts.append(
            ScannedRows(rows.name, rows.has_lines, rows.folder or "", rows.prefix, pictures, first_row)
        )
        self.warnings += [f"{rows.name}: {note}" for note in roles.notes]
        path_hashes, missing_rows = array("q"), list[int]()
        columns = roles.names if pictures is not None else list(dict.fromkeys((image, *roles.names)))
        for batch in rows.read(columns):
            start = len(self.samples)
            offsets = range(start, start + batch.count) if batch.lines is None else batch.lines
            splits: str | list[str] = rows.split
            if roles.split is not None:
                splits = self._splits(roles.split, batch.columns[roles.split], offsets)
            if pictures is not None:
                self._add_pictures(pictures, batch, splits)
            else:
                self._add_files(image, batch.columns[image], splits, offsets, path_hashes, missing_rows)
            if roles.label is not None:
                self.values.label_cells += self._share_texts(batch.columns[roles.label])
            for name in roles.fields:
                self.values.fields[name] += self._share_texts(batch.columns[name])
        if not rows.is_dataset:
            self._check_unique(image, path_hashes)
        if missing_rows:
            self._warn_of_missing(rows, missing_rows)

    def _splits(self, column: str, values: Sequence[Any], offsets: Sequence[int]) -> list[str]:
        """Return the splits that the values of the last part say."""
        splits = []
        for value, offset in zip(values, offsets, strict=True):
            try:
                splits.append(split_name(column, value))
            except ValueError as error:
                where = self.parts[-1].row_name(offset, len(self.samples) + len(splits))
                raise SourceError(f"{column!r}: {error}", path=where) from None
        return splits

    def _share_texts(self, values: Sequence[Any]) -> list[Any]:
        """Return the values, with one text for all that are equal: classes repeat."""
        if len(self._texts) > _BATCH_ROWS:
            self._texts.clear()
        share = self._texts.setdefault
        return [share(value, value) if isinstance(value, str) else value for value in values]

    def _add_pictures(self, pictures: StoredPictures, batch: RowBatch, splits: str | Sequence[str]) -> None:
        """Append rows that hold their pictures."""
        part, row = self.parts[-1], len(self.samples)
        part_row = row - part.first_row
        sizes = [0] * batch.count
        if pictures.sizes is not None:
            sizes = pictures.sizes[part_row:][: batch.count].tolist()
        for position in batch.unread:
            sizes[position] = -1
        first_number = part_row if part.prefix else row
        paths = [f"{part.prefix}{first_number + position:08d}" for position in range(batch.count)]
        self.samples.add_files(paths, splits, sizes, (), range(row, row + batch.count))

    def _add_files(
        self,
        column: str,
        paths: Sequence[Any],
        splits: str | Sequence[str],
        offsets: Sequence[int],
        path_hashes: "array[int]",
        missing_rows: list[int],
    ) -> None:
        """Append rows whose pictures are files, hashes of their absolute paths, and those without a file.

        Raises:
            SourceError: a value cannot be the path of a picture.
        """
        part = self.parts[-1]
        folder = os.path.abspath(part.folder)
        short_paths, sizes, times = list[str](), array("q"), array("q")
        for row, (path, offset) in enumerate(zip(paths, offsets, strict=True), len(self.samples)):
            if reason := _path_problem(path):
                raise SourceError(f"{column!r}: {path!r:.60} {reason}", path=part.row_name(offset, row))
            short_path, full_path, status = _find_file(folder, path)
            if status is None:
                missing_rows.append(row)
            size, modified_ns = status or (-1, 0)
            sizes.append(size)
            times.append(modified_ns)
            short_paths.append(f"{part.prefix}{short_path}")
            path_hashes.append(hash(full_path))
        self.samples.add_files(short_paths, splits, sizes, times, offsets)

    def _check_unique(self, column: str, path_hashes: Sequence[int]) -> None:
        """Raise SourceError if two rows of the last part name one picture, by hashes of absolute paths."""
        scanned, hashes = self.parts[-1], np.array(path_hashes, np.int64)
        order = np.argsort(hashes, kind="stable")
        repeated = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
        if not len(repeated):
            return
        first, second = (order[repeated[0] : repeated[0] + 2] + scanned.first_row).tolist()
        first_name = f"row {first - scanned.first_row}"
        if scanned.has_lines:
            first_name = f"line {self.samples.offsets[first]:,} (id {first})"
        raise SourceError(
            f"{column!r}: {self.samples.path(second)!r} is in {first_name}, too; remove one of them, or "
            f"write all its labels into one cell (--separator)",
            path=self.row_name(second),
        )

    def _warn_of_missing(self, rows: Rows, missing_rows: Sequence[int]) -> None:
        """Warn of rows of the last part without a picture; SourceError if none of its rows has one."""
        scanned, first_missing = self.parts[-1], self.row_name(missing_rows[0])
        missing_file = scanned.file_of(self.samples.path(missing_rows[0]))
        count = len(self.samples) - scanned.first_row
        if len(missing_rows) < count:
            number = f"{quantity(len(missing_rows), 'row')} of {count:,} without a picture"
            self.warnings.append(f"{scanned.name}: {number}; the first is {first_missing}: {missing_file!r}")
            return
        remedy = (
            "paths are relative to the table, or to the folder that --root names, and have the same "
            "extension as the files"
        )
        if rows.is_dataset:
            remedy = "check the folder of the dataset"
        for column in rows.columns:
            if column.has_pictures:
                remedy += f"; or take the bytes in {column.name!r}: --image {column.name}"
        raise SourceError(
            f"there is no picture {missing_file!r}, nor one for any other row",
            path=first_missing,
            remedy=remedy,
        )


# --- files that rows name ---


def _spellings(path: str) -> Iterator[str]:
    """Yield other paths of a file that there is not: a path of Windows, and an id without the extension."""
    slashed = path.replace("\\", "/")
    if slashed != path:
        yield slashed
    if extension(path) not in IMAGE_EXTENSIONS:
        yield from (f"{slashed}{suffix}" for suffix in _USUAL_EXTENSIONS)


def _path_problem(path: Any) -> str | None:
    """Return why a row's value cannot be the path of its picture, with a remedy; None if it can."""
    if not isinstance(path, str) or not path:
        return "is no path of a picture; fill it in"
    if "://" in path:
        return "is a URL; download the pictures first"
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "is not a valid file name; correct it"
    if len(encoded) > _MAX_PATH_BYTES:
        return f"has {len(encoded):,} bytes, so it cannot be a path; correct it"
    if b"\0" in encoded:
        return "has a NUL in it, so it cannot be a path; correct it"
    return None


def _find_file(folder: str, path: str) -> tuple[str, str, tuple[int, int] | None]:
    """Return a path in its shortest form, the absolute one, and the status of the file; None without a file.

    Args:
        folder: absolute path of the folder that `path` is relative to.
    """
    short_path, full_path = _normalize(folder, path)
    if (status := status_of(full_path)) is not None:
        return short_path, full_path, status
    for spelling in _spellings(path):
        other_path, other_full_path = _normalize(folder, spelling)
        if (status := status_of(other_full_path)) is not None:
            return other_path, other_full_path, status
    return short_path, full_path, None


def _normalize(folder: str, path: str) -> tuple[str, str]:
    """Return a row's path without `.`, `..` and double slashes, and the absolute path of the file.

    A path whose `..` follows a link to another folder, or a missing folder, is returned as it is written.
    """
    if not _EMPTY_OR_DOTS.search(path):
        return path, f"{folder}/{path}"
    short_path = os.path.normpath(path.replace("//", "/"))  # normpath leaves two slashes at the start
    if ".." in path.split("/"):
        joined_path = os.path.join(folder, path)
        try:
            is_same = os.path.samefile(joined_path, os.path.normpath(joined_path))
        except OSError:
            is_same = False
        if not is_same:
            return path, joined_path
    return short_path, os.path.normpath(os.path.join(folder, short_path))


def _read_file(part: ScannedRows, ref: SampleRef, where: str, max_pixels: int) -> bytes:
    """Return the content of the file that a row names; it must be unchanged since the scan."""
    path = part.file_of(ref.path)
    if ref.bytes < 0:
        reason = "is a folder" if os.path.isdir(path) else "is not a file"
        raise ImageError(where, f"{reason}; named in {part.row_name(ref.offset, ref.id)}")
    return read_picture(path, max_pixels, (ref.bytes, ref.modified_ns))


# --- CSV and JSON lines ---


def open_csv(name: str, folder: str) -> Rows:
    """Open a CSV or TSV, with paths relative to `folder`; all cells stay text.

    Raises:
        SourceError: the file cannot be read, is no text, or has no header; or, when it is read, a row has
            more or fewer cells than the header.
    """
    content = _read_text(name)
    _, header = next(_records(name, content), (0, []))
    if not header:
        raise SourceError("is empty; expected a first line with the names of its columns", path=name)
    names = [column.strip() for column in header]

    def read(wanted: Sequence[str]) -> Iterator[RowBatch]:
        records = islice(_records(name, content), 1, None)
        positions = {column: names.index(column) for column in wanted}
        while batch := list(islice(records, _TEXT_ROWS)):
            columns = {
                column: [cells[position] for _, cells in batch] for column, position in positions.items()
            }
            yield RowBatch(columns, len(batch), [line for line, _ in batch])

    columns = [ColumnInfo(column) for column in names]
    return Rows(name, columns, read, is_text=True, has_lines=True, folder=folder)


def _records(name: str, content: bytes) -> Iterator[tuple[int, list[str]]]:
    """Yield header and rows of a CSV with this content: the first line of each, and its cells.

    Raises:
        SourceError: a quote is not closed, or a row has more or fewer cells than the header.
    """
    first_line = next(iter(content[:_MAX_HEADER_BYTES].splitlines()), b"").decode(errors="replace")
    delimiter = find_delimiter(first_line, _DELIMITERS[Path(name).suffix.lower()])
    reader = csv.reader(
        io.TextIOWrapper(io.BytesIO(content), "utf-8", newline=""),
        delimiter=delimiter,
        skipinitialspace=f"{delimiter} " in first_line,
        strict=True,
    )
    count, row = 0, -1
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise SourceError(
                f"not CSV ({error})",
                path=f"{name}, line {line:,}",
                remedy=(
                    f"close every quote, double those within quotes, and write cells of over "
                    f"{csv.field_size_limit():,} characters as JSON lines"
                ),
            ) from error
        if not cells:
            continue  # a blank line
        count = count or len(cells)
        if len(cells) != count:
            raise SourceError(
                f"expected {count} cells as in the header, got {len(cells)}",
                path=f"{name}, line {line:,} (id {row})",
                remedy="put quotes around a cell that has the separator or a line break in it",
            )
        row += 1
        yield line, cells


def open_json_lines(name: str, folder: str) -> Rows:
    """Open JSON lines, one object per line, with paths relative to `folder`.

    Raises:
        SourceError: the file cannot be read, is no text, or a line is no object.
    """
    decode = msgspec.json.Decoder().decode
    lines, objects = list[int](), list[dict[str, Any]]()
    for line, text in enumerate(_read_text(name).splitlines(), 1):
        if not text or text.isspace():
            continue
        where = f"{name}, line {line:,}"
        try:
            value = decode(text)
        except msgspec.DecodeError:
            try:
                value = json.loads(text)  # takes NaN, too, and its errors say more
            except (ValueError, RecursionError) as error:
                raise SourceError(f"not JSON ({error}); expected one object per line", path=where) from error
        if not isinstance(value, dict):
            raise SourceError('is not a JSON object; expected one per line: {"path": "a.jpg"}', path=where)
        lines.append(line)
        objects.append(value)
    names = dict.fromkeys(chain.from_iterable(objects))
    if not names:
        raise SourceError("is empty; expected one JSON object per line", path=name)

    def read(wanted: Sequence[str]) -> Iterator[RowBatch]:
        columns = {column: [value.get(column) for value in objects] for column in wanted}
        yield RowBatch(columns, len(objects), lines)

    columns = [ColumnInfo(column) for column in names]
    return Rows(name, columns, read, has_lines=True, folder=folder)


@contextmanager
def _open_table(path: str) -> Iterator[BinaryIO]:
    """Open the file of a table; SourceError if it cannot be opened, or cannot be read in the block."""
    try:
        with io.BufferedReader(open_regular(path)) as file:
            yield file
    except OSError as error:
        hint = did_you_mean(path)
        raise SourceError(
            f"the table cannot be read ({os_reason(error)}){hint}",
            path=path,
            remedy="" if hint else "check its name and permissions",
        ) from error


def _read_text(name: str) -> bytes:
    """Return the text of a table in UTF-8, without a byte order mark; SourceError if it is no text."""
    with _open_table(name) as file:
        content = file.read()
    encoding = encoding_of(content)
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        if encoding == "utf-16":
            raise SourceError(
                f"is damaged UTF-16 ({error.reason})", path=name, remedy="save it again, as UTF-8"
            ) from error
        *lines, last_line = (content[: error.start] + b"?").splitlines()
        raise SourceError(
            f"byte {len(last_line.removeprefix(codecs.BOM_UTF8)):,} is not UTF-8",
            path=f"{name}, line {len(lines) + 1:,}",
            remedy=utf_8_remedy(name),
        ) from error
    if "\0" in text:
        line = len(f"{text[: text.index(chr(0))]}?".encode().splitlines())
        raise SourceError(
            "has a NUL byte, expected text in UTF-8",
            path=f"{name}, line {line:,}",
            remedy="save the table again as UTF-8",
        )
    return content.removeprefix(codecs.BOM_UTF8) if encoding != "utf-16" else text.encode()


# --- Parquet and Arrow's own files ---


def open_arrow(
    name: str, folder: str, split: str = "", prefix: str = "", *, may_be_paths: bool = True
) -> Rows:
    """Open a Parquet file, or one of Arrow's own.

    Args:
        name: path of the file.
        folder: folder that paths of pictures, also of those without bytes, are relative to.
        split, prefix: see `Rows`.
        may_be_paths: whether a column may hold the paths of pictures, instead of these.

    Raises:
        MissingDependencyError: pyarrow is not installed.
        SourceError: the file is none of these, or damaged.
    """
    with _open_arrow_file(name) as file:
        columns = [
            ColumnInfo(column.name, _class_names(file.schema, column.name), _has_bytes(column.type))
            for column in file.schema
        ]

    def read(wanted: Sequence[str]) -> Iterator[RowBatch]:
        with _open_arrow_file(name) as file:
            for batch in file.read(wanted):
                values = {column: batch.column(column).to_pylist() for column in wanted}
                yield RowBatch(values, batch.num_rows)

    return Rows(
        name,
        columns,
        read,
        partial(_open_pictures, name, folder),
        folder=folder if may_be_paths else None,
        split=split,
        prefix=prefix,
    )


class _ArrowFile(NamedTuple):
    """A file whose columns Arrow reads.

    Attributes:
        schema: names and types of the columns.
        read: function of names of columns that yields record batches. Bytes of Parquet, which are pictures,
            come a few at a time; others stay in the mapped file.
        mapped: the mapped file, as a buffer of Arrow; None for Parquet, which has to be decoded.
    """

    schema: Any
    read: Callable[[Sequence[str]], Iterator[Any]]
    mapped: Any = None


@contextmanager
def _open_arrow_file(name: str) -> Iterator[_ArrowFile]:
    """Open the file; SourceError if it cannot be read, also in the block."""
    try:
        import pyarrow
    except ImportError as error:
        raise MissingDependencyError(
            f"Parquet and Arrow's own files need the extra 'table' ({error})",
            path=name,
            remedy=f"run: {install_command('table')}",
        ) from error
    with _open_table(name) as file:
        try:
            yield _open_parquet(file) if is_parquet(name) else _open_arrow(name, file)
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
            kind = "Parquet" if is_parquet(name) else "an Arrow file"
            reason = " ".join(str(error).split())[:200]
            raise SourceError(
                f"not {kind} that can be read ({reason})", path=name, remedy="write it again"
            ) from error


def _open_parquet(file: BinaryIO) -> _ArrowFile:
    from pyarrow import parquet

    opened = parquet.ParquetFile(
        file, pre_buffer=False, page_checksum_verification=True, buffer_size=_BUFFER_BYTES
    )

    schema = opened.schema_arrow

    def read(names: Sequence[str]) -> Iterator[Any]:
        batch_rows = _BATCH_PICTURES if _have_bytes(schema, names) else _BATCH_ROWS
        remaining = opened.metadata.num_rows
        for batch in opened.iter_batches(batch_rows, columns=list(names), use_threads=False):
            remaining -= batch.num_rows
            if remaining < 0:
                break
            batch.validate(full=True)  # text that is no UTF-8
            yield batch
        if remaining:
            raise ValueError("more or fewer rows than its end says")

    return _ArrowFile(schema, read)


def _open_arrow(name: str, file: BinaryIO) -> _ArrowFile:
    """Map one of Arrow's own files, with an index of its batches at its end, or a stream of them."""
    import pyarrow

    has_index = file.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
    open_reader = pyarrow.ipc.open_file if has_index else pyarrow.ipc.open_stream
    mapped = pyarrow.memory_map(name).read_buffer()
    schema = open_reader(mapped).schema

    def read(names: Sequence[str]) -> Iterator[Any]:
        options = pyarrow.ipc.IpcReadOptions(use_threads=False)
        if not _have_bytes(schema, names):  # a choice of columns is copied to memory
            options.included_fields = [schema.get_field_index(column) for column in names or schema.names[:1]]
        reader = open_reader(mapped, options=options)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if has_index else reader
        for batch in batches:
            batch.validate(full=True)  # damaged offsets would crash the process when they are used
            yield batch

    return _ArrowFile(schema, read, mapped)


def _class_names(schema: Any, column: str) -> tuple[str, ...] | None:
    """Return the names of a column's classes, as Hugging Face's library stores them; None without these."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        feature = features[column]
        names = feature.get("feature", feature)["names"]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return unique_names(list(map(str, names))) if isinstance(names, list) and names else None


def _have_bytes(schema: Any, names: Sequence[str]) -> bool:
    """Return whether one of these columns has pictures."""
    return any(_has_bytes(schema.field(name).type) for name in names)


def _has_bytes(column_type: Any) -> bool:
    """Return whether values of this type are bytes, or structs with bytes."""
    from pyarrow import types

    if types.is_struct(column_type):
        return any(field.name == "bytes" and _has_bytes(field.type) for field in column_type)
    return bool(types.is_binary(column_type) or types.is_large_binary(column_type))


@dataclass(frozen=True, slots=True)
class _PicturesInFile:
    """Pictures in a column that lie in a file as they are, see `StoredPictures`.

    Attributes:
        path: the file: an uncompressed table, or a copy of a table's pictures.
        scanned_status: size of the file in bytes, and time of its last write in ns.
        starts: int64 [n], offset of each picture in bytes.
        sizes: int64 [n], size of each picture in bytes; -1 if the row has none.
        files: paths of those pictures that are files of their own, by their part rows.
    """

    path: str
    scanned_status: tuple[int, int]
    starts: Ints
    sizes: Ints
    files: Mapping[int, str]

    def read(self, part_row: int, where: str, max_pixels: int) -> bytes:
        if part_row in self.files:
            return read_picture(self.files[part_row], max_pixels)
        size = int(self.sizes[part_row])
        if size < 0:
            raise ImageError(where, "has no picture, neither bytes nor a file")
        data = read_part(self.path, where, self.scanned_status, int(self.starts[part_row]), size)
        if len(data) != size:
            raise SourceError("could not be read as a whole", path=where, remedy="run the same command again")
        return data


_found_pictures: dict[tuple[Any, ...], _PicturesInFile] = {}
"""Pictures of tables by name, folder, column and status of the table, since copying them takes time."""


def _open_pictures(name: str, folder: str, column: str) -> _PicturesInFile:
    """Find the pictures in a column of Parquet or of an Arrow file, once for each content of the file."""
    status = os.stat(name)
    key = (name, folder, column, status.st_size, status.st_mtime_ns)
    pictures = _found_pictures.get(key)
    if pictures is None or not os.path.exists(pictures.path):  # the staging folder was cleaned up meanwhile
        pictures = _found_pictures[key] = _find_pictures(name, folder, column)
    return pictures


def _find_pictures(name: str, folder: str, column: str) -> _PicturesInFile:
    """Find the pictures in a column; copy them if they are packed."""
    with _open_arrow_file(name) as file:
        if file.mapped is not None:
            locate = partial(_locate_in_table, file.mapped)
            if (pictures := _list_pictures(file, folder, column, name, locate)) is not None:
                return pictures
        with ExitStack() as stack:
            with _failed_copy(name):
                copy = stack.enter_context(tempfile.NamedTemporaryFile(dir=staging.folder(), delete=False))
            try:
                pictures = _list_pictures(file, folder, column, copy.name, partial(_copy, name, copy))
            except BaseException:
                os.unlink(copy.name)
                raise
    assert pictures is not None
    return pictures


def _locate_in_table(mapped: Any, content: Any, offsets: Ints) -> int | None:
    """Return where the `content` of a batch begins in the mapped table; None if it is compressed."""
    start: int = content.address - mapped.address
    return start if 0 <= start <= mapped.size - content.size else None


def _copy(name: str, copy: Any, content: Any, offsets: Ints) -> int:
    """Copy the pictures of a batch, and return where its `content` would begin in the copy."""
    with _failed_copy(name):
        start: int = copy.tell() - int(offsets[0])
        copy.write(memoryview(content)[offsets[0] : offsets[-1]])
        copy.flush()
    return start


def _failed_copy(name: str) -> AbstractContextManager[None]:
    problem = f"its pictures cannot be copied into {tempfile.gettempdir()}"
    return os_errors_as(SourceError, problem, "set TMPDIR to a folder on a larger disk", path=name)


def _list_pictures(
    file: _ArrowFile, folder: str, column: str, path: str, locate: Callable[[Any, Ints], int | None]
) -> _PicturesInFile | None:
    """List the pictures in a column, as they lie in the file `path`; None if they are not in it.

    Args:
        locate: function of the bytes of a batch, and of the offsets of its pictures in these, that returns
            where the bytes begin in the file; None if they are not in it.
    """
    import pyarrow

    starts, sizes, files = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], dict[int, str]()
    part_row = 0
    for batch in file.read([column]):
        if not batch.num_rows:
            continue
        pictures: Any = batch.column(column)
        paths: Any = None
        if pyarrow.types.is_struct(pictures.type):
            names = [part.name for part in pictures.type]
            parts = dict(zip(names, pictures.flatten(), strict=True))
            pictures, paths = parts["bytes"], parts.get("path")
        pictures = pictures.cast(pyarrow.large_binary())  # its offsets have 64 bits
        has_none = pictures.is_null().to_numpy(zero_copy_only=False)
        _, offset_bytes, content = pictures.buffers()
        offsets = np.frombuffer(offset_bytes, np.int64)[pictures.offset :][: len(pictures) + 1]
        start = locate(content, offsets) if offsets[-1] > offsets[0] else 0
        if start is None:
            return None
        starts.append(offsets[:-1] + start)
        sizes.append(np.where(has_none, -1, np.diff(offsets)))
        for position in np.flatnonzero(has_none).tolist() if paths is not None else ():
            picture_path = os.path.join(folder, str(paths[position].as_py() or ""))
            if (file_status := status_of(picture_path)) is not None:
                files[part_row + position], sizes[-1][position] = picture_path, file_status[0]
        part_row += len(pictures)
    status = os.stat(path)
    return _PicturesInFile(
        path, (status.st_size, status.st_mtime_ns), np.concatenate(starts), np.concatenate(sizes), files
    )


def is_parquet(name: str) -> bool:
    """Return whether a file of this name is Parquet."""
    return name.lower().endswith(".parquet")


def saved_files(folder: Path) -> dict[str, str]:
    """Return the Arrow files in a folder that `save_to_disk` wrote, and the split of each; "" if it has none.

    Raises:
        SourceError: the folder is damaged.
    """
    path, split_of = folder / SAVED_SPLITS, dict[str, str]()
    has_splits = path.is_file()
    try:
        for split in json.loads(path.read_bytes())["splits"] if has_splits else [""]:
            path = folder / split / SAVED_DATASET
            for file in json.loads(path.read_bytes())["_data_files"]:
                split_of[os.path.join(split, file["filename"])] = split
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise SourceError(
            f"not what save_to_disk wrote, or damaged ({' '.join(str(error).split())[:200]})",
            path=path,
            remedy="save it again",
        ) from error
    return split_of


OPENERS: dict[str, Callable[[str, str], Rows]] = {
    ".csv": open_csv,
    ".tsv": open_csv,
    ".jsonl": open_json_lines,
    ".parquet": open_arrow,
    ".feather": open_arrow,
    ".arrow": open_arrow,
}
"""Suffix of a table -> function of its path, and of the folder of its pictures, that opens it."""
