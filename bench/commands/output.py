"""What the commands have in common at their end: where a result goes, and how it is shown."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from bench.measure.trials import is_kept
from bench.report.page import make_page
from bench.report.result import Result, format_document
from bench.report.show import Showing, show
from precache.cli.commandline import STDOUT, check_output, combine_options, note
from precache.cli.terminal import ProgressBar
from precache.page import write as write_page
from precache.reporting import Progress, explain_interruption, no_progress

_PATH = click.Path(path_type=Path)
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """Where a result goes, and how it is shown.

    Attributes:
        json_path: file that keeps trials while they are measured, and the result; `-` prints it alone.
        html_path: file of the page.
        details: every column and finding.
        markdown: as Markdown.
        quiet: nothing is printed but errors.
    """

    json_path: Path | None = None
    html_path: Path | None = None
    details: bool = False
    markdown: bool = False
    quiet: bool = False

    @contextmanager
    def measuring(self, title: str, unit: str) -> Iterator[Progress]:
        """Check the files before anything is measured, then show progress of the block.

        Raises:
            SettingError: a file cannot be written.
        """
        for path in (self.json_path, self.html_path):  # now, not after minutes of measuring
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
        """Show the result, and write what was asked for."""
        if self.json_path == STDOUT:
            click.echo(format_document(result.to_json()), nl=False)
        elif not self.quiet:
            showing = Showing(markdown=self.markdown, details=self.details)
            show(result, showing, has_page=self.html_path is not None)
        is_written = self.json_path is None or self.json_path == STDOUT or self.json_path.is_file()
        if self.json_path is not None and not is_written:  # a device, or the result was read from a file
            self.json_path.parent.mkdir(parents=True, exist_ok=True)
            self.json_path.write_text(format_document(result.to_json()), encoding="utf-8")
        if self.html_path is not None:
            self.html_path.parent.mkdir(parents=True, exist_ok=True)
            write_page(self.html_path, make_page(result))
        if not self.quiet and self.json_path != STDOUT:
            for path in (self.json_path, self.html_path):
                if path is not None:
                    click.echo(f"wrote {path}")

    def _describe_unfinished(self) -> str:
        if self.json_path is not None and is_kept(self.json_path):
            kept = f"{self.json_path} keeps those that were: the same command goes on"
            return f" before all runs were done; {kept}"
        return " before all runs were done; nothing was written: with --json FILE finished runs are kept"


def output_options(function: _Function) -> _Function:
    """Options whose values make the parameter `output`, an Output."""
    options = {
        "json_path": click.option(
            "--json",
            "json_path",
            type=_PATH,
            help="Keep finished runs and the result in this file: the same command goes on from it. "
            "'-' prints the result alone.",
        ),
        "html_path": click.option("--html", "html_path", type=_PATH, help="Write a web page here."),
        "details": click.option("--details", is_flag=True, help="Print every column and finding."),
        "markdown": click.option("--markdown", is_flag=True, help="Print the table as Markdown."),
        "quiet": click.option(
            "--quiet",
            is_flag=True,
            help="Print nothing but errors; --json FILE or --html FILE has the result.",
        ),
    }
    return combine_options("output", Output, options)(function)
