"""Result of `bench accuracy`: whether a model is as good that was trained from another source of pictures.

Trainings are paired by seed, because those of one seed begin with the same weights. The interval of the mean
difference decides. It is Student's t, two-sided, and so wide that in 95% of results it holds for all their
sources at once (Bonferroni). 'Worse' and 'better': it leaves 0 out. 'As good': it lies within the margin (two
one-sided tests) and holds 0. Anything else is within noise. The functions here are pure.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Any

from bench.report import stats
from bench.report.loaders import other_cpu_share
from bench.report.result import Result, Row, Trial
from bench.report.stats import Estimate, disturbance
from bench.report.words import machine_line
from precache.reporting import quantity

LEVEL = 0.95
AS_GOOD, WORSE, BETTER, WITHIN_NOISE = "as good", "worse", "better", "within noise"
_MAX_SEEDS = 1000
Seeds = dict[int, Trial]
"""Trainings from one source, by seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceComparison:
    """Difference between models trained from one source of pictures and from the baseline.

    Attributes:
        name: name of the source.
        baseline: name of the source that it is compared with.
        seeds: number of seeds that both were trained with.
        difference: points of top-1 accuracy, above 0 where the source is better: the mean over the seeds, and
            its interval, which is infinite for one seed.
        verdict: AS_GOOD, WORSE, BETTER or WITHIN_NOISE.
        seeds_needed: number of seeds that would give another verdict than WITHIN_NOISE, if mean and deviation
            stay as they are; None: not known, or more than a thousand.
    """

    name: str
    baseline: str
    seeds: int
    difference: Estimate
    verdict: str
    seeds_needed: int | None = None


def make_result(
    machine: Mapping[str, str],
    settings: Mapping[str, Any],
    trials: Sequence[Trial],
    skipped: Mapping[str, str],
) -> Result:
    """Make the result from trainings.

    Args:
        settings: settings that all trainings share, from `bench.measure.accuracy`, with the name of the
            `baseline` and the `margin`: the points of accuracy that do not matter.
        trials: one for each training.
        skipped: what could not be trained, and why.
    """
    trainings = group_by_source(settings, trials)
    comparisons = compare(settings, trials)
    too_weak = describe_weak_baseline(settings, trials)
    seeds = [comparison.seeds_needed for comparison in comparisons if comparison.seeds_needed is not None]
    next_step = ""
    if too_weak:
        answer = [too_weak]
    else:
        answer = [describe(comparison) for comparison in comparisons]
        if seeds:
            next_step = f"With --seeds {max(seeds)} and the same --json FILE, the missing seeds are trained."
    answer.append(disturbance(other_cpu_share(trials), "; accuracy does not depend on that"))
    return Result(
        command="accuracy",
        question="Does the model get worse?",
        machine=dict(machine),
        settings=dict(settings),
        trials=tuple(trials),
        rows=tuple(_make_rows(settings, trainings, comparisons)),
        thing="pictures from",
        columns=("top1_accuracy", "difference_points", "verdict", "train_s"),
        answer=tuple((sentence,) for sentence in answer if sentence),
        bars="top1_accuracy",
        conditions=tuple(_describe_conditions(machine, settings, trainings)),
        next_step=next_step,
        skipped=dict(skipped),
    )


def group_by_source(settings: Mapping[str, Any], trials: Sequence[Trial]) -> dict[str, Seeds]:
    """Return trainings by the name of their source, the baseline first, and by seed."""
    sources: dict[str, Seeds] = {settings["baseline"]: {}}
    for trial in sorted(trials, key=lambda trial: trial.key["seed"]):
        sources.setdefault(trial.key["source"], {})[trial.key["seed"]] = trial
    return {name: trainings for name, trainings in sources.items() if trainings}


def compare(settings: Mapping[str, Any], trials: Sequence[Trial]) -> list[SourceComparison]:
    """Compare each source with the baseline, over the seeds that both were trained with."""
    trainings = group_by_source(settings, trials)
    baseline, margin = settings["baseline"], settings["margin"]
    differences = {}
    for name, by_seed in trainings.items():
        shared = by_seed.keys() & trainings.get(baseline, {}).keys()
        if name != baseline and shared:
            differences[name] = [
                100 * (_top1(by_seed[seed]) - _top1(trainings[baseline][seed])) for seed in sorted(shared)
            ]
    level = 1 - (1 - LEVEL) / max(1, len(differences))
    comparisons = []
    for name, values in differences.items():
        low, high = interval(values, level)
        verdict = WITHIN_NOISE
        if high < 0:
            verdict = WORSE
        elif low > 0:
            verdict = BETTER
        elif -margin <= low and high <= margin:
            verdict = AS_GOOD
        comparisons.append(
            SourceComparison(
                name=name,
                baseline=baseline,
                seeds=len(values),
                difference=Estimate(fmean(values), low, high),
                verdict=verdict,
                seeds_needed=count_needed_seeds(values, margin, level) if verdict == WITHIN_NOISE else None,
            )
        )
    return comparisons


def _top1(trial: Trial) -> float:
    return trial.numbers["top1_accuracy"]


