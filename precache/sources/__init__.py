"""Where samples come from: one file each, one protocol, see `precache.sources.base`."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from precache.errors import SettingError, SourceError
from precache.sources import table, webdataset
from precache.sources.archive import ArchiveSource, is_archive, is_other_archive
from precache.sources.at_url import open_at
from precache.sources.base import Source
from precache.sources.converted import is_converted, open_converted
from precache.sources.dataset import open_object, open_saved
from precache.sources.listing import PREFIX
from precache.sources.masks import MaskColumn, MaskTree
from precache.sources.options import ARCHIVE, TABLE, TARS, TREE, SourceOptions, is_table
from precache.sources.table import TableSource
from precache.sources.tree import TreeSource
from precache.sources.webdataset import WebDatasetSource
from precache.storage.urls import Url, is_url, local_path, locate

__all__ = ["Source", "SourceOptions", "open_source"]


def open_source(source: Any, options: SourceOptions | None = None) -> Source:
    """The source at a path, of the kind that the path says; that of a dataset; or `source` where it is one.

    Args:
        source: a path, a URL (see `precache.sources.at_url`), `hf:FOLDER` for a dataset of Hugging Face on
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
        return open_at(path, options)
    return _open_folder(path, options) if path.is_dir() else _open_file(path, options)


def _open_masked(source: Any, options: SourceOptions, mask: str) -> Source:
    """With masks in a folder; or in a column, of a table that has one of this name."""
    options = replace(options, mask=None)
    if is_url(mask):
        raise SettingError(f"--mask {mask}: masks are read from a folder of this machine; copy them first")
    path = local_path(source) if isinstance(source, str | os.PathLike) and not is_url(source) else Path()
    if not (is_table(path) and path.is_file() and mask in table.columns_of(path)):
        return MaskTree(open_source(source, options), local_path(mask))
    pictures = open_source(path, replace(options, fields=tuple(dict.fromkeys((*options.fields, mask)))))
    assert isinstance(pictures, TableSource)
    if pictures.url:
        raise SettingError(
            f"--mask {mask}: masks of pictures at a URL are read from a folder; name that folder"
        )
    return MaskColumn(pictures, Path(pictures.folder), mask, mask in options.fields)


def _open_file(path: Path, options: SourceOptions) -> Source:
    if is_table(path):
        options.only(TABLE)
        return TableSource(path, options)
    if is_archive(path):
        options.only(ARCHIVE)
        return ArchiveSource(path, options)
    remedy = table.why_no_table(path)
    if remedy is not None and path.is_file():
        raise SourceError(f"{path}: expected a table as CSV, TSV, JSON lines or Parquet; {remedy}")
    if is_other_archive(path) and path.is_file():
        raise SourceError(f"{path}: expected a tar or a zip; unpack it, and convert the folder")
    return _open_tree(path, options)


def _open_folder(path: Path, options: SourceOptions) -> Source:
    if is_converted(path):
        return open_converted(path, options)
    if webdataset.holds_tars(path):
        options.only(TARS)
        return WebDatasetSource(path, options)
    return _open_tree(path, options)


def _open_tree(path: Path, options: SourceOptions) -> Source:
    options.only(TREE)
    return TreeSource(path, 1 if options.class_depth is None else options.class_depth)
