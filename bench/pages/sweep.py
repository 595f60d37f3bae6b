"""A sweep as one HTML page that needs no network: what to choose, and throughput over each setting."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from bench.findings.grid import Measured, Point, plateau, recommend, sentence, switches
from bench.findings.sweep_file import SweepFile
from bench.findings.trust import disturbance, is_disturbed
from bench.findings.verdict import KEEPS_UP, judge

# Okabe and Ito, "Color Universal Design" (2008), without black and yellow
_COLOURS = ("#2b83c6", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
_HEIGHT = 380
# Charts take the page's colours from here: dark mode and print need no script. Columns are as wide from
# the start: a chart keeps the width that it was drawn with.
_STYLE = """
:root { color-scheme: light dark; --fg: #1c1e21; --bg: #fff; --line: #d9dce1; }
@media (prefers-color-scheme: dark) { :root { --fg: #e6e8eb; --bg: #15171a; --line: #3a3f47; } }
@media print { :root { color-scheme: light; --fg: #000; --bg: #fff; --line: #ccc; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg);
  max-width: 74rem; margin: 1.5rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.25rem; }
.charts { display: grid; gap: 1rem 2rem; grid-template-columns: repeat(2, minmax(0, 1fr)); }
@media (max-width: 50rem) { .charts { grid-template-columns: minmax(0, 1fr); } }
figure { margin: 0; min-width: 0; break-inside: avoid; } figcaption { font-weight: 600; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
.js-plotly-plot .main-svg text:not(.hoverlayer *) { fill: var(--fg) !important; }
.js-plotly-plot .gridlayer path { stroke: var(--line) !important; }
"""


def html(points: Sequence[Point], file: SweepFile, conditions: str) -> str:
    """The page of those of `points` that `file` knows."""
    measured = [m for m in file.measured() if m.point in set(points)]
    advice = "".join(f"<p><strong>{escape(line)}</strong></p>" for line in answer(points, file))
    groups = dict.fromkeys(replace(point, workers=0, batch_size=0) for point in points)
    charts = "".join(_section(number, group, measured) for number, group in enumerate(groups))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Loader sweep</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>"
        f"<h1>How many workers, which batch size?</h1>{advice}"
        "<p>Images/s of the trainer fed by the loader, and its range; dotted: the trainer alone; "
        "a star: the plateau begins, within 2% of the most of its line.</p>"
        f"{charts}{_table(points, measured, file)}<p>{escape(conditions)}</p></body></html>\n"
    )


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
    shown = "".join(
        f"<figure><figcaption>{title}</figcaption>"
        + plotly.io.to_html(
            figure,
            config={"responsive": True, "displayModeBar": False},
            include_plotlyjs=False,
            full_html=False,
            default_height=f"{_HEIGHT}px",
            div_id=f"chart-{number}-{rank}",
        )
        + "</figure>"
        for rank, (title, figure) in enumerate(figures.items())
    )
    name = f"{group.backend} on {group.data}{switches(group)}"
    return f'<h2>{escape(name)}</h2><div class="charts">{shown}</div>'


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
        cells = (name, f"{point.batch_size:,}", str(point.workers), rate, share, note)
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{title}</th>" for title in titles)
    rows = "".join(lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
