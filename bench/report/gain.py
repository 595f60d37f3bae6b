"""What another loader, and converting, gain over what people have today: one figure and one wording. Pure.

The baseline is torchvision's ImageFolder in a DataLoader. The first advice is to change that line to
`loaders.build`, which takes nothing; the second is to convert. Rows may be measured or predicted; a sentence
names a winner only where the ranges of several runs lie apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report.row import RAW_TREE, TODAY_BACKEND, Result, Row
from bench.report.stats import disturbance, exceeds, is_disturbed, other_cpu
from bench.report.verdict import KEEPS_UP, judge
from bench.report.words import counted, duration, percent
from precache.cli.commandline import human_bytes

TODAY = "ImageFolder and DataLoader"
"""The baseline, in sentences."""
LINE = "`loaders.build`"
"""What replaces it, in sentences."""


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
        """What is fastest; empty where nothing can be told to be faster than today's."""
        return self.converted or (() if self.line is None else (self.line,))


def find_gain(rows: Sequence[Row], today: Row | None = None) -> Gain:
    """Of rows with one trainer. Today's loader may be that of `--against`, where all were measured alone.

    `today` stands for it where ImageFolder could not be measured.
    """
    ours = [row for row in rows if row.is_ours]
    alone = all(row.ratio is None for row in ours)
    today = next((row for row in (rows if alone else ours) if row.backend == TODAY_BACKEND), today)
    if today is None:
        return Gain(None, None, ())
    others = sorted((row for row in ours if row is not today), key=lambda row: -row.rate.median)
    line = next((row for row in others if row.data == RAW_TREE and exceeds(row.rate, today.rate)), None)
    converted = [row for row in others if row.data != RAW_TREE]
    alike = tuple(
        row
        for row in converted
        if row.rate.high >= converted[0].rate.low and exceeds(row.rate, (line or today).rate)
    )
    return Gain(today, line, alike)


def saved_share(row: Row, today: Row) -> float | None:
    """Share, 0 to 1, of today's time of training that `row` saves; None where within noise."""
    return 1 - today.rate.median / row.rate.median if row.rate.low > today.rate.high else None


def best_rows(result: Result) -> list[Row]:
    """Of each trainer what is faster than today's loader by most; beside other busy processes none is."""
    if is_disturbed(other_cpu(result.settings)):
        return []
    names = dict.fromkeys(row.trainer_name for row in result.rows if row.is_ours)
    by_trainer = ([row for row in result.rows if row.trainer_name == name] for name in names)
    return [row for rows in by_trainer for row in find_gain(rows).best]


def sentences(result: Result, gpu_price: float | None = None) -> list[str]:
    """What the result says, a text for each trainer; `gpu_price` as for `answers`."""
    return [" ".join(told) for told in answers(result, gpu_price)]


def answers(result: Result, gpu_price: float | None = None) -> list[list[str]]:
    """What the result says, a few sentences for each trainer.

    Args:
        gpu_price: dollars per hour of the accelerator; None leaves money out.
    """
    names = list(dict.fromkeys(row.trainer_name for row in result.rows if not row.peer))
    said = []
    for name in names:
        rows = [row for row in result.rows if row.trainer_name == name]
        ours = [row for row in rows if row.is_ours]
        if not ours:
            continue
        told = answer(
            rows,
            accelerator=what_is_fed(result, ours[0]),
            images=next((count for row in ours if (count := result.samples(row))), None),
            repeats=result.settings["repeats"],
            others=other_cpu(result.settings),
            gpu_price=gpu_price,
        )
        told[0] = (f"{name}: " if len(names) > 1 else "") + told[0]
        said.append(told)
    return said


