"""What feeding a trainer otherwise gains, and when converting has paid: one figure and one wording. Pure.

The baseline is what people have, torchvision's ImageFolder in a DataLoader. The first advice is to change
that line to `loaders.build`, which takes nothing; the second is to convert.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report.words import duration, epochs, percent
from precache.console.commandline import human_bytes

TODAY = "ImageFolder and DataLoader"
"""The baseline, in sentences."""
LINE = "`loaders.build`"
"""What replaces it, in sentences."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What it takes once to have the data.

    Attributes:
        seconds: of converting; None where not measured.
        size_bytes: on disk; None where not known.
    """

    seconds: float | None
    size_bytes: float | None

    @property
    def words(self) -> str:
        """As in '24.2 s, 286 MiB'."""
        time = "time not measured" if self.seconds is None else duration(self.seconds)
        return time if self.size_bytes is None else f"{time}, {human_bytes(self.size_bytes)}"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to feed a trainer.

    Attributes:
        name: in sentences.
        images_per_s: of training, or of the loader alone where no trainer was fed.
        busy: share of the time, 0 to 1, that the accelerator works; None where no trainer was fed.
        cost: of its data; None: the pictures as they are.
    """

    name: str
    images_per_s: float
    busy: float | None
    cost: Cost | None = None


def epochs_to_pay(conversion_s: float, images: int, today: float, then: float) -> int | None:
    """After how many epochs of `images` converting has saved the time that it took; None if never.

    Args:
        today, then: images/s of training with the baseline, and with what was converted.
    """
    saved_s = images * (1 / today - 1 / then)  # an epoch
    return max(1, math.ceil(conversion_s / saved_s)) if saved_s > 0 else None


def does(today: Way, accelerator: str, *, already: bool = False) -> str:
    """What the baseline does, without a full stop: the first words of every answer."""
    several = today.name == TODAY
    verb = ("already " if already else "") + ("deliver" if today.busy is None else "keep")
    verb += "" if several else "s"
    if today.busy is None:
        return f"{today.name} {verb} {today.images_per_s:,.0f} images/s"
    return f"{today.name} {verb} {accelerator} busy {percent(today.busy)} of the time"


def advice(today: Way, line: Way | None, converted: Sequence[Way], images: int | None) -> list[str]:
    """What to do instead, a sentence for each step: the other line, then converting.

    Args:
        line: on the tree as it is; None where it gains nothing.
        converted: as good as one another, of which the first is measured by; empty where it gains no more.
        images: of an epoch; None where not known.
    """
    said = [] if line is None else [f"Change that line to {line.name}: {_effect(line, today)}."]
    if not converted:
        return said
    best = converted[0]
    cost = best.cost
    names = " or ".join(f"{way.name} ({way.cost.words})" for way in converted if way.cost is not None)
    said.append(f"Convert to {names}{', too' if line is not None else ''}: {_effect(best, today)}.")
    if best.busy is not None and cost is not None and cost.seconds is not None and images is not None:
        count = epochs_to_pay(cost.seconds, images, today.images_per_s, best.images_per_s)
        said.append(f"Converting pays after {epochs(count)}.")
    return said


def times(speedup: float) -> str:
    """'3.5 times', '12 times'."""
    return f"{speedup:.1f} times" if speedup < 10 else f"{speedup:.0f} times"


def _effect(way: Way, today: Way) -> str:
    speedup = way.images_per_s / today.images_per_s
    if way.busy is None:
        return f"{way.images_per_s:,.0f} images/s, {times(speedup)} as many"
    # below 1.5 '1.1 times sooner' is read as more than it is
    sooner = f"{1 - 1 / speedup:.0%}" if speedup < 1.5 else times(speedup)
    return f"it is busy {percent(way.busy)}, and training ends {sooner} sooner than today"
