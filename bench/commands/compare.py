"""`bench compare`: two results of `bench loaders`, row by row; exit code 1 on a regression."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from bench.report import stats
from bench.report.row import Key, Result, by_key, read_result
from bench.report.stats import Estimate, disturbance, is_disturbed, other_cpu
from bench.report.verdict import NOT_DISTINGUISHABLE, WITHIN_NOISE
from bench.report.words import Table, counted, say
from precache.cli import commandline
from precache.cli.commandline import STDOUT, check_output, write_json
from precache.errors import SettingError, check_share

SLOWER, FASTER, REGRESSION = "slower", "faster", "regression"
_MACHINE = ("cpu", "accelerator", "memory")
_WORK = (
    *("batch_size", "size", "workers", "trainers", "amp", "compiled", "cache", "page_cache"),
    *("augment", "shuffle", "device"),
)
_PATH = click.Path(path_type=Path)


@dataclass(frozen=True, slots=True)
class RateChange:
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


@click.command(name="compare", cls=commandline.Command)
@click.argument("before_path", metavar="A.json", type=_PATH)
@click.argument("after_path", metavar="B.json", type=_PATH)
@click.option("--tolerance", default=0.05, show_default=True, help="How much slower is no regression yet.")
@click.option("--force", is_flag=True, help="Compare even if machine, work, data or rows differ.")
@click.option("--json", "json_path", type=_PATH, help="Write it here; '-' prints it.")
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
    ours, theirs = by_key(before.rows), by_key(after.rows)
    gone, new = ([key for key in one if key not in other] for one, other in ((ours, theirs), (theirs, ours)))
    found = rate_changes(before, after, tolerance)
    if not found:
        raise SettingError(f"{before_path} and {after_path} have no row in common; measure the same backends")
    lost = [change for change in found if change.verdict == REGRESSION]
    if not quiet and json_path != STDOUT:
        click.echo(f"{len(lost)} of {counted(len(found), 'rate')} fell by more than {tolerance:.0%}.")
        if gone and not force:
            click.echo(
                f"{after_path} lacks {counted(len(gone), 'row')} of {before_path}; --force goes on without."
            )
        titles = ("loader", "trainer", "rate", "A", "B", "B/A", "verdict")
        Table(titles, [_cells(change) for change in found], words=("trainer", "rate", "verdict")).show()
        for path, result, keys in ((before_path, before, gone), (after_path, after, new)):
            for key in keys:
                click.echo(f"only in {path}: {key.words} with {key.trainer}")
            if is_disturbed(share := other_cpu(result.settings)):
                say(f"{path}: {disturbance(share, then='')}")
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
            "changes": [{**asdict(change), "row": change.row._asdict()} for change in found],
            "only_before": [key._asdict() for key in gone],
            "only_after": [key._asdict() for key in new],
        }
        write_json(json_path, content, quiet=quiet)
    if lost or (gone and not force):
        raise click.exceptions.Exit(1)


def differences(before: Result, after: Result) -> list[str]:
    """What of machine, work and data is not the same in both, with both values.

    Not looked at is what one result does not say, and the data of a loader that only one of them has.
    """
    data = before.settings.get("data", {})
    of_data = _differing(data, data, after.settings.get("data", {}))
    return [
        *_differing(_MACHINE, before.machine, after.machine),
        *_differing(_WORK, before.settings, after.settings),
        *(f"data of {text}" for text in of_data),
    ]


def _differing(names: Iterable[str], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {_text(before[name])} and {_text(after[name])}"
        for name in names
        if name in before and name in after and before[name] != after[name]
    ]


def _text(value: Any) -> str:
    if isinstance(value, dict):  # the data of a loader
        return f"{value['samples']:,} pictures (digest {value['digest'][:12]})"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def rate_changes(before: Result, after: Result, tolerance: float) -> list[RateChange]:
    """The rows that both results have, rate by rate."""
    ours, theirs = by_key(before.rows), by_key(after.rows)
    repeated = min(before.settings["repeats"], after.settings["repeats"]) > 1
    found = []
    for key in (key for key in ours if key in theirs):
        for rate in ("loader",) if ours[key].trainer is None else ("loader", "together"):
            one, other = getattr(ours[key], rate), getattr(theirs[key], rate)
            ratio = stats.quotient(other, one)
            if not repeated:  # one repeat has no range
                verdict = NOT_DISTINGUISHABLE
            elif ratio.high < 1:
                # another library's loader is not ours to fix
                verdict = REGRESSION if ratio.high < 1 - tolerance and not ours[key].peer else SLOWER
            else:
                verdict = FASTER if ratio.low > 1 else NOT_DISTINGUISHABLE
            found.append(RateChange(key, rate, one, other, ratio, verdict))
    return found


def _cells(change: RateChange) -> tuple[str, ...]:
    return (
        change.row.words,
        change.row.trainer,
        change.rate,
        f"{change.before.median:,.0f}",
        f"{change.after.median:,.0f}",
        f"{change.ratio:.2f}",
        WITHIN_NOISE if change.verdict == NOT_DISTINGUISHABLE else change.verdict,
    )
