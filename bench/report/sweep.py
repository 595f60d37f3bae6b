"""A sweep over workers and batch sizes: what needs no measuring, and what to choose.

Pure, but for `show`, which prints.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import click
import plotly.graph_objects as go

from bench.report import page as pages
from bench.report.page import COLOURS, figure, line, spread
from bench.report.row import Row
from bench.report.stats import NEGLIGIBLE_SHARE, disturbance, is_disturbed
from bench.report.verdict import (
    KEEPS_UP,
    NO_TRAINER,
    NOT_DISTINGUISHABLE,
    judge,
    lost_share,
)
from bench.report.words import Table, counted, say
from precache import page

FALLING_SHARE = 0.9
"""With less of what fewer workers gave, more of them do harm."""
HOPELESS_SHARE = 0.5
"""Settings that reached less of the best at one batch size are not tried at the next."""


class Point(NamedTuple):
    """What differs between the trials of a sweep: fields of `bench.measure.settings.Settings`.

    Attributes:
        backend, data: of the loader; its folder.
        batch_size: samples per batch.
        workers: of the loader.
    """

    backend: str
    data: str
    batch_size: int
    workers: int

    @property
    def loader(self) -> str:
        """What is measured on what."""
        return f"{self.backend} on {self.data}"

    @property
    def words(self) -> str:
        """`2 workers, batch 64`."""
        return f"{counted(self.workers, 'worker')}, batch {self.batch_size:,}"


@dataclass(frozen=True, slots=True)
class Found:
    """A sweep so far.

    Attributes:
        points: that were asked for.
        measured: the row of each that was; its `rate` is that of the loader where there is no trainer.
        left_out: why the others were not: they cannot be of use, or do not fit into memory.
        other_cpu: what other processes took of the CPUs, 0 to 1, on average; None where not known.
    """

    points: Sequence[Point]
    measured: Mapping[Point, Row]
    left_out: Mapping[Point, str]
    other_cpu: float | None


def grid(
    loaders: Iterable[tuple[str, str]], workers: Iterable[int], batch_sizes: Iterable[int]
) -> list[Point]:
    """Every combination, in the order of measuring: workers change fastest.

    Args:
        loaders: pairs of backend and folder.
    """
    return [
        Point(backend, data, batch_size, count)
        for (backend, data), batch_size, count in itertools.product(loaders, batch_sizes, workers)
    ]


def prune(point: Point, measured: Mapping[Point, Row], too_large: Collection[Point]) -> str | None:
    """Why `point` need not be measured after these were; None if it must.

    A series is all that differs in workers alone. A point is left out where

    1. fewer workers of its series unblock the trainer (it loses less than 2%): more cannot help;
    2. in its series the largest number of workers measured gave less than 90% of what fewer did: more
       do harm;
    3. at the next smaller batch size that was measured with as many workers, they gave less than half
       of the best that the backend reached there: so many workers are clearly wrong;
    4. it, or a smaller batch, did not fit into memory.
    """
    alike = [one.batch_size for one in too_large if one[:2] == point[:2]]
    if min(alike, default=math.inf) <= point.batch_size:
        return f"batch {min(alike):,} did not fit into memory"
    rates = {at: row.rate.median for at, row in measured.items() if at[:2] == point[:2]}
    fewer = [at for at in _series(rates, point) if at.workers < point.workers]
    for at in fewer:
        if judge(measured[at].ratio) == KEEPS_UP:
            return f"the trainer does not wait with {counted(at.workers, 'worker')}"
    if len(fewer) > 1:
        most, best = fewer[-1], max(fewer, key=rates.__getitem__)
        if rates[most] < FALLING_SHARE * rates[best]:
            return f"{counted(most.workers, 'worker')} gave less than {best.workers}"
    smaller = [at for at in rates if at.batch_size < point.batch_size and at.workers == point.workers]
    if smaller:
        last = max(smaller, key=lambda at: at.batch_size)
        best_rate = max(rate for at, rate in rates.items() if at.batch_size == last.batch_size)
        if rates[last] < HOPELESS_SHARE * best_rate:
            share = f"{rates[last] / best_rate:.0%} of the best"
            return f"with batch {last.batch_size:,} {counted(last.workers, 'worker')} gave {share}"
    return None


def choose(measured: Mapping[Point, Row]) -> tuple[Point, Point]:
    """What to choose of one loader's settings, and what gave the most images/s.

    First the smallest batch of which any number of workers is within 2% of the best throughput; then, among
    its numbers of workers, the fewest that unblock the trainer, or else of which that is not
    distinguishable, or else that are within 2% of the most they reach.
    """
    rates = {at: row.rate.median for at, row in measured.items()}
    best = max(rates, key=rates.__getitem__)
    enough = [at for at, rate in rates.items() if rate >= (1 - NEGLIGIBLE_SHARE) * rates[best]]
    batch_size = min(at.batch_size for at in enough)
    top = max((at for at in enough if at.batch_size == batch_size), key=rates.__getitem__)
    series = _series(rates, top)
    for verdict in (KEEPS_UP, NOT_DISTINGUISHABLE):
        for at in series:
            if judge(measured[at].ratio) == verdict:
                return at, best
    most = max(rates[at] for at in series)
    return next(at for at in series if rates[at] >= (1 - NEGLIGIBLE_SHARE) * most), best


def answer(found: Found) -> list[str]:
    """What to choose, one sentence for each backend and folder, or why nothing is named."""
    if is_disturbed(found.other_cpu):
        return [disturbance(found.other_cpu)]
    return [_sentence(own) for own in _by_loader(found).values()]


def _sentence(measured: Mapping[Point, Row]) -> str:
    point, best = choose(measured)
    chosen, most = measured[point], measured[best].rate.median
    verdict, rate = judge(chosen.ratio), chosen.rate.median
    text = f"{point.backend} on {point.data}: choose {point.words}: {rate:,.0f} images/s"
    if point != best:
        text += f", {rate / most:.0%} of the best ({most:,.0f} with {best.words})"
    if verdict == NO_TRAINER or chosen.ratio is None:
        return f"{text}."
    if verdict == KEEPS_UP:
        return f"{text}; the trainer does not wait."
    if verdict == NOT_DISTINGUISHABLE:
        return f"{text}; the trainer may wait: the trials disagree."
    lost = f"it gets {lost_share(chosen.ratio):.0%} fewer images/s than alone"
    return f"{text}; the trainer waits with every number of workers: {lost}."


def tables(found: Found) -> list[Table]:
    """One for each backend and folder: workers down, batch sizes across."""
    chosen = set()
    if not is_disturbed(found.other_cpu):
        chosen = {choose(own)[0] for own in _by_loader(found).values()}

    def cell(point: Point) -> str:
        if point not in found.measured:
            return "too large" if "fit into memory" in found.left_out.get(point, "") else "-"
        row = found.measured[point]
        keeps_up = row.ratio is None or judge(row.ratio) == KEEPS_UP
        waits = "" if row.ratio is None or keeps_up else f" (waits {lost_share(row.ratio):.0%})"
        return f"{row.rate.median:,.0f}{waits}{' chosen' * (point in chosen)}"

    shown = []
    for loader in dict.fromkeys(point[:2] for point in found.points):
        own = [point for point in found.points if point[:2] == loader]
        sizes = sorted({point.batch_size for point in own})
        rows = [
            [str(workers), *(cell(Point(*loader, size, workers)) for size in sizes)]
            for workers in sorted({point.workers for point in own})
        ]
        shown.append(Table(["workers", *(f"batch {size:,}" for size in sizes)], rows, title=own[0].loader))
    return shown


_LEGEND = (
    "images/s of the trainer, fed by the loader; waits: how many fewer than alone; -: not measured, the file "
    "says why."
)


def show(found: Found, conditions: str) -> None:
    """Print what to choose, the tables, and under which conditions they hold."""
    for text in answer(found):
        say(text)
    for table in tables(found):
        click.echo()
        table.show()
    click.echo()
    say(_LEGEND)
    say(f"{conditions}.")


def html(found: Found, conditions: str) -> str:
    """The page: what to choose, and for each loader throughput over its settings as chart and table."""
    parts = []
    charts = {next(iter(own)).loader: _chart(own) for own in _by_loader(found).values()}
    for number, table in enumerate(tables(found)):
        parts.append(f"<h2>{page.with_code(table.title)}</h2>")
        if table.title in charts:
            drawn = {"Over workers: a flat line gains nothing from more": charts[table.title]}
            parts.append(pages.charts(drawn, f"chart-{number}"))
        parts.append(table.html())
    parts.append(page.paragraphs([f"{_LEGEND} Dotted: the trainer alone.", f"{conditions}."]))
    return pages.document("How many workers, which batch size?", answer(found), parts)


def _chart(measured: Mapping[Point, Row]) -> go.Figure:
    """A line for each batch size over the number of workers, and dotted the trainer's own rate."""
    traces = []
    for number, batch_size in enumerate(sorted({at.batch_size for at in measured})):
        series = sorted(at for at in measured if at.batch_size == batch_size)  # ascending in workers
        rows = [measured[at] for at in series]
        colour, places = COLOURS[number % len(COLOURS)], [str(at.workers) for at in series]
        rates, name = [row.rate for row in rows], f"batch {batch_size:,}"
        up = [rate.median for rate in rates]
        traces.append(line(places, up, name, colour, mode="lines+markers", error_y=spread(rates)))
        alone = [row.trainer.median for row in rows if row.trainer is not None]
        if len(alone) == len(series):
            traces.append(line(places, alone, name, colour, width=1, dash="dot", showlegend=False))
    drawn = figure(traces, 280, "workers", "images/s")
    values = [str(workers) for workers in sorted({at.workers for at in measured})]
    drawn.update_xaxes(type="category", categoryarray=values)
    return drawn.update_yaxes(rangemode="tozero")


def _series(points: Iterable[Point], point: Point) -> list[Point]:
    """Those that differ from `point` in workers alone, ascending."""
    return sorted(at for at in points if at[:3] == point[:3])


def _by_loader(found: Found) -> dict[tuple[str, str], dict[Point, Row]]:
    own: dict[tuple[str, str], dict[Point, Row]] = {}
    for point in found.points:
        if point in found.measured:
            own.setdefault((point.backend, point.data), {})[point] = found.measured[point]
    return own
