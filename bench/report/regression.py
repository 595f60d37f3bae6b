"""Two results of `bench loaders`, row by row: what got slower."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bench.report import stats
from bench.report.row import Key, Result, by_key
from bench.report.stats import Estimate
from bench.report.verdict import NOT_DISTINGUISHABLE

SLOWER, FASTER, REGRESSION = "slower", "faster", "regression"
_MACHINE = ("cpu", "accelerator", "memory")
_WORK = (
    *("batch_size", "size", "workers", "trainers", "amp", "compiled", "cache", "page_cache"),
    *("augment", "shuffle", "device"),
)


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

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "row": self.row._asdict()}


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
    both = [name for name in names if name in before and name in after]
    return [
        f"{name} {_text(before[name])} and {_text(after[name])}"
        for name in both
        if before[name] != after[name]
    ]


def _text(value: Any) -> str:
    if isinstance(value, dict):  # the data of a loader
        return f"{value['samples']:,} pictures (digest {value['digest'][:12]})"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def rate_changes(
    before: Result, after: Result, tolerance: float
) -> tuple[list[RateChange], list[Key], list[Key]]:
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
            if verdict == REGRESSION and ours[key].peer:  # another library's: not ours to fix
                verdict = SLOWER
            found.append(RateChange(key, rate, one, other, ratio, verdict))
    return found, [key for key in ours if key not in theirs], [key for key in theirs if key not in ours]


def _judge(ratio: Estimate, tolerance: float) -> str:
    if ratio.high < 1 - tolerance:
        return REGRESSION
    if ratio.high < 1:
        return SLOWER
    return FASTER if ratio.low > 1 else NOT_DISTINGUISHABLE
