"""Sources of samples: trees, tables, datasets, WebDataset tars; `open_source` opens any of them.

All sources have the protocol of `precache.sources.base`. To add one, write:

    a kind of table      a `RowReader` (see `precache.sources.rows`), its suffix in `options.TABLE_SUFFIXES`
                         and a branch in `_open_table`
    a kind of dataset    a `RowReader` and a branch in `_open_dataset`
    anything else        a `Source` (see `precache.sources.base`), its name in messages in
                         `precache.sources.options`, and a branch in `_open_by_name`, which looks at the
                         file's name, in `_open_folder` or in `_open_url`

Sources at a URL are:

    s3://BUCKET/photos              a tree of objects
    s3://BUCKET/sets/caltech        a converted dataset
    s3://BUCKET/tars/0.tar          a WebDataset tar, fetched first: pictures are read in shuffled order
    s3://BUCKET/labels.csv          a table, fetched; its pictures are objects, or files below --root
    s3://BUCKET/tars                WebDataset tars, or Parquet with pictures, fetched first
    https://HOST/0.tar              any of these but trees and folders of tars: a web server lists no folders

Fetched files lie in the staging folder (TMPDIR) until the process ends.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import SettingError, SourceError, shell_command
from precache.recipe import SPLIT_NAME
from precache.reporting import quantity, warn
from precache.sources import huggingface, parquet, webdataset
from precache.sources.base import Source
from precache.sources.converted import is_converted, open_converted
from precache.sources.dataset import FolderReader, open_dataset_reader
from precache.sources.options import (
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
from precache.sources.shard_files import find_split, find_splits, list_shards, select_shards
from precache.sources.table import DELIMITERS, JSON_LINES, CsvReader, JsonLinesReader
from precache.sources.tree import ObjectTree, TreeSource
from precache.sources.webdataset import WebDatasetSource
from precache.storage import staging
from precache.storage.objects import ObjectInfo, ObjectStore
from precache.storage.retries import Check, call_for_each
from precache.storage.urls import Location, Url, locate

__all__ = ["Source", "SourceOptions", "open_source"]

_COMPRESSED_TABLES = tuple(
    f"{suffix}{compression}" for suffix in TABLE_SUFFIXES for compression in (".gz", ".xz", ".zst")
)
_OTHER_TABLES = (*_COMPRESSED_TABLES, ".xls", ".xlsx", ".ods", ".json", ".ndjson", ".feather", ".arrow")
"""Suffixes of tables that cannot be read, so that the error says so."""
_ARCHIVES = (".zip", ".rar", ".7z", ".tar.lz4", ".tar.lz", ".tar.z", *webdataset.COMPRESSED_SUFFIXES)
"""Suffixes of archives, which are unpacked by other programs."""
_PROBED_OBJECTS = 1000  # the first objects below a URL that say whether it is a tree
_FETCH_THREADS = 4


def open_source(source: Any, options: SourceOptions | None = None) -> Source:
    """Open the source of the samples at a path or URL, or in a dataset in memory.

    Args:
        source: a path, a URL (see the module), `hf:FOLDER` for a dataset that Hugging Face's `save_to_disk`
            wrote, anything with `__len__` and `__getitem__`, a mapping of split names to such datasets, or a
            `Source`, which is returned as it is.

    Raises:
        SettingError: `source` is not a source, or an option does not fit it.
        SourceError: the source cannot be opened.
        MissingDependencyError: the source needs an extra that is not installed.
    """
    options = options or SourceOptions()
    if isinstance(source, bytes):  # a path, though bytes have __len__ and __getitem__ like a dataset
        source = locate(source)
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


def _open_by_name(place: Location, options: SourceOptions) -> Source | None:
    """Open the table or the WebDataset tar at `place`; return None if its name is that of neither."""
    name = Path(place.name)
    if is_table(name):
        options.check_kind(TABLE)
        return _open_table(place, _local_file(place), options)
    if name.suffix.lower() == ".tar" and (isinstance(place, Url) or place.is_file()):
        return WebDatasetSource(place, _local_file(place), options)
    return None


def _open_table(place: Location, file: Path, options: SourceOptions) -> RowSource:
    """Open a table; the name of a Parquet file with pictures says their split.

    Args:
        file: local file of the table: `place`, or what was fetched from there.
    """
    folder = str(place.parent) if options.root is None else options.root
    suffix, name = file.suffix.lower(), str(place)
    if suffix in DELIMITERS:
        part = RowPart(CsvReader(name, file), folder)
    elif suffix == JSON_LINES:
        part = RowPart(JsonLinesReader(name, file), folder)
    else:
        part = RowPart(ParquetReader(name, file, folder), folder)
        _, image = part.choose_columns(options)
        if image.pictures is not None:
            _warn_of_copies(place)
            part = replace(part, split=find_split(place.name))
    return RowSource(place, _table_paths(place, options), (part,), options)


def _open_parquet_folder(
    place: Location, folder: Path, names: Sequence[str], options: SourceOptions
) -> RowSource:
    """Open a folder of Parquet files with pictures; the name of each file says its split.

    Args:
        folder: local folder of the files: `place`, or what was fetched from there.
        names: paths of the files in the folder.
    """
    options.check_kind(TABLE)
    pictures_folder = str(folder) if options.root is None else options.root
    parts = []
    for name, split in zip(names, find_splits(place, names), strict=True):
        reader = ParquetReader(str(place / name), folder / name, pictures_folder)
        parts.append(RowPart(reader, split=split, prefix=f"{name}/"))
    _warn_of_copies(place)
    return RowSource(place, _table_paths(place, options), tuple(parts), options)


def _warn_of_copies(place: Location) -> None:
    warn(
        f"{place}: its pictures are copied into {tempfile.gettempdir()} first: they are read in shuffled "
        f"order, and of Parquet only many rows at once"
    )


def _table_paths(place: Location, options: SourceOptions) -> tuple[Location, ...]:
    """Return `Source.paths` of a table: the table, and the folder that --root names.

    The table's own folder is not among them, so that a dataset can be written beside the table.

    Raises:
        SettingError: there is no such folder.
    """
    if options.root is None:
        return (place,)
    root = locate(options.root)
    if isinstance(root, Path) and not os.path.isdir(options.root):
        raise SettingError(f"--root {options.root}: no such folder", remedy="name that of the pictures")
    return (place, root)


def _open_dataset(dataset: Any, options: SourceOptions, folder: Path | None = None) -> RowSource:
    """Open a dataset in memory, or a mapping of split names to datasets.

    Args:
        folder: folder that the dataset was loaded from; None if it was made in memory.

    Raises:
        SettingError: `dataset` is not a dataset, or a split's name is not valid.
        SourceError: a dataset has no samples.
    """
    options.check_kind(DATASET)
    has_splits = isinstance(dataset, Mapping) and all(isinstance(name, str) for name in dataset)
    datasets = dict(dataset) if has_splits else {"": dataset}
    if not datasets:
        raise SettingError(
            "a mapping without splits is not a source; expected one such as {'train': dataset}"
        )
    for split_dataset in datasets.values():
        has_rows = hasattr(split_dataset, "__len__") and hasattr(split_dataset, "__getitem__")
        if isinstance(split_dataset, type) or not has_rows:
            expected = "expected a path, or a dataset with __len__ and __getitem__"
            raise SettingError(f"{type(split_dataset).__name__} is not a source; {expected}")
    first_class = type(next(iter(datasets.values())))
    root = folder or Path(f"{first_class.__module__.partition('.')[0]}.{first_class.__name__}")
    parts: list[RowPart] = []
    paths = [] if folder is None else [folder]
    for split, split_dataset in datasets.items():
        if split and not SPLIT_NAME.fullmatch(split):
            raise SettingError(
                f"{split!r} is not a valid split name",
                path=root,
                remedy="write letters and digits, as in train",
            )
        if split and options.split is not None:
            raise SettingError("has splits already", path=root, remedy=f"leave out split={options.split!r}")
        name = f"{root}, split {split}" if split else str(root)
        if not len(split_dataset):
            raise SourceError("has no samples; expected one for each picture", path=name)
        if huggingface.is_dataset(split_dataset):
            hf_reader = huggingface.HuggingFaceReader(split_dataset, name)
            parts.append(RowPart(hf_reader, split=split, is_dataset=True))
            continue
        reader = open_dataset_reader(split_dataset, name)
        part = RowPart(reader, split=split, is_dataset=True)
        if isinstance(reader, FolderReader):
            paths.append(Path(reader.folder))
            part = replace(part, folder=reader.folder, prefix=f"{split}/" if split else "")
        parts.append(part)
    return RowSource(root, tuple(paths), tuple(parts), options)


def _open_file(path: Path, options: SourceOptions) -> Source:
    """Open a table or a WebDataset tar; the error for any other file says what was expected."""
    if source := _open_by_name(path, options):
        return source
    if path.is_file():
        name = path.name.lower()
        if name.endswith(_OTHER_TABLES):
            raise SourceError(
                "expected a table as CSV, TSV, JSON lines or Parquet",
                path=path,
                remedy="unpack it, or save it so, in UTF-8",
            )
        if name.endswith(_ARCHIVES):
            raise SourceError("is an archive", path=path, remedy=_unpack_remedy(path))
    return _open_tree(path, options)


def _unpack_remedy(path: Path) -> str:
    """Return how to unpack an archive to what can be converted."""
    if path.suffix.lower() == ".zip":
        return f"run '{shell_command('unzip', path, '-d', path.with_suffix(''))}', and convert the folder"
    if path.name.lower().endswith(webdataset.COMPRESSED_SUFFIXES):
        command = shell_command("tar xf", path)
        return f"run '{command}', and convert the folder; WebDataset tars are read when they are decompressed"
    return "unpack it, and convert the folder"


def _open_folder(path: Path, options: SourceOptions) -> Source:
    """Open a folder as what it holds: a converted dataset, tars, Parquet files, or class folders."""
    if is_converted(path):
        return open_converted(path, options)
    if list_shards(path, webdataset.is_tar):
        options.check_kind(TARS)
        return WebDatasetSource(path, path, options)
    if names := list_shards(path, parquet.is_parquet):
        return _open_parquet_folder(path, path, names, options)
    return _open_tree(path, options)


def _open_tree(place: Location, options: SourceOptions) -> Source:
    options.check_kind(TREE)
    depth = 1 if options.class_depth is None else options.class_depth
    return ObjectTree(place, depth) if isinstance(place, Url) else TreeSource(place, depth)


def _open_url(url: Url, options: SourceOptions) -> Source:
    """Open the source at `url`, whose name and objects say its kind."""
    if url.key and (source := _open_by_name(url, options)):
        return source
    store = ObjectStore(url)
    if store.find(MANIFEST_NAME) is not None:
        return open_converted(url, options)
    if url.scheme in ("http", "https"):
        raise SourceError(
            "is neither a table, a tar nor a converted dataset, and a web server cannot list a tree",
            path=url,
            remedy="name one of these",
        )
    first_names = [info.name for info in store.list_first(_PROBED_OBJECTS)]
    if not first_names:
        raise SourceError(
            f"holds no objects, so no class folder with pictures; expected {url}/CLASS/picture.jpg",
            path=url,
            remedy="check the URL",
        )
    is_shard = webdataset.is_tar
    if not select_shards(first_names, is_shard):
        is_shard = parquet.is_parquet
    if not select_shards(first_names, is_shard):
        return _open_tree(url, options)
    infos = {info.name: info for info in store.list()}
    names = select_shards(infos, is_shard)
    if not names:
        return _open_tree(url, options)
    options.check_kind(TARS if is_shard is webdataset.is_tar else TABLE)  # fails before anything is fetched
    folder = _fetch(url, [infos[name] for name in names])
    if is_shard is webdataset.is_tar:
        return WebDatasetSource(url, folder, options)
    return _open_parquet_folder(url, folder, names, options)


def _local_file(place: Location) -> Path:
    """Return the file at `place`, fetched first if that is a URL."""
    if isinstance(place, Path):
        return place
    info = ObjectStore(place.parent).find(place.name)
    if info is None:
        raise SourceError("does not exist", path=place, remedy="check the URL")
    return _fetch(place.parent, [info]) / place.name


def _fetch(url: Url, infos: Sequence[ObjectInfo]) -> Path:
    """Fetch the objects of `infos`, which lie below `url`, and return the folder of their files.

    Raises:
        SourceError: the disk has no room for them.
        StorageError: an object cannot be fetched.
    """
    folder = Path(tempfile.mkdtemp(dir=staging.folder()))
    files = quantity(len(infos), "file")
    total_bytes = sum(info.bytes for info in infos)
    free_bytes = shutil.disk_usage(folder).free
    if total_bytes > free_bytes:
        raise SourceError(
            f"{files}, {total_bytes:,} bytes, must be fetched into {tempfile.gettempdir()}, where "
            f"{free_bytes:,} bytes are free",
            path=url,
            remedy="set TMPDIR to a folder on a larger disk",
        )
    warn(f"{url}: fetching {files}, {total_bytes:,} bytes, into {folder} first")
    store = ObjectStore(url)

    def fetch(info: ObjectInfo, check: Check) -> None:
        (folder / info.name).parent.mkdir(exist_ok=True)
        with open(folder / info.name, "xb") as file:
            store.download(info.name, file.fileno(), info.bytes, check)
        os.utime(folder / info.name, ns=(info.modified_ns, info.modified_ns))

    call_for_each(fetch, infos, _FETCH_THREADS)
    return folder
