"""Where samples come from, by one protocol, see `precache.sources.base`; what opens each of them is here.

To add a source:

    a kind of table      a `RowReader`, see `precache.sources.rows`; its suffix in `options.TABLE_SUFFIXES`,
                         and a branch in `_open_table` here
    a kind of dataset    a `RowReader`, and a branch in `_open_dataset`
    anything else        a `Source`, see `precache.sources.base`: `root`, `paths`, `scan`, `read`, `where`;
                         what it is called in `precache.sources.options`, and a branch in `_open_named`, by
                         its file's name, `_open_folder` or `_open_url`

A source at a URL:

    s3://BUCKET/photos              a tree of objects
    s3://BUCKET/sets/caltech        a converted dataset
    s3://BUCKET/photos.tar, .zip    an archive, fetched first: pictures are read in shuffled order
    s3://BUCKET/labels.csv          a table, fetched; its pictures are objects, or files below --root
    s3://BUCKET/tars                WebDataset tars, or Parquet with pictures, fetched
    https://HOST/photos.tar         the same, but for trees and tars: a web server lists nothing

What is fetched lies in the staging folder (TMPDIR) until the process ends.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import SettingError, SourceError
from precache.recipe import SPLIT_NAME
from precache.reporting import quantity, warn
from precache.sources import huggingface, parquet, webdataset
from precache.sources.archive import ArchiveSource, is_archive
from precache.sources.base import Source
from precache.sources.converted import is_converted, open_converted
from precache.sources.dataset import FolderReader, reader_of
from precache.sources.masks import MaskedSource
from precache.sources.options import (
    ARCHIVE,
    DATASET,
    TABLE,
    TABLE_SUFFIXES,
    TARS,
    TREE,
    SourceOptions,
    is_table,
)
from precache.sources.parquet import ParquetReader
from precache.sources.rows import RowPart, RowSource
from precache.sources.shard_files import find_split, shards_among, shards_in, splits_of
from precache.sources.table import DELIMITERS, JSON_LINES, CsvReader, JsonLinesReader
from precache.sources.tree import ObjectTree, TreeSource
from precache.sources.webdataset import WebDatasetSource
from precache.storage import staging
from precache.storage.objects import ObjectInfo, ObjectStore
from precache.storage.retries import Check, call_for_each
from precache.storage.urls import Location, Url, is_url, local_path, locate

__all__ = ["Source", "SourceOptions", "open_source"]

_PACKED = tuple(f"{suffix}{packed}" for suffix in TABLE_SUFFIXES for packed in (".gz", ".xz", ".zst"))
_OTHER_TABLES = (*_PACKED, ".xls", ".xlsx", ".ods", ".json", ".ndjson", ".feather", ".arrow")
_OTHER_ARCHIVES = (".rar", ".7z", ".tar.zst", ".tzst", ".tar.lz4", ".tar.lz", ".tar.z")
_PROBED = 1000  # objects that say whether a prefix holds tars alone
_AT_A_TIME = 4  # tars that are fetched


def open_source(source: Any, options: SourceOptions | None = None) -> Source:
    """The source at a path, of the kind that the path says; that of a dataset; or `source` where it is one.

    Args:
        source: a path, a URL (see the module), `hf:FOLDER` for a dataset of Hugging Face on
            disk, anything with `__len__` and `__getitem__`, a mapping of splits to such datasets, or a
            `Source`.

    Raises:
        SettingError: not a source, or an option that it does not take.
        SourceError: it cannot be opened.
        MissingDependencyError: it needs an extra.
    """
    options = options or SourceOptions()
    if isinstance(source, bytes):  # no row of samples
        source = locate(source)
    if options.mask is not None:
        return _open_masked(source, options, options.mask)
    options = replace(options, boxes=None)  # a field like others, for a source
    if not isinstance(source, str | os.PathLike | Url):
        is_source = all(hasattr(source, name) for name in ("scan", "read", "where"))
        return source if is_source else _open_dataset(source, options)
    if not isinstance(source, Url) and str(source).startswith(huggingface.PREFIX):
        folder = str(Path(source)).removeprefix(huggingface.PREFIX)
        return _open_dataset(huggingface.load_saved(folder), options, Path(folder))
    path = locate(source)
    if isinstance(path, Url):
        return _open_url(path, options)
    return _open_folder(path, options) if path.is_dir() else _open_file(path, options)


def _open_masked(source: Any, options: SourceOptions, mask: str) -> Source:
    """With masks in a folder; or in a column, of a table that has one of this name."""
    options = replace(options, mask=None)
    if is_url(mask):
        raise SettingError(f"--mask {mask}: masks are read from a folder of this machine; copy them first")
    path = local_path(source) if isinstance(source, str | os.PathLike) and not is_url(source) else Path()
    pictures = open_source(source, options)
    if not (isinstance(pictures, RowSource) and is_table(path) and path.is_file()):
        return MaskedSource(pictures, local_path(mask))
    (part,) = pictures.parts
    if mask not in [column.name for column in part.reader.columns()]:
        return MaskedSource(pictures, local_path(mask))
    _, image = part.choose(options)
    if image.pictures is not None:
        raise SettingError(f"--mask {mask}: masks of pictures in Parquet are read from a folder; name that")
    folder = locate(part.folder or "")
    if isinstance(folder, Url):
        raise SettingError(
            f"--mask {mask}: masks of pictures at a URL are read from a folder; name that folder"
        )
    fields = tuple(dict.fromkeys((*options.fields, mask)))
    pictures = replace(pictures, options=replace(pictures.options, fields=fields))
    return MaskedSource(pictures, folder, mask, mask in options.fields)


def _open_named(place: Location, options: SourceOptions) -> Source | None:
    """The table or the archive that `place` names; None where its name says neither."""
    name = Path(place.name)
    if is_table(name):
        options.only(TABLE)
        return _open_table(place, _on_disk(place), options)
    if is_archive(name):
        options.only(ARCHIVE)
        return ArchiveSource(place, _on_disk(place), options)
    return None


def _open_table(place: Location, file: Path, options: SourceOptions) -> RowSource:
    """The source of a table; where it is Parquet with pictures, its name says their split."""
    folder = str(place.parent) if options.root is None else options.root
    suffix, name = file.suffix.lower(), str(place)
    if suffix in DELIMITERS:
        part = RowPart(CsvReader(name, file), folder)
    elif suffix == JSON_LINES:
        part = RowPart(JsonLinesReader(name, file), folder)
    else:
        part = RowPart(ParquetReader(name, file, folder), folder)
        _, image = part.choose(options)
        if image.pictures is not None:
            _warn_of_copies(place)
            part = replace(part, split=find_split(place.name))
    return RowSource(place, _paths_of(place, options), (part,), options)


def _open_parquets(place: Location, folder: Path, names: Sequence[str], options: SourceOptions) -> RowSource:
    """The source of Parquet files with pictures, of which each says its split by its name."""
    options.only(TABLE)
    pictures = str(folder) if options.root is None else options.root
    parts = [
        RowPart(ParquetReader(str(place / name), folder / name, pictures), split=split, prefix=f"{name}/")
        for name, split in zip(names, splits_of(place, names), strict=True)
    ]
    _warn_of_copies(place)
    return RowSource(place, _paths_of(place, options), tuple(parts), options)


def _warn_of_copies(place: Location) -> None:
    warn(
        f"{place}: its pictures are copied into {tempfile.gettempdir()} first: they are read in shuffled "
        f"order, and of Parquet only many rows at once"
    )


def _paths_of(place: Location, options: SourceOptions) -> tuple[Location, ...]:
    """What a table at `place` reads: it, and the folder of the pictures where that is named.

    Not the folder of the table: a dataset may well be put beside it.

    Raises:
        SettingError: there is no such folder.
    """
    if options.root is None:
        return (place,)
    root = locate(options.root)
    if isinstance(root, Path) and not os.path.isdir(options.root):
        raise SettingError(f"--root {options.root}: no such folder; name that of the pictures")
    return (place, root)


def _open_dataset(dataset: Any, options: SourceOptions, folder: Path | None = None) -> RowSource:
    """The source that reads `dataset`, or a mapping of splits to datasets.

    Args:
        folder: where it was loaded from.

    Raises:
        SettingError: it is not a dataset, or has splits that cannot be.
        SourceError: it has no samples.
    """
    options.only(DATASET)
    is_split = isinstance(dataset, Mapping) and all(isinstance(name, str) for name in dataset)
    datasets = dict(dataset) if is_split else {"": dataset}
    if not datasets:
        raise SettingError(
            "a mapping without splits is not a source; expected one such as {'train': dataset}"
        )
    for one in datasets.values():
        if isinstance(one, type) or not (hasattr(one, "__len__") and hasattr(one, "__getitem__")):
            expected = "expected a path, or a dataset with __len__ and __getitem__"
            raise SettingError(f"{type(one).__name__} is not a source; {expected}")
    kind = type(next(iter(datasets.values())))
    root = folder or Path(f"{kind.__module__.partition('.')[0]}.{kind.__name__}")
    parts, paths = [], [] if folder is None else [folder]
    for split, one in datasets.items():
        if split and not SPLIT_NAME.fullmatch(split):
            raise SettingError(
                f"{root}: {split!r} is not a valid split name; write letters and digits, as in train"
            )
        if split and options.split is not None:
            raise SettingError(f"{root}: has splits already; leave out split={options.split!r}")
        name = f"{root}, split {split}" if split else str(root)
        if not len(one):
            raise SourceError(f"{name}: has no samples; expected one for each picture")
        if huggingface.is_dataset(one):
            parts.append(RowPart(huggingface.HuggingFaceReader(one, name), split=split, is_dataset=True))
            continue
        reader = reader_of(one, name)
        part = RowPart(reader, split=split, is_dataset=True)
        if isinstance(reader, FolderReader):
            paths.append(Path(reader.folder))
            part = replace(part, folder=reader.folder, prefix=f"{split}/" if split else "")
        parts.append(part)
    return RowSource(root, tuple(paths), tuple(parts), options)


def _open_file(path: Path, options: SourceOptions) -> Source:
    if source := _open_named(path, options):
        return source
    if path.is_file():
        name = path.name.lower()
        if name.endswith(_OTHER_TABLES):
            remedy = "unpack it, or save it so, in UTF-8"
            raise SourceError(f"{path}: expected a table as CSV, TSV, JSON lines or Parquet; {remedy}")
        if name.endswith(_OTHER_ARCHIVES):
            raise SourceError(f"{path}: expected a tar or a zip; unpack it, and convert the folder")
    return _open_tree(path, options)


def _open_folder(path: Path, options: SourceOptions) -> Source:
    if is_converted(path):
        return open_converted(path, options)
    if shards_in(path, webdataset.is_tar):
        options.only(TARS)
        return WebDatasetSource(path, path, options)
    if names := shards_in(path, parquet.is_parquet):
        return _open_parquets(path, path, names, options)
    return _open_tree(path, options)


def _open_tree(place: Location, options: SourceOptions) -> Source:
    options.only(TREE)
    depth = 1 if options.class_depth is None else options.class_depth
    return ObjectTree(place, depth) if isinstance(place, Url) else TreeSource(place, depth)


def _open_url(url: Url, options: SourceOptions) -> Source:
    """The source at `url`, of the kind that its name and the storage say."""
    if url.key and (source := _open_named(url, options)):
        return source
    store = ObjectStore(url)
    if store.find(MANIFEST_NAME) is not None:
        return open_converted(url, options)
    if url.scheme in ("http", "https"):
        raise SourceError(
            f"{url}: is neither an archive, a table nor a converted dataset, and a web server cannot list a "
            f"tree; name one of these"
        )
    first = store.list_first(_PROBED)
    if not first:
        raise SourceError(
            f"{url}: holds no objects, so no class folder with pictures; expected {url}/CLASS/picture.jpg; "
            f"check the URL"
        )
    is_shard = webdataset.is_tar
    if not shards_among((info.name for info in first), is_shard):
        is_shard = parquet.is_parquet
    if not shards_among((info.name for info in first), is_shard):
        return _open_tree(url, options)
    infos = {info.name: info for info in store.list()}
    names = shards_among(infos, is_shard)
    if not names:
        return _open_tree(url, options)
    options.only(TARS if is_shard is webdataset.is_tar else TABLE)  # before they are fetched
    folder = _fetched(url, [infos[name] for name in names])
    if is_shard is webdataset.is_tar:
        return WebDatasetSource(url, folder, options)
    return _open_parquets(url, folder, names, options)


def _on_disk(place: Location) -> Path:
    """The file itself, or what is fetched from the URL."""
    if isinstance(place, Path):
        return place
    info = ObjectStore(place.parent).find(place.name)
    if info is None:
        raise SourceError(f"{place}: does not exist; check the URL")
    return _fetched(place.parent, [info]) / place.name


def _fetched(url: Url, infos: Sequence[ObjectInfo]) -> Path:
    """A folder with the objects of `infos`, which lie below `url`, as files.

    Raises:
        SourceError: there is no room for them.
        StorageError: one cannot be fetched.
    """
    folder = Path(tempfile.mkdtemp(dir=staging.folder()))
    needed, free = sum(info.bytes for info in infos), shutil.disk_usage(folder).free
    if needed > free:
        raise SourceError(
            f"{url}: {quantity(len(infos), 'file')}, {needed:,} bytes, must be fetched into "
            f"{tempfile.gettempdir()}, where {free:,} bytes are free; set TMPDIR to a folder on a larger disk"
        )
    warn(f"{url}: fetching {quantity(len(infos), 'file')}, {needed:,} bytes, into {folder} first")
    store = ObjectStore(url)

    def fetch(info: ObjectInfo, check: Check) -> None:
        (folder / info.name).parent.mkdir(exist_ok=True)
        with open(folder / info.name, "xb") as file:
            store.download(info.name, file.fileno(), info.bytes, check)
        os.utime(folder / info.name, ns=(info.modified_ns, info.modified_ns))

    call_for_each(fetch, infos, _AT_A_TIME)
    return folder
