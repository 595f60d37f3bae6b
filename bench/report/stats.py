"""Statistics of repeated measurements: medians with ranges, percentiles, ratios, disturbances. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

NEGLIGIBLE_SHARE = 0.02
"""Share below which a difference is not worth acting on, however certain it is."""
OTHER_CPU_LIMIT = 0.1
"""Share of the CPUs; where other processes take more, rates are not those of the whole machine."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Median, lowest and highest value of a quantity; a bound (`at_least`, `at_most`) has an infinite end."""

    median: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """Plain JSON values: three numbers by name."""
        return {"median": self.median, "low": self.low, "high": self.high}

    def __format__(self, form: str) -> str:
        """Write `1.20 (1.15-1.25)`, `1.20` or `at least 1.20`, each number in the given format."""
        return self.text(lambda value: format(value, form))

    def text(self, write: Callable[[float], str]) -> str:
        """Write the median and the range, or the bound; `write` writes a number."""
        if self.high == math.inf:
            return f"at least {write(self.low)}"
        if self.low == -math.inf:
            return f"at most {write(self.high)}"
        if self.low == self.high:
            return write(self.median)
        return f"{write(self.median)} ({write(self.low)}-{write(self.high)})"


def exactly(value: float) -> Estimate:
    """Make an estimate without a range, as of something that was counted once."""
    return Estimate(value, value, value)


def at_least(value: float) -> Estimate:
    """Make a lower bound: it exceeds what lies below it, and nothing is known to exceed it."""
    return Estimate(value, value, math.inf)


def at_most(value: float) -> Estimate:
    """Make an upper bound: it exceeds nothing."""
    return Estimate(value, -math.inf, value)


def estimate(values: Sequence[float]) -> Estimate:
    """Make an estimate from at least one measurement."""
    return Estimate(median(values), min(values), max(values))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Ratio of two quantities that were measured in the same repeats, repeat by repeat."""
    return estimate([n / d for n, d in zip(numerators, denominators, strict=True)])


def quotient(numerator: Estimate, denominator: Estimate) -> Estimate:
    """Ratio of two quantities that were measured apart; its range holds 1 where their ranges overlap."""
    return Estimate(
        numerator.median / denominator.median,
        numerator.low / denominator.high,
        numerator.high / denominator.low,
    )


def exceeds(a: Estimate, b: Estimate) -> bool:
    """Whether every run of `a` is above every run of `b`, the median by more than the negligible share."""
    return a.median >= b.median * (1 + NEGLIGIBLE_SHARE) and a.low > b.high


def percentile(values: Sequence[float], share: float) -> float:
    """Smallest value that at least `share` (0 to 1) of `values` do not exceed (nearest rank)."""
    rank = max(1, math.ceil(share * len(values)))
    return sorted(values)[rank - 1]


def is_disturbed(share: float | None) -> bool:
    """Whether other processes took so much of the CPUs that no winner is named."""
    return share is not None and share > OTHER_CPU_LIMIT
