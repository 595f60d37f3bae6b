"""`precache auto`: convert a tree to what suits this machine, and measure what that brought.

It is registered with `precache` by the name of this module, for `precache` imports nothing of `bench`.
"""

from typing import Any

import click

from bench.commands.options import PLACE
from bench.commands.recommend import CONVERTING, FORMATS_HELP, MEASURING, convert_what_pays
from bench.measure.trainers import EPILOG
from precache.cli import commandline
from precache.cli.commandline import gathered
from precache.cli.main import RAW
from precache.storage.urls import Location


@click.command(name="auto", cls=commandline.Command, epilog=EPILOG)
@click.argument("src", type=PLACE, default=RAW)
@click.argument("dst", type=PLACE, required=False)
@click.option("--max-bytes", metavar="SIZE", help="What DST may take, as in 20GB.  [default: what is free]")
@click.option("--format", "formats", help=FORMATS_HELP)
@click.option("--yes", is_flag=True, help="Convert without asking.")
@gathered("converting", dict, CONVERTING)
@gathered("asked", dict, MEASURING)
def command(
    src: Location,
    dst: Location | None,
    max_bytes: str | None,
    formats: str | None,
    yes: bool,
    converting: dict[str, Any],
    asked: dict[str, Any],
) -> None:
    """Convert the tree SRC (default data/raw) to what suits this machine, into DST (default data/FORMAT).

    A sample is measured, as by 'bench recommend'. What keeps most of the pictures within --max-bytes is
    chosen, you are asked, and after the conversion the trainer is fed from both. Nothing is converted where
    another loader of the tree is as fast. Killed, the same command goes on.
    """
    convert_what_pays(src, dst, max_bytes, formats, yes, converting, asked)
