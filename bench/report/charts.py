"""The figures of the report's page, by plotly. Colours are told apart by colour-blind eyes, too.

Text, grid and background take their colours from the page's style (`bench.report.loaders_page`), so that they
follow dark mode and print; names that came with a result are escaped, for plotly reads some HTML in labels.
"""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import accumulate, chain
from math import ceil, floor, log10
from typing import Any

import plotly.graph_objects as go

from bench.report import table as report
from bench.report.gain import busy
from bench.report.row import Row, Watched
from bench.report.stats import Estimate
from bench.report.verdict import COLD_FETCH
from bench.report.words import percent

# Okabe and Ito, "Color Universal Design" (2008): those that stand out from black and from white.
_BLUE, _SKY, _ORANGE, _RED, _GREEN, _PURPLE = "#2b83c6", "#56b4e9", "#e69f00", "#d55e00", "#009e73", "#cc79a7"
_GREY = "#8a8f98"
_LINES = (_BLUE, _ORANGE, _GREEN, _PURPLE, _RED, _SKY)
_LANE_PIXELS = 46  # its name, and a bar or dots below it
_SERIES_PIXELS = 170
_AXIS_PIXELS = 60
_LEGEND_PIXELS = 18  # an entry, for on a phone each has a line of its own
_LONGEST_NAME = 30
# suffix of a monitor's series -> title of the chart, factor to its unit, what ticks look like
_UNITS = {
    "_share": ("Busy or filled, share", 1.0, ".0%"),
    "_bytes_per_s": ("Disk, network and swap, MB/s", 1e-6, ",.3~r"),
    "_bytes": ("Memory, GiB", 2**-30, ",.3~r"),
    "_w": ("Power, W", 1.0, ",.3~r"),
    "_mhz": ("Clocks, MHz", 1.0, ","),
}


def fed(rows: Sequence[Row]) -> go.Figure:
    """A bar per row, images/s with its trainer, how busy that keeps it, and its own rate; one trainer's."""
    shown = [(row, row.together, row.trainer) for row in rows if row.together and row.trainer]
    limit = shown[0][2].median
    rates = [rate for _, rate, _ in shown]
    bars = go.Bar(
        x=[rate.median for rate in rates],
        y=list(range(len(rates))),
        orientation="h",
        width=0.4,
        marker_color=_BLUE,
        error_x=_spread(rates),
        name="fed by the loader, and its range",
    )
    shares = [busy(row) for row, _, _ in shown]
    names = [
        f"{_name(row)}: {rate.median:,.0f}" + (f" ({percent(share.median)} busy)" if share else "")
        for (row, rate, _), share in zip(shown, shares, strict=True)
    ]
    figure = _lanes([bars], names, "images/s")
    _mark(figure, limit, "trainer alone", _RED)
    figure.update_xaxes(range=[0, 1.08 * max(limit, *(rate.high for rate in rates))])
    return figure


def alone(rows: Sequence[Row]) -> go.Figure:
    """Images/s of each loader without a trainer, warm and cold, beside each trainer's rate."""
    rows = list({(row.backend, row.data, row.peer): row for row in rows}.values())
    ours = [None if row.peer else row.loader for row in rows]
    others = [row.loader if row.peer else None for row in rows]
    dots = [
        _dots(rates, title, colour, symbol)
        for rates, title, colour, symbol in (
            (ours, "loader alone", _BLUE, "circle"),
            ([row.cold for row in rows], "page cache dropped before", _SKY, "diamond"),
            (others, "for comparison: another library or the limit", _GREY, "square"),
        )
        if any(rates)
    ]
    names = [f"{_name(row)}: {row.loader.median:,.0f}" for row in rows]
    figure = _lanes(dots, names, "images/s, logarithmic")
    for trainer in dict.fromkeys(row.trainer.median for row in rows if row.trainer):
        _mark(figure, trainer, "trainer alone", _RED)
    _logarithmic(figure, [*(trace.x for trace in dots), *([shape.x0] for shape in figure.layout.shapes)])
    return figure


def stages(row: Row) -> go.Figure:
    """Images/s that each stage alone can do, beside what was predicted and measured."""
    dots = go.Scatter(
        x=list(row.stages.rates.values()),
        y=list(range(len(row.stages.rates))),
        mode="markers",
        marker={
            "color": [_ORANGE if stage == row.stages.binds else _BLUE for stage in row.stages.rates],
            "size": 13,
        },
        name="stage alone",
    )
    names = [
        f"{escape(stage)}: {rate:,.0f}{' (the bottleneck)' if stage == row.stages.binds else ''}"
        for stage, rate in row.stages.rates.items()
    ]
    figure = _lanes([dots], names, "images/s, logarithmic")
    if row.stages.predicted is not None:
        _mark(figure, row.stages.predicted, "predicted together", _GREEN, "dot")
    if row.together is not None:
        _mark(figure, row.together.median, "measured together", _PURPLE, "solid")
    _logarithmic(figure, [dots.x, *([shape.x0] for shape in figure.layout.shapes)])
    return figure


