"""A result on the terminal and in the files that were asked for."""

import textwrap
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from bench.report import events, loaders_page, picture, summary, table
from bench.report.gain import sentences
from bench.report.row import Result
from precache.console.commandline import write_json
from precache.console.progress import Progress
from precache.console.tables import new_console
from precache.errors import printable

_TABLE_WIDTH = 130  # more than any row


@dataclass(frozen=True, kw_only=True, slots=True)
class Showing:
    """How a result is shown.

    Attributes:
        markdown: as Markdown.
        details: every column and finding, instead of the table of five columns.
        gpu_price: dollars per hour of the accelerator; None leaves money out.
    """

    markdown: bool = False
    details: bool = False
    gpu_price: float | None = None


def show(
    result: Result, showing: Showing, html_path: Path | None = None, asked: Collection[str] = ()
) -> None:
    """Print the sentence, the table, when it holds, and how to get the rest; `write` says where the page is.

    Args:
        asked: backends that were asked for by name.
    """
    if showing.markdown:
        click.echo(table.markdown(result) if showing.details else summary.markdown(result, showing.gpu_price))
        return
    for sentence in sentences(result, showing.gpu_price):
        _say(sentence)
        click.echo()
    if showing.details:
        _show_details(result)
        return
    new_console(width=_TABLE_WIDTH).print(summary.terminal_table(result))
    for name, reason in summary.skipped(result, asked).items():
        click.echo(f"skipped {name}: {reason}")
    click.echo()
    for line in summary.note(result):
        _say(f"{line}.")
    if html_path is None:
        click.echo("everything else: --details, or a page with --html FILE")


@contextmanager
def all_or_nothing(
    on_progress: Progress | None = None,
) -> Iterator[Progress]:
    """Counts runs done and in all, and passes them on; a signal that ends them says what is lost."""
    counted = (0, 0)

    def count(done: int, total: int) -> None:
        nonlocal counted
        counted = done, total
        if on_progress is not None:
            on_progress(done, total)

    try:
        yield count
    except Exception:
        raise
    except BaseException as stop:
        done, total = counted
        stop.args = (f" after {done} of {total} runs; nothing was written: a result needs all runs",)
        raise


def _show_details(result: Result) -> None:
    new_console(width=_TABLE_WIDTH).print(table.terminal_table(result))
    for name, reason in result.skipped.items():
        click.echo(f"skipped {name}: {reason}")
    click.echo(f"{table.conditions(result)}.")
    click.echo(table.legend(result))
    for sentence in (*table.headline(result), *table.findings(result), *table.comparisons(result)):
        click.echo(sentence)


def _say(text: str) -> None:
    """A text on lines of at most `table.WIDTH` columns, unbroken words apart."""
    click.echo(textwrap.fill(printable(text), table.WIDTH, break_long_words=False, break_on_hyphens=False))


def write(
    result: Result,
    json_path: Path | None,
    html_path: Path | None,
    quiet: bool = False,
    *,
    svg_path: Path | None = None,
    gpu_price: float | None = None,
) -> None:
    """Write the files that were asked for; unless `quiet`, say so."""
    if json_path is not None:
        write_json(json_path, result.to_json(), quiet=quiet)
    renders: tuple[tuple[str, Path | None, Callable[[], str]], ...] = (
        ("the page:", html_path, lambda: loaders_page.html(result, gpu_price)),
        ("wrote", svg_path, lambda: picture.svg(result)),
    )
    for said, path, render in renders:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(render(), encoding="utf-8")
            if not quiet:
                click.echo(f"{said} {path}")
    folder = click.get_current_context().meta.get(events.__name__)
    if folder is not None:
        runs = events.write_events(result, folder)
        if not quiet:
            click.echo(f"wrote {folder}: {', '.join(runs) or 'nothing, no row has the times of its batches'}")
