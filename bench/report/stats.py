"""Medians, percentiles and ratios with their spread. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Estimate:
    """A quantity measured several times: the median, and the lowest and highest measurement."""

    median: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    """The estimate of at least one measurement."""
    return Estimate(median(values), min(values), max(values))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """The ratio of two quantities measured side by side, repeat by repeat."""
    return estimate([n / d for n, d in zip(numerators, denominators, strict=True)])


def quotient(numerator: Estimate, denominator: Estimate) -> Estimate:
    """The ratio of two quantities measured apart: its range holds 1 where theirs overlap."""
    return Estimate(
        numerator.median / denominator.median,
        numerator.low / denominator.high,
        numerator.high / denominator.low,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of `values` do not exceed (nearest rank)."""
    rank = max(1, math.ceil(share * len(values)))
    return sorted(values)[rank - 1]