def waterfall(row: Row, batch_size: int) -> go.Figure:
    """From the compute of a batch over what it is held up by to its whole time, ms; warm cache."""
    assert row.trainer is not None
    assert row.together is not None
    whole_ms = batch_size / row.together.median * 1e3
    parts = {"compute": batch_size / row.trainer.median * 1e3}
    warm = {name: seconds for name, seconds in row.stages.stalls.items() if name != COLD_FETCH}
    parts |= {f"{name} stall": seconds * 1e3 for name, seconds in warm.items()}
    rest_ms = whole_ms - sum(parts.values())
    if abs(rest_ms) >= 0.01 * whole_ms:
        parts["not explained"] = rest_ms
    bars = go.Waterfall(
        x=[*parts.values(), whole_ms],
        y=list(range(len(parts) + 1)),
        measure=["absolute", *["relative"] * (len(parts) - 1), "total"],
        orientation="h",
        width=0.4,
        increasing_marker_color=_ORANGE,
        decreasing_marker_color=_GREEN,
        totals_marker_color=_BLUE,
        connector_line={"color": _GREY, "width": 1},
        showlegend=False,
    )
    names = [f"{escape(name)}: {part:,.1f} ms" for name, part in parts.items()]
    return _lanes([bars], [*names, f"whole batch: {whole_ms:,.1f} ms"], "ms")


def throughput(row: Row, batch_size: int) -> go.Figure:
    """Images/s over the timed batches' time, with the trainer's rate."""
    batch_s = row.batches.batch_s
    ends_s = list(accumulate(batch_s))
    rates = [batch_size / seconds for seconds in batch_s]
    traces = [_line(ends_s, rates, "each batch", _SKY, width=1)]
    spikes = row.batches.spikes
    if spikes is not None:
        means = zip(spikes.running_wait_s, spikes.running_step_s, strict=True)
        running = [batch_size / (wait + step) for wait, step in means]
        traces.append(_line(ends_s, running, "running mean", _BLUE, width=2.5))
    if row.trainer is not None:
        limit = row.trainer.median
        ends = [0, ends_s[-1]]
        traces.append(_line(ends, [limit, limit], f"trainer alone: {limit:,.0f}", _RED, dash="dash"))
    figure = _figure(traces, _SERIES_PIXELS, "seconds")
    # a batch that was ready takes next to no time: such peaks would press the rest flat
    highest = 1.6 * max(row.trainer.median if row.trainer else 0.0, len(rates) * batch_size / ends_s[-1])
    figure.update_yaxes(title="images/s", range=[0, highest])
    return figure


def batch_strip(row: Row) -> go.Figure:
    """Step and wait of every timed batch, stacked, ms; spikes and first batches of epochs marked."""
    times = row.batches
    batches = list(range(len(times.step_s)))
    whole_ms = [seconds * 1e3 for seconds in times.batch_s]
    top_ms = max(whole_ms)
    traces = [
        go.Bar(
            x=batches,
            y=[s * 1e3 for s in times.step_s],
            name="step",
            marker={"color": _BLUE, "line_width": 0},
        ),
        go.Bar(
            x=batches,
            y=[s * 1e3 for s in times.wait_s],
            name="wait",
            marker={"color": _ORANGE, "line_width": 0},
        ),
    ]
    if times.epoch_starts:
        across = chain.from_iterable((start, start, None) for start in times.epoch_starts)
        up = [0, 1.1 * top_ms, None] * len(times.epoch_starts)
        traces.append(_line(list(across), up, "first batch of an epoch", _PURPLE, dash="dot"))
    found = times.spikes
    spikes = sorted({*found.wait_spikes.batches, *found.step_spikes.batches}) if found else []
    if spikes:
        above = [whole_ms[batch] + 0.05 * top_ms for batch in spikes]
        marker = {"color": _RED, "symbol": "triangle-down", "size": 8}
        traces.append(go.Scatter(x=spikes, y=above, mode="markers", name="spike", marker=marker))
    figure = _figure(traces, _SERIES_PIXELS, "batch")
    figure.update_layout(barmode="stack", bargap=0)
    figure.update_yaxes(title="ms", range=[0, 1.15 * top_ms])
    return figure


def monitor(sampled: Watched | None) -> dict[str, go.Figure]:
    """A chart per unit of what was sampled, by title; series that stayed at zero are left out."""
    if sampled is None:
        return {}
    found = {name: values for name, values in sampled.series.items() if any(values)}
    figures = {}
    for suffix, (title, factor, ticks) in _UNITS.items():
        names = [name for name in found if _suffix(name) == suffix]
        if names:
            figures[title] = _series(sampled.time_s, {name: found[name] for name in names}, suffix, factor)
            figures[title].update_yaxes(tickformat=ticks, rangemode="tozero")
    return figures


