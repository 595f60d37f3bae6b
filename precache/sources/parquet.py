"""Parquet: tables with paths of pictures, and files with pictures in them, as Hugging Face publishes them.

    data/train-00000-of-00002.parquet    image: struct<bytes, path>, label: int64
    data/train-00001-of-00002.parquet

A column of pictures is of bytes, or of structs with `bytes`, and with `path` of a file where these are empty.
Where the schema has the names of classes, in the metadata called `huggingface`, labels are indices of these.
A source is one file, or all of a folder and of the folders in it, by name, and their names say the splits.
A sample's path is its row in 8 digits, behind the path of its file in a folder:
data/train-00000-of-00002.parquet/00000042.

Pictures are read in shuffled order, and of Parquet only a row group of hundreds can be read at once. So they
are copied out first, one behind the other, see `precache.storage.staging`.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from precache.dataset.columns import Ints
from precache.errors import ImageError, MissingDependencyError, SourceError, os_errors_as
from precache.packages import install_extra
from precache.pictures.reading import read_part, read_picture, status_of
from precache.reporting import warn
from precache.sources.base import ANY_SIZE
from precache.sources.labelled_list import IMAGE_NAMES
from precache.sources.labels import unique_names
from precache.sources.rows import PicturesInFiles, PicturesInRows, Row
from precache.sources.table import PATHS_REMEDY, open_table
from precache.storage import staging
from precache.storage.urls import Location

SUFFIX = ".parquet"
_PAGES_BYTES = 1 << 20  # read at a time, in the place of a row group
_BATCH_ROWS = 65_536
_BATCH_PICTURES = 32


def is_parquet(name: str) -> bool:
    """Whether a file of this name is Parquet."""
    return name.lower().endswith(SUFFIX)


@dataclass(frozen=True, slots=True)
class ParquetReader:
    """The rows of a Parquet file.

    Attributes:
        table: its name in messages.
        file: what is read: `table`, or what was fetched from there.
        folder: the folder or the URL that paths are relative to.
        source: the folder of which it is one of several files, which then hold their pictures; or `table`.
    """

    table: Location
    file: Path
    folder: str
    source: Location

    counts_lines = False
    is_text = False

    @property
    def name(self) -> str:
        return str(self.table)

    def names(self) -> list[str]:
        return list(self._schema().names)

    def picture_names(self) -> list[str]:
        schema = self._schema()
        found = _columns_of_bytes(schema)
        usual = [name for name in schema.names if name in IMAGE_NAMES]
        called = [name for name in usual if name in found]
        if called:
            return called
        return [] if usual and not self._is_one_of_several else found

    def class_names(self, label: str) -> tuple[str, ...] | None:
        """The names as Hugging Face's library stores them."""
        try:
            features = json.loads((self._schema().metadata or {})[b"huggingface"])["info"]["features"]
            feature = features[label]
            names = feature.get("feature", feature)["names"]
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            return None
        return unique_names(list(map(str, names))) if isinstance(names, list) and names else None

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        if not names:
            with self._open() as parquet:
                count = parquet.metadata.num_rows
            for number in range(count):
                yield Row(number, ())
            return
        number = 0
        for columns in self._batches(names, _BATCH_ROWS):
            for values in zip(*columns, strict=True):
                yield Row(number, values)
                number += 1

    def pictures(self, name: str) -> PicturesInFiles | PicturesInRows:
        found = _columns_of_bytes(self._schema())
        if name not in found and self._is_one_of_several:
            raise SourceError(
                f"{self.table}: has no column of pictures, as bytes; where it has their paths, name one "
                f"file, not the folder, and --image"
            )
        if name not in found:
            held = "".join(f"; or take the bytes in {other!r}: --image {other}" for other in found)
            return PicturesInFiles(self.folder, f"{PATHS_REMEDY}{held}")
        status = os.stat(self.file)
        copy = _copied(self, name, status.st_size, status.st_mtime_ns)
        if not os.path.exists(copy.path):  # somebody has cleaned up
            _copied.cache_clear()
            copy = _copied(self, name, status.st_size, status.st_mtime_ns)
        return PicturesInRows(copy.read, copy.sizes)

    def holds_pictures(self, name: str | None) -> bool:
        """Whether it holds the pictures of this column, or of any if it is None, and not their paths."""
        return bool(self.picture_names()) if name is None else name in _columns_of_bytes(self._schema())

    def content(self, picture: Any) -> bytes | None:
        """The bytes of a picture, or of the file that is named for them; None where there is neither."""
        data: bytes | None = picture.get("bytes") if isinstance(picture, dict) else picture
        if data is not None or not isinstance(picture, dict) or not picture.get("path"):
            return data
        path = os.path.join(self.folder, picture["path"])
        return None if status_of(path) is None else read_picture(path, ANY_SIZE)

    def column(self, name: str) -> Iterator[Any]:
        """The pictures of a column, few at a time."""
        for (pictures,) in self._batches([name], _BATCH_PICTURES):
            yield from pictures

    @property
    def _is_one_of_several(self) -> bool:
        return self.source != self.table

    def _schema(self) -> Any:
        with self._open() as parquet:
            return parquet.schema_arrow

    def _batches(self, names: Sequence[str], count: int) -> Iterator[list[list[Any]]]:
        """The values of the columns, so many rows at a time; SourceError where the file is damaged."""
        with self._open() as parquet:
            left = parquet.metadata.num_rows
            for batch in parquet.iter_batches(count, columns=list(names), use_threads=False):
                found = list(batch.schema.names)
                left -= batch.num_rows
                if left < 0:
                    break
                yield [batch.column(found.index(name)).to_pylist() for name in names]
        if left:
            raise SourceError(f"{self.table}: has more or fewer rows than its end says; write it again")

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """The `pyarrow.parquet.ParquetFile`; what it raises in the block is told.

        Raises:
            MissingDependencyError: pyarrow is not installed.
            SourceError: it is no Parquet, or damaged.
        """
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise MissingDependencyError(
                f"{self.table}: Parquet needs the extra 'table' ({error}); run: {install_extra('table')}"
            ) from error
        with open_table(self.table, self.file) as file:
            try:
                yield parquet.ParquetFile(
                    file, pre_buffer=False, page_checksum_verification=True, buffer_size=_PAGES_BYTES
                )
            except (pyarrow.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
                reason = " ".join(str(error).split())[:200]
                raise SourceError(
                    f"{self.table}: not Parquet that can be read ({reason}); write it again"
                ) from error


def _columns_of_bytes(schema: Any) -> list[str]:
    """The names of the columns that may hold pictures."""
    return [field.name for field in schema if _holds_bytes(field.type)]


def _holds_bytes(kind: Any) -> bool:
    from pyarrow import types

    if types.is_struct(kind):
        return any(field.name == "bytes" and _holds_bytes(field.type) for field in kind)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


@dataclass(frozen=True, slots=True)
class _Copy:
    """The pictures of a column, one behind the other in a file.

    Attributes:
        table: the name of the Parquet file in messages.
        path: the file; `as_scanned`, its size and time.
        sizes: int64 [n], bytes of each picture; -1 where a row has none.
        ends: int64 [n], where each of them ends.
    """

    table: str
    path: str
    as_scanned: tuple[int, int]
    sizes: Ints
    ends: Ints

    def read(self, row: int) -> bytes:
        """The picture of a row; raises as `PicturesInRows.read`."""
        size, where = int(self.sizes[row]), f"{self.table}: row {row}"
        if size < 0:
            raise ImageError(where, "has no picture, neither bytes nor a file")
        data = read_part(self.path, where, self.as_scanned, int(self.ends[row]) - size, size)
        if len(data) != size:
            raise SourceError(f"{where}: could not be read as a whole; run the same command again")
        return data


@cache
def _copied(reader: ParquetReader, column: str, file_bytes: int, modified_ns: int) -> _Copy:
    """The copy of a column's pictures, made once for each state of the file.

    Raises:
        SourceError: there is no room for it.
    """
    folder = staging.folder()
    _warn_of_copies(reader.source, folder)
    sizes = []
    with (
        os_errors_as(
            SourceError,
            f"{reader.source}: its pictures cannot be copied into {folder.parent}",
            "set TMPDIR to a folder on a larger disk",
        ),
        tempfile.NamedTemporaryFile(dir=folder, delete=False) as copy,
    ):
        try:
            for picture in reader.column(column):
                data = reader.content(picture)
                sizes.append(-1 if data is None else copy.write(data))
        except BaseException:
            os.unlink(copy.name)
            raise
    status = os.stat(copy.name)
    found = np.array(sizes, np.int64)
    return _Copy(
        reader.name, copy.name, (status.st_size, status.st_mtime_ns), found, np.cumsum(np.maximum(found, 0))
    )


@cache
def _warn_of_copies(source: Location, folder: Path) -> None:
    """Say it once, not for each of the files of a source."""
    warn(
        f"{source}: its pictures are copied into {folder.parent} first: they are read in shuffled order, and "
        f"of Parquet only many rows at once"
    )
