"""Is a model that was trained from one source of pictures worse than from another? Pure.

Trainings are paired by seed: both begin with the same weights. The interval of the mean difference is
Student's t, two-sided 95%, and holds for that comparison alone. Where several sources are compared with one
baseline, chance makes one of them differ more often; 'worse' and 'better' are said by Holm's procedure ("A
Simple Sequentially Rejective Multiple Test Procedure", 1979), which keeps the chance of a false one among all
of them below 5%. 'The same' is said where the interval lies within the margin (two one-sided tests).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

LEVEL = 0.95
SAME, WORSE, BETTER, CANNOT_TELL = "same", "worse", "better", "cannot tell"
MOST_SEEDS = 1000
Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One source of pictures beside the baseline; accuracies in percent, differences in points.

    Attributes:
        top1: mean over the seeds.
        difference: mean over the seeds, above 0 where the source is better.
        low, high: of the interval; -inf and inf of one seed.
        verdict: one of SAME, WORSE, BETTER, CANNOT_TELL.
        enough: seeds that would tell, if differences go on to be as they are; None: not known, or more than
            MOST_SEEDS.
    """

    name: str
    baseline: str
    seeds: int
    top1: float
    difference: float
    low: float
    high: float
    verdict: str
    enough: int | None = None

    @property
    def within(self) -> float:
        """The larger end of the interval."""
        return max(abs(self.low), abs(self.high))


def compare(lines: Sequence[Line], margin: float) -> list[Compared]:
    """Each source beside the first one of `lines`, which are trainings of the same seeds.

    Args:
        lines: of `bench.accuracy.results`.
        margin: points that do not matter.
    """
    by_arm = final(lines)
    (baseline, reference), *others = by_arm.items()
    differences = {
        name: [top1[seed] - reference[seed] for seed in sorted(reference)] for name, top1 in others
    }
    differ = holm({name: p_value(values) for name, values in differences.items()})
    found = []
    for name, values in differences.items():
        mean, (low, high) = fmean(values), interval(values)
        if name in differ:
            verdict = WORSE if mean < 0 else BETTER
        elif -margin <= low and high <= margin:
            verdict = SAME
        else:
            verdict = CANNOT_TELL
        found.append(
            Compared(
                name=name,
                baseline=baseline,
                seeds=len(values),
                top1=fmean(by_arm[name].values()),
                difference=mean,
                low=low,
                high=high,
                verdict=verdict,
                enough=enough(values, margin, len(others)) if verdict == CANNOT_TELL else None,
            )
        )
    return found


def final(lines: Sequence[Line]) -> dict[str, dict[int, float]]:
    """Source -> seed -> top-1 in percent at the end."""
    by_arm: dict[str, dict[int, float]] = {}
    for line in lines:
        by_arm.setdefault(line["arm"], {})[line["seed"]] = line["curve"][-1][1]
    return by_arm


def interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Of the mean of what `values` are drawn from; all numbers, of one value."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = quantile(0.5 + level / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def p_value(values: Sequence[float]) -> float:
    """How likely a mean so far from 0 is where there is no difference; 1 of one value."""
    if len(values) < 2 or fmean(values) == 0:
        return 1.0
    error = stdev(values) / math.sqrt(len(values))
    return 0.0 if error == 0 else 2 * (1 - cdf(abs(fmean(values)) / error, len(values) - 1))


def holm(p_values: Mapping[str, float], level: float = LEVEL) -> set[str]:
    """The names of those that differ, with a chance of at most 1 - `level` that one is named wrongly."""
    named: set[str] = set()
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda pair: pair[1])):
        if p > (1 - level) / (len(p_values) - rank):
            break
        named.add(name)
    return named


def enough(values: Sequence[float], margin: float, comparisons: int) -> int | None:
    """The fewest seeds that give another verdict than CANNOT_TELL, if mean and deviation stay as they are."""
    if len(values) < 2:
        return None
    mean, deviation = abs(fmean(values)), stdev(values)
    for seeds in range(len(values) + 1, MOST_SEEDS + 1):
        error = deviation / math.sqrt(seeds)
        if quantile(0.5 + LEVEL / 2, seeds - 1) * error <= margin - mean:
            return seeds
        if quantile(1 - (1 - LEVEL) / 2 / comparisons, seeds - 1) * error <= mean:
            return seeds
    return None


def cdf(t: float, degrees: int) -> float:
    """Of Student's distribution: Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.3-4."""
    angle = math.atan2(t, math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    term = total = cosine if degrees % 2 else 1.0
    for k in range(3 if degrees % 2 else 2, degrees, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    if degrees == 1:
        inside = 2 * angle / math.pi
    elif degrees % 2:
        inside = 2 / math.pi * (angle + sine * total)
    else:
        inside = sine * total
    return 0.5 + inside / 2


def quantile(share: float, degrees: int) -> float:
    """What a share of Student's distribution, above 0.5, lies below."""
    low, high = 0.0, 1.0
    while cdf(high, degrees) < share:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if cdf(middle, degrees) < share else (low, middle)
    return high


def sentence(found: Compared) -> str:
    """The answer for one source."""
    name, seeds = found.name, f"{found.seeds} {'seed' if found.seeds == 1 else 'seeds'}"
    difference = f"{found.difference:+.2f} points"
    evidence = f"{difference}, 95% interval {found.low:+.2f} to {found.high:+.2f}, {seeds}"
    if found.verdict == SAME:
        return (
            f"A model trained on {name} is as good as on {found.baseline}, within ±{found.within:.2f} points "
            f"({evidence})."
        )
    if found.verdict in (WORSE, BETTER):
        return (
            f"A model trained on {name} is {found.verdict} than on {found.baseline}, by "
            f"{abs(found.difference):.2f} points ({evidence})."
        )
    asked = f"Cannot tell with {seeds} whether a model trained on {name} is as good as on {found.baseline}"
    if found.seeds < 2:
        return f"{asked} ({difference}); train at least 3."
    many = f"more than {MOST_SEEDS:,} would be needed" if found.enough is None else f"{found.enough} would do"
    return f"{asked} ({evidence}); {many}."
