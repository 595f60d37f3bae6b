"""Where samples come from: one file each, one protocol, see `precache.sources.base`."""

import os
from dataclasses import replace
from pathlib import Path

from precache.errors import SourceError
from precache.sources import opened, rows, webdataset
from precache.sources.archive import ArchiveSource
from precache.sources.base import Source
from precache.sources.masks import MaskTree
from precache.sources.options import SourceOptions
from precache.sources.table import TableSource
from precache.sources.tree import TreeSource
from precache.sources.webdataset import WebDatasetSource

__all__ = ["Source", "SourceOptions", "open_source"]


def open_source(source: str | os.PathLike[str] | Source, options: SourceOptions | None = None) -> Source:
    """The source at a path, of the kind that the path says; or `source` itself where it is one.

    Raises:
        SettingError: an option is not for such a source.
        SourceError: it cannot be opened.
    """
    options = options or SourceOptions()
    if options.mask is not None:
        return MaskTree(open_source(source, replace(options, mask=None)), Path(options.mask))
    options = replace(options, boxes=None)  # a field like others, for a source
    if not isinstance(source, str | os.PathLike):
        return source
    path = Path(source)
    if rows.is_table(path) and not path.is_dir():
        options.only("a table", "root", "image", "label", "target", "separator", "split", "fields")
        return TableSource(path, options)
    remedy = rows.why_no_table(path)
    if remedy is not None and path.is_file():
        raise SourceError(f"{path}: expected a table as CSV, TSV, JSON lines or Parquet; {remedy}")
    if opened.has_suffix(path, opened.SUFFIXES) and not path.is_dir():
        options.only("an archive", "image", "label", "target", "separator", "fields", "class_depth")
        return ArchiveSource(path, options)
    if opened.has_suffix(path, opened.OTHER_SUFFIXES) and path.is_file():
        raise SourceError(f"{path}: expected a tar or a zip; unpack it, and convert the folder")
    if webdataset.holds_tars(path):
        options.only("WebDataset tars", "image", "label", "target", "separator", "fields")
        return WebDatasetSource(path, options)
    options.only("a tree of class folders", "class_depth")
    return TreeSource(path, 1 if options.class_depth is None else options.class_depth)
