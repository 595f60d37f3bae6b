"""`bench report`: a result that was written before."""

from pathlib import Path

import click

from bench.commands.loaders import show_result, write_pages
from bench.commands.options import PATH, Showing, option, showing_options
from bench.report.row import read_result
from precache.cli import commandline


@click.command(name="report", cls=commandline.Command)
@click.argument("result_path", metavar="RESULT.json", type=PATH)
@option("html_path")
@click.option("--svg", "svg_path", type=PATH, help="Write a picture here: a bar for each loader.")
@showing_options
def command(result_path: Path, html_path: Path | None, svg_path: Path | None, showing: Showing) -> None:
    """Show a result that 'bench loaders --json' wrote."""
    result = read_result(result_path)
    show_result(result, showing, html_path)
    write_pages(result, showing, html_path, svg_path)
