"""Rows: tables and datasets, of any kind, as one source.

A row says what is known of one picture: one of its columns is the picture, or the path of its file, and
others are its label, its split and its fields, such as boxes or the path of a mask. What a kind of table or
dataset has to say is a `RowReader`; all else is done here. To add a kind, write a reader, and open it in
`precache.sources`.

    precache.sources.table          CSV, TSV and JSON lines, with the paths of pictures
    precache.sources.parquet        Parquet, with paths or with the pictures
    precache.sources.dataset        anything with `__len__` and `__getitem__`, and torchvision's folders
    precache.sources.huggingface    datasets of Hugging Face's library

`precache.sources.labels` turns the labels into classes or numbers. Ids are numbers of rows, from 0, counted
on from reader to reader. A file is known by its path, a picture without one by the number of its row.
"""

import hashlib
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash
from PIL import Image

from precache.dataset.columns import Ints
from precache.errors import ImageError, SourceError
from precache.pictures.reading import check_bytes, read_picture, status_of
from precache.reporting import quantity
from precache.sources.base import (
    ANY_SIZE,
    SampleRef,
    Samples,
    Scan,
    picture_checksum,
)
from precache.sources.labelled_list import Columns, LabelledList
from precache.sources.options import SourceOptions
from precache.sources.picture_values import picture_of
from precache.sources.tree import ObjectTree, read_object
from precache.storage.objects import ObjectStore
from precache.storage.urls import Location, Url, locate

IMAGE_NAMES = ("image", "img", "picture", "path", "file", "filename", "file_name")
"""What the column of the pictures, or of their paths, is called more often than not."""

_PATH_BYTES = 4096  # no system takes longer ones
_PROBED = 8  # pictures that are looked at to tell two datasets apart


class Row(NamedTuple):
    """A row, as a reader gives it.

    Attributes:
        number: of the row from 0; the line that it begins in, from 1, where the reader `counts_lines`.
        values: those of the columns that were asked for, in their order.
        unread: whether the row could not be read, and has the values of another one.
    """

    number: int
    values: Sequence[Any]
    unread: bool = False


