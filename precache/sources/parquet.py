"""Parquet, and Parquet files with pictures in them, as Hugging Face publishes them, as a source.

    data/train-00000-of-00002.parquet    image: struct<bytes, path>, label: int64
    data/train-00001-of-00002.parquet

A column of pictures is of bytes, or of structs with `bytes`, and with `path` of a file where these are empty.
Where the schema has the names of classes, in the metadata called `huggingface`, labels are indices of these.
A source is one file, or all of a folder and of the folders in it, by name, and their names say the splits.
Ids are numbers of rows, counted on from file to file; a sample's path is its row in 8 digits, behind the path
of its file in a folder: data/train-00000-of-00002.parquet/00000042.

Pictures are read in shuffled order, and of Parquet only a row group of hundreds can be read at once. So they
are copied out first, one behind the other, see `precache.storage.staging`.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from precache.errors import ImageError, MissingDependencyError, SettingError, SourceError, did_you_mean
from precache.packages import install_extra
from precache.pictures.reading import check_bytes, read_part, read_picture, status_of
from precache.reporting import warn
from precache.sources.base import ANY_SIZE, SampleRef, Scan
from precache.sources.labels import IMAGE_NAMES, Columns, Rows, unique_names
from precache.sources.options import SourceOptions
from precache.sources.shard_files import splits_of
from precache.storage import open_regular, staging, temporary_path
from precache.storage.urls import Location, Url, locate

SUFFIX = ".parquet"
_PAGES_BYTES = 1 << 20  # read at a time, in the place of a row group
_BATCH_ROWS = 32  # of pictures, and what else is in their rows


def is_parquet(name: str) -> bool:
    """Whether a file of this name is Parquet."""
    return name.lower().endswith(SUFFIX)


@contextmanager
def opened(shown: Location, file: BinaryIO) -> Iterator[Any]:
    """The `pyarrow.parquet.ParquetFile` in `file`; what it raises in the block is told.

    Raises:
        MissingDependencyError: pyarrow is not installed.
        SourceError: it is no Parquet, or damaged; names `shown`.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependencyError(
            f"{shown}: Parquet needs the extra 'table' ({error}); run: {install_extra('table')}"
        ) from error
    try:
        yield parquet.ParquetFile(
            file, pre_buffer=False, page_checksum_verification=True, buffer_size=_PAGES_BYTES
        )
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SourceError(f"{shown}: not Parquet that can be read ({reason}); write it again") from error


def picture_columns(schema: Any, *, may_be_paths: bool = True) -> list[str]:
    """The columns that may be the pictures: those of bytes that are called so, or else all of bytes.

    Args:
        may_be_paths: a column that is called so and is not of bytes holds their paths, so that none is.
    """
    found = [field.name for field in schema if _holds_bytes(field.type)]
    usual = [name for name in schema.names if name in IMAGE_NAMES]
    called = [name for name in usual if name in found]
    return called if called or (usual and may_be_paths) else found


def _holds_bytes(kind: Any) -> bool:
    from pyarrow import types

    if types.is_struct(kind):
        return any(field.name == "bytes" and _holds_bytes(field.type) for field in kind)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def class_names(schema: Any, column: Any) -> tuple[str, ...] | None:
    """The names that labels in a column are indices of, as Hugging Face's library stores them; None: none."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        feature = features[column]
        names = feature.get("feature", feature)["names"]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return unique_names(list(map(str, names))) if isinstance(names, list) and names else None


@contextmanager
def _open(shown: Location, file: Path) -> Iterator[Any]:
    try:
        stream = BufferedReader(open_regular(file))
    except OSError as error:
        raise SourceError(
            f"{shown}: cannot be read ({error.strerror or error}){did_you_mean(file)}"
            f"; check its name and permissions"
        ) from error
    with stream, opened(shown, stream) as table:
        yield table


def schema_of(shown: Location, file: Path) -> Any:
    """The `pyarrow.Schema` of a file; raises as `opened`."""
    with _open(shown, file) as table:
        return table.schema_arrow


def holds_pictures(shown: Location, file: Path, options: SourceOptions) -> bool:
    """Whether the column of the pictures holds them, and not their paths; raises as `opened`."""
    schema = schema_of(shown, file)
    return bool(picture_columns(schema)) if options.image is None else _is_of_bytes(schema, options.image)


def _is_of_bytes(schema: Any, name: str) -> bool:
    return schema.names.count(name) == 1 and _holds_bytes(schema.field(name).type)


def _difference(
    found: tuple[Columns, tuple[str, ...] | None], first: tuple[Columns, tuple[str, ...] | None]
) -> str:
    """What tells a file from the first one, in words that the first one's name ends."""
    for what in ("image", "label"):
        its, other = getattr(found[0], what), getattr(first[0], what)
        if its != other:
            return f"has {its!r} for the {what}, not {other!r} as"
    names = zip(found[1] or (), first[1] or (), strict=False)
    its, other = next((pair for pair in names if pair[0] != pair[1]), (None, None))
    if its is not None:
        return f"has the class {its!r} where {other!r} is one in"
    return f"names {len(found[1] or ()):,} classes, not {len(first[1] or ()):,} as"


