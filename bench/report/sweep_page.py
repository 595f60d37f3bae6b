"""A sweep as one HTML page that needs no network: what to choose, and throughput over each setting."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape

import plotly.graph_objects as go

from bench.report import skeleton
from bench.report.grid import Measured, Point, plateau, recommend, sentence, switches
from bench.report.sweep_file import SweepFile
from bench.report.trust import disturbance, is_disturbed
from bench.report.verdict import KEEPS_UP, judge
from precache.console import page

# Okabe and Ito, "Color Universal Design" (2008), without black and yellow
_COLOURS = ("#2b83c6", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
_HEIGHT = 380
# Columns are as wide from the start: a chart keeps the width that it was drawn with.
_STYLE = """
.charts { grid-template-columns: repeat(2, minmax(0, 1fr)); }
@media (max-width: 50rem) { .charts { grid-template-columns: minmax(0, 1fr); } }
"""


def html(points: Sequence[Point], file: SweepFile, conditions: str) -> str:
    """The page of those of `points` that `file` knows."""
    measured = [m for m in file.measured() if m.point in set(points)]
    advice = page.paragraphs(answer(points, file))
    groups = dict.fromkeys(replace(point, workers=0, batch_size=0) for point in points)
    charts = "".join(_section(number, group, measured) for number, group in enumerate(groups))
    content = (
        f'<h1>How many workers, which batch size?</h1><section class="verdict">{advice}</section>'
        '<p class="note">Images/s of the trainer fed by the loader, and its range; dotted: the trainer '
        "alone; a star: the plateau begins, within 2% of the most of its line.</p>"
        f"{charts}{_table(points, measured, file)}<p>{escape(conditions)}</p>"
    )
    return skeleton.document("Loader sweep", content, _STYLE)


def answer(points: Sequence[Point], file: SweepFile) -> list[str]:
    """What to choose, one sentence for each backend and folder, or why nothing is named."""
    other_cpu = file.other_cpu(points)
    if is_disturbed(other_cpu):
        return [disturbance(other_cpu)]
    measured = [m for m in file.measured() if m.point in set(points)]
    return [sentence(found) for found in recommend(measured, other_cpu)]


def _section(number: int, group: Point, measured: Sequence[Measured]) -> str:
    own = [m for m in measured if replace(m.point, workers=0, batch_size=0) == group]
    if not own:
        return ""
    figures = {
        "Over workers": _chart(own, _workers, "workers", lambda m: f"batch {m.point.batch_size:,}"),
        "Over batch size": _chart(own, _batch_size, "batch size", lambda m: f"workers {m.point.workers}"),
    }
    name = f"{group.backend} on {group.data}{switches(group)}"
    return f"<h2>{escape(name)}</h2>{skeleton.draw(figures, f'chart-{number}')}"


def _workers(measured: Measured) -> int:
    return measured.point.workers


def _batch_size(measured: Measured) -> int:
    return measured.point.batch_size


def _chart(
    measured: Sequence[Measured],
    across: Callable[[Measured], int],
    title: str,
    line_of: Callable[[Measured], str],
) -> go.Figure:
    """A line per `line_of`, with its plateau and the trainer's own rate."""
    ordered = sorted(measured, key=lambda m: (_workers(m), _batch_size(m)))
    ordered.sort(key=across)
    names = list(dict.fromkeys(line_of(m) for m in sorted(measured, key=lambda m: m.point.batch_size)))
    figure = go.Figure()
    for number, name in enumerate(names):
        series = [m for m in ordered if line_of(m) == name]
        _add_line(figure, series, across, name, _COLOURS[number % len(_COLOURS)])
    figure.update_layout(
        template="none",
        height=_HEIGHT,
        margin={"l": 10, "r": 16, "t": 10, "b": 10},
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        dragmode=False,  # else a finger on a chart cannot scroll the page
        showlegend=True,
    )
    values = [str(value) for value in sorted({across(m) for m in measured})]
    figure.update_xaxes(title=title, type="category", categoryarray=values, automargin=True)
    figure.update_yaxes(title="images/s", rangemode="tozero", automargin=True)
    return figure


def _add_line(
    figure: go.Figure, series: Sequence[Measured], across: Callable[[Measured], int], name: str, colour: str
) -> None:
    places = [str(across(m)) for m in series]
    rates = [m.together for m in series]
    spread = {
        "type": "data",
        "array": [rate.high - rate.median for rate in rates],
        "arrayminus": [rate.median - rate.low for rate in rates],
        "thickness": 1.2,
    }
    figure.add_scatter(
        x=places,
        y=[rate.median for rate in rates],
        error_y=spread,
        mode="lines+markers",
        name=name,
        legendgroup=name,
        line={"color": colour},
    )
    begins = plateau(series)
    figure.add_scatter(
        x=[str(across(begins))],
        y=[begins.together.median],
        mode="markers",
        marker={"symbol": "star", "size": 15, "color": colour},
        name=f"{name}: plateau",
        legendgroup=name,
        showlegend=False,
    )
    if all(m.trainer is not None for m in series):
        figure.add_scatter(
            x=places,
            y=[m.trainer.median for m in series if m.trainer is not None],
            mode="lines",
            line={"color": colour, "dash": "dot", "width": 1},
            name=f"{name}: trainer alone",
            legendgroup=name,
            showlegend=False,
        )


def _table(points: Sequence[Point], measured: Sequence[Measured], file: SweepFile) -> str:
    found = {m.point: m for m in measured}
    titles = ("backend and folder", "batch", "workers", "images/s", "of the trainer", "")
    lines = []
    for point in points:
        name = f"{point.backend} on {point.data}{switches(point)}"
        rate = share = ""
        note = file.pruned.get(point) or file.failed.get(point, "")
        if point in found:
            m = found[point]
            rate = f"{m.together.median:,.0f}"
            share = "" if m.ratio is None else f"{m.ratio.median:.0%}"
            note = "does not wait" if judge(m.ratio) == KEEPS_UP else ""
        elif note:
            note = f"not measured: {note}"
        lines.append((name, f"{point.batch_size:,}", str(point.workers), rate, share, note))
    return page.table(titles, lines)
