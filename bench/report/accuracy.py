"""The result of `bench accuracy`: is a model as good that was trained from another source of pictures? Pure.

Trainings are paired by seed: both begin with the same weights. The interval of the mean difference decides.
It is Student's t, two-sided, and so wide that in 95% of results it holds for all their sources at once
(Bonferroni). 'Worse', 'better': it leaves 0 out. 'As good': it lies within the margin (two one-sided tests)
and holds 0. Anything else is within noise.
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
from precache.reporting import counted

LEVEL = 0.95
AS_GOOD, WORSE, BETTER, WITHIN_NOISE = "as good", "worse", "better", "within noise"
_MOST_SEEDS = 1000
Seeds = dict[int, Trial]
"""Trainings from one source, by seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One source of pictures beside the baseline.

    Attributes:
        seeds: how many both were trained with.
        difference: points of top-1, above 0 where the source is better: the mean over the seeds, and its
            interval, which is infinite for one seed.
        verdict: AS_GOOD, WORSE, BETTER or WITHIN_NOISE.
        enough: seeds that would tell, if differences go on to be as they are; None: not known, or more than
            a thousand.
    """

    name: str
    baseline: str
    seeds: int
    difference: Estimate
    verdict: str
    enough: int | None = None


def make_result(
    machine: Mapping[str, str],
    settings: Mapping[str, Any],
    trials: Sequence[Trial],
    skipped: Mapping[str, str],
) -> Result:
    """Work out what trainings say.

    Args:
        settings: what they have in common, of `bench.measure.accuracy`, with the name of the `baseline` and
            the `margin`, points that do not matter.
    """
    trainings = group_by_source(settings, trials)
    compared = compare(settings, trials)
    unlearnt = describe_unlearnt(settings, trials)
    seeds = [one.enough for one in compared if one.enough is not None]
    next_step = ""
    if unlearnt:
        answer = [unlearnt]
    else:
        answer = [describe(one) for one in compared]
        if seeds:
            next_step = f"With --seeds {max(seeds)} and the same --json FILE, the missing seeds are trained."
    answer.append(disturbance(other_cpu_share(trials), "; accuracy does not depend on that"))
    return Result(
        command="accuracy",
        question="Does the model get worse?",
        machine=dict(machine),
        settings=dict(settings),
        trials=tuple(trials),
        rows=tuple(_make_rows(settings, trainings, compared)),
        thing="pictures from",
        columns=("top1_accuracy", "difference_points", "verdict", "train_s"),
        answer=tuple((sentence,) for sentence in answer if sentence),
        bars="top1_accuracy",
        conditions=tuple(_describe_conditions(machine, settings, trainings)),
        next_step=next_step,
        skipped=dict(skipped),
    )


def group_by_source(settings: Mapping[str, Any], trials: Sequence[Trial]) -> dict[str, Seeds]:
    """Trainings by source, the baseline first, and by seed."""
    found: dict[str, Seeds] = {settings["baseline"]: {}}
    for trial in sorted(trials, key=lambda trial: trial.key["seed"]):
        found.setdefault(trial.key["source"], {})[trial.key["seed"]] = trial
    return {name: trainings for name, trainings in found.items() if trainings}


def compare(settings: Mapping[str, Any], trials: Sequence[Trial]) -> list[Compared]:
    """Each source beside the baseline, over the seeds that both were trained with."""
    trainings = group_by_source(settings, trials)
    baseline, margin = settings["baseline"], settings["margin"]
    differences = {}
    for name, own in trainings.items():
        shared = own.keys() & trainings.get(baseline, {}).keys()
        if name != baseline and shared:
            differences[name] = [
                100 * (_top1(own[seed]) - _top1(trainings[baseline][seed])) for seed in sorted(shared)
            ]
    level = 1 - (1 - LEVEL) / max(1, len(differences))
    compared = []
    for name, values in differences.items():
        low, high = interval(values, level)
        verdict = WITHIN_NOISE
        if high < 0:
            verdict = WORSE
        elif low > 0:
            verdict = BETTER
        elif -margin <= low and high <= margin:
            verdict = AS_GOOD
        compared.append(
            Compared(
                name=name,
                baseline=baseline,
                seeds=len(values),
                difference=Estimate(fmean(values), low, high),
                verdict=verdict,
                enough=count_enough(values, margin, level) if verdict == WITHIN_NOISE else None,
            )
        )
    return compared


def _top1(trial: Trial) -> float:
    return trial.numbers["top1_accuracy"]


def interval(values: Sequence[float], level: float) -> tuple[float, float]:
    """Where the mean lies of what `values` are drawn from; anywhere, for one value."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = quantile(0.5 + level / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def count_enough(values: Sequence[float], margin: float, level: float) -> int | None:
    """The fewest seeds that tell, if mean and deviation stay as they are; None: too many, or one value."""
    if len(values) < 2:
        return None
    mean, deviation = abs(fmean(values)), stdev(values)

    def tells(seeds: int) -> bool:
        half = quantile(0.5 + level / 2, seeds - 1) * deviation / math.sqrt(seeds)
        return half < mean or half <= margin - mean

    counts = range(len(values) + 1, _MOST_SEEDS + 1)
    at = bisect_left(counts, True, key=tells)  # more seeds never tell less
    return counts[at] if at < len(counts) else None


