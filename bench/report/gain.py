"""What another loader, and converting, gain over what people have today: ImageFolder in a DataLoader. Pure.

The first advice is to change that line to `loaders.build`, which takes nothing; the second is to convert.
Rows may be measured or predicted; a sentence names a winner only where the ranges of several runs lie apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report.result import Row
from bench.report.stats import Estimate, disturbance, exceeds
from bench.report.verdict import KEEPS_UP, SYNTHETIC, judge, reads_tree, training_rate
from bench.report.words import duration, percent
from precache.reporting import counted, human_bytes

TODAY_BACKEND = "imagefolder"
TODAY = "ImageFolder and DataLoader"
"""The baseline, in sentences."""
LINE = "`loaders.build`"
"""What replaces it, in sentences."""


def is_ours(row: Row) -> bool:
    """Whether it is a loader that one could train with here: no other library's, no noise."""
    return not row.key.get("peer") and row.key["backend"] != SYNTHETIC


@dataclass(frozen=True, slots=True)
class Gain:
    """What people have today, and what does better, fed to one trainer or alone.

    Attributes:
        today: ImageFolder in a DataLoader; None where it was not measured.
        line: the fastest loader of ours on the tree as it is; None unless it is faster than today's.
        converted: the fastest on converted data, and those that overlap with it, as far as they are faster
            than today's and than `line`.
    """

    today: Row | None
    line: Row | None
    converted: tuple[Row, ...]

    @property
    def best(self) -> tuple[Row, ...]:
        """What is fastest; empty where nothing is faster than today's beyond noise."""
        if self.converted or self.line is None:
            return self.converted
        return (self.line,)


def find_gain(rows: Sequence[Row], today: Row | None = None) -> Gain:
    """Compare rows with one trainer. Today's loader may be a peer's where all were measured alone.

    Args:
        today: stands for it where ImageFolder could not be measured.
    """
    ours = [row for row in rows if is_ours(row)]
    alone = all("fed_ratio" not in row.values for row in ours)
    for row in rows if alone else ours:
        if row.key["backend"] == TODAY_BACKEND:
            today = row
            break
    if today is None:
        return Gain(None, None, ())
    others = sorted((row for row in ours if row is not today), key=lambda row: -training_rate(row).median)
    line = None
    for row in others:
        if reads_tree(row) and exceeds(training_rate(row), training_rate(today)):
            line = row
            break
    converted = [row for row in others if not reads_tree(row)]
    to_beat = training_rate(line or today)
    alike = tuple(
        row
        for row in converted
        if training_rate(row).high >= training_rate(converted[0]).low and exceeds(training_rate(row), to_beat)
    )
    return Gain(today, line, alike)


def saved_share(row: Row, today: Row) -> float | None:
    """Share, 0 to 1, of today's time of training that `row` saves; None where within noise."""
    now, then = training_rate(today), training_rate(row)
    return 1 - now.median / then.median if exceeds(then, now) else None


def answer(
    rows: Sequence[Row],
    *,
    accelerator: str,
    images: int | None,
    repeats: int,
    other_cpu: float | None,
    gpu_price: float | None = None,
    today: Row | None = None,
) -> list[str]:
    """What to do, of rows with one trainer: what today's loader does, the other line, converting.

    Args:
        accelerator: what is fed, in words.
        images: of an epoch; None where not known.
        repeats: of which the ranges are.
        other_cpu: share of the CPUs that other processes took; None where not known.
        gpu_price: dollars per hour of the accelerator; None leaves money out.
        today: see `find_gain`.
    """
    gain, ours = find_gain(rows, today), [row for row in rows if is_ours(row)]
    today = gain.today
    if today is None:
        return _answer_without_today(ours)
    if judge(today.values.get("fed_ratio")) == KEEPS_UP:  # noise can only lower that
        return [
            f"{does(today, accelerator, already=True)}: neither another loader nor converting gains anything."
        ]
    why_none = _why_no_winner(gain, today, [row for row in ours if row is not today], repeats, other_cpu)
    if why_none:
        return [f"{does(today, accelerator)}.", why_none]
    sentences = [f"{does(today, accelerator)}.", *what_to_do(gain, images)]
    if not gain.converted and not all(reads_tree(row) for row in ours):
        sentences.append("Converting gains no more.")
    if gpu_price is not None and "busy_share" in today.values:
        speedup = training_rate(gain.best[0]).median / training_rate(today).median
        sentences.append(
            f"At ${gpu_price:,.2f} an hour, what costs $100 today then costs ${100 / speedup:,.0f}: "
            f"${gpu_price * (1 - 1 / speedup):,.2f} saved of every hour."
        )
    return sentences


