"""The options of a command that say what is what in a source, and what they make."""

from typing import Any

import click

from precache.dataset.targets import TARGETS
from precache.sources import SourceOptions

SOURCE_FLAGS = {
    "root": click.option("--root", help="Table: folder of its pictures.  [default: that of the table]"),
    "image": click.option("--image", help="Table, dataset: column of the pictures."),
    "label": click.option("--label", help="Table, dataset: column of their labels."),
    "target": click.option(
        "--target", help=f"What a label is: {', '.join(TARGETS)}.  [default: as it looks]"
    ),
    "separator": click.option("--separator", help="Between several classes in one label, such as ';'."),
    "split": click.option("--split", help="Table, dataset: column of the names of splits."),
    "fields": click.option("--field", "fields", multiple=True, help="Columns to be kept: width,caption."),
    "class_depth": click.option(
        "--class-depth", type=int, help="Tree: how deep class folders lie; 0: no classes.  [default: 1]"
    ),
    "mask": click.option(
        "--mask", help="Folder of masks: MASKS/cat/1.png for the picture cat/1.jpg; or column of a table."
    ),
    "boxes": click.option(
        "--boxes", help="Which of the fields are boxes: [[left, top, right, bottom], ...]."
    ),
    "where": click.option("--where", help="Converted dataset: samples to take: 'label in (cat, dog)'."),
}
"""For `precache.console.commandline.gathered`."""


def source_options(fields: tuple[str, ...], **options: Any) -> SourceOptions:
    """What the values of SOURCE_FLAGS say; SettingError for a bad one."""
    names = [name.strip() for listed in fields for name in listed.split(",")]
    return SourceOptions(fields=tuple(name for name in names if name), **options)
