"""Command `bench report`: shows a result that another command wrote to a file, or compares two of them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from bench.commands.options import price_option
from bench.commands.output import Output, output_options
from bench.measure.trials import read_document
from bench.report import hardware, loaders, ranks, recommendation, watch
from bench.report.regression import (
    ResultComparison,
    compare_results,
    find_differing_work,
    make_difference_table,
)
from bench.report.result import Document, Result
from bench.report.sentences import disturbance
from bench.report.words import say
from precache.cli.commandline import PATH, STDOUT, debug_option
from precache.cli.terminal import note
from precache.errors import SettingError, check_share, printable
from precache.reporting import quantity


def _make_loaders_result(document: Document, gpu_price: float | None) -> Result:
    if document.settings.get("ranks") is not None:
        return ranks.make_result(document.machine, document.settings, document.trials, document.skipped)
    return loaders.make_result(
        document.machine, document.settings, document.trials, document.skipped, gpu_price
    )


def _without_price(make: Callable[..., Result]) -> Callable[[Document, float | None], Result]:
    """Return a maker that ignores the price of an accelerator and calls `make`."""

    def make_result(document: Document, _: float | None) -> Result:
        return make(document.machine, document.settings, document.trials, document.skipped)

    return make_result


def _make_watch_result(document: Document, gpu_price: float | None) -> Result:
    return watch.make_result(document.machine, document.settings, document.trials, gpu_price)


MAKERS: dict[str, Callable[[Document, float | None], Result]] = {
    "hardware": _without_price(hardware.make_result),
    "loaders": _make_loaders_result,
    "recommend": _without_price(recommendation.make_result),
    "watch": _make_watch_result,
}
"""Functions that make a result from the trials in a file, by the command that wrote it."""


def read_result(path: Path, gpu_price: float | None = None) -> Result:
    """Return the result in the file at `path`.

    Args:
        gpu_price: dollars per hour of an accelerator, for the cost of waiting; None: no cost is given.

    Raises:
        SettingError: the file cannot be read, is no result, or has no finished run.
    """
    document = read_document(path)
    if document.command not in MAKERS:
        raise SettingError(f"is of 'bench {document.command}', which bench report does not know", path=path)
    try:
        return MAKERS[document.command](document, gpu_price)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise SettingError(
            f"holds too few finished runs, or is not a result of bench ({error!r})",
            path=path,
            remedy="run the command that wrote it again",
        ) from error


@click.command(name="report", short_help="Show a result again; compare two of the same work.")
@click.argument("paths", metavar="RESULT.json [AFTER.json]", type=PATH, nargs=-1, required=True)
@click.option(
    "--tolerance",
    default=0.05,
    show_default=True,
    help="How much worse a figure may get before it is a regression: 0.05 is 5%.",
)
@click.option("--force", is_flag=True, help="Compare even if machine, work, data or rows differ.")
@price_option
@output_options
@debug_option
def command(
    paths: tuple[Path, ...], tolerance: float, force: bool, gpu_price: float | None, output: Output
) -> None:
    """Show a result that --json of a command of bench wrote; of two, say what got slower.

    \b
    bench report result.json --html report.html
    bench report before.json after.json --tolerance 0.2

    Exit code 1 if a figure of AFTER.json is worse than in RESULT.json by more than the tolerance in every
    repeat, or if AFTER.json lacks a row.
    """
    if len(paths) > 2:
        raise SettingError(
            "is one result too many", path=paths[2], remedy="give one to show, or two to compare"
        )
    check_share("tolerance", tolerance)
    if len(paths) == 1:
        if output.json_path in paths:
            raise SettingError("--json names the result itself", path=paths[0], remedy="name another file")
        output.finish(read_result(paths[0], gpu_price))
        return
    before, after = read_result(paths[0]), read_result(paths[1])
    differing = find_differing_work(before, after)
    if differing and not force:
        raise SettingError(
            f"{paths[0]} and {paths[1]} differ in {'; '.join(differing)}",
            remedy="use --force to compare them all the same",
        )
    comparison = compare_results(before, after, tolerance)
    if not comparison.differences:
        raise SettingError(
            f"{paths[0]} and {paths[1]} have no row in common", remedy="measure the same loaders"
        )
    lost_rows = () if force else comparison.only_before
    if output.json_path is not None:
        document: dict[str, Any] = {
            "before": str(paths[0]),
            "after": str(paths[1]),
            "tolerance": tolerance,
            **comparison.to_json(),
        }
        _write_json(output.json_path, document, quiet=output.quiet)
    if not output.quiet and output.json_path != STDOUT:
        count = quantity(len(comparison.differences), "figure")
        say(f"{len(comparison.regressions)} of {count} got worse by more than {tolerance:.0%}.")
        if lost_rows:
            say(f"{paths[1]} lacks {quantity(len(lost_rows), 'row')} of {paths[0]}; --force goes on without.")
        if differing:
            say(f"Compared although they differ in {'; '.join(differing)}.")
        results = [(paths[0], before), (paths[1], after)]
        _show_differences(comparison, results, markdown=output.markdown)
    if comparison.regressions or lost_rows:
        raise click.exceptions.Exit(1)


def _write_json(path: Path, content: object, *, quiet: bool) -> None:
    """Write `content` to `path` and, unless `quiet`, say so; print it alone for `-`."""
    text = json.dumps(content, indent=1)
    if path == STDOUT:
        click.echo(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    if not quiet:
        note(f"wrote {path}")


def _show_differences(
    comparison: ResultComparison, results: Sequence[tuple[Path, Result]], *, markdown: bool
) -> None:
    """Print the table of differences, the rows that only one result has, and what else was running."""
    table = make_difference_table(comparison)
    if markdown:
        click.echo(table.markdown())
    else:
        table.show()
    for (path, _), names in zip(results, (comparison.only_before, comparison.only_after), strict=True):
        for name in names:
            click.echo(printable(f"only in {path}: {name}"))
    for path, result in results:
        disturbed = disturbance(loaders.other_cpu_share(result.trials), then="")
        if disturbed:
            say(f"{path}: {disturbed}")
    say("In brackets: the lowest and highest after/before over the repeats of both.")