def _answer_without_today(ours: Sequence[Row]) -> list[str]:
    best = max(ours, key=lambda row: training_rate(row).median)
    rate = best.values["loader_images_per_s"].median
    sentence = f"Backend `{best.key['backend']}` delivers {rate:,.0f} images/s"
    if "busy_share" in best.values:
        busy = percent(best.values["busy_share"].median)
        sentence += f" and keeps the accelerator busy {busy} of the time"
    return [
        f"{sentence}.",
        f"What {TODAY} do was not measured: backend imagefolder on the raw tree measures it.",
    ]


def _why_no_winner(
    gain: Gain, today: Row, others: Sequence[Row], repeats: int, other_cpu: float | None
) -> str:
    """Why nothing is said to be faster than today's; empty where something is."""
    disturbed = disturbance(other_cpu)
    if disturbed:
        return disturbed
    if not others:
        return "No other loader was measured."
    if repeats < 2:
        return "One run of each names no winner: use --repeats 2 or more."
    if gain.best:
        return ""
    if all(training_rate(row).high < training_rate(today).low for row in others):
        return "No other loader here is faster."
    return f"The ranges of {repeats} runs overlap, so no loader wins."


def does(today: Row, accelerator: str, *, already: bool = False) -> str:
    """What the baseline does, without a full stop: the first words of every answer."""
    subject, adverb = way(today), "already " if already else ""
    plural = today.key["backend"] == TODAY_BACKEND
    if "busy_share" not in today.values:
        verb = "deliver" if plural else "delivers"
        return f"{subject} {adverb}{verb} {training_rate(today).median:,.0f} images/s"
    verb = "keep" if plural else "keeps"
    busy = percent(today.values["busy_share"].median)
    return f"{subject} {adverb}{verb} {accelerator} busy {busy} of the time"


def what_to_do(gain: Gain, images: int | None) -> list[str]:
    """What to do instead of today's, a sentence for each step: the other line, then converting."""
    today, line = gain.today, gain.line
    assert today is not None
    sentences = []
    if line is not None:
        sentences.append(f"Change that line to {way(line)}: {_effect(line, today)}.")
    if not gain.converted:
        return sentences
    best = gain.converted[0]
    names = " or ".join(f"{way(row)} ({cost(row)})" for row in gain.converted)
    too = ", too" if line is not None else ""
    sentences.append(f"Convert to {names}{too}: {_effect(best, today)}.")
    if "busy_share" in best.values and "convert_s" in best.values and images is not None:
        seconds = best.values["convert_s"].median
        count = epochs_to_pay(seconds, images, training_rate(today).median, training_rate(best).median)
        pays = "does not pay" if count is None else f"pays after {counted(count, 'epoch')}"
        sentences.append(f"Converting {pays}.")
    return sentences


def way(row: Row) -> str:
    """How one trains from it, as sentences call it."""
    backend, data = row.key["backend"], row.key["data"]
    if backend == TODAY_BACKEND:
        return TODAY
    if reads_tree(row):
        return LINE if backend == "pytorch" else f"{LINE} with backend {backend}"
    return data if data.startswith(backend) else f"{data} for backend {backend}"


def cost(row: Row) -> str:
    """What converted data takes once, as in '24.2 s, 286 MiB'."""
    seconds, stored = row.values.get("convert_s"), row.values.get("stored_bytes")
    time = "time not measured" if seconds is None else duration(seconds.median)
    return time if stored is None else f"{time}, {human_bytes(stored.median)}"


def epochs_to_pay(conversion_s: float, images: int, today: float, then: float) -> int | None:
    """After how many epochs of `images` converting has saved the time that it took; None if never.

    Args:
        today, then: images/s of training with the baseline, and with what was converted.
    """
    saved_s = images * (1 / today - 1 / then)  # an epoch
    return max(1, math.ceil(conversion_s / saved_s)) if saved_s > 0 else None


def times(speedup: float) -> str:
    """'3.5 times', '12 times'."""
    return f"{speedup:.1f} times" if speedup < 10 else f"{speedup:.0f} times"


def _effect(row: Row, today: Row) -> str:
    speedup = training_rate(row).median / training_rate(today).median
    if "busy_share" not in row.values:
        return f"{training_rate(row).median:,.0f} images/s, {times(speedup)} as many"
    # below 1.5 '1.1 times sooner' is read as more than it is
    sooner = f"{1 - 1 / speedup:.0%}" if speedup < 1.5 else times(speedup)
    busy = percent(row.values["busy_share"].median)
    return f"it is busy {busy}, and training ends {sooner} sooner than today"


def busy_share(fed_ratio: Estimate) -> Estimate:
    """Share of the time, 0 to 1, that the accelerator computes, of fed over alone."""
    return Estimate(min(1.0, fed_ratio.median), min(1.0, fed_ratio.low), min(1.0, fed_ratio.high))
