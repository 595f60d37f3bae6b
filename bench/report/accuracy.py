"""Is a model that was trained from one source of pictures worse than from another? Pure.

Trainings are paired by seed: both begin with the same weights. The interval of the mean difference is
Student's t, two-sided 95%, and holds for that comparison alone; it decides. 'Worse' or 'better': it leaves
0 out. 'The same': it lies within the margin (two one-sided tests) and holds 0. Where several sources are
compared with one baseline, one may differ by chance: `Compared.chance`, by Holm, "A Simple Sequentially
Rejective Multiple Test Procedure" (1979), says how likely that is among all of them.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from statistics import fmean, stdev
from typing import Any

from bench.report import stats

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
        chance: how likely one of all sources differs that clearly though none is worse or better.
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
    chance: float
    enough: int | None = None

    @property
    def within(self) -> float:
        """The larger end of the interval."""
        return max(abs(self.low), abs(self.high))

    @property
    def may_be_chance(self) -> bool:
        """Whether it is worse or better by itself, but one of so many may well be."""
        return self.verdict in (WORSE, BETTER) and self.chance > 1 - LEVEL


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What the trainings from one source took, evaluations left out.

    Attributes:
        train_s: of a training.
        ratio: of it to the baseline's, seed by seed.
        level_s: until the mean over the seeds first was at the level that all sources reach; see `level`.
        energy_j: of the accelerator, a training, mean; None where it is not known.
    """

    train_s: stats.Estimate
    ratio: stats.Estimate
    level_s: float
    energy_j: float | None


def compare(lines: Sequence[Line], margin: float) -> list[Compared]:
    """Each source beside the first one of `lines`, which are trainings of the same seeds.

    Args:
        lines: of `bench.measure.trainings_file`.
        margin: points that do not matter.
    """
    by_arm = final(lines)
    (baseline, reference), *others = by_arm.items()
    differences = {
        name: [top1[seed] - reference[seed] for seed in sorted(reference)] for name, top1 in others
    }
    chance = holm({name: p_value(values) for name, values in differences.items()})
    found = []
    for name, values in differences.items():
        mean, (low, high) = fmean(values), interval(values)
        if high < 0:
            verdict = WORSE
        elif low > 0:
            verdict = BETTER
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
                chance=chance[name],
                enough=enough(values, margin) if verdict == CANNOT_TELL else None,
            )
        )
    return found


def final(lines: Sequence[Line]) -> dict[str, dict[int, float]]:
    """Source -> seed -> top-1 in percent at the end."""
    return {
        name: {line["seed"]: line["curve"][-1][1] for line in own} for name, own in _by_arm(lines).items()
    }


def too_little(lines: Sequence[Line]) -> str:
    """A sentence where the baseline's models are hardly better than guesses; empty where they have learnt."""
    name, values = next(iter(final(lines).items()))
    guessed = 100 / lines[0].get("classes", math.inf)
    if fmean(values.values()) >= 2 * guessed:
        return ""
    return (
        f"Nothing can be told: models trained on {name} reach {fmean(values.values()):.1f}%, and guessing "
        f"{guessed:.1f}%. Train longer, or with other settings."
    )


def costs(lines: Sequence[Line]) -> dict[str, Cost]:
    """Of each source, the baseline first."""
    by_arm = _by_arm(lines)
    reached = level(lines)
    reference = [line["train_s"] for line in next(iter(by_arm.values()))]
    found = {}
    for name, own in by_arm.items():
        seconds = [line["train_s"] for line in own]
        joules = [line["energy_j"] for line in own]
        found[name] = Cost(
            train_s=stats.estimate(seconds),
            ratio=stats.ratio(seconds, reference),
            level_s=next(at_s for _, top1, at_s in mean_curve(own) if top1 >= reached),
            energy_j=None if None in joules else fmean(joules),
        )
    return found


def level(lines: Sequence[Line]) -> int:
    """Top-1, whole percent, that the mean over the seeds reaches of every source."""
    return min(math.floor(max(top1 for _, top1, _ in mean_curve(own))) for own in _by_arm(lines).values())


def mean_curve(lines: Sequence[Line]) -> list[tuple[int, float, float]]:
    """Over trainings from one source: epochs done, top-1 in percent, seconds."""
    points = zip(*(line["curve"] for line in lines), strict=True)
    return [(each[0][0], fmean(p[1] for p in each), fmean(p[2] for p in each)) for each in points]


def _by_arm(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Source -> its trainings, by seed."""
    names = list(dict.fromkeys(line["arm"] for line in lines))
    ordered = sorted(lines, key=lambda line: (names.index(line["arm"]), line["seed"]))
    return {name: list(own) for name, own in groupby(ordered, key=lambda line: line["arm"])}


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


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Each adjusted for there being several."""
    adjusted, worst = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda pair: pair[1])):
        worst = max(worst, min(1.0, p * (len(p_values) - rank)))
        adjusted[name] = worst
    return adjusted


def enough(values: Sequence[float], margin: float) -> int | None:
    """The fewest seeds that give another verdict than CANNOT_TELL, if mean and deviation stay as they are."""
    if len(values) < 2:
        return None
    mean, deviation = abs(fmean(values)), stdev(values)

    def tells(seeds: int) -> bool:
        half = quantile(0.5 + LEVEL / 2, seeds - 1) * deviation / math.sqrt(seeds)
        return half < mean or half <= margin - mean

    counts = range(len(values) + 1, MOST_SEEDS + 1)
    found = bisect_left(counts, True, key=tells)  # more seeds never tell less
    return counts[found] if found < len(counts) else None


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


@cache
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
    evidence = f"{difference}, 95% interval {found.low:+.2f} to {found.high:+.2f}"
    if found.verdict == SAME:
        return (
            f"A model trained on {name} is as good as on {found.baseline}, within ±{found.within:.2f} points "
            f"({evidence}, {seeds})."
        )
    if found.verdict in (WORSE, BETTER):
        doubt = f"; one of all sources would differ as clearly by chance in {found.chance:.0%} of such runs"
        return (
            f"A model trained on {name} is {found.verdict} than on {found.baseline}, by "
            f"{abs(found.difference):.2f} points ({evidence}, {seeds}{doubt if found.may_be_chance else ''})."
        )
    asked = f"Cannot tell with {seeds} whether a model trained on {name} is as good as on {found.baseline}"
    if found.seeds < 2:
        return f"{asked} ({difference}); train at least 3."
    many = f"more than {MOST_SEEDS:,} would be needed" if found.enough is None else f"{found.enough} would do"
    return f"{asked} ({evidence}); {many}."