def interval(values: Sequence[float], level: float) -> tuple[float, float]:
    """Confidence interval of the mean of what `values` are drawn from; infinite for one value."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = quantile(0.5 + level / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def count_needed_seeds(values: Sequence[float], margin: float, level: float) -> int | None:
    """Count the fewest seeds that give a verdict, if mean and deviation stay as they are.

    Returns:
        The number of seeds; None where it is more than a thousand, or `values` is a single one.
    """
    if len(values) < 2:
        return None
    mean, deviation = abs(fmean(values)), stdev(values)

    def gives_verdict(seeds: int) -> bool:
        half = quantile(0.5 + level / 2, seeds - 1) * deviation / math.sqrt(seeds)
        return half < mean or half <= margin - mean

    counts = range(len(values) + 1, _MAX_SEEDS + 1)
    position = bisect_left(counts, True, key=gives_verdict)  # once there is a verdict, more seeds keep it
    return counts[position] if position < len(counts) else None


def cdf(t: float, degrees: int) -> float:
    """Cumulative distribution function of Student's t.

    Source: Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.3-4.
    """
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
    """Quantile of Student's t: the value below which the share, above 0.5, of the distribution lies."""
    low, high = 0.0, 1.0
    while cdf(high, degrees) < share:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if cdf(middle, degrees) < share else (low, middle)
    return high


def describe(comparison: SourceComparison) -> str:
    """Write the sentence that answers the question for one source."""
    points, name, baseline = comparison.difference, comparison.name, comparison.baseline
    if comparison.seeds < 2:
        return (
            f"One seed cannot tell whether a model trained on {name} is as good as one trained on "
            f"{baseline} ({points.median:+.2f} points); train at least 3."
        )
    evidence = (
        f"{points.median:+.2f} points, {points.low:+.2f} to {points.high:+.2f} with "
        f"{quantity(comparison.seeds, 'seed')}"
    )
    if comparison.verdict != WITHIN_NOISE:
        beside = "as good as" if comparison.verdict == AS_GOOD else f"{comparison.verdict} than"
        return f"A model trained on {name} is {beside} one trained on {baseline}: {evidence}."
    needed = f"more than {_MAX_SEEDS:,} seeds"
    if comparison.seeds_needed is not None:
        needed = f"{comparison.seeds_needed} seeds"
    return (
        f"The difference between models trained on {name} and on {baseline} is within noise: "
        f"{evidence}. {needed[:1].upper()}{needed[1:]} would tell."
    )


def describe_weak_baseline(settings: Mapping[str, Any], trials: Sequence[Trial]) -> str:
    """Write a sentence where the baseline's models are hardly better than guessing; else return ''."""
    name = settings["baseline"]
    trainings = group_by_source(settings, trials).get(name, {})
    guessed = 1 / settings["classes"]
    if not trainings or (top1 := fmean(map(_top1, trainings.values()))) >= 2 * guessed:
        return ""
    return (
        f"Nothing can be told: models trained on {name} reach {top1:.1%}, and guessing {guessed:.1%}. Train "
        f"longer, or with other settings."
    )


def _make_rows(
    settings: Mapping[str, Any], trainings: Mapping[str, Seeds], comparisons: Sequence[SourceComparison]
) -> list[Row]:
    by_name = {comparison.name: comparison for comparison in comparisons}
    first = trainings.get(settings["baseline"], {})
    rows = []
    for name, by_seed in trainings.items():
        top1 = [_top1(trial) for trial in by_seed.values()]
        values = {
            "top1_accuracy": Estimate(fmean(top1), min(top1), max(top1)),
            "train_s": stats.estimate([trial.numbers["train_s"] for trial in by_seed.values()]),
        }
        texts = {"verdict": "-", "difference_points": "-"}
        if name in by_name:
            values["difference_points"] = by_name[name].difference
            values["train_ratio"] = stats.estimate(
                [
                    trial.numbers["train_s"] / first[seed].numbers["train_s"]
                    for seed, trial in by_seed.items()
                    if seed in first
                ]
            )
            texts = {"verdict": by_name[name].verdict}
        rows.append(
            Row(
                name=name,
                key={"source": name},
                values=values,
                texts=texts,
                baseline=name == settings["baseline"],
            )
        )
    return rows


def _describe_conditions(
    machine: Mapping[str, str], settings: Mapping[str, Any], trainings: Mapping[str, Seeds]
) -> list[str]:
    precision = "float32" if settings["amp"] == "off" else f"{settings['amp']} autocast"
    sources = ", ".join(f"{name}: {settings['data'][name]['name']}" for name in trainings)
    workers = quantity(settings["loader_workers"], "worker")
    threads = quantity(settings["threads"], "thread")
    return [
        f"{machine_line(machine, ('torch', 'torchvision', 'pillow'))}; {workers}, {threads} of torch.",
        f"{settings['model']}, {settings['size']}x{settings['size']}, {settings['epochs']} epochs of "
        f"batches of {settings['batch_size']}: {settings['steps']:,} steps from the same weights for each "
        f"source; learning rate {settings['lr']:g}, {precision}, {quantity(len(settings['seeds']), 'seed')}.",
        f"Pictures from {sources}.",
        f"As good: the interval of the difference lies within ±{settings['margin']:g} points; better or "
        f"worse: it leaves 0 out. It holds at 95% for all rows together (Student's t, Bonferroni).",
    ]
