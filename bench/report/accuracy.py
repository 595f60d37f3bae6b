"""Is a model that was trained from one source of pictures worse than from another: statistics, table, page.

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
from html import escape
from statistics import fmean, median, stdev
from typing import Any

import plotly.graph_objects as go

from bench.report.page import COLOURS, GREY, charts, document, figure, line
from bench.report.stats import disturbance
from bench.report.table import Table
from bench.report.words import counted, machine_line
from precache import page

LEVEL = 0.95
SAME, WORSE, BETTER, CANNOT_TELL = "same", "worse", "better", "cannot tell"
MOST_SEEDS = 1000
Line = Mapping[str, Any]
"""A training, of `bench.measure.accuracy`."""
_DASHES = ("solid", "dash", "dot")


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


def compare(lines: Sequence[Line], margin: float) -> list[Compared]:
    """Each source beside the first one of `lines`, which are trainings of the same seeds.

    Args:
        margin: points that do not matter.
    """
    top1 = final(lines)
    (baseline, reference), *others = top1.items()
    differences = {
        name: [values[seed] - reference[seed] for seed in sorted(reference)] for name, values in others
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
                top1=fmean(top1[name].values()),
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
        name: {line["seed"]: line["curve"][-1][1] for line in own} for name, own in _by_source(lines).items()
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


def mean_curve(lines: Sequence[Line]) -> list[tuple[int, float, float]]:
    """Over trainings from one source: epochs done, top-1 in percent, seconds."""
    points = zip(*(line["curve"] for line in lines), strict=True)
    return [(each[0][0], fmean(p[1] for p in each), fmean(p[2] for p in each)) for each in points]


def _by_source(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Source -> its trainings, by seed."""
    found: dict[str, list[Line]] = {}
    for each in sorted(lines, key=lambda each: each["seed"]):
        found.setdefault(each["arm"], []).append(each)
    return found


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
    name, seeds = found.name, counted(found.seeds, "seed")
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


def answers(lines: Sequence[Line], margin: float) -> list[str]:
    """A sentence for each source; and whether other processes disturbed the times."""
    disturbed = disturbance(fmean(line["other_cpu"] for line in lines), "; accuracy does not depend on that")
    little = too_little(lines)
    said = [little] if little else [sentence(each) for each in compare(lines, margin)]
    return [*said, disturbed] if disturbed else said


def table(lines: Sequence[Line], margin: float) -> Table:
    """A row for each source, the baseline first."""
    compared = {each.name: each for each in compare(lines, margin)}
    sources = _by_source(lines)
    baseline_s = [each["train_s"] for each in next(iter(sources.values()))]
    rows = []
    for name, own in sources.items():
        top1 = [each["curve"][-1][1] for each in own]
        train_s = [each["train_s"] for each in own]
        times = median(mine / first for mine, first in zip(train_s, baseline_s, strict=True))
        spread = f" ± {stdev(top1):.2f}" if len(top1) > 1 else ""
        row = [name, f"{fmean(top1):.2f}%{spread}", *_beside(compared.get(name))]
        rows.append([*row, f"{median(train_s):,.0f} s ({times:.2f}x)"])
    titles = ["pictures from", "top-1", "difference", "95% interval", "verdict", "training"]
    return Table(titles, rows, words=("verdict",))