def answer(
    rows: Sequence[Row],
    *,
    accelerator: str,
    images: int | None,
    repeats: int,
    others: float | None,
    gpu_price: float | None = None,
    today: Row | None = None,
) -> list[str]:
    """What to do, of rows with one trainer: what today's loader does, the other line, converting.

    Args:
        accelerator: what is fed, in words.
        images: of an epoch; None where not known.
        repeats: of which the ranges are.
        others: what other processes took of the CPUs, see `bench.report.stats`.
        gpu_price: dollars per hour of the accelerator; None leaves money out.
        today: see `find_gain`.
    """
    gain, ours = find_gain(rows, today), [row for row in rows if row.is_ours]
    today = gain.today
    if today is None:
        best = max(ours, key=lambda row: row.rate.median)
        share = best.busy
        fed = "" if share is None else f" and keeps the accelerator busy {percent(share.median)} of the time"
        return [
            f"Backend `{best.backend}` delivers {best.loader.median:,.0f} images/s{fed}.",
            f"What {TODAY} do was not measured: add the raw tree and backend imagefolder to compare.",
        ]
    if judge(today.ratio) == KEEPS_UP:  # noise can only lower that
        already = does(today, accelerator, already=True)
        return [f"{already}: neither another loader nor converting gains anything."]
    why_none = _no_winner(gain, today, [row for row in ours if row is not today], repeats, others)
    if why_none:
        return [f"{does(today, accelerator)}.", why_none]
    said = [f"{does(today, accelerator)}.", *advice(gain, images)]
    if not gain.converted and any(row.data != RAW_TREE for row in ours):
        said.append("Converting gains no more.")
    if gpu_price is not None and today.busy is not None:
        speedup = gain.best[0].rate.median / today.rate.median
        said.append(
            f"At ${gpu_price:,.2f} an hour, what costs $100 today then costs ${100 / speedup:,.0f}: "
            f"${gpu_price * (1 - 1 / speedup):,.2f} saved of every hour."
        )
    return said


def _no_winner(gain: Gain, today: Row, other: Sequence[Row], repeats: int, others: float | None) -> str:
    """Why nothing is said to be faster than today's; empty where something is."""
    disturbed = disturbance(others)
    if disturbed or not other:
        return disturbed or "No other loader was measured."
    if repeats < 2:
        return "One run of each names no winner: use --repeats 2 or more."
    if gain.best:
        return ""
    if all(row.rate.high < today.rate.low for row in other):
        return "No other loader here is faster."
    return f"The ranges of {repeats} runs overlap, so no loader wins."


def does(today: Row, accelerator: str, *, already: bool = False) -> str:
    """What the baseline does, without a full stop: the first words of every answer."""
    several = today.backend == TODAY_BACKEND
    name = way(today)
    verb = ("already " if already else "") + ("deliver" if today.busy is None else "keep")
    verb += "" if several else "s"
    if today.busy is None:
        return f"{name} {verb} {today.rate.median:,.0f} images/s"
    return f"{name} {verb} {accelerator} busy {percent(today.busy.median)} of the time"


def advice(gain: Gain, images: int | None) -> list[str]:
    """What to do instead of today's, a sentence for each step: the other line, then converting."""
    today, line = gain.today, gain.line
    assert today is not None
    said = [] if line is None else [f"Change that line to {way(line)}: {_effect(line, today)}."]
    if not gain.converted:
        return said
    best = gain.converted[0]
    names = " or ".join(f"{way(row)} ({cost(row)})" for row in gain.converted)
    said.append(f"Convert to {names}{', too' if line is not None else ''}: {_effect(best, today)}.")
    if best.busy is not None and best.convert_s is not None and images is not None:
        count = epochs_to_pay(best.convert_s, images, today.rate.median, best.rate.median)
        pays = "does not pay" if count is None else f"pays after {counted(count, 'epoch')}"
        said.append(f"Converting {pays}.")
    return said


def way(row: Row) -> str:
    """How one trains from it, as sentences call it."""
    if row.backend == TODAY_BACKEND:
        return TODAY
    if row.data == RAW_TREE:
        return LINE if row.backend == "pytorch" else f"{LINE} with backend {row.backend}"
    return row.data if row.data.startswith(row.backend) else f"{row.data} for backend {row.backend}"


def cost(row: Row) -> str:
    """What converted data takes once, as in '24.2 s, 286 MiB'."""
    time = "time not measured" if row.convert_s is None else duration(row.convert_s)
    return time if row.size_bytes is None else f"{time}, {human_bytes(row.size_bytes)}"


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
    speedup = row.rate.median / today.rate.median
    if row.busy is None:
        return f"{row.rate.median:,.0f} images/s, {times(speedup)} as many"
    # below 1.5 '1.1 times sooner' is read as more than it is
    sooner = f"{1 - 1 / speedup:.0%}" if speedup < 1.5 else times(speedup)
    return f"it is busy {percent(row.busy.median)}, and training ends {sooner} sooner than today"


def what_is_fed(result: Result, row: Row) -> str:
    """What the row's loader feeds, in words."""
    if row.trainer_name.startswith("emulated") and row.trainer is not None:
        return f"an emulated accelerator of {row.trainer.median:,.0f} images/s"
    on_cpu = str(result.settings.get("device", "cpu")) == "cpu"
    return f"{row.trainer_name} on this CPU" if on_cpu else "this accelerator"
