"""Gain of another loader, and of converting, over ImageFolder in a DataLoader, which people have today. Pure.

The first advice is to change that line to `loaders.build`, which takes neither disk nor time; the second is
to convert. Rows may be measured or predicted. A sentence names a winner only where the ranges of several runs
do not overlap.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report.result import Row
from bench.report.stats import Estimate, disturbance, exceeds
from bench.report.verdict import KEEPS_UP, SYNTHETIC, judge, reads_tree, training_rate
from bench.report.words import duration, percent
from precache.reporting import human_bytes, quantity

TODAY_BACKEND = "imagefolder"
TODAY = "ImageFolder and DataLoader"
"""Name of the baseline in sentences."""
LINE = "`loaders.build`"
"""Name of what replaces the baseline on the same tree, in sentences."""


def is_real_loader(row: Row) -> bool:
    """Whether the row is a loader that one could train with: not noise."""
    return bool(row.key["backend"] != SYNTHETIC)


@dataclass(frozen=True, slots=True)
class Gain:
    """Loader that people have today, and the loaders that are faster, fed to one trainer or alone.

    Attributes:
        today: row of ImageFolder in a DataLoader; None where it was not measured.
        line: row of the fastest backend on the tree as it is; None unless it is faster than `today`.
        converted: rows of the fastest loader of converted data and of those whose ranges overlap with it, as
            far as they are faster than `today` and than `line`.
    """

    today: Row | None
    line: Row | None
    converted: tuple[Row, ...]

    @property
    def best(self) -> tuple[Row, ...]:
        """Rows that are fastest; empty where nothing is faster than today's beyond noise."""
        if self.converted or self.line is None:
            return self.converted
        return (self.line,)


def find_gain(rows: Sequence[Row], today: Row | None = None) -> Gain:
    """Compare the rows of one trainer.

    Args:
        rows: rows that were measured or predicted with the same trainer.
        today: row that stands in where ImageFolder could not be measured.
    """
    real_rows = [row for row in rows if is_real_loader(row)]
    for row in real_rows:
        if row.key["backend"] == TODAY_BACKEND:
            today = row
            break
    if today is None:
        return Gain(None, None, ())
    others = sorted(
        (row for row in real_rows if row is not today), key=lambda row: -training_rate(row).median
    )
    line = None
    for row in others:
        if reads_tree(row) and exceeds(training_rate(row), training_rate(today)):
            line = row
            break
    converted = [row for row in others if not reads_tree(row)]
    to_beat = training_rate(line or today)
    fastest = tuple(
        row
        for row in converted
        if training_rate(row).high >= training_rate(converted[0]).low and exceeds(training_rate(row), to_beat)
    )
    return Gain(today, line, fastest)


def saved_share(row: Row, today: Row) -> float | None:
    """Share, 0 to 1, of today's training time that `row` saves; None where that is within noise."""
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
    """Write what today's loader does and what to do, from rows of one trainer.

    Args:
        rows: rows that were measured or predicted with the same trainer.
        accelerator: description of what is fed.
        images: pictures of an epoch; None where not known.
        repeats: number of runs that the ranges are over.
        other_cpu: share of the CPUs that other processes took; None where not known.
        gpu_price: dollars per hour of the accelerator; None leaves money out.
        today: see `find_gain`.
    """
    gain, real_rows = find_gain(rows, today), [row for row in rows if is_real_loader(row)]
    today = gain.today
    if today is None:
        return _answer_without_today(real_rows)
    if judge(today.values.get("fed_ratio")) == KEEPS_UP:  # a busy machine can only lower the ratio
        start = describe_today(today, accelerator, already=True)
        return [f"{start}: neither another loader nor converting gains anything."]
    others = [row for row in real_rows if row is not today]
    reason = _reason_for_no_winner(gain, today, others, repeats, other_cpu)
    if reason:
        return [f"{describe_today(today, accelerator)}.", reason]
    sentences = [f"{describe_today(today, accelerator)}.", *list_steps(gain, images)]
    if not gain.converted and not all(reads_tree(row) for row in real_rows):
        sentences.append("Converting gains no more.")
    if gpu_price is not None and "busy_share" in today.values:
        speedup = training_rate(gain.best[0]).median / training_rate(today).median
        sentences.append(
            f"At ${gpu_price:,.2f} an hour, what costs $100 today then costs ${100 / speedup:,.0f}: "
            f"${gpu_price * (1 - 1 / speedup):,.2f} saved of every hour."
        )
    return sentences


