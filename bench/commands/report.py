"""`bench report`: a result that was written before."""

from pathlib import Path

import click

from bench.commands.options import PATH, option, showing_options, tensorboard_option
from bench.report.row import read_result
from bench.report.terminal import Showing, show, write
from precache.console import commandline


@click.command(name="report", cls=commandline.Command)
@click.argument("result_path", metavar="RESULT.json", type=PATH)
@option("html_path")
@tensorboard_option
@click.option("--svg", "svg_path", type=PATH, help="Write a picture here: a bar for each loader.")
@showing_options
def command(result_path: Path, html_path: Path | None, svg_path: Path | None, showing: Showing) -> None:
    """Show a result that 'bench loaders --json' wrote."""
    result = read_result(result_path)
    show(result, showing, html_path)
    write(result, None, html_path, svg_path=svg_path, gpu_price=showing.gpu_price)
