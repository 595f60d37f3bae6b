"""`bench compare`: two results of `bench loaders`, row by row; exit code 1 on a regression."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.table import Table

from bench.analysis import stats
from bench.analysis.stats import Estimate
from bench.analysis.verdict import NOT_DISTINGUISHABLE
from bench.reporting.result import Result, Row
from bench.reporting.result_file import read_result
from precache import commandline
from precache.commandline import STDOUT, check_output, write_json
from precache.errors import SettingError, check_share
from precache.tables import new_console

SLOWER, FASTER, REGRESSION = "slower", "faster", "regression"
_MACHINE = ("cpu", "accelerator", "memory")
_WORK = (
    *("batch_size", "size", "workers", "trainers", "amp", "compiled", "cache", "page_cache"),
    *("augment", "shuffle", "device"),
)
_WIDTH = 100


class Key(NamedTuple):
    """What tells the rows of a result apart; `rank` is that among rows alike in all else."""

    backend: str
    data: str
    trainer: str
    rank: int

    @property
    def arm(self) -> str:
        """What was measured on what, `shards on shards (2)`."""
        return f"{self.backend} on {self.data}" + (f" ({self.rank})" if self.rank > 1 else "")


@dataclass(frozen=True, slots=True)
class Change:
    """One rate of one row in both results.

    Attributes:
        rate: which one, `loader` or `together`.
        before, after: images/s in the first and the second result.
        ratio: after over before.
        verdict: SLOWER, FASTER, REGRESSION or NOT_DISTINGUISHABLE.
    """

    row: Key
    rate: str
    before: Estimate
    after: Estimate
    ratio: Estimate
    verdict: str


def differences(before: Result, after: Result) -> list[str]:
    """What of machine, work and data is not the same in both, with both values.

    Not looked at is what an older result does not say, and the data of an arm that only one of them has.
    """
    found = [
        (name, before.machine[name], after.machine[name])
        for name in _MACHINE
        if before.machine[name] != after.machine[name]
    ]
    found += [
        (name, _text(before.settings[name]), _text(after.settings[name]))
        for name in _WORK
        if name in before.settings
        and name in after.settings
        and before.settings[name] != after.settings[name]
    ]
    theirs = after.settings.get("data", {})
    found += [
        (f"data of {arm}", _pictures(data), _pictures(theirs[arm]))
        for arm, data in before.settings.get("data", {}).items()
        if theirs.get(arm, data) != data
    ]
    return [f"{name} {one} and {other}" for name, one, other in found]


def changes(before: Result, after: Result, tolerance: float) -> tuple[list[Change], list[Key], list[Key]]:
    """The rows of both results compared, and the rows that only the first, or the second, has."""
    ours, theirs = by_key(before.rows), by_key(after.rows)
    repeated = min(before.settings["repeats"], after.settings["repeats"]) > 1
    found = []
    for key in (key for key in ours if key in theirs):
        rates = ("loader",) if ours[key].trainer is None else ("loader", "together")
        for rate in rates:
            one, other = getattr(ours[key], rate), getattr(theirs[key], rate)
            ratio = stats.quotient(other, one)
            verdict = _judge(ratio, tolerance) if repeated else NOT_DISTINGUISHABLE  # one has no range
            if verdict == REGRESSION and ours[key].peer:  # what ours are compared with: not ours to mend
                verdict = SLOWER
            found.append(Change(key, rate, one, other, ratio, verdict))
    return found, [key for key in ours if key not in theirs], [key for key in theirs if key not in ours]


def _judge(ratio: Estimate, tolerance: float) -> str:
    if ratio.high < 1 - tolerance:
        return REGRESSION
    if ratio.high < 1:
        return SLOWER
    return FASTER if ratio.low > 1 else NOT_DISTINGUISHABLE


def by_key(rows: Iterable[Row]) -> dict[Key, Row]:
    """The rows, in their order."""
    found: dict[Key, Row] = {}
    for row in rows:
        rank = 1
        while (key := Key(row.backend, row.data, row.trainer_name, rank)) in found:
            rank += 1
        found[key] = row
    return found


@click.command(name="compare", cls=commandline.Command)
@click.argument("before_path", metavar="A.json", type=click.Path(path_type=Path))
@click.argument("after_path", metavar="B.json", type=click.Path(path_type=Path))
@click.option("--tolerance", default=0.05, show_default=True, help="Loss that is no regression yet.")
@click.option("--force", is_flag=True, help="Compare even if machine, work, data or rows differ.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write it here; '-' prints it.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors; for the exit code and --json FILE.")
def compare_command(
    before_path: Path, after_path: Path, tolerance: float, force: bool, json_path: Path | None, quiet: bool
) -> None:
    """Compare two results of 'bench loaders --json', B over A.

    Exit code 1 if a rate fell by more than the tolerance (its whole interval lies below), or if B lacks a
    row of A.
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
    found, gone, new = changes(before, after, tolerance)
    if not found:
        raise SettingError(f"{before_path} and {after_path} have no row in common; measure the same backends")
    lost = [change for change in found if change.verdict == REGRESSION]
    if not quiet and json_path != STDOUT:
        _print_tables(found)
        for path, keys in ((before_path, gone), (after_path, new)):
            for key in keys:
                click.echo(f"only in {path}: {key.arm} with {key.trainer}")
        if differing:
            click.echo(f"Compared although they differ in {'; '.join(differing)}.")
        click.echo("A, B: median images/s. In brackets: the range of the ratio over the repeats of both.")
        click.echo(f"{len(lost)} of {len(found)} rates fell by more than {tolerance:.0%}.")
        if gone and not force:
            click.echo(
                f"{after_path} lacks {len(gone)} of the rows of {before_path}; --force goes on without."
            )
    if json_path is not None:
        content = {
            "version": 1,
            "before": str(before_path),
            "after": str(after_path),
            "tolerance": tolerance,
            "differences": differing,
            "changes": [{**asdict(change), "row": change.row._asdict()} for change in found],
            "only_before": [key._asdict() for key in gone],
            "only_after": [key._asdict() for key in new],
        }
        write_json(json_path, content, quiet=quiet)
    if lost or (gone and not force):
        raise click.exceptions.Exit(1)


def _print_tables(found: Sequence[Change]) -> None:
    console = new_console(width=_WIDTH)
    for trainer in dict.fromkeys(change.row.trainer for change in found):
        table = Table(box=None, pad_edge=False)
        for title in ("backend", "data", "rate", "A", "B", "B/A", "verdict"):
            justify: Any = "right" if title in ("A", "B", "B/A") else "left"
            table.add_column(title, justify=justify, no_wrap=True)
        for change in found:
            if change.row.trainer == trainer:
                backend, data, _, rank = change.row
                table.add_row(
                    backend,
                    data if rank == 1 else f"{data} ({rank})",
                    change.rate,
                    f"{change.before.median:,.0f}",
                    f"{change.after.median:,.0f}",
                    f"{change.ratio.median:.2f} ({change.ratio.low:.2f}-{change.ratio.high:.2f})",
                    change.verdict,
                )
        click.echo(f"Trainer {trainer}:")
        console.print(table)


def _pictures(data: dict[str, Any]) -> str:
    return f"{data['samples']:,} pictures (digest {data['digest'][:12]})"


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
