"""Medians, percentiles and ratios with their spread, and when not to rely on them. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

NEGLIGIBLE_SHARE = 0.02
"""A difference below this share is not worth acting on, however well it can be told from nothing."""
OTHER_CPU_LIMIT = 0.1
"""Share of the CPUs: where other processes take more, rates are those of a part of the machine."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A quantity measured several times: the median, and the lowest and highest measurement."""

    median: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """Three numbers by name."""
        return {"median": self.median, "low": self.low, "high": self.high}

    def __format__(self, form: str) -> str:
        """`1.20 (1.15-1.25)`, each in the format of a number."""
        return f"{self.median:{form}} ({self.low:{form}}-{self.high:{form}})"


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


def exceeds(one: Estimate, other: Estimate) -> bool:
    """Whether every run of `one` is above every run of `other`, by more than the negligible share."""
    return one.median >= other.median * (1 + NEGLIGIBLE_SHARE) and one.low > other.high


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of `values` do not exceed (nearest rank)."""
    rank = max(1, math.ceil(share * len(values)))
    return sorted(values)[rank - 1]


def is_disturbed(share: float | None) -> bool:
    """Whether other processes took so much of the CPUs that no winner is named."""
    return share is not None and share > OTHER_CPU_LIMIT


def disturbance(share: float | None, then: str = ", so no winner is named") -> str:
    """Say that other processes took CPU time, and what follows from it; empty where they took little."""
    if share is None or not is_disturbed(share):
        return ""
    return (
        f"Other processes took {share:.0%} of the CPUs while this was measured: the rates are too low, and "
        f"not all by as much{then}. Measure again on a quiet machine."
    )