def cdf(t: float, degrees: int) -> float:
    """Student's distribution: Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.3-4."""
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


def describe(one: Compared) -> str:
    """The answer for one source."""
    points = one.difference
    if one.seeds < 2:
        return (
            f"One seed cannot tell whether a model trained on {one.name} is as good as one trained on "
            f"{one.baseline} ({points.median:+.2f} points); train at least 3."
        )
    evidence = (
        f"{points.median:+.2f} points, {points.low:+.2f} to {points.high:+.2f} with "
        f"{counted(one.seeds, 'seed')}"
    )
    if one.verdict != WITHIN_NOISE:
        beside = "as good as" if one.verdict == AS_GOOD else f"{one.verdict} than"
        return f"A model trained on {one.name} is {beside} one trained on {one.baseline}: {evidence}."
    needed = f"more than {_MOST_SEEDS:,} seeds" if one.enough is None else f"{one.enough} seeds"
    return (
        f"The difference between models trained on {one.name} and on {one.baseline} is within noise: "
        f"{evidence}. {needed[:1].upper()}{needed[1:]} would tell."
    )


def describe_unlearnt(settings: Mapping[str, Any], trials: Sequence[Trial]) -> str:
    """A sentence where the baseline's models are hardly better than guesses; empty where they have learnt."""
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
    settings: Mapping[str, Any], trainings: Mapping[str, Seeds], compared: Sequence[Compared]
) -> list[Row]:
    beside = {one.name: one for one in compared}
    first = trainings.get(settings["baseline"], {})
    rows = []
    for name, own in trainings.items():
        top1 = [_top1(trial) for trial in own.values()]
        values = {
            "top1_accuracy": Estimate(fmean(top1), min(top1), max(top1)),
            "train_s": stats.estimate([trial.numbers["train_s"] for trial in own.values()]),
        }
        texts = {"verdict": "-", "difference_points": "-"}
        if name in beside:
            values["difference_points"] = beside[name].difference
            values["train_ratio"] = stats.estimate(
                [
                    trial.numbers["train_s"] / first[seed].numbers["train_s"]
                    for seed, trial in own.items()
                    if seed in first
                ]
            )
            texts = {"verdict": beside[name].verdict}
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
    workers = counted(settings["loader_workers"], "worker")
    threads = counted(settings["threads"], "thread")
    return [
        f"{machine_line(machine, ('torch', 'torchvision', 'pillow'))}; {workers}, {threads} of torch.",
        f"{settings['model']}, {settings['size']}x{settings['size']}, {settings['epochs']} epochs of "
        f"batches of {settings['batch_size']}: {settings['steps']:,} steps from the same weights for each "
        f"source; learning rate {settings['lr']:g}, {precision}, {counted(len(settings['seeds']), 'seed')}.",
        f"Pictures from {sources}.",
        f"As good: the interval of the difference lies within ±{settings['margin']:g} points; better or "
        f"worse: it leaves 0 out. It holds at 95% for all rows together (Student's t, Bonferroni).",
    ]