@dataclass(frozen=True, slots=True)
class ParquetSource:
    """Parquet files with pictures in them as a `Source`.

    Attributes:
        root: the file, or the folder that they are in; `folder` is what is read for it.
        names: of the files, relative to `folder`; one without a name is `folder` itself.
        copied: file that the pictures were copied into, and `as_scanned`, its size and time.
    """

    root: Location
    folder: Path
    names: tuple[str, ...]
    options: SourceOptions
    copied: str = ""
    as_scanned: tuple[int, int] = (0, 0)

    @property
    def paths(self) -> tuple[Location, ...]:
        return (self.root,) if self.options.root is None else (self.root, locate(self.options.root))

    def scan(self) -> Scan:
        root = self.options.root
        if root is not None and not isinstance(locate(root), Url) and not os.path.isdir(root):
            raise SettingError(f"--root {root}: no such folder; name that of the pictures")
        splits = splits_of(self.root, [name or self.root.name for name in self.names])
        columns, classes = self._columns(0)
        for number in range(1, len(self.names)):
            if (found := self._columns(number)) != (columns, classes):
                differs = _difference(found, (columns, classes))
                raise SourceError(
                    f"{self._shown(number)}: {differs} {self._shown(0)}; convert it alone, or write both "
                    f"with the same columns"
                )
        rows = Rows(lambda row: self._where(rows.path(row)), columns)
        copied = self._copy_name(columns)
        known, temporary = copied.exists(), temporary_path(copied)  # of an earlier scan
        if not known:
            warn(
                f"{self.root}: its pictures are copied into {copied.parent.parent} first: they are read in "
                f"shuffled order, and of Parquet only many rows at once"
            )
        try:
            with open(os.devnull if known else temporary, "wb") as copy:
                self._read(columns, splits, rows, copy)
            if not known:
                os.replace(temporary, copied)
        except OSError as error:
            raise SourceError(
                f"{self.root}: its pictures cannot be copied into {copied.parent.parent} ({error.strerror}); "
                f"set TMPDIR to a folder on a larger disk"
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
        if not len(rows):
            raise SourceError(f"{self.root}: has no rows; expected one for each picture")
        status = os.stat(copied)
        as_scanned = status.st_size, status.st_mtime_ns
        scanned = replace(self, copied=str(copied), as_scanned=as_scanned)
        note = [f"{self.root}: {columns.note}"] if columns.note else []
        return rows.scan(scanned, self.options, (), note, classes)

    def read(self, ref: SampleRef, max_pixels: int) -> bytes:
        where = self.where(ref)
        if ref.bytes < 0:
            raise ImageError(where, "has no picture, neither bytes nor a file")
        check_bytes(where, ref.bytes, max_pixels)
        data = read_part(self.copied, where, self.as_scanned, ref.place, ref.bytes)
        if len(data) != ref.bytes:
            raise SourceError(f"{where}: could not be read as a whole; run the same command again")
        return data

    def where(self, ref: SampleRef) -> str:
        """The path of its file, and its row there."""
        return self._where(ref.path)

    def _where(self, path: str) -> str:
        name, _, row = path.rpartition("/")
        return f"{self.root / name if name else self.root}: row {int(row):,}"

    def _shown(self, number: int) -> Location:
        return self.root / self.names[number] if self.names[number] else self.root

    def _columns(self, number: int) -> tuple[Columns, tuple[str, ...] | None]:
        """Which columns of a file hold what, and the names of classes."""
        shown, image = self._shown(number), self.options.image
        schema = schema_of(shown, self.folder / self.names[number])
        pictures = picture_columns(schema, may_be_paths=not self.names[number])
        if not pictures if image is None else image in schema.names and not _is_of_bytes(schema, image):
            raise SourceError(
                f"{shown}: has no column of pictures, as bytes; where it has their paths, name one file, not "
                f"the folder, and --image"
            )
        columns = Columns.of(shown, list(schema.names), self.options, pictures, "label")
        return columns, None if columns.label is None else class_names(schema, columns.label)

    def _copy_name(self, columns: Columns) -> Path:
        """The file for the copy: another one for other files, or for another column of them."""
        told = [os.path.abspath(self.folder), str(columns.image), self.options.root or ""]
        for name in self.names:
            status = os.stat(self.folder / name)
            told += [name, str(status.st_size), str(status.st_mtime_ns)]
        digest = hashlib.sha256("\0".join(told).encode(errors="surrogateescape")).hexdigest()
        return staging.folder() / f"{digest[:16]}.pictures"

    def _read(self, columns: Columns, splits: Sequence[str], rows: Rows, copy: BinaryIO) -> None:
        """Add the rows of all files, and write their pictures one behind the other."""
        place = 0
        for number, split in enumerate(splits):
            for path, values in self._rows_of(number, columns):
                data = self._content(values[columns.image])
                own = split if columns.split is None else values[columns.split]
                rows.add(path, -1 if data is None else len(data), 0, place, own)
                place += copy.write(data or b"")
                if columns.label is not None:
                    rows.labels.add(values[columns.label])
                for name in columns.fields:
                    rows.values[name].append(values[name])

    def _rows_of(self, number: int, columns: Columns) -> Iterator[tuple[str, dict[Any, Any]]]:
        """The path of the sample of each row of a file, and the row's values, by column."""
        names = list(dict.fromkeys((columns.image, *columns.names)))
        folder, row = f"{self.names[number]}/".lstrip("/"), 0
        with _open(self._shown(number), self.folder / self.names[number]) as table:
            for batch in table.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
                found = list(batch.schema.names)
                values = (batch.column(found.index(name)).to_pylist() for name in names)
                for cells in zip(*values, strict=True):
                    yield f"{folder}{row:08d}", dict(zip(names, cells, strict=True))
                    row += 1

    def _content(self, picture: Any) -> bytes | None:
        """The bytes of a picture, or of the file that is named for them; None where there is neither."""
        if isinstance(picture, dict) and picture.get("bytes") is None and picture.get("path"):
            folder = self.options.root or (self.folder if self.names[0] else self.folder.parent)
            path = os.path.join(folder, picture["path"])
            return None if status_of(path) is None else read_picture(path, ANY_SIZE)
        return picture.get("bytes") if isinstance(picture, dict) else picture
