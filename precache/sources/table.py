"""A table of pictures: a row each, with the path of the file and what it is labelled with.

    path,species,fold,width
    photos/0001.jpg,heron,train,640

Paths are relative to the folder of the table, or to another one that is named; they may be absolute, and may
lead elsewhere with `..`: whoever writes a table of files means them. They are kept in their shortest form.
A row without a file is rejected when it is converted. Ids are the numbers of the rows, from 0.
`precache.sources.rows` reads the files, and `precache.sources.labels` says what becomes of the labels.
"""

import errno
import os
import stat
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from precache.console.notices import counted
from precache.dataset.columns import Column, ValueOfRowError
from precache.errors import ImageError, SettingError, SourceError
from precache.pictures.reading import read_picture, steadily
from precache.recipe import SPLIT_NAME
from precache.sources import rows
from precache.sources.base import SampleRef, Samples, Scan, digest_of
from precache.sources.labels import Labelled, Labels, typed
from precache.sources.objects import ObjectTree, read_object
from precache.sources.options import SourceOptions, find_label
from precache.storage.objects import ObjectInfo, ObjectStore
from precache.storage.urls import Location, Url, locate

IMAGE_NAMES = ("image", "path", "file", "filename", "file_name")
_PATH_BYTES = 4096  # no system takes longer ones
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_NAMED = 20  # columns that a message names


@dataclass(frozen=True, slots=True)
class TableSource:
    """A table as a `Source`."""

    root: Path
    options: SourceOptions

    @property
    def paths(self) -> tuple[Location, ...]:
        """The table, and the folder that its paths are relative to where it is named.

        Not the folder of the table: a dataset may well be put beside it.
        """
        return (self.root,) if self.options.root is None else (self.root, locate(self.options.root))

    @property
    def folder(self) -> str:
        """That paths are relative to."""
        return str(self.root.parent) if self.options.root is None else self.options.root

    @property
    def url(self) -> Url | None:
        """The folder, where that is a URL."""
        place = locate(self.folder)
        return place if isinstance(place, Url) else None

    @property
    def ahead(self) -> int:
        """How many pictures are asked for at a time."""
        return ObjectTree.ahead if self.url else 0

    def scan(self) -> Scan:
        """See `precache.sources.base.Source`."""
        asked = self._columns()
        if self.options.root is not None and not self.url and not os.path.isdir(self.options.root):
            raise SettingError(f"--root {self.options.root}: no such folder; name that of the pictures")
        found = _Found(self.root, None if self.url else os.path.abspath(self.folder))
        found.read(asked)
        found.check_twice(asked.image)
        sizes, modified_ns, warnings = found.stat(self.folder)
        labelled = found.labelled(asked, self.options)
        names, splits = found.splits()
        samples = Samples(
            ids=np.arange(len(found)),
            labels=labelled.labels,
            file_bytes=sizes,
            modified_ns=modified_ns,
            splits=splits,
            split_names=names,
            paths=bytes(found.paths),
            path_ends=np.frombuffer(found.path_ends, np.int64),
            places=np.frombuffer(found.lines, np.int64),
            targets=labelled.targets,
            fields={name: found.field(name) for name in asked.fields},
        )
        of = f"{self.root}: the labels in {asked.label!r}"
        warnings += [f"{self.root}: {asked.note}"] if asked.note else []
        warnings += [f"{of} {note}" for note in labelled.notes]
        return Scan(
            self,
            labelled.classes,
            samples,
            (),
            len(samples),
            digest_of(samples, labelled.classes),
            tuple(warnings),
            labelled.target,
        )

    def read(self, ref: SampleRef, max_pixels: int) -> bytes:
        """The content of the file that the row names."""
        path = os.path.join(self.folder, ref.path)
        if ref.bytes < 0:
            reason = "is a folder" if os.path.isdir(path) else "is no file"
            where = rows.place_of(self.root, ref.place, ref.id)
            raise ImageError(self.where(ref), f"{reason}; named in {where}")
        if self.url:
            scanned = (ref.bytes, ref.modified_ns)
            return read_object(self.url, ref.path, ref.bytes, max_pixels, lambda it: _as_found(it) == scanned)
        return read_picture(path, max_pixels, (ref.bytes, ref.modified_ns))

    def where(self, ref: SampleRef) -> str:
        """Its row, and the path of its file."""
        return f"{rows.place_of(self.root, ref.place, ref.id)}: {os.path.join(self.folder, ref.path)}"

    def _columns(self) -> "_Asked":
        """The names of the columns that are asked for.

        Raises:
            SettingError: there is no such column, or there are two.
        """
        options = self.options
        names = rows.columns_of(self.root)
        image = options.image
        if image is None:
            usual = [name for name in names if name in IMAGE_NAMES]
            if len(usual) != 1:
                which = "no column is" if not usual else "several columns are"
                raise SettingError(
                    f"{self.root}: {which} named {', '.join(IMAGE_NAMES)}; name that of the pictures' paths "
                    f"with --image; there are {_listed(names)}"
                )
            image = usual[0]
        fields = tuple(dict.fromkeys(options.fields))
        label, note = find_label(self.root, names, options, (image, options.split, *fields))
        flags = {"image": image, "label": label, "split": options.split}
        for flag, name in [*flags.items(), *(("field", field) for field in fields)]:
            if name is not None and names.count(name) != 1:
                number = "no column" if name not in names else "several columns"
                raise SettingError(
                    f"{self.root}: has {number} {name!r}, as --{flag} asks; has {_listed(names)}"
                )
        return _Asked(image, label, options.split, fields, note)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    hint = ""
    if len(names) == 1 and (other := next((sign for sign in ";\t|" if sign in names[0]), None)):
        hint = f" (are its columns separated by {other!r}? expected as the name of the file says: , or tab)"
    return ", ".join(f"{name!r:.60}" for name in names[:_NAMED]) + more + hint


