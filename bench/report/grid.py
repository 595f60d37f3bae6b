"""Several numbers of workers and batch sizes: what needs no measuring, and which to choose. Pure."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from bench.report.result import Row
from bench.report.stats import NEGLIGIBLE_SHARE
from bench.report.verdict import KEEPS_UP, NO_TRAINER, UNCLEAR, judge, lost_share, training_rate
from precache.reporting import counted

FALLING_SHARE = 0.9
"""With less of what fewer workers gave, more of them do harm."""
HOPELESS_SHARE = 0.5
"""Settings that reached less of the best at one batch size are not tried at the next."""


class Point(NamedTuple):
    """Settings of one loader: samples per batch, and workers."""

    batch_size: int
    workers: int

    @property
    def words(self) -> str:
        """`2 workers, batch 64`."""
        return f"{counted(self.workers, 'worker')}, batch {self.batch_size:,}"


def point_of(row: Row) -> Point:
    """Settings with which the row was measured."""
    return Point(row.key["batch_size"], row.key["workers"])


def find_reason_to_skip(
    point: Point, measured: Mapping[Point, Row], too_large: Collection[Point]
) -> str | None:
    """Why `point` need not be measured after these of the same loader and trainer; None if it must.

    A series is all that differs in workers alone. A point is left out where

    1. fewer workers of its series unblock the trainer (it loses less than 2%): more cannot help;
    2. in its series the largest number of workers measured gave less than 90% of what fewer did: more
       do harm;
    3. at the next smaller batch size that was measured with as many workers, they gave less than half
       of the best that the loader reached there: so many workers are clearly wrong;
    4. it, or a smaller batch, did not fit into memory.
    """
    smallest_too_large = min((one.batch_size for one in too_large), default=math.inf)
    if smallest_too_large <= point.batch_size:
        return f"batch {smallest_too_large:,} did not fit into memory"
    rates = {at: training_rate(row).median for at, row in measured.items()}
    fewer = [at for at in _series(rates, point.batch_size) if at.workers < point.workers]
    for at in fewer:
        if judge(measured[at].values.get("fed_ratio")) == KEEPS_UP:
            return f"the trainer does not wait with {counted(at.workers, 'worker')}"
    if len(fewer) > 1:
        most, best = fewer[-1], max(fewer, key=rates.__getitem__)
        if rates[most] < FALLING_SHARE * rates[best]:
            return f"{counted(most.workers, 'worker')} gave less than {best.workers}"
    smaller = [at for at in rates if at.batch_size < point.batch_size and at.workers == point.workers]
    if smaller:
        last = max(smaller, key=lambda at: at.batch_size)
        best_rate = max(rate for at, rate in rates.items() if at.batch_size == last.batch_size)
        if rates[last] < HOPELESS_SHARE * best_rate:
            share = f"{rates[last] / best_rate:.0%} of the best"
            return f"with batch {last.batch_size:,} {counted(last.workers, 'worker')} gave {share}"
    return None


def choose(rows: Iterable[Row]) -> tuple[Row, Row]:
    """Which settings of one loader to choose, and which gave the most images/s.

    First the smallest batch of which any number of workers is within 2% of the best throughput; then, among
    its numbers of workers, the fewest that unblock the trainer, or else of which some runs say so, or else
    that are within 2% of the most they reach.
    """
    measured = {point_of(row): row for row in rows}
    rates = {at: training_rate(row).median for at, row in measured.items()}
    best = max(rates, key=rates.__getitem__)
    enough = [at for at, rate in rates.items() if rate >= (1 - NEGLIGIBLE_SHARE) * rates[best]]
    series = _series(rates, min(at.batch_size for at in enough))
    for verdict in (KEEPS_UP, UNCLEAR):
        for at in series:
            if judge(measured[at].values.get("fed_ratio")) == verdict:
                return measured[at], measured[best]
    most = max(rates[at] for at in series)
    fewest = next(at for at in series if rates[at] >= (1 - NEGLIGIBLE_SHARE) * most)
    return measured[fewest], measured[best]


def describe_choice(loader: str, chosen: Row, best: Row) -> str:
    """The sentence that says what to choose."""
    rate, most = training_rate(chosen).median, training_rate(best).median
    text = f"{loader}: choose {point_of(chosen).words}: {rate:,.0f} images/s"
    if chosen is not best:
        text += f", {rate / most:.0%} of the best ({most:,.0f} with {point_of(best).words})"
    ratio = chosen.values.get("fed_ratio")
    verdict = judge(ratio)
    if verdict == NO_TRAINER or ratio is None:
        return f"{text}."
    if verdict == KEEPS_UP:
        return f"{text}; the trainer does not wait."
    if verdict == UNCLEAR:
        return f"{text}; the trainer may wait: the runs disagree."
    lost = f"it gets {lost_share(ratio):.0%} fewer images/s than alone"
    return f"{text}; the trainer waits with every number of workers: {lost}."


def _series(points: Iterable[Point], batch_size: int) -> list[Point]:
    """Points of that batch size, the fewest workers first."""
    return sorted(at for at in points if at.batch_size == batch_size)
