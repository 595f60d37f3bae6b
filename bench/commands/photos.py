"""`bench photos`: photographs of a chosen size, to measure on."""

import re
from pathlib import Path

import click

from bench.machine.photos import make_photos
from precache.console import commandline
from precache.console.commandline import ProgressBar
from precache.errors import SettingError

_PATH = click.Path(path_type=Path)


@click.command(name="photos", cls=commandline.Command)
@click.argument("src", type=_PATH)
@click.argument("dst", type=_PATH)
@click.option("--mean", default="500x400", show_default=True, help="Width and height in pixels.")
@click.option("--pictures", default=1000, show_default=True, help="How many to make.")
def command(src: Path, dst: Path, mean: str, pictures: int) -> None:
    """Make larger photographs of the tree SRC in DST, to measure conversions on."""
    match = re.fullmatch(r"(\d+)x(\d+)", mean)
    if match is None:
        raise SettingError(f"mean must be a size in pixels as 500x400, got {mean!r}")
    with ProgressBar("photos", "image") as bar:
        make_photos(src, dst, (int(match[1]), int(match[2])), pictures, bar)
    click.echo(f"{dst}: {pictures:,} pictures")
