"""Two results of the same work, figure by figure: what got slower. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.report import stats
from bench.report.result import Result, Row
from bench.report.stats import Estimate
from bench.report.table import COLUMNS, Table

REGRESSION, WORSE, BETTER, WITHIN_NOISE = "regression", "worse", "better", "within noise"
_MACHINE = ("cpu", "accelerator", "memory")


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of a row that both results have.

    Attributes:
        row: its name.
        of: what tells the row from others.
        value: the figure, by its name in `bench.report.table.COLUMNS`.
        before, after: in the first and the second result.
        ratio: after over before.
        verdict: REGRESSION, WORSE, BETTER or WITHIN_NOISE.
    """

    row: str
    of: dict[str, Any]
    value: str
    before: Estimate
    after: Estimate
    ratio: Estimate
    verdict: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two results say together.

    Attributes:
        differences: of all figures of which more or less is better.
        only_before, only_after: names of rows that only the first, or only the second, has.
    """

    differences: tuple[Difference, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    @property
    def regressions(self) -> list[Difference]:
        """Figures that got worse by more than the tolerance in every repeat."""
        return [one for one in self.differences if one.verdict == REGRESSION]


def compare_results(before: Result, after: Result, tolerance: float) -> Comparison:
    """Pair the rows of two results.

    Args:
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
                is_ours = not row.key.get("peer")  # another library's loader is not ours to fix
                verdict = _judge(ratio, column.better, tolerance, is_ours) if is_repeated else WITHIN_NOISE
                differences.append(
                    Difference(row.name, row.key, name, row.values[name], other.values[name], ratio, verdict)
                )
    only_after = [row.name for row in after.rows if _find(row, before) is None]
    return Comparison(tuple(differences), tuple(only_before), tuple(only_after))


def _find(row: Row, result: Result) -> Row | None:
    for other in result.rows:
        if other.key == row.key:
            return other
    return None


def _judge(ratio: Estimate, better: str, tolerance: float, is_ours: bool) -> str:
    low, high = ratio.low, ratio.high
    if better == "less":  # twice the seconds is half as good
        low, high = 1 / high, 1 / low
    if low > 1:
        return BETTER
    if high >= 1:
        return WITHIN_NOISE
    return REGRESSION if is_ours and high < 1 - tolerance else WORSE


def find_differing_work(before: Result, after: Result) -> list[str]:
    """What of machine, work and data is not the same in both, with both values.

    What one result does not say is not looked at, nor are data that only one of them has.
    """
    left_out = ("data", "repeats", "cpus")
    names = [name for name in before.settings if name not in left_out]
    differing = [
        *_find_differing(_MACHINE, before.machine, after.machine),
        *_find_differing(names, before.settings, after.settings),
    ]
    ours, theirs = before.settings.get("data", {}), after.settings.get("data", {})
    digests = {data["name"]: data["digest"] for data in ours.values() if "digest" in data}
    for path, data in theirs.items():
        if data.get("digest") != digests.get(data["name"], data.get("digest")):
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


def make_difference_table(comparison: Comparison) -> Table:
    """A line for each figure that both results have."""
    rows = [
        (
            one.row,
            COLUMNS[one.value].title,
            COLUMNS[one.value].text(one.before),
            COLUMNS[one.value].text(one.after),
            f"{one.ratio:.2f}",
            one.verdict,
        )
        for one in comparison.differences
    ]
    titles = ("row", "figure", "before", "after", "after/before", "verdict")
    return Table(titles, rows, words=("figure", "verdict"))