def _answer_without_today(real_rows: Sequence[Row]) -> list[str]:
    best = max(real_rows, key=lambda row: training_rate(row).median)
    rate = best.values["loader_images_per_s"].median
    sentence = f"Backend `{best.key['backend']}` delivers {rate:,.0f} images/s"
    if "busy_share" in best.values:
        busy = percent(best.values["busy_share"].median)
        sentence += f" and keeps the accelerator busy {busy} of the time"
    return [
        f"{sentence}.",
        f"What {TODAY} do was not measured: backend imagefolder on the raw tree measures it.",
    ]


def _reason_for_no_winner(
    gain: Gain, today: Row, others: Sequence[Row], repeats: int, other_cpu: float | None
) -> str:
    """Say why no loader is named as faster than today's; empty where one is."""
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


def describe_today(today: Row, accelerator: str, *, already: bool = False) -> str:
    """Say what the baseline does, without a full stop; every answer begins with it."""
    subject, adverb = source_name(today), "already " if already else ""
    plural = today.key["backend"] == TODAY_BACKEND
    if "busy_share" not in today.values:
        verb = "deliver" if plural else "delivers"
        return f"{subject} {adverb}{verb} {training_rate(today).median:,.0f} images/s"
    verb = "keep" if plural else "keeps"
    busy = percent(today.values["busy_share"].median)
    return f"{subject} {adverb}{verb} {accelerator} busy {busy} of the time"


def list_steps(gain: Gain, images: int | None) -> list[str]:
    """Write a sentence for each step that gains: changing the line, then converting."""
    today, line = gain.today, gain.line
    assert today is not None
    sentences = []
    if line is not None:
        sentences.append(f"Change that line to {source_name(line)}: {_effect(line, today)}.")
    if not gain.converted:
        return sentences
    best = gain.converted[0]
    names = " or ".join(f"{source_name(row)} ({cost(row)})" for row in gain.converted)
    too = ", too" if line is not None else ""
    sentences.append(f"Convert to {names}{too}: {_effect(best, today)}.")
    if "busy_share" in best.values and "convert_s" in best.values and images is not None:
        seconds = best.values["convert_s"].median
        count = epochs_to_pay(seconds, images, training_rate(today).median, training_rate(best).median)
        pays = "does not pay" if count is None else f"pays after {quantity(count, 'epoch')}"
        sentences.append(f"Converting {pays}.")
    return sentences


def source_name(row: Row) -> str:
    """Name of what the row trains from, as sentences call it: `loaders.build`, or converted data."""
    backend, data = row.key["backend"], row.key["data"]
    if backend == TODAY_BACKEND:
        return TODAY
    if reads_tree(row):
        return LINE if backend == "pytorch" else f"{LINE} with backend {backend}"
    return data if data.startswith(backend) else f"{data} for backend {backend}"


def cost(row: Row) -> str:
    """Time and disk that converting takes once, like '24.2 s, 286 MiB'."""
    seconds, stored = row.values.get("convert_s"), row.values.get("stored_bytes")
    time = "time not measured" if seconds is None else duration(seconds.median)
    return time if stored is None else f"{time}, {human_bytes(stored.median)}"


def epochs_to_pay(conversion_s: float, images: int, today: float, then: float) -> int | None:
    """Number of epochs after which converting has saved the time that it took; None if never.

    Args:
        conversion_s: seconds of the conversion.
        images: pictures of an epoch.
        today, then: images/s of training with the baseline, and with converted data.
    """
    saved_s = images * (1 / today - 1 / then)  # seconds of an epoch
    return max(1, math.ceil(conversion_s / saved_s)) if saved_s > 0 else None


def times(speedup: float) -> str:
    """Write a speedup as '3.5 times' or '12 times'."""
    return f"{speedup:.1f} times" if speedup < 10 else f"{speedup:.0f} times"


def _effect(row: Row, today: Row) -> str:
    """Say what training with the row gains over today, without a full stop."""
    speedup = training_rate(row).median / training_rate(today).median
    if "busy_share" not in row.values:
        return f"{training_rate(row).median:,.0f} images/s, {times(speedup)} as many"
    # '1.1 times sooner' reads as more than it is, so small speedups are given in per cent
    sooner = f"{1 - 1 / speedup:.0%}" if speedup < 1.5 else times(speedup)
    busy = percent(row.values["busy_share"].median)
    return f"it is busy {busy}, and training ends {sooner} sooner than today"


def busy_share(fed_ratio: Estimate) -> Estimate:
    """Share of the time, 0 to 1, that the accelerator computes: images/s fed over images/s alone."""
    return Estimate(min(1.0, fed_ratio.median), min(1.0, fed_ratio.low), min(1.0, fed_ratio.high))
