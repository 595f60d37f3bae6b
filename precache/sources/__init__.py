"""Where samples come from: one file each, one protocol, see `precache.sources.base`."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from precache.errors import SettingError, SourceError
from precache.sources import opened, rows, webdataset
from precache.sources.archive import ArchiveSource
from precache.sources.base import Source
from precache.sources.dataset import open_object, open_saved
from precache.sources.hf import PREFIX
from precache.sources.masks import MaskColumn, MaskTree
from precache.sources.options import SourceOptions
from precache.sources.table import TableSource
from precache.sources.tree import TreeSource
from precache.sources.walk import ALONE, Scanning
from precache.sources.webdataset import WebDatasetSource
from precache.storage.urls import Url, is_url, local_path, locate

__all__ = ["Scanning", "Source", "SourceOptions", "open_source"]


def open_source(source: Any, options: SourceOptions | None = None, how: Scanning = ALONE) -> Source:
    """The source at a path, of the kind that the path says; that of a dataset; or `source` where it is one.

    Args:
        source: a path, a URL (see `precache.sources.at_url`), `hf:FOLDER` for a dataset of Hugging Face on
            disk, anything with `__len__` and `__getitem__`, a mapping of splits to such datasets, or a
            `Source`.
        how: a large tree is scanned.

    Raises:
        SettingError: an option is not for such a source, or it is none.
        SourceError: it cannot be opened.
        MissingDependencyError: it needs an extra.
    """
    options = options or SourceOptions()
    if isinstance(source, bytes):  # no row of samples
        source = locate(source)
    if options.mask is not None:
        return _open_masked(source, options, options.mask, how)
    options = replace(options, boxes=None)  # a field like others, for a source
    if not isinstance(source, str | os.PathLike | Url):
        is_source = all(hasattr(source, name) for name in ("scan", "read", "where"))
        return source if is_source else open_object(source, options)
    if not isinstance(source, Url) and str(source).startswith(PREFIX):
        return open_saved(str(Path(source)).removeprefix(PREFIX), options)
    path = locate(source)
    if isinstance(path, Url):
        from precache.sources.at_url import open_at  # it reads manifests, and these hold options of sources

        return open_at(path, options)
    return _open_folder(path, options, how) if path.is_dir() else _open_file(path, options)


def _open_masked(source: Any, options: SourceOptions, mask: str, how: Scanning) -> Source:
    """With masks in a folder; or in a column, of a table that has one of this name."""
    options = replace(options, mask=None)
    if is_url(mask):
        raise SettingError(f"--mask {mask}: masks are read from a folder of this machine; copy them first")
    path = local_path(source) if isinstance(source, str | os.PathLike) and not is_url(source) else Path()
    if not (rows.is_table(path) and path.is_file() and mask in rows.columns_of(path)):
        return MaskTree(open_source(source, options, how), local_path(mask))
    table = open_source(path, replace(options, fields=tuple(dict.fromkeys((*options.fields, mask)))))
    assert isinstance(table, TableSource)
    if table.url:
        raise SettingError(
            f"--mask {mask}: masks of pictures at a URL are read from a folder; name that folder"
        )
    return MaskColumn(table, Path(table.folder), mask, mask in options.fields)


def _open_file(path: Path, options: SourceOptions) -> Source:
    if rows.is_table(path):
        options.only("a table", "root", "image", "label", "target", "separator", "split", "fields")
        return TableSource(path, options)
    if opened.has_suffix(path, opened.SUFFIXES):
        options.only("an archive", "image", "label", "target", "separator", "fields", "class_depth")
        return ArchiveSource(path, options)
    remedy = rows.why_no_table(path)
    if remedy is not None and path.is_file():
        raise SourceError(f"{path}: expected a table as CSV, TSV, JSON lines or Parquet; {remedy}")
    if opened.has_suffix(path, opened.OTHER_SUFFIXES) and path.is_file():
        raise SourceError(f"{path}: expected a tar or a zip; unpack it, and convert the folder")
    return _open_tree(path, options)


def _open_folder(path: Path, options: SourceOptions, how: Scanning) -> Source:
    from precache.sources import converted  # which reads manifests, and these hold options of sources

    if converted.is_converted(path):
        options.only("a converted dataset", "where")
        return converted.open_converted(path, options.where)
    if webdataset.holds_tars(path):
        options.only("WebDataset tars", "image", "label", "target", "separator", "fields")
        return WebDatasetSource(path, options)
    return _open_tree(path, options, how)


def _open_tree(path: Path, options: SourceOptions, how: Scanning = ALONE) -> Source:
    options.only("a tree of class folders", "class_depth")
    return TreeSource(path, 1 if options.class_depth is None else options.class_depth, how)
