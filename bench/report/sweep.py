"""A sweep over workers, batch sizes, precision and pinning: what needs no measuring, and what to choose.

Pure, but for `show`, which prints.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import click
import plotly.graph_objects as go

from bench.report import page as pages
from bench.report.page import COLOURS, figure, line, spread
from bench.report.stats import Estimate
from bench.report.trust import disturbance, is_disturbed
from bench.report.verdict import (
    KEEPS_UP,
    NEGLIGIBLE_SHARE,
    NO_TRAINER,
    NOT_DISTINGUISHABLE,
    judge,
    lost_share,
)
from bench.report.words import Table, counted
from precache.console import page
from precache.errors import check_range

FALLING_SHARE = 0.9
"""With less of what fewer workers gave, more of them do harm."""
HOPELESS_SHARE = 0.5
"""Settings that reached less of the best at one batch size are not tried at the next."""
_DECODE_ON_DEVICE = ("dali", "nvjpeg")
_STYLE = """
.charts { grid-template-columns: repeat(2, minmax(0, 1fr)); }
@media (max-width: 50rem) { .charts { grid-template-columns: minmax(0, 1fr); } }
"""  # columns are as wide from the start: a chart keeps the width that it was drawn with


class Point(NamedTuple):
    """What differs between the trials of a sweep: fields of `bench.measure.settings.Settings`.

    Attributes:
        backend, data: of the loader; its folder.
        batch_size: samples per batch.
        amp: precision of the trainer, `bf16`, `fp16` or `off`; None where it does not compute.
        pin: whether batches cross to the device from pinned memory, ahead of the training, or from
            pageable memory, in its thread; None where that makes no difference.
        workers: of the loader.
    """

    backend: str
    data: str
    batch_size: int
    amp: str | None
    pin: bool | None
    workers: int

    @property
    def loader(self) -> str:
        """What is measured on what, with what else all of its trials share."""
        return f"{self.backend} on {self.data}{self.switches}"

    @property
    def switches(self) -> str:
        """`, amp bf16, pin off`; empty where they make no difference."""
        amp = "" if self.amp is None else f", amp {self.amp}"
        pin = "" if self.pin is None else f", pin {'on' if self.pin else 'off'}"
        return amp + pin

    @property
    def words(self) -> str:
        """`2 workers, batch 64, amp bf16`."""
        return f"{counted(self.workers, 'worker')}, batch {self.batch_size:,}{self.switches}"


@dataclass(frozen=True, slots=True)
class Measured:
    """What the trials of a point gave.

    Attributes:
        together: images/s of the trainer fed by the loader; of the loader where there is no trainer.
        trainer: images/s of the trainer alone, on a batch that stays on the device.
        ratio: together over trainer, trial by trial.
    """

    point: Point
    together: Estimate
    trainer: Estimate | None = None
    ratio: Estimate | None = None

    @property
    def rate(self) -> float:
        """The median of `together`."""
        return self.together.median


@dataclass(frozen=True, slots=True)
class Found:
    """A sweep so far.

    Attributes:
        points: that were asked for.
        measured: of each that was.
        left_out: why the others were not: they cannot be of use, or do not fit into memory.
        other_cpu: what other processes took of the CPUs, 0 to 1, on average; None where not known.
    """

    points: Sequence[Point]
    measured: Mapping[Point, Measured]
    left_out: Mapping[Point, str]
    other_cpu: float | None


@dataclass(frozen=True, slots=True)
class Axes:
    """The values of each setting, ascending, without repetition."""

    workers: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    amp: tuple[str | None, ...]
    pin: tuple[bool | None, ...]

    def __post_init__(self) -> None:
        for count in self.workers:
            check_range("workers", count, 0)
        for size in self.batch_sizes:
            check_range("batch_size", size, 1)


def drop_axes(axes: Axes, device_type: str, *, computes: bool, cache: str = "none") -> tuple[Axes, list[str]]:
    """`axes` without those that make no difference, and a line for each that had more than one value.

    `computes` is whether the trainer does, `cache` that of the loaders.
    """
    notes = []
    if not computes:
        notes += ["--amp changes nothing for a trainer that does not compute"] if len(axes.amp) > 1 else []
        axes = replace(axes, amp=(None,))
    if device_type != "cuda" or cache == "device":
        why = "without CUDA" if device_type != "cuda" else "with --cache device"
        notes += [f"--pin changes nothing {why}"] if len(axes.pin) > 1 else []
        axes = replace(axes, pin=(None,))
    return axes, [f"{note}: it is left out" for note in notes]


def grid(loaders: Iterable[tuple[str, str]], axes: Axes) -> list[Point]:
    """Every combination, in the order of measuring: workers change fastest, then pin, amp, batch size.

    `loaders` are pairs of backend and folder. Backends that decode on the device have no axis `pin`: no
    pictures cross to it.
    """
    return [
        Point(backend, data, batch_size, amp, pin, workers)
        for backend, data in loaders
        for batch_size, amp, pin, workers in itertools.product(
            axes.batch_sizes,
            axes.amp,
            (None,) if backend in _DECODE_ON_DEVICE else axes.pin,
            axes.workers,
        )
    ]


def prune(point: Point, measured: Collection[Measured], too_large: Collection[Point]) -> str | None:
    """Why `point` need not be measured after these were; None if it must.

    A series is all that differs in workers alone. A point is left out where

    1. fewer workers of its series unblock the trainer (it loses less than 2%): more cannot help;
    2. in its series the largest number of workers measured gave less than 90% of what fewer did: more
       do harm;
    3. at the next smaller batch size at which its other settings were measured, they gave less than half
       of the best that the backend reached there: one of them, be it workers, amp or pin, is clearly wrong;
    4. it, or a smaller batch with the same amp, did not fit into memory.
    """
    alike = [one for one in too_large if (*one[:2], one.amp) == (*point[:2], point.amp)]
    if any(one.batch_size <= point.batch_size for one in alike):
        return f"batch {min(one.batch_size for one in alike):,} did not fit into memory"
    same = [m for m in measured if m.point[:2] == point[:2]]
    fewer = [m for m in _series(same, point) if m.point.workers < point.workers]
    for m in fewer:
        if judge(m.ratio) == KEEPS_UP:
            return f"the trainer does not wait with {counted(m.point.workers, 'worker')}"
    if len(fewer) > 1:
        most, best = fewer[-1], max(fewer, key=lambda m: m.rate)
        if most.rate < FALLING_SHARE * best.rate:
            return f"{counted(most.point.workers, 'worker')} gave less than {best.point.workers}"
    smaller = [
        m
        for m in same
        if m.point.batch_size < point.batch_size and m.point._replace(batch_size=point.batch_size) == point
    ]
    if smaller:
        last = max(smaller, key=lambda m: m.point.batch_size)
        best_rate = max(m.rate for m in same if m.point.batch_size == last.point.batch_size)
        if last.rate < HOPELESS_SHARE * best_rate:
            share = f"{last.rate / best_rate:.0%} of the best"
            return f"with batch {last.point.batch_size:,} these settings gave {share}"
    return None


def plateau(series: Sequence[Measured]) -> Measured:
    """The first of a series, ascending in workers or batch size, within 2% of its best."""
    enough = (1 - NEGLIGIBLE_SHARE) * max(m.rate for m in series)
    return next(m for m in series if m.rate >= enough)


def choose(measured: Collection[Measured]) -> tuple[Measured, Measured]:
    """What to choose of one loader's settings, and what gave the most images/s.

    First the smallest batch of which any setting is within 2% of the best throughput, with amp and pin
    as they are best there; then, among its numbers of workers, the fewest that unblock the trainer, or
    else of which that is not distinguishable, or else that are within 2% of the most they reach.
    """
    best = max(measured, key=lambda m: m.rate)
    enough = [m for m in measured if m.rate >= (1 - NEGLIGIBLE_SHARE) * best.rate]
    batch_size = min(m.point.batch_size for m in enough)
    top = max((m for m in enough if m.point.batch_size == batch_size), key=lambda m: m.rate)
    series = _series(measured, top.point)
    for verdict in (KEEPS_UP, NOT_DISTINGUISHABLE):
        for m in series:
            if judge(m.ratio) == verdict:
                return m, best
    return plateau(series), best


def answer(found: Found) -> list[str]:
    """What to choose, one sentence for each backend and folder, or why nothing is named."""
    if is_disturbed(found.other_cpu):
        return [disturbance(found.other_cpu)]
    return [_sentence(*choose(own)) for own in _by_loader(found).values()]


def _sentence(chosen: Measured, best: Measured) -> str:
    point, verdict = chosen.point, judge(chosen.ratio)
    text = f"{point.backend} on {point.data}: choose {point.words}: {chosen.rate:,.0f} images/s"
    if point != best.point:
        share = f"{chosen.rate / best.rate:.0%} of the best"
        text += f", {share} ({best.rate:,.0f} with {best.point.words})"
    if verdict == NO_TRAINER or chosen.ratio is None:
        return f"{text}."
    if verdict == KEEPS_UP:
        return f"{text}; the trainer does not wait."
    if verdict == NOT_DISTINGUISHABLE:
        return f"{text}; the trainer may wait: the trials disagree."
    lost = f"it gets {lost_share(chosen.ratio):.0%} fewer images/s than alone"
    return f"{text}; the trainer waits with every number of workers: {lost}."


def tables(found: Found) -> list[Table]:
    """One for each backend, folder, amp and pin: workers down, batch sizes across."""
    chosen = set()
    if not is_disturbed(found.other_cpu):
        chosen = {choose(own)[0].point for own in _by_loader(found).values()}

    def cell(point: Point) -> str:
        if point not in found.measured:
            return "too large" if "fit into memory" in found.left_out.get(point, "") else "-"
        m = found.measured[point]
        waits = "" if m.ratio is None or judge(m.ratio) == KEEPS_UP else f" (waits {lost_share(m.ratio):.0%})"
        return f"{m.rate:,.0f}{waits}{' chosen' * (point in chosen)}"

    shown = []
    for group in dict.fromkeys(point._replace(workers=0, batch_size=0) for point in found.points):
        own = [point for point in found.points if point._replace(workers=0, batch_size=0) == group]
        sizes = sorted({point.batch_size for point in own})
        rows = [
            [str(workers), *(cell(group._replace(workers=workers, batch_size=size)) for size in sizes)]
            for workers in sorted({point.workers for point in own})
        ]
        shown.append(Table(["workers", *(f"batch {size:,}" for size in sizes)], rows, title=group.loader))
    return shown


def show(found: Found, conditions: str) -> None:
    """Print what to choose, the tables, and under which conditions they hold."""
    for text in answer(found):
        click.echo(text)
    for table in tables(found):
        click.echo()
        table.show()
    click.echo(
        "\nimages/s of the trainer, fed by the loader; waits: how many fewer than alone; "
        f"-: not measured, the file says why.\n{conditions}."
    )


def html(found: Found, conditions: str) -> str:
    """The page: what to choose, throughput over each setting, every point."""
    parts = []
    for number, group in enumerate(dict.fromkeys(p._replace(workers=0, batch_size=0) for p in found.points)):
        own = [m for p, m in found.measured.items() if p._replace(workers=0, batch_size=0) == group]
        if own:
            drawn = {
                "Over workers: a flat line gains nothing from more": _chart(
                    own, lambda p: p.workers, "workers", lambda p: f"batch {p.batch_size:,}"
                ),
                "Over batch size: where it flattens, larger ones only take memory": _chart(
                    own, lambda p: p.batch_size, "batch size", lambda p: f"workers {p.workers}"
                ),
            }
            parts.append(f"<h2>{page.with_code(group.loader)}</h2>{pages.charts(drawn, f'chart-{number}')}")
    note = (
        "Images/s of the trainer fed by the loader, and its range; dotted: the trainer alone; a star: from "
        "here on at most 2% more."
    )
    every = page.folded("Every trial", _every(found).html())
    parts = [f'<p class="note">{note}</p>', *parts, every, page.paragraphs([conditions])]
    return pages.document("How many workers, which batch size?", answer(found), parts, _STYLE)


def _every(found: Found) -> Table:
    lines = []
    for point in found.points:
        m = found.measured.get(point)
        note = f"not measured: {found.left_out.get(point, 'not yet')}" if m is None else ""
        if m is not None and judge(m.ratio) == KEEPS_UP:
            note = "does not wait"
        rate = "" if m is None else f"{m.rate:,.0f}"
        share = "" if m is None or m.ratio is None else f"{m.ratio.median:.0%}"
        lines.append([point.loader, f"{point.batch_size:,}", str(point.workers), rate, share, note])
    titles = ("backend and folder", "batch", "workers", "images/s", "of the trainer", "note")
    return Table(titles, lines, words=("note",))


def _chart(
    measured: Sequence[Measured],
    across: Callable[[Point], int],
    title: str,
    name_of: Callable[[Point], str],
) -> go.Figure:
    """A line per `name_of`, with its plateau and the trainer's own rate."""
    ordered = sorted(measured, key=lambda m: (across(m.point), m.point.workers, m.point.batch_size))
    names = dict.fromkeys(name_of(m.point) for m in sorted(measured, key=lambda m: m.point.batch_size))
    traces = []
    for number, name in enumerate(names):
        series = [m for m in ordered if name_of(m.point) == name]
        colour, places = COLOURS[number % len(COLOURS)], [str(across(m.point)) for m in series]
        rates = [m.together for m in series]
        up = [rate.median for rate in rates]
        traces.append(line(places, up, name, colour, mode="lines+markers", error_y=spread(rates)))
        begins = plateau(series)
        star = {"symbol": "star", "size": 15, "color": colour}
        place = [str(across(begins.point))]
        traces.append(line(place, [begins.rate], name, colour, mode="markers", marker=star, showlegend=False))
        alone = [m.trainer.median for m in series if m.trainer is not None]
        if len(alone) == len(series):
            traces.append(line(places, alone, name, colour, width=1, dash="dot", showlegend=False))
    drawn = figure(traces, 280, title, "images/s")
    values = [str(value) for value in sorted({across(m.point) for m in measured})]
    drawn.update_xaxes(type="category", categoryarray=values)
    return drawn.update_yaxes(rangemode="tozero")


def _series(measured: Collection[Measured], point: Point) -> list[Measured]:
    """Those that differ from `point` in workers alone, ascending."""
    own = [m for m in measured if m.point._replace(workers=point.workers) == point]
    return sorted(own, key=lambda m: m.point.workers)


def _by_loader(found: Found) -> dict[tuple[str, str], list[Measured]]:
    own: dict[tuple[str, str], list[Measured]] = {}
    for point in found.points:
        if point in found.measured:
            own.setdefault((point.backend, point.data), []).append(found.measured[point])
    return own
