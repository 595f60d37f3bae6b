"""Options and steps with which a command of `bench` ends: write its result to files, and show it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click

from bench.measure.trials import can_keep_trials
from bench.report.result import Result, Row, format_document
from bench.report.table import legend, make_table, printable_lines
from bench.report.words import say, versions_of
from precache.cli.commandline import PATH, STDOUT, check_output, combine_options
from precache.cli.terminal import ProgressBar, note
from precache.errors import printable
from precache.packages import DALI
from precache.page import write as write_page
from precache.reporting import Progress, explain_interruption, no_progress

_VERSIONS = ("python", "torch", "torchvision", "pillow", "simplejpeg", *DALI)
_PAGE = "bench.report.page"
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """Files that a result is written to, and the form in which it is shown.

    Attributes:
        json_path: file that keeps trials while they are measured, and then the result; `-` prints the result
            alone.
        html_path: file of the page.
        details: whether every column and finding is printed.
        markdown: whether the table is printed as Markdown.
        quiet: whether nothing is printed but errors.
    """

    json_path: Path | None = None
    html_path: Path | None = None
    details: bool = False
    markdown: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.html_path is not None:
            import_module(_PAGE)  # plotly takes a second to import; one that is missing is named at once

    @contextmanager
    def progress(self, title: str, unit: str) -> Iterator[Progress]:
        """Check that the files can be written, then yield the callback that shows the block's progress.

        Args:
            title: what is done, before the bar.
            unit: what is counted: "run".

        Raises:
            SettingError: a file cannot be written.
        """
        for path in (self.json_path, self.html_path):  # before minutes of measuring, not after
            check_output(path)
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        is_shown = not self.quiet and self.json_path != STDOUT
        if is_shown and self.json_path is not None and self.json_path.is_file():
            note(f"{self.json_path} is there: the runs in it are not measured again")
        with explain_interruption(self._describe_unfinished):
            if self.quiet:
                yield no_progress
            else:
                with ProgressBar(title, unit) as bar:
                    yield bar

    def finish(self, result: Result) -> None:
        """Write the result to the files that the options name, then show it: its reader may end early."""
        is_written = self.json_path is None or self.json_path == STDOUT or self.json_path.is_file()
        # `Trials` has written its file already, but no device; a result that was read from another file is
        # not written yet
        if self.json_path is not None and not is_written:
            self.json_path.parent.mkdir(parents=True, exist_ok=True)
            self.json_path.write_text(format_document(result.to_json()), encoding="utf-8")
        if self.html_path is not None:
            self.html_path.parent.mkdir(parents=True, exist_ok=True)
            write_page(self.html_path, import_module(_PAGE).make_page(result))
        if self.json_path == STDOUT:
            click.echo(format_document(result.to_json()), nl=False)
        elif not self.quiet:
            has_page = self.html_path is not None
            show(result, markdown=self.markdown, details=self.details, has_page=has_page)
            for path in (self.json_path, self.html_path):
                if path is not None:
                    note(f"wrote {path}")

    def _describe_unfinished(self) -> str:
        """Return the end of the message with which a signal stops the block: which runs are kept."""
        if self.json_path is not None and can_keep_trials(self.json_path):
            reason = f"{self.json_path} keeps those that were: the same command goes on"
            return f" before all runs were done; {reason}"
        return " before all runs were done; nothing was written: with --json FILE finished runs are kept"


def output_options(function: _Function) -> _Function:
    """Add the options whose values make the parameter `output`, an Output, to a command."""
    options = {
        "json_path": click.option(
            "--json",
            "json_path",
            type=PATH,
            help="Keep finished runs and the result in this file: the same command goes on from it. "
            "'-' prints the result alone.",
        ),
        "html_path": click.option("--html", "html_path", type=PATH, help="Write a web page here."),
        "details": click.option("--details", is_flag=True, help="Print every column and finding."),
        "markdown": click.option("--markdown", is_flag=True, help="Print the table as Markdown."),
        "quiet": click.option(
            "--quiet",
            is_flag=True,
            help="Print nothing but errors; --json FILE or --html FILE has the result.",
        ),
    }
    return combine_options("output", Output, options)(function)


def show(result: Result, *, markdown: bool = False, details: bool = False, has_page: bool = False) -> None:
    """Print a result.

    Args:
        result: result of any command.
        markdown: whether it is shown as Markdown.
        details: whether every column and finding is shown, instead of a table of a few columns.
        has_page: whether a page is written, too.
    """
    table = make_table(result, details=details)
    paragraphs = [" ".join(paragraph) for paragraph in result.answer]
    skipped = [f"skipped {name}: {reason}" for name, reason in result.skipped.items()]
    notes = list(result.conditions)
    if details:
        notes.append(f"{', '.join(versions_of(result.machine, _VERSIONS))}.")
    notes.append(legend(result, details=details))
    if markdown:
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
    for sentence in filter(None, notes):
        say(sentence)
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


def describe_rows(result: Result) -> Iterator[str]:
    """Yield a text for each row that has sentences."""
    for row in result.rows:
        if row.sentences:
            yield f"{row.name}: {' '.join(row.sentences)}"
