"""`bench report`: a result that was written before."""

from pathlib import Path

import click

from bench.commands.loaders import show_result, write_report
from bench.commands.options import PATH, Showing, option, showing_options
from bench.report.row import read_result
from precache.cli import commandline


@click.command(name="report", cls=commandline.Command)
@click.argument("result_path", metavar="RESULT.json", type=PATH)
@option("html_path")
@showing_options
def command(result_path: Path, html_path: Path | None, showing: Showing) -> None:
    """Show a result that 'bench loaders --json' wrote."""
    result = read_result(result_path)
    show_result(result, showing, html_path)
    write_report(result, showing, html_path)
