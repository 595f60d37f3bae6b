"""`bench report`: a result that was written before."""

from pathlib import Path

import click

from bench.findings.result_file import read_result
from bench.pages.terminal import show, tensorboard_option, write
from precache import commandline

_PATH = click.Path(path_type=Path)


@click.command(name="report", cls=commandline.Command)
@click.argument("result_path", metavar="RESULT.json", type=_PATH)
@click.option("--html", "html_path", type=_PATH, help="Write the report here.")
@tensorboard_option
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
def command(result_path: Path, html_path: Path | None, markdown: bool) -> None:
    """Show a result that 'bench loaders --json' wrote."""
    result = read_result(result_path)
    show(result, markdown)
    write(result, None, html_path)
