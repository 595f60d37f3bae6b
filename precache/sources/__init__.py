"""Where samples come from: one file each, one protocol, see `precache.sources.base`."""

import os
from dataclasses import replace
from pathlib import Path

from precache.sources.base import Source
from precache.sources.masks import MaskTree
from precache.sources.options import SourceOptions
from precache.sources.tree import TreeSource

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
    if not isinstance(source, str | os.PathLike):
        return source
    options.only("a tree of class folders")
    return TreeSource(Path(source))
