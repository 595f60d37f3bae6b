"""Gain of another loader, and of converting, over ImageFolder in a DataLoader, which people have today. Pure.

The first advice is to change that line to `loaders.build`, which takes neither disk nor time; the second is
to convert. Rows may be measured or predicted. A row wins only where its range is above that of the other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report.result import Row
from bench.report.stats import Estimate, exceeds
from bench.report.verdict import SYNTHETIC, reads_tree, training_rate
from precache.formats import FORMATS

TODAY_BACKEND = "imagefolder"
"""Backend of the baseline."""


def is_real_loader(row: Row) -> bool:
    """Whether the row is a loader that one could train with: not noise."""
    return bool(row.key["backend"] != SYNTHETIC)


def is_usual_backend(row: Row) -> bool:
    """Whether `loaders.build` takes the row's backend for its data where none is named."""
    if reads_tree(row):
        return bool(row.key["backend"] == "pytorch")
    return row.data_kind in FORMATS and FORMATS[row.data_kind].backend == row.key["backend"]


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


def epochs_to_pay(conversion_s: float, images: int, today: float, then: float) -> int | None:
    """Number of epochs after which converting has saved the time that it took; None if never.

    Args:
        conversion_s: seconds of the conversion.
        images: pictures of an epoch.
        today, then: images/s of training with the baseline, and with converted data.
    """
    saved_s = images * (1 / today - 1 / then)  # seconds of an epoch
    return max(1, math.ceil(conversion_s / saved_s)) if saved_s > 0 else None


def busy_share(fed_ratio: Estimate) -> Estimate:
    """Share of the time, 0 to 1, that the accelerator computes: images/s fed over images/s alone."""
    return Estimate(min(1.0, fed_ratio.median), min(1.0, fed_ratio.low), min(1.0, fed_ratio.high))
