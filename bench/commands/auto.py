"""Command `precache auto`: convert a tree to what suits this machine, and measure what that brought.

`precache` knows this module by its name alone, because it imports nothing of `bench`.
"""

from typing import Any

import click

from bench.commands.options import PLACE
from bench.commands.output import Output, output_options
from bench.commands.recommend import (
    CONVERSION_OPTIONS,
    FORMATS_HELP,
    TRIAL_OPTIONS,
    Conversions,
    choose_formats,
    convert_as_recommended,
    require_local,
)
from bench.measure.trainers import EPILOG
from precache.cli import commandline
from precache.cli.commandline import combine_options
from precache.cli.main import RAW
from precache.conversion.destination import resolve as resolve_place
from precache.storage.urls import Location


@click.command(name="auto", cls=commandline.Command, epilog=EPILOG)
@click.argument("src", type=PLACE, default=RAW)
@click.argument("dst", type=PLACE, required=False)
@click.option("--max-bytes", metavar="SIZE", help="What DST may take, as in 20GB.  [default: what is free]")
@click.option("--format", "formats", help=FORMATS_HELP)
@click.option("--yes", is_flag=True, help="Convert without asking.")
@combine_options("conversion_options", dict, CONVERSION_OPTIONS)
@combine_options("trial_options", dict, TRIAL_OPTIONS)
@output_options
def command(
    src: Location,
    dst: Location | None,
    max_bytes: str | None,
    formats: str | None,
    yes: bool,
    conversion_options: dict[str, Any],
    trial_options: dict[str, Any],
    output: Output,
) -> None:
    """Convert the tree SRC (default data/raw) to what suits this machine, into DST (default data/FORMAT).

    It measures a sample, as 'bench recommend' does, chooses the format that trains fastest within
    --max-bytes, asks, converts, and feeds the trainer from both to compare. It converts nothing where
    another loader of the tree is as fast, or while other processes keep the CPUs busy. If it is killed, the
    same command continues.
    """
    conversions = Conversions(
        dst=None if dst is None else resolve_place(require_local("DST", dst)),
        max_bytes=max_bytes,
        formats=choose_formats(formats),
        yes=yes,
        **conversion_options,
    )
    convert_as_recommended(src, conversions, trial_options, output)
