"""Grids of worker counts and batch sizes: which points need no measuring, and which one to choose. Pure."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from bench.report.result import Row
from bench.report.stats import NEGLIGIBLE_SHARE
from bench.report.verdict import Verdict, judge, training_rate
from precache.reporting import quantity

FALLING_SHARE = 0.9
"""Share of the rate of fewer workers; where more workers give less, still more would give even less."""
HOPELESS_SHARE = 0.5
"""Share of the best rate at one batch size; settings that reached less are not tried at the next size."""


class Point(NamedTuple):
    """Settings of one loader: samples per batch, and workers."""

    batch_size: int
    workers: int

    @property
    def words(self) -> str:
        """Description like '2 workers, batch 64'."""
        return f"{quantity(self.workers, 'worker')}, batch {self.batch_size:,}"


def point_of(row: Row) -> Point:
    """Point at which the row was measured."""
    return Point(row.key["batch_size"], row.key["workers"])


def find_reason_to_skip(
    point: Point, measured: Mapping[Point, Row], too_large: Collection[Point]
) -> str | None:
    """Say why a point need not be measured; None if it must be.

    A series is all points of one batch size. A point is left out where

    1. fewer workers of its series unblock the trainer (it loses less than 2%): more cannot help;
    2. in its series the largest number of workers measured gave less than 90% of what fewer did: more
       do harm;
    3. at the next smaller batch size that was measured with as many workers, they gave less than half
       of the best that the loader reached there: so many workers are clearly wrong;
    4. it, or a smaller batch, did not fit into memory.

    Args:
        point: point in question.
        measured: rows of the same loader and trainer by their points.
        too_large: points whose batches did not fit into memory.
    """
    smallest_too_large = min((other.batch_size for other in too_large), default=math.inf)
    if smallest_too_large <= point.batch_size:
        return f"batch {smallest_too_large:,} did not fit into memory"
    rates = {other: training_rate(row).median for other, row in measured.items()}
    fewer = [other for other in _series(rates, point.batch_size) if other.workers < point.workers]
    for other in fewer:
        if judge(measured[other].values.get("fed_ratio")) == Verdict.KEEPS_UP:
            return f"the trainer does not wait with {quantity(other.workers, 'worker')}"
    if len(fewer) > 1:
        most, best = fewer[-1], max(fewer, key=rates.__getitem__)
        if rates[most] < FALLING_SHARE * rates[best]:
            return f"{quantity(most.workers, 'worker')} gave less than {best.workers}"
    smaller = [
        other for other in rates if other.batch_size < point.batch_size and other.workers == point.workers
    ]
    if smaller:
        last = max(smaller, key=lambda other: other.batch_size)
        best_rate = max(rate for other, rate in rates.items() if other.batch_size == last.batch_size)
        if rates[last] < HOPELESS_SHARE * best_rate:
            share = f"{rates[last] / best_rate:.0%} of the best"
            return f"with batch {last.batch_size:,} {quantity(last.workers, 'worker')} gave {share}"
    return None


def choose(rows: Iterable[Row]) -> tuple[Row, Row]:
    """Choose one row of a loader.

    The batch size is the smallest one at which any number of workers is within 2% of the best throughput. The
    number of workers is the fewest at that batch size that unblock the trainer; else the fewest with which it
    keeps up in some runs; else the fewest that are within 2% of the most at that batch size.

    Returns:
        The chosen row, and the row with the most images/s.
    """
    measured = {point_of(row): row for row in rows}
    rates = {point: training_rate(row).median for point, row in measured.items()}
    best = max(rates, key=rates.__getitem__)
    fast_points = [point for point, rate in rates.items() if rate >= (1 - NEGLIGIBLE_SHARE) * rates[best]]
    series = _series(rates, min(point.batch_size for point in fast_points))
    for verdict in (Verdict.KEEPS_UP, Verdict.UNCLEAR):
        for point in series:
            if judge(measured[point].values.get("fed_ratio")) == verdict:
                return measured[point], measured[best]
    largest_rate = max(rates[point] for point in series)
    fast_enough = [point for point in series if rates[point] >= (1 - NEGLIGIBLE_SHARE) * largest_rate]
    return measured[fast_enough[0]], measured[best]


def _series(points: Iterable[Point], batch_size: int) -> list[Point]:
    """Points of a batch size, the fewest workers first."""
    return sorted(point for point in points if point.batch_size == batch_size)