@dataclass(frozen=True, slots=True)
class _Asked:
    """Names of columns, and what is to be said of that of the labels."""

    image: str
    label: str | None
    split: str | None
    fields: tuple[str, ...]
    note: str


class _Found:
    """The rows of a table, in columns; some 100 bytes a row where there are no fields.

    Args:
        folder: that paths are relative to, absolute; None: that is a URL.
    """

    def __init__(self, table: Path, folder: str | None) -> None:
        self.table, self._folder = table, folder
        self.paths, self.path_ends = bytearray(), array("q")
        self.lines = array("q")
        self._hashes = array("Q")
        self._labels = Labels()
        self._split_of: dict[str, int] = {}
        self._splits = array("q")
        self._fields: dict[str, list[Any]] = {}

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, asked: _Asked) -> None:
        """Read all of it."""
        names = list(
            dict.fromkeys(n for n in (asked.image, asked.label, asked.split, *asked.fields) if n is not None)
        )
        at = {name: place for place, name in enumerate(names)}
        fields = [(at[name], self._fields.setdefault(name, [])) for name in asked.fields]
        image = at[asked.image]
        label = None if asked.label is None else at[asked.label]
        split = None if asked.split is None else at[asked.split]
        for line, values in rows.rows_of(self.table, names):
            self.lines.append(line)
            self._add_path(asked.image, values[image])
            if label is not None:
                self._labels.add(values[label])
            if split is not None and asked.split is not None:
                self._add_split(asked.split, values[split])
            for place, column in fields:
                column.append(values[place])
        if not self.lines:
            raise SourceError(f"{self.table}: has no rows; expected one for each picture")

    def error(self, row: int, column: str, reason: str) -> SourceError:
        """What is wrong with a row, in one line."""
        return SourceError(f"{rows.place_of(self.table, self.lines[row], row)}: {column!r}: {reason}")

    def _add_path(self, column: str, path: Any) -> None:
        row = len(self.lines) - 1
        if not isinstance(path, str) or not path:
            raise self.error(row, column, f"expected the path of a picture, got {path!r:.60}; fill it in")
        if "://" in path:
            raise self.error(row, column, f"{path!r:.60} is no path of a file; download the pictures first")
        try:
            encoded = os.fsencode(path)
        except UnicodeEncodeError:
            raise self.error(
                row, column, f"{path!r:.60} is no name that a file can have; correct it"
            ) from None
        if b"\0" in encoded or len(encoded) > _PATH_BYTES:
            what = f"is of {len(encoded):,} bytes" if len(encoded) > _PATH_BYTES else "has a NUL in it"
            raise self.error(row, column, f"{path!r:.60} {what}, as no path of a file; correct it")
        short, place = rows.shortest(self._folder, path)
        self.paths += os.fsencode(short)
        self.path_ends.append(len(self.paths))
        self._hashes.append(xxhash.xxh3_64_intdigest(os.fsencode(place)))

    def _add_split(self, column: str, value: Any) -> None:
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str) and value.isdecimal():
            value = column + value  # folds are numbers more often than not
        if not isinstance(value, str) or not SPLIT_NAME.fullmatch(value):
            raise self.error(
                len(self.lines) - 1, column, f"{value!r:.60} is no name of a split; write one such as train"
            )
        self._splits.append(self._split_of.setdefault(value, len(self._split_of)))

    def _path(self, row: int) -> bytes:
        return bytes(self.paths[self.path_ends[row - 1] if row else 0 : self.path_ends[row]])

    def check_twice(self, column: str) -> None:
        """Raise SourceError where two rows name one picture."""
        hashes = np.frombuffer(self._hashes, np.uint64)
        order = np.argsort(hashes, kind="stable")
        for at in np.flatnonzero(hashes[order][1:] == hashes[order][:-1]).tolist():
            first, second = int(order[at]), int(order[at + 1])
            paths = (os.fsdecode(self._path(row)) for row in (first, second))
            if len({rows.shortest(self._folder, path)[1] for path in paths}) == 1:  # not their hashes alone
                other = f"line {self.lines[first]:,} (id {first})" if self.lines[first] else f"row {first}"
                raise self.error(
                    second,
                    column,
                    f"{os.fsdecode(self._path(second))!r} is in {other}, too; remove one of them, or "
                    f"write all its labels into one cell (--separator)",
                )

    def stat(self, folder: str) -> tuple[Any, Any, list[str]]:
        """Size, -1 where there is no file, and time of the last write of each picture; and a warning.

        Raises:
            SourceError: there is none of them, or one cannot be looked at.
        """
        sizes, modified_ns = np.full(len(self), -1), np.zeros(len(self), np.int64)
        prefix, find = os.fsencode(folder), _status_on_disk
        if isinstance(url := locate(folder), Url):
            objects = {os.fsencode(info.name): _as_found(info) for info in ObjectStore(url).list()}
            prefix, find = b"", lambda path: objects.get(os.path.normpath(path))
        for row in range(len(self)):
            status = find(os.path.join(prefix, self._path(row)))
            if status is not None:
                sizes[row], modified_ns[row] = status
        absent = np.flatnonzero(sizes < 0)
        if not len(absent):
            return sizes, modified_ns, []
        first = int(absent[0])
        path = os.path.join(folder, os.fsdecode(self._path(first)))
        where = rows.place_of(self.table, self.lines[first], first)
        if len(absent) == len(self):
            raise SourceError(
                f"{where}: there is no picture {path!r}, nor one for any other row; paths are relative "
                f"to the table, or to the folder that --root names, and to end as .jpg where the files do"
            )
        missing = f"{counted(len(absent), 'row')} of {len(self):,} without a picture"
        return sizes, modified_ns, [f"{self.table}: {missing}; the first is {where}: {path!r}"]

    def labelled(self, asked: _Asked, options: SourceOptions) -> Labelled:
        """What the rows are labelled with."""
        if asked.label is None:
            return Labelled("none", (), np.full(len(self), -1))
        try:
            cells = not rows.is_typed(self.table)
            return self._labels.labelled(options.target, options.separator, cells=cells)
        except ValueOfRowError as error:
            raise self.error(error.row, asked.label, error.reason) from error

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
            raise self.error(values.index(None), name, "is empty; fill it in, or leave the column out")
        try:
            return Column.of(values if rows.is_typed(self.table) else typed(values))
        except ValueOfRowError as error:
            raise self.error(error.row, name, error.reason) from error


def _status_on_disk(path: bytes) -> tuple[int, int] | None:
    """Size and time of a file; None where there is none."""
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        status = steadily(lambda: os.stat(path), os.fsdecode(path))
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def _as_found(info: ObjectInfo) -> tuple[int, int]:
    return info.bytes, info.modified_ns
