"""`bench compare`: two results of `bench loaders`, row by row; exit code 1 on a regression."""

from collections.abc import Sequence
from pathlib import Path

import click

from bench.report.regression import REGRESSION, RateChange, differences, rate_changes
from bench.report.row import read_result
from bench.report.trust import disturbance, is_disturbed, other_cpu
from bench.report.verdict import NOT_DISTINGUISHABLE, WITHIN_NOISE
from bench.report.words import Table, counted
from precache.console import commandline
from precache.console.commandline import STDOUT, check_output, write_json
from precache.errors import SettingError, check_share


@click.command(name="compare", cls=commandline.Command)
@click.argument("before_path", metavar="A.json", type=click.Path(path_type=Path))
@click.argument("after_path", metavar="B.json", type=click.Path(path_type=Path))
@click.option("--tolerance", default=0.05, show_default=True, help="How much slower is no regression yet.")
@click.option("--force", is_flag=True, help="Compare even if machine, work, data or rows differ.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write it here; '-' prints it.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors; for the exit code and --json FILE.")
def command(
    before_path: Path, after_path: Path, tolerance: float, force: bool, json_path: Path | None, quiet: bool
) -> None:
    """Say what got slower from A to B, two results of 'bench loaders --json'.

    Exit code 1 if a rate fell by more than the tolerance in every repeat, or if B lacks a row of A.
    """
    check_share("tolerance", tolerance)
    check_output(json_path)
    before, after = read_result(before_path), read_result(after_path)
    differing = differences(before, after)
    if differing and not force:
        raise SettingError(
            f"{before_path} and {after_path} differ in {'; '.join(differing)}; use --force to compare them "
            f"all the same"
        )
    found, gone, new = rate_changes(before, after, tolerance)
    if not found:
        raise SettingError(f"{before_path} and {after_path} have no row in common; measure the same backends")
    lost = [change for change in found if change.verdict == REGRESSION]
    if not quiet and json_path != STDOUT:
        click.echo(f"{len(lost)} of {counted(len(found), 'rate')} fell by more than {tolerance:.0%}.")
        if gone and not force:
            click.echo(
                f"{after_path} lacks {counted(len(gone), 'row')} of {before_path}; --force goes on without."
            )
        _show_tables(found)
        for path, keys in ((before_path, gone), (after_path, new)):
            for key in keys:
                click.echo(f"only in {path}: {key.loader} with {key.trainer}")
        for path, result in ((before_path, before), (after_path, after)):
            if is_disturbed(other_cpu(result.settings)):
                click.echo(f"{path}: {disturbance(other_cpu(result.settings), then='')}")
        if differing:
            click.echo(f"Compared although they differ in {'; '.join(differing)}.")
        click.echo("A, B: median images/s. In brackets: the lowest and highest B/A over the repeats of both.")
    if json_path is not None:
        content = {
            "version": 1,
            "before": str(before_path),
            "after": str(after_path),
            "tolerance": tolerance,
            "differences": differing,
            "changes": [change.to_json() for change in found],
            "only_before": [key._asdict() for key in gone],
            "only_after": [key._asdict() for key in new],
        }
        write_json(json_path, content, quiet=quiet)
    if lost or (gone and not force):
        raise click.exceptions.Exit(1)


def _show_tables(found: Sequence[RateChange]) -> None:
    for trainer in dict.fromkeys(change.row.trainer for change in found):
        of_trainer = [change for change in found if change.row.trainer == trainer]
        Table(
            ("backend", "data", "rate", "A", "B", "B/A", "verdict"),
            [_cells(change) for change in of_trainer],
            words=("data", "rate", "verdict"),
            title=f"Trainer {trainer}:",
        ).show()


def _cells(change: RateChange) -> tuple[str, ...]:
    backend, data, _, rank = change.row
    return (
        backend,
        data if rank == 1 else f"{data} ({rank})",
        change.rate,
        f"{change.before.median:,.0f}",
        f"{change.after.median:,.0f}",
        f"{change.ratio.median:.2f} ({change.ratio.low:.2f}-{change.ratio.high:.2f})",
        WITHIN_NOISE if change.verdict == NOT_DISTINGUISHABLE else change.verdict,
    )
