"""The scan of what is to be converted: a tree by several processes; one that is killed goes on."""

import os
from pathlib import Path
from typing import Any

from precache.console.notices import warn
from precache.dataset import boxes
from precache.destination import is_untouched
from precache.errors import SettingError
from precache.pictures import masks
from precache.recipe import Recipe
from precache.sources import Scanning, Source, SourceOptions, open_source
from precache.sources.base import Scan, lie_apart
from precache.sources.converted import prepared
from precache.sources.kept import kept_path
from precache.sources.splits import apply_list
from precache.storage.urls import Location, Url


def scanned(
    source: Any,
    destination: Location,
    recipe: Recipe,
    options: SourceOptions,
    split_list: str | os.PathLike[str] | None,
    workers: int,
) -> tuple[Source, Scan, Recipe, SourceOptions]:
    """The opened source and what it holds, with what recipe and options are once that is known."""
    how = Scanning(workers) if split_list else _scanning(source, destination, workers, options)
    opened = open_source(source, options, how)
    scan, options = prepared(opened.scan(), recipe, options)
    boxes.check(options.boxes, scan.samples.fields, masks=masks.reader_of(scan.source) is not None)
    for warning in scan.warnings:
        warn(warning)
    if split_list is not None:
        scan, recipe = apply_list(scan, recipe, split_list)
    elif recipe.listed:
        raise SettingError(f"splits {recipe.splits!r} means a list file; pass the file as split_list")
    return opened, scan, recipe, options


def _scanning(source: Any, destination: Location, workers: int, options: SourceOptions) -> Scanning:
    """Of a tree whose pictures will all be read, such that a scan that is killed goes on."""
    if isinstance(destination, Url):
        return Scanning(workers)
    folder = Path(os.path.realpath(destination))
    on_disk = isinstance(source, str | os.PathLike) and all(
        lie_apart(path, folder) for path in (source, options.mask) if path is not None
    )
    return Scanning(workers, kept_path(folder) if on_disk and is_untouched(folder) else None)