@dataclass(frozen=True, slots=True)
class StoredPictures:
    """The pictures of a column that holds them; all of a reader that worker processes get.

    Attributes:
        read: gives what the row of a number has for its picture, see `precache.sources.picture_values`.
            Raises ImageError where it has none, and SourceError where it cannot be read now.
        sizes: int64 [n], bytes of each picture, -1 where a row has none; None: not known until they are read.
    """

    read: Callable[[int], Any]
    sizes: Ints | None = None


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column, as a reader knows it.

    Attributes:
        class_names: names that whole numbers in it are indices of; None: there are none.
        pictures: opens the pictures that it holds; None: it holds none, but perhaps the paths of files.
    """

    name: str
    class_names: tuple[str, ...] | None = None
    pictures: Callable[[], StoredPictures] | None = None


class RowReader(Protocol):
    """What is particular to a kind of table or dataset."""

    @property
    def name(self) -> str:
        """The name of the file or the dataset, in messages."""

    @property
    def counts_lines(self) -> bool:
        """Whether rows are known by the line that they begin in, as in a text editor."""

    @property
    def is_text(self) -> bool:
        """Whether values are text that says what it holds, as the cells of a CSV are."""

    def columns(self) -> list[TableColumn]:
        """The columns.

        Raises:
            SourceError: it cannot be read, or has none.
            MissingDependencyError: a library is missing.
        """

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        """The rows, with the values of the columns of these names, of which there may be none.

        None stands for a value that is not there.

        Raises:
            SourceError: one is damaged; names it.
        """


@dataclass(frozen=True, slots=True)
class RowPart:
    """The rows of a reader as a part of a source: the whole of it, or a split, or one of several files.

    Attributes:
        folder: the folder or URL that paths of pictures are relative to; None: rows have to hold pictures.
        split: the split of its rows, where they have no column of splits.
        prefix: what the paths of its samples begin with.
        is_dataset: whether it is a dataset of a program, not a table: a file may be in several rows, and it
            goes without saying that labels are in the column of this name.
    """

    reader: RowReader
    folder: str | None = None
    split: str = ""
    prefix: str = ""
    is_dataset: bool = False

    def choose(self, options: SourceOptions) -> tuple[Columns, TableColumn]:
        """Which columns hold what, and that of the pictures.

        Raises:
            SettingError: one is not there, or several may be meant.
            SourceError: there are no pictures.
        """
        reader, columns = self.reader, self.reader.columns()
        by_name = {column.name: column for column in columns}
        # what is called a picture and is one; or else is called so and may be a path; or else is one
        usual = [column for column in columns if column.name in IMAGE_NAMES]
        images = [column for column in usual if column.pictures is not None]
        if not images and self.folder is not None:
            images = usual
        if not images:
            images = [column for column in columns if column.pictures is not None]
        if options.image in by_name:
            images = [by_name[options.image]]
        if self.folder is None and all(column.pictures is None for column in images):
            raise SourceError(
                f"{reader.name}: has no column of pictures, as bytes; where it has their paths, name one "
                f"file, not the folder, and --image"
            )
        names = [column.name for column in columns]
        chosen = Columns.of(reader.name, names, [column.name for column in images], options)
        image = by_name[chosen.image]
        if chosen.label is not None:
            chosen = replace(chosen, class_names=by_name[chosen.label].class_names)
        if chosen.label == "label" and (self.is_dataset or image.pictures is not None):
            chosen = replace(chosen, note="")  # so are they called there
        return chosen, image


@dataclass(frozen=True, slots=True)
class ScannedPart:
    """What worker processes need of a part, once its rows are listed.

    Attributes:
        name, counts_lines: those of the reader.
        prefix: see `RowPart`.
        pictures: what the rows hold; None: files in `folder`.
        first: id of its first row; `SampleRef.place` is the number of a row, counted on from there.
    """

    name: str
    counts_lines: bool
    folder: str
    prefix: str
    pictures: StoredPictures | None
    first: int

    @property
    def url(self) -> Url | None:
        """The folder of the pictures, where that is a URL."""
        place = locate(self.folder) if self.pictures is None else None
        return place if isinstance(place, Url) else None

    def row_name(self, place: int, sample_id: int) -> str:
        """The name of a row for messages."""
        if self.counts_lines:
            return f"{self.name}, line {place:,} (id {sample_id})"
        return f"{self.name}: row {place - self.first}"

    def file_of(self, path: str) -> str:
        """The file of the sample of this path, as messages show it."""
        return os.path.join(self.folder, path.removeprefix(self.prefix))


@dataclass(frozen=True, slots=True)
class RowSource:
    """Tables and datasets as a `Source`.

    Attributes:
        root, paths: see `Source`.
        parts: one or several, of which none counts lines; none once they are scanned.
        scanned: see `ScannedPart`.
    """

    root: Location
    paths: tuple[Location, ...]
    parts: tuple[RowPart, ...]
    options: SourceOptions
    scanned: tuple[ScannedPart, ...] = ()

    @property
    def reads_at_a_time(self) -> int:
        """How many pictures are asked for at a time, once it is scanned."""
        return ObjectTree.reads_at_a_time if any(part.url for part in self.scanned) else 0

    def scan(self) -> Scan:
        chosen = [part.choose(self.options) for part in self.parts]
        first, _ = chosen[0]
        for part, (columns, _) in zip(self.parts, chosen, strict=True):
            if difference := _difference(columns, first):
                raise SourceError(
                    f"{part.reader.name}: {difference} {self.parts[0].reader.name}; convert it alone, or "
                    f"write both with the same columns"
                )
        scanned: list[ScannedPart] = []
        rows = LabelledList(
            lambda row: _part_at(scanned, rows.places[row]).row_name(rows.places[row], row),
            first,
            is_text=self.parts[0].reader.is_text,
        )
        warnings: list[str] = []
        for part, (columns, image) in zip(self.parts, chosen, strict=True):
            reader = part.reader
            pictures = None if image.pictures is None else image.pictures()
            scanned.append(
                ScannedPart(
                    reader.name, reader.counts_lines, part.folder or "", part.prefix, pictures, len(rows)
                )
            )
            if pictures is None:
                warnings += _list_files(rows, part, scanned[-1], columns)
            else:
                _list_stored(rows, part, scanned[-1], pictures, columns)
            if columns.note:
                warnings.append(f"{reader.name}: {columns.note}")
        if not len(rows):
            raise SourceError(f"{self.root}: has no rows; expected one for each picture")
        source = replace(self, parts=(), scanned=tuple(scanned))
        scan = rows.scan(source, self.options, (), warnings)
        probes = source._probe(scan.samples)
        if not probes:
            return scan
        return replace(scan, digest=hashlib.sha256(f"{scan.digest}{probes}".encode()).hexdigest())

    def read(self, ref: SampleRef, max_pixels: int) -> bytes | Image.Image:
        part, where = _part_at(self.scanned, ref.place), self.where(ref)
        if part.pictures is None:
            return _read_file(part, ref, where, max_pixels)
        check_bytes(where, ref.bytes, max_pixels)
        picture = picture_of(part.pictures.read(ref.place - part.first), where, max_pixels)
        if ref.bytes < 0:
            raise ImageError(where, "could not be read when the dataset was listed")
        return picture

    def where(self, ref: SampleRef) -> str:
        """Its row, and the path of its file where it has one."""
        part = _part_at(self.scanned, ref.place)
        row = part.row_name(ref.place, ref.id)
        return row if part.pictures is not None else f"{row}: {part.file_of(ref.path)}"

    def _probe(self, samples: Samples) -> str:
        """Checksums of a few of the pictures in rows: labels alone do not tell two datasets apart.

        Raises:
            SourceError: one is another picture each time that it is read.
        """
        found = []
        for row in sorted({round(at) for at in np.linspace(0, len(samples) - 1, _PROBED)}):
            ref = samples[row]
            if _part_at(self.scanned, ref.place).pictures is None:
                continue  # their sizes are in the digest
            try:
                once, again = (picture_checksum(self.read(ref, ANY_SIZE)) for _ in range(2))
            except ImageError:
                continue  # the conversion says what is wrong with it
            if once != again:
                raise SourceError(
                    f"{self.where(ref)}: changes each time it is read; leave out the random transform: "
                    f"loaders augment anew in each epoch"
                )
            found.append(f"{row}:{once}")
        return " ".join(found)


def _part_at(parts: Sequence[ScannedPart], place: int) -> ScannedPart:
    return parts[bisect_right(parts, place, key=lambda part: part.first) - 1]


def _difference(columns: Columns, first: Columns) -> str:
    """What tells the columns of a part from those of the first one, whose name ends the phrase; or ""."""
    if columns.label != first.label:
        return f"has {columns.label!r} for the label, not {first.label!r} as"
    names, first_names = columns.class_names or (), first.class_names or ()
    for name, other in zip(names, first_names, strict=False):
        if name != other:
            return f"has the class {name!r} where {other!r} is one in"
    if len(names) != len(first_names):
        return f"names {len(names):,} classes, not {len(first_names):,} as"
    return ""


def _list_stored(
    rows: LabelledList, part: RowPart, listed: ScannedPart, pictures: StoredPictures, columns: Columns
) -> None:
    """Add the rows of a part that hold their pictures."""
    names = columns.names
    for row in part.reader.rows(names):
        place, size = listed.first + row.number, 0
        if pictures.sizes is not None:
            size = int(pictures.sizes[row.number])
        if row.unread:
            size = -1
        path = f"{part.prefix}{row.number:08d}" if part.prefix else f"{place:08d}"
        rows.add_row(dict(zip(names, row.values, strict=True)), part.split, path, size, 0, place)


def _list_files(rows: LabelledList, part: RowPart, listed: ScannedPart, columns: Columns) -> list[str]:
    """Add the rows of a part whose pictures are files; and a warning of those that are not there.

    Raises:
        SourceError: two rows name one picture, or there is none of them, or one cannot be looked at.
    """
    names = list(dict.fromkeys((columns.image, *columns.names)))
    find, missing, hashes = _finder_of(listed), list[int](), array("Q")
    folder = None if listed.url else os.path.abspath(listed.folder)
    for row in part.reader.rows(names):
        values, place = dict(zip(names, row.values, strict=True)), listed.first + row.number
        path = values[columns.image]
        if reason := _why_no_path(path):
            where = listed.row_name(place, len(rows))
            raise SourceError(f"{where}: {columns.image!r}: {path!r:.60} {reason}")
        short, whole = _shortest(folder, path)
        hashes.append(xxhash.xxh3_64_intdigest(os.fsencode(whole)))
        status = find(short)
        if status is None:
            missing.append(len(rows))
        size, modified_ns = status or (-1, 0)
        rows.add_row(values, part.split, f"{part.prefix}{short}", size, modified_ns, place)
    if not part.is_dataset:
        _check_once(rows, listed, columns.image, np.frombuffer(hashes, np.uint64))
    if not missing:
        return []
    path = listed.file_of(rows.path(missing[0]))
    if len(missing) == len(hashes):
        remedy = (
            "check the folder of the dataset"
            if part.is_dataset
            else "paths are relative to the table, or to the folder that --root names, and have the same "
            "extension as the files"
        )
        stored = [column.name for column in part.reader.columns() if column.pictures is not None]
        instead = "".join(f"; or take the bytes in {name!r}: --image {name}" for name in stored)
        raise SourceError(
            f"{rows.where(missing[0])}: there is no picture {path!r}, nor one for any other row; "
            f"{remedy}{instead}"
        )
    count = f"{quantity(len(missing), 'row')} of {len(hashes):,} without a picture"
    return [f"{listed.name}: {count}; the first is {rows.where(missing[0])}: {path!r}"]


def _finder_of(part: ScannedPart) -> Callable[[str], tuple[int, int] | None]:
    """Function that gives size and time of the last write of a file, in ns; None where there is none."""
    if part.url is None:
        return lambda name: status_of(os.path.join(part.folder, name))
    objects = {info.name: (info.bytes, info.modified_ns) for info in ObjectStore(part.url).list()}
    return lambda name: objects.get(os.path.normpath(name))


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


def _check_once(rows: LabelledList, listed: ScannedPart, column: str, hashes: npt.NDArray[np.uint64]) -> None:
    """Raise SourceError where two of the rows name one picture.

    Args:
        hashes: uint64 [n], those of the whole paths in the rows of the part.
    """
    order = np.argsort(hashes, kind="stable")
    repeated = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    if not len(repeated):
        return
    first, second = order[repeated[0] : repeated[0] + 2].tolist()
    other = f"line {rows.places[first]:,} (id {first})" if listed.counts_lines else f"row {first}"
    raise rows.error(
        second,
        column,
        f"{rows.path(second)!r} is in {other}, too; remove one of them, or write all its labels into one "
        f"cell (--separator)",
    )


def _read_file(part: ScannedPart, ref: SampleRef, where: str, max_pixels: int) -> bytes:
    """The content of the file that a row names, which is as it was scanned."""
    path, scanned_status, url = part.file_of(ref.path), (ref.bytes, ref.modified_ns), part.url
    if ref.bytes < 0:
        reason = "is a folder" if os.path.isdir(path) else "is not a file"
        raise ImageError(where, f"{reason}; named in {part.row_name(ref.place, ref.id)}")
    if url is None:
        return read_picture(path, max_pixels, scanned_status)
    return read_object(
        url, ref.path, ref.bytes, max_pixels, lambda it: (it.bytes, it.modified_ns) == scanned_status
    )