def _series(
    time_s: Sequence[float], series: dict[str, tuple[float, ...]], suffix: str, factor: float
) -> go.Figure:
    cores = [name for name in series if _is_core(name)]
    traces = []
    for number, name in enumerate(cores):  # faint: there may be a hundred
        line = _line(time_s, series[name], "each core", _GREY, width=0.7)
        traces.append(line.update(legendgroup="cores", showlegend=number == 0, opacity=0.6))
    for number, name in enumerate(name for name in series if not _is_core(name)):
        values = [value * factor for value in series[name]]
        label = escape(
            name.removesuffix(suffix).replace("_", " ").replace("cpu", "CPU").replace("gpu", "GPU")
        )
        colour, dash = _LINES[number % len(_LINES)], "solid" if number < len(_LINES) else "dot"
        traces.append(_line(time_s, values, label, colour, dash=dash))
    return _figure(traces, _SERIES_PIXELS, "seconds")


def _suffix(name: str) -> str | None:
    return next((suffix for suffix in _UNITS if name.endswith(suffix)), None)


def _is_core(name: str) -> bool:
    return name.startswith("cpu_") and name.removeprefix("cpu_").removesuffix("_share").isdecimal()


def _lanes(traces: Sequence[Any], names: Sequence[str], across: str) -> go.Figure:
    """Horizontal lanes, y = 0, 1, ... from the top, each below its name, so that a phone has room."""
    figure = _figure(traces, _LANE_PIXELS * len(names), across)
    for lane, name in enumerate(names):
        figure.add_annotation(
            x=0, xref="paper", xanchor="left", y=lane, yshift=18, text=name, showarrow=False
        )
    figure.update_yaxes(range=[len(names) - 0.6, -0.75], showticklabels=False, showgrid=False)
    return figure


def _logarithmic(figure: go.Figure, shown: Iterable[Sequence[float]]) -> None:
    """A logarithmic axis, from a little below to a little above what is shown; plotly's own ticks overlap."""
    rates = list(chain.from_iterable(shown))
    low, high = log10(min(rates)) - 0.15, log10(max(rates)) + 0.15
    steps = (1,) if high - low > 2 else (1, 2, 5)
    ticks = [step * 10.0**power for power in range(floor(low), ceil(high)) for step in steps]
    figure.update_xaxes(type="log", range=[low, high], tickvals=ticks, tickformat=",~s")


def _figure(traces: Sequence[Any], plot_pixels: int, across: str) -> go.Figure:
    figure = go.Figure(traces)
    entries = sum(trace.showlegend is not False for trace in traces)
    figure.update_layout(
        template="none",
        height=plot_pixels + _AXIS_PIXELS + _LEGEND_PIXELS * (entries + 1),
        margin={"l": 10, "r": 16, "t": 34, "b": 10},
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        dragmode=False,  # else a finger on a chart cannot scroll the page
        showlegend=True,
    )
    figure.update_xaxes(title=across, automargin=True, zeroline=False, tickangle=0)
    figure.update_yaxes(automargin=True, zeroline=False)
    return figure


def _dots(rates: Sequence[Estimate | None], title: str, colour: str, symbol: str) -> go.Scatter:
    there = [(lane, rate) for lane, rate in enumerate(rates) if rate]
    return go.Scatter(
        x=[rate.median for _, rate in there],
        y=[lane for lane, _ in there],
        mode="markers",
        marker={"color": colour, "symbol": symbol, "size": 12},
        error_x=_spread([rate for _, rate in there]),
        name=title,
    )


def _line(
    across: Sequence[float | None],
    up: Sequence[float | None],
    name: str,
    colour: str,
    width: float = 2,
    dash: str = "solid",
) -> go.Scatter:
    line = {"color": colour, "width": width, "dash": dash}
    return go.Scatter(x=across, y=up, mode="lines", name=name, line=line)


def _mark(figure: go.Figure, rate: float, name: str, colour: str, dash: str = "dash") -> None:
    line = {"color": colour, "dash": dash, "width": 2}
    figure.add_vline(x=rate, line=line, name=f"{name}: {rate:,.0f}", showlegend=True)


def _spread(rates: Sequence[Estimate]) -> dict[str, Any]:
    """From the lowest to the highest measurement."""
    return {
        "type": "data",
        "array": [rate.high - rate.median for rate in rates],
        "arrayminus": [rate.median - rate.low for rate in rates],
        "color": _GREY,
        "thickness": 1.5,
    }


def _name(row: Row) -> str:
    name = report.name(row)
    return escape(name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…")
