"""`bench report`: a result that was written before."""

from pathlib import Path
from typing import Any

import click

from bench.findings.result_file import read_result
from bench.pages.terminal import Showing, show, showing_options, tensorboard_option, write
from precache import commandline

_PATH = click.Path(path_type=Path)


@click.command(name="report", cls=commandline.Command)
@click.argument("result_path", metavar="RESULT.json", type=_PATH)
@click.option("--html", "html_path", type=_PATH, help="Write the report here.")
@tensorboard_option
@click.option("--svg", "svg_path", type=_PATH, help="Write a picture here: a bar for each loader.")
@showing_options
def command(result_path: Path, html_path: Path | None, svg_path: Path | None, **showing: Any) -> None:
    """Show a result that 'bench loaders --json' wrote."""
    result = read_result(result_path)
    shown = Showing(**showing)
    show(result, shown, html_path)
    write(result, None, html_path, svg_path=svg_path, gpu_price=shown.gpu_price)
