"""The flags that describe a source (which column is the label, ...), and the `SourceOptions` they make."""

import csv
from collections.abc import Iterable
from typing import Any

import click

from precache.recipe import flag_of
from precache.sources import SourceOptions
from precache.sources.options import OPTIONS

_LISTS = ("fields", "classes")
SOURCE_FLAGS = {
    name: click.option(
        flag_of(name),
        name,
        help=option.help,
        type=int if name == "class_depth" else str,
        multiple=name in _LISTS,
    )
    for name, option in OPTIONS.items()
}
"""For `precache.cli.commandline.gathered`."""


def source_options(fields: tuple[str, ...], classes: tuple[str, ...], **options: Any) -> SourceOptions:
    """What the values of SOURCE_FLAGS say; SettingError for a bad one."""
    return SourceOptions(fields=_names(fields), classes=_names(classes), **options)


def _names(lines: Iterable[str]) -> tuple[str, ...]:
    """The names in lines of CSV, so that one may have a comma in it."""
    cells = (cell.strip() for row in csv.reader(lines, skipinitialspace=True) for cell in row)
    return tuple(cell for cell in cells if cell)
