"""Printing of a result on the terminal: the answer, one table, the conditions, and what to do next."""

from collections.abc import Iterator
from dataclasses import dataclass

import click

from bench.report.result import Result, Row
from bench.report.table import legend, make_table
from bench.report.words import say, versions_of
from precache.errors import printable
from precache.packages import DALI

_VERSIONS = ("python", "torch", "torchvision", "pillow", "simplejpeg", *DALI)


@dataclass(frozen=True, kw_only=True, slots=True)
class Showing:
    """Form in which a result is shown.

    Attributes:
        markdown: whether it is shown as Markdown.
        details: whether every column and finding is shown, instead of a table of a few columns.
    """

    markdown: bool = False
    details: bool = False


def show(result: Result, showing: Showing = Showing(), *, has_page: bool = False) -> None:
    """Print a result.

    Args:
        result: result of any command.
        showing: form in which it is shown.
        has_page: whether a page is written, too.
    """
    details = showing.details
    table = make_table(result, details=details)
    paragraphs = [" ".join(paragraph) for paragraph in result.answer]
    skipped = [f"skipped {name}: {reason}" for name, reason in result.skipped.items()]
    notes = list(result.conditions)
    if details:
        notes.append(f"{', '.join(versions_of(result.machine, _VERSIONS))}.")
    notes.append(legend(result, details=details))
    if showing.markdown:
        parts = [
            *paragraphs,
            table.markdown(),
            *(f"{row.name}:\n\n```\n{printable_lines(row)}\n```" for row in rows_with_lines(result)),
            *skipped,
            *notes,
        ]
        lines = "\n\n".join(part for part in parts if part).split("\n")
        click.echo("\n".join(map(printable, lines)))
        return
    for paragraph in paragraphs:
        say(paragraph)
        click.echo()
    if result.rows:
        table.show()
    for row in rows_with_lines(result):
        click.echo(f"\n{printable(row.name)}:\n{printable_lines(row)}")
    for line in skipped:
        click.echo(printable(line))
    click.echo()
    for note in filter(None, notes):
        say(note)
    if details:
        for finding in describe_rows(result):
            click.echo()
            say(finding)
    has_more = any(row.sentences or row.detail for row in result.rows)
    if has_more and not (details or has_page):
        click.echo("everything else: --details, or a page with --html FILE")
    if result.next_step:
        click.echo()
        show_next_step(result.next_step)


def show_next_step(text: str) -> None:
    """Print sentences; indented lines, which are to be pasted, are not broken."""
    for line in text.splitlines():
        if line.startswith(" "):
            click.echo(printable(line))
        else:
            say(line)


def rows_with_lines(result: Result) -> list[Row]:
    """Rows with lines to paste into a script or to run."""
    return [row for row in result.rows if row.paste]


def printable_lines(row: Row) -> str:
    """Lines of a row to paste or to run, with escapes for what does not print."""
    return "\n".join(map(printable, row.paste))


def describe_rows(result: Result) -> Iterator[str]:
    """Yield a text for each row that has sentences."""
    for row in result.rows:
        if row.sentences:
            yield f"{row.name}: {' '.join(row.sentences)}"
