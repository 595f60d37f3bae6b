"""Comparison of two results of the same work, figure by figure: what got slower. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bench.report import stats
from bench.report.result import Result, Row, name_data
from bench.report.stats import Estimate
from bench.report.table import COLUMNS, Table

_MACHINE = ("cpu", "accelerator", "memory")


class Judgement(str, Enum):
    """What became of a figure; the value is its word in tables and files."""

    REGRESSION = "regression"
    WORSE = "worse"
    BETTER = "better"
    WITHIN_NOISE = "within noise"


@dataclass(frozen=True, slots=True)
class Difference:
    """Figure that both results have, before and after.

    Attributes:
        row: name of the row.
        key: key of the row, which tells it from others.
        value: name of the figure in `bench.report.table.COLUMNS`.
        before, after: the figure in the first and in the second result.
        ratio: after over before.
        judgement: what became of it.
    """

    row: str
    key: dict[str, Any]
    value: str
    before: Estimate
    after: Estimate
    ratio: Estimate
    judgement: Judgement

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        estimates = {"before": self.before, "after": self.after, "ratio": self.ratio}
        return {
            "row": self.row,
            "key": self.key,
            "value": self.value,
            **{name: estimate.to_json() for name, estimate in estimates.items()},
            "verdict": self.judgement.value,
        }


@dataclass(frozen=True, slots=True)
class ResultComparison:
    """Differences between two results.

    Attributes:
        differences: one for each shared figure of which more, or less, is better.
        only_before, only_after: names of rows that only the first, or only the second, result has.
    """

    differences: tuple[Difference, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    @property
    def regressions(self) -> list[Difference]:
        """Figures that got worse by more than the tolerance in every repeat."""
        return [difference for difference in self.differences if difference.judgement == Judgement.REGRESSION]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "differences": [difference.to_json() for difference in self.differences],
            "only_before": list(self.only_before),
            "only_after": list(self.only_after),
        }


def compare_results(before: Result, after: Result, tolerance: float) -> ResultComparison:
    """Pair the rows of two results, and judge each figure that both have.

    Args:
        before, after: results of the same command.
        tolerance: share, 0 to 1, by which a figure may get worse without being a regression.
    """
    differences, only_before = [], []
    is_repeated = min(before.settings.get("repeats", 1), after.settings.get("repeats", 1)) > 1
    for row in before.rows:
        other = _find(row, after)
        if other is None:
            only_before.append(row.name)
            continue
        for name, column in COLUMNS.items():
            if column.better and name in row.values and name in other.values:
                ratio = stats.quotient(other.values[name], row.values[name])
                judgement = Judgement.WITHIN_NOISE
                if is_repeated:
                    judgement = _judge(ratio, column.better, tolerance)
                differences.append(
                    Difference(
                        row.name, row.key, name, row.values[name], other.values[name], ratio, judgement
                    )
                )
    only_after = [row.name for row in after.rows if _find(row, before) is None]
    return ResultComparison(tuple(differences), tuple(only_before), tuple(only_after))


def _find(row: Row, result: Result) -> Row | None:
    for other in result.rows:
        if other.key == row.key:
            return other
    return None


def _judge(ratio: Estimate, better: str, tolerance: float) -> Judgement:
    low, high = ratio.low, ratio.high
    if better == "less":  # twice the seconds is half as good
        low, high = 1 / high, 1 / low
    if low > 1:
        return Judgement.BETTER
    if high >= 1:
        return Judgement.WITHIN_NOISE
    return Judgement.REGRESSION if high < 1 - tolerance else Judgement.WORSE


def find_differing_work(before: Result, after: Result) -> list[str]:
    """List what differs between two results in machine, settings and data, with both values.

    A setting or folder that only one of them has is not compared.
    """
    left_out = ("data", "repeats", "cpus")
    names = [name for name in before.settings if name not in left_out]
    differing = [
        *_find_differing(_MACHINE, before.machine, after.machine),
        *_find_differing(names, before.settings, after.settings),
    ]
    data_before, data_after = before.settings.get("data", {}), after.settings.get("data", {})
    digests = {name_data(path, before.settings): data.get("digest") for path, data in data_before.items()}
    for path, data in data_after.items():
        digest = digests.get(name_data(path, after.settings))
        if digest is not None and data.get("digest") != digest:
            differing.append(f"data: {path} holds other pictures")
    return differing


def _find_differing(names: Iterable[str], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {_text(before[name])} and {_text(after[name])}"
        for name in names
        if name in before and name in after and before[name] != after[name]
    ]


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def make_difference_table(comparison: ResultComparison) -> Table:
    """Make a table with a line for each figure that both results have."""
    rows = []
    for difference in comparison.differences:
        column = COLUMNS[difference.value]
        rows.append(
            (
                difference.row,
                column.title,
                column.text(difference.before),
                column.text(difference.after),
                f"{difference.ratio:.2f}",
                difference.judgement.value,
            )
        )
    titles = ("row", "figure", "before", "after", "after/before", "verdict")
    return Table(titles, rows, words=("figure", "verdict"))