def conditions(lines: Sequence[Line], margin: float) -> list[str]:
    """What was done on which machine, and what the columns are."""
    one, told = lines[0], lines[0]["conditions"]
    dates = sorted({each["machine"]["date"] for each in lines})
    machine = {**one["machine"], "date": " to ".join(dict.fromkeys((dates[0], dates[-1])))}
    precision = "float32" if told["amp"] == "off" else f"{told['amp']} autocast"
    return [
        f"{told['model']}, {told['size']}x{told['size']}; {told['epochs']} epochs of batches of "
        f"{told['batch_size']}; {one['steps']:,} steps from the same weights for each source; SGD with "
        f"Nesterov momentum, learning rate {told['lr']:g}, cosine; {precision}, "
        f"{counted(len({each['seed'] for each in lines}), 'seed')}.",
        "Top-1: on the untouched validation pictures, Resize and CenterCrop of torchvision, mean ± standard "
        "deviation over seeds. Difference and interval: in points, paired by seed, Student's t, for each "
        f"source alone. Same: the interval lies within ±{margin:g} points; better or worse: it leaves 0 out, "
        "'or chance': that may well happen to one of so many sources (Holm). Training: seconds of one, "
        "without evaluations, and how many times those of the first row, seed by seed; medians.",
        f"{counted(told['workers'], 'worker')}, {counted(told['threads'], 'thread')} of torch; "
        f"{machine_line(machine, ('torch', 'torchvision', 'pillow'))}.",
    ]


def html(lines: Sequence[Line], margin: float) -> str:
    """The page."""
    what = "top-1 on the validation pictures, a thin line for each seed and a thick one for their mean"
    figures = {
        f"How far each source ends from the first one: a line that crosses 0 may be chance, and what lies in "
        f"the grey band, {margin:g} to both sides, does not matter": _intervals(lines, margin),
        f"How soon the models learn: {what}": _curves(lines),
    }
    seeds = [
        (name, str(seed), f"{top1:.2f}%")
        for name, all_ in final(lines).items()
        for seed, top1 in all_.items()
    ]
    parts = [
        table(lines, margin).html(),
        charts(figures, "accuracy"),
        "<h2>Where the pictures come from</h2>",
        page.facts({each["arm"]: each["source"]["described"] for each in lines}),
        page.folded("Every training", Table(("pictures from", "seed", "top-1"), seeds).html()),
        page.paragraphs(conditions(lines, margin)),
    ]
    style = ".verdict { margin-bottom: 1.5rem; }"
    return document("Does the model get worse?", answers(lines, margin), parts, style)


def _beside(each: Compared | None) -> list[str]:
    if each is None:
        return ["-", "-", "-"]
    low_high = f"{each.low:+.2f} to {each.high:+.2f}" if each.seeds > 1 else "-"
    verdict = f"{each.verdict} or chance" if each.may_be_chance else each.verdict
    return [f"{each.difference:+.2f}", low_high, verdict]


def _intervals(lines: Sequence[Line], margin: float) -> go.Figure:
    compared = [each for each in compare(lines, margin) if each.seeds > 1][::-1]
    dots = go.Scatter(
        x=[each.difference for each in compared],
        y=[escape(each.name) for each in compared],
        error_x={"type": "data", "array": [each.high - each.difference for each in compared], "thickness": 2},
        mode="markers",
        marker={"size": 9, "color": COLOURS[0]},
        showlegend=False,
    )
    drawn = figure([dots], 40 + 32 * len(compared), "points of top-1")
    drawn.add_vrect(x0=-margin, x1=margin, fillcolor=GREY, opacity=0.15, line_width=0)
    drawn.add_vline(x=0, line_width=1, line_color=GREY)
    return drawn


def _curves(lines: Sequence[Line]) -> go.Figure:
    """Over seconds of training."""
    traces = []
    for number, (name, own) in enumerate(_by_source(lines).items()):
        colour, dash = COLOURS[number % len(COLOURS)], _DASHES[number // len(COLOURS) % len(_DASHES)]
        thin: dict[str, Any] = {"width": 1, "opacity": 0.35, "showlegend": False, "hoverinfo": "skip"}
        curves = [(each["curve"], thin) for each in own]
        for curve, look in [*curves, (mean_curve(own), {"width": 3})]:
            x, y = [point[2] for point in curve], [point[1] for point in curve]
            traces.append(line(x, y, name, colour, dash=dash, legendgroup=escape(name), **look))
    drawn = figure(traces, 340, "seconds of training", "top-1, %")
    drawn.update_xaxes(rangemode="tozero")
    drawn.update_yaxes(rangemode="tozero")
    return drawn
