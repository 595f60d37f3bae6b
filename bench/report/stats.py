"""Statistics of measurements. Pure.

Repeats have medians with ranges, percentiles, ratios. The batches of one run have what averages hide: spikes,
their period, first batches of epochs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

NEGLIGIBLE_SHARE = 0.02
"""Share below which a difference is not worth acting on, however certain it is."""
OTHER_CPU_LIMIT = 0.1
"""Share of the CPUs; where other processes take more, rates are not those of the whole machine."""
# Of normal noise about one batch in 20,000 exceeds the quicker half's median by this many deviations.
_DEVIATIONS = 8.0
_TO_SIGMA = 1.4826  # standard deviation over median absolute deviation, for normal noise
_SHORT_SHARE = 0.1  # share of a batch's time below which an excess is not reported
_FEWEST_BATCHES = 8
_REGULAR_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class Estimate:
    """Median, lowest and highest value of a quantity; a bound (`at_least`, `at_most`) has an infinite end."""

    median: float
    low: float
    high: float

    def to_json(self) -> dict[str, float | None]:
        """Plain JSON values: three numbers by name; None where a bound has no end."""
        values = {"median": self.median, "low": self.low, "high": self.high}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}

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


@dataclass(frozen=True, slots=True)
class Spikes:
    """Batches that took far longer than the quicker half.

    Attributes:
        batches: positions in the series.
        above_s: seconds above which a batch counts as a spike; None where too few batches were timed.
        period: number of batches from one spike to the next; None where spikes are not regular.
    """

    batches: tuple[int, ...] = ()
    above_s: float | None = None
    period: int | None = None


@dataclass(frozen=True, slots=True)
class Batches:
    """Timed batches of one run, in order.

    Attributes:
        wait_s: seconds that the trainer waited for each batch.
        step_s: seconds of the step on each batch.
        epoch_starts: positions of the first batches of epochs.
        wait_spikes, step_spikes: spikes of `wait_s` and `step_s`, first batches of epochs left out.
        first_wait_s: seconds that a first batch of an epoch waits more than the others, in the median; None
            where that is short beside a batch's time, or where no epoch begins.
    """

    wait_s: tuple[float, ...]
    step_s: tuple[float, ...]
    epoch_starts: tuple[int, ...] = ()
    wait_spikes: Spikes = Spikes()
    step_spikes: Spikes = Spikes()
    first_wait_s: float | None = None


def analyse_batches(wait_s: Sequence[float], step_s: Sequence[float], epoch_starts: Sequence[int]) -> Batches:
    """Find spikes and slow first batches among timed batches.

    Args:
        wait_s: float [n], seconds that the trainer waited for each batch.
        step_s: float [n], seconds of the step on each batch.
        epoch_starts: positions of the first batches of epochs.
    """
    waits, steps = np.asarray(wait_s, dtype=np.float64), np.asarray(step_s, dtype=np.float64)
    starts = sorted(set(epoch_starts))
    typical_s = float(np.median(waits + steps)) if len(waits) else 0.0
    wait_spikes = _find_spikes(waits, starts, typical_s)
    step_spikes = _find_spikes(steps, starts, typical_s)
    first_wait_s = None
    if starts:
        others = np.delete(waits, starts)
        usual_s = float(np.median(others)) if len(others) else 0.0
        more_s = median(max(0.0, float(waits[start]) - usual_s) for start in starts)
        first_wait_s = more_s if more_s >= _SHORT_SHARE * typical_s else None
    return Batches(tuple(wait_s), tuple(step_s), tuple(epoch_starts), wait_spikes, step_spikes, first_wait_s)


def _find_spikes(series: npt.NDArray[np.float64], starts: list[int], typical_s: float) -> Spikes:
    """Find batches that took far longer than the quicker half, without first batches of epochs.

    Args:
        series: float64 [n], seconds of each batch.
        starts: positions of the first batches of epochs.
        typical_s: median of wait and step together, in seconds.
    """
    steady = np.setdiff1d(np.arange(len(series)), starts)
    if len(steady) < _FEWEST_BATCHES:
        return Spikes()
    # Two workers that cannot keep up make every second batch a spike. The median of all batches would then
    # lie between the spikes and the rest, and the deviation from it would be too large to tell them apart.
    quicker = np.sort(series[steady])[: len(steady) // 2]
    base = float(np.median(quicker))
    deviation = _TO_SIGMA * float(np.median(np.abs(quicker - base)))
    # Where waits of 200 ms come again and again, a wait of 20 ms is no spike.
    halfway = (float(np.quantile(series[steady], 0.9)) - base) / 2
    above_s = base + max(_DEVIATIONS * deviation, _SHORT_SHARE * typical_s, halfway)
    batches = [int(batch) for batch in steady if series[batch] > above_s]
    return Spikes(tuple(batches), above_s, _find_period(batches, starts, len(steady)))


def _find_period(batches: list[int], starts: list[int], steady: int) -> int | None:
    """Find the usual distance between neighbouring spikes of an epoch.

    Returns:
        Batches from one spike to the next; None where spikes are not regular throughout the series.
    """
    epochs = np.searchsorted(starts, batches, side="right")
    distances = np.diff(batches)[np.diff(epochs) == 0]
    if len(distances) < 3:
        return None
    period = int(median(distances.tolist()))
    is_regular = np.mean(distances == period) >= _REGULAR_SHARE
    lasts_throughout = len(batches) * period >= _REGULAR_SHARE * steady
    return period if is_regular and lasts_throughout and period > 1 else None
