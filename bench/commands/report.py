"""`bench report`: a result that was written before."""

from pathlib import Path

import click

from bench.commands.loaders import write_report
from bench.commands.options import PATH, option, showing_options
from bench.report.result import Showing, show
from bench.report.row import read_result
from precache.cli import commandline


@click.command(name="report", cls=commandline.Command)
@click.argument("result_path", metavar="RESULT.json", type=PATH)
@option("html_path")
@showing_options
def command(result_path: Path, html_path: Path | None, showing: Showing) -> None:
    """Show a result that 'bench loaders --json' wrote."""
    result = read_result(result_path)
    show(result, showing, has_page=html_path is not None)
    write_report(result, showing, html_path)
