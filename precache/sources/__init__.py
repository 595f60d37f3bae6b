"""Where samples come from: one file each, one protocol, see `precache.sources.base`.

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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import SettingError, SourceError
from precache.reporting import counted, warn
from precache.sources import parquet, table, webdataset
from precache.sources.archive import ArchiveSource, is_archive
from precache.sources.base import Source
from precache.sources.converted import is_converted, open_converted
from precache.sources.dataset import PREFIX, open_object, open_saved
from precache.sources.masks import MaskedSource
from precache.sources.options import ARCHIVE, TABLE, TABLE_SUFFIXES, TARS, TREE, SourceOptions, is_table
from precache.sources.parquet import ParquetSource
from precache.sources.shard_files import shards_among, shards_in
from precache.sources.table import TableSource
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
        return source if is_source else open_object(source, options)
    if not isinstance(source, Url) and str(source).startswith(PREFIX):
        return open_saved(str(Path(source)).removeprefix(PREFIX), options)
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
    if not (is_table(path) and path.is_file() and mask in table.columns_of(path)):
        return MaskedSource(open_source(source, options), local_path(mask))
    pictures = open_source(path, replace(options, fields=tuple(dict.fromkeys((*options.fields, mask)))))
    if not isinstance(pictures, TableSource):
        raise SettingError(f"--mask {mask}: masks of pictures in Parquet are read from a folder; name that")
    if pictures.url:
        raise SettingError(
            f"--mask {mask}: masks of pictures at a URL are read from a folder; name that folder"
        )
    return MaskedSource(pictures, Path(pictures.folder), mask, mask in options.fields)


def _open_named(place: Location, options: SourceOptions) -> Source | None:
    """The table or the archive that `place` names; None where its name says neither."""
    name = Path(place.name)
    if is_table(name):
        options.only(TABLE)
        file = _on_disk(place)
        is_parquet = parquet.is_parquet(name.name) and file.is_file()
        if is_parquet and parquet.holds_pictures(place, file, options):
            return ParquetSource(place, file, ("",), options)
        return TableSource(place, file, options)
    if is_archive(name):
        options.only(ARCHIVE)
        return ArchiveSource(place, _on_disk(place), options)
    return None


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
        options.only(TABLE)
        return ParquetSource(path, path, tuple(names), options)
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
    first = store.first(_PROBED)
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
    options.only(TARS if is_shard is webdataset.is_tar else TABLE)
    folder = _fetched(url, [infos[name] for name in names])
    if is_shard is webdataset.is_tar:
        return WebDatasetSource(url, folder, options)
    return ParquetSource(url, folder, tuple(names), options)


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
            f"{url}: {counted(len(infos), 'file')}, {needed:,} bytes, must be fetched into "
            f"{tempfile.gettempdir()}, where {free:,} bytes are free; set TMPDIR to a folder on a larger disk"
        )
    warn(f"{url}: fetching {counted(len(infos), 'file')}, {needed:,} bytes, into {folder} first")
    store = ObjectStore(url)

    def fetch(info: ObjectInfo, check: Check) -> None:
        (folder / info.name).parent.mkdir(exist_ok=True)
        with open(folder / info.name, "xb") as file:
            store.download(info.name, file.fileno(), info.bytes, check)
        os.utime(folder / info.name, ns=(info.modified_ns, info.modified_ns))

    call_for_each(fetch, infos, _AT_A_TIME)
    return folder
