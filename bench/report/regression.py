"""Two results of `bench loaders`, row by row: what got slower."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench.report import stats
from bench.report.row import Result, Row
from bench.report.stats import Estimate
from bench.report.verdict import NOT_DISTINGUISHABLE

SLOWER, FASTER, REGRESSION = "slower", "faster", "regression"
_MACHINE = ("cpu", "accelerator", "memory")
_WORK = (
    *("batch_size", "size", "workers", "trainers", "amp", "compiled", "cache", "page_cache"),
    *("augment", "shuffle", "device"),
)


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


def _pictures(data: dict[str, Any]) -> str:
    return f"{data['samples']:,} pictures (digest {data['digest'][:12]})"


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
