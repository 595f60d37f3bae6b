"""A result on the terminal and in the files that were asked for."""

from pathlib import Path

import click

from bench.findings.result import Result
from bench.pages import events, loaders, table
from precache.commandline import write_json
from precache.tables import new_console

_PATH = click.Path(path_type=Path)
_TABLE_WIDTH = 130  # more than any row


def _choose_events(context: click.Context, _: click.Parameter, folder: Path | None) -> None:
    if folder is not None:
        events.writer_class()  # its absence is an error now, not after minutes of measuring
        context.meta[events.__name__] = folder


tensorboard_option = click.option(
    "--tensorboard",
    type=_PATH,
    metavar="DIR",
    callback=_choose_events,
    expose_value=False,
    help="Write events for TensorBoard here: batch times, and what ran meanwhile.",
)


def show(result: Result, as_markdown: bool) -> None:
    """Print the table and what follows from it."""
    if as_markdown:
        click.echo(table.markdown(result))
        return
    new_console(width=_TABLE_WIDTH).print(table.terminal_table(result))
    for name, reason in result.skipped.items():
        click.echo(f"skipped {name}: {reason}")
    click.echo(f"{table.conditions(result)}.")
    click.echo(table.legend(result))
    for sentence in (*table.headline(result), *table.findings(result), *table.comparisons(result)):
        click.echo(sentence)


def write(result: Result, json_path: Path | None, html_path: Path | None, quiet: bool = False) -> None:
    """Write the files that were asked for; unless `quiet`, say so."""
    if json_path is not None:
        write_json(json_path, result.to_json(), quiet=quiet)
    if html_path is not None:
        html_path.parent.mkdir(parents=True, exist_ok=True)
        html_path.write_text(loaders.html(result), encoding="utf-8")
        if not quiet:
            click.echo(f"wrote {html_path}")
    folder = click.get_current_context().meta.get(events.__name__)
    if folder is not None:
        runs = events.write_events(result, folder)
        if not quiet:
            click.echo(f"wrote {folder}: {', '.join(runs) or 'nothing, no row has the times of its batches'}")
