"""A result of `bench loaders` as one HTML page and as one picture: the answer, how busy each loader keeps the
accelerator, and everything else folded."""

import base64
import json
from collections.abc import Iterator, Sequence
from html import escape
from itertools import chain
from math import ceil, floor, log10
from typing import Any

import plotly.graph_objects as go

from bench.report import page as pages
from bench.report.gain import answers, find_gain, saved_share, times, what_is_fed
from bench.report.page import BLUE, COLOURS, GREEN, GREY, ORANGE, PURPLE, RED, SKY, figure, line, spread
from bench.report.result import conditions, findings, legend, next_step, shown_rows, skipped, table
from bench.report.row import SYNTHETIC, Result, Row, Watched
from bench.report.stats import Estimate
from bench.report.trust import is_disturbed, other_cpu
from bench.report.verdict import files_are, gains_over, observations
from bench.report.words import Table, percent
from precache import page
from precache.cli.commandline import human_bytes

_LANE_PIXELS, _SERIES_PIXELS = 46, 170
_STYLE = """
.busy { max-width: none; margin: 1.8rem 0 1.2rem; } .busy figcaption { margin-bottom: .6rem; }
.lane { display: grid; grid-template-columns: 14rem minmax(8rem, 1fr) 3.5rem 18.5rem; gap: 0 .9rem;
  align-items: center; padding: .3rem 0; }
.lane .track { background: var(--tint); border-radius: 4px; height: 1.4rem; overflow: hidden; }
.lane .track div { background: var(--bar); height: 100%; border-radius: 4px; min-width: 2px; }
.lane.today .track div { background: #8a8f98; }
.lane .share { text-align: right; font-weight: 600; font-variant-numeric: tabular-nums; }
.lane .saves { color: var(--soft); }
.lane.best .name { font-weight: 600; }
@media (max-width: 48rem) {
  .lane { grid-template-columns: 1fr auto; padding: .5rem 0; }
  .lane .name { order: 1; } .lane .share { order: 2; }
  .lane .track { order: 3; grid-column: 1 / -1; height: 1rem; }
  .lane .saves { order: 4; grid-column: 1 / -1; font-size: .9rem; } }
@media print { .lane .track { border: 1px solid var(--line); }
  .lane .track div { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
# suffix of a monitor's series -> caption of the chart, factor to its unit, what ticks look like
_UNITS = {
    "_share": ("Cores, GPU and memory: a share near 100% is a limit that was met", 1.0, ".0%"),
    "_bytes_per_s": ("Disk, network and swap, MB/s: what the loader read meanwhile", 1e-6, ",.3~r"),
    "_bytes": ("Memory, GiB: a rising line is a leak", 2**-30, ",.3~r"),
    "_w": ("Power, W: it falls where the GPU waits", 1.0, ",.3~r"),
    "_mhz": ("Clocks, MHz: they fall where the GPU is too hot", 1.0, ","),
}


def html(result: Result, gpu_price: float | None = None) -> str:
    """The page.

    Args:
        gpu_price: dollars per hour of the accelerator; None leaves money out.
    """
    step = next_step(result)
    notes = [f"{line}." for line in conditions(result)]
    parts = [
        _lanes_of_trainers(result, gpu_price),
        page.paragraphs([step] if step else []),
        f'<p class="note">{"<br>".join(map(escape, [*notes, *skipped(result)]))}</p>',
        page.folded("All numbers", _numbers(result)),
        page.folded("Images/s of each loader alone", pages.charts({_ALONE: _alone(result.rows)}, "alone")),
        *_details(result),
        page.folded("Machine, versions and settings", _facts(result)),
    ]
    said = [part for first, *more in answers(result, gpu_price) for part in (first, " ".join(more)) if part]
    said = said or list(findings(result))[:1]
    return pages.document("Does the trainer wait for data?", said, parts, _STYLE)


def _lanes_of_trainers(result: Result, gpu_price: float | None) -> str:
    """The first chart: a bar for each loader, and what it saves. It is HTML and needs no script."""
    shown = shown_rows(result, details=False)
    names = dict.fromkeys(row.trainer_name for row in shown if row.ratio is not None)
    drawn = []
    for name in names:
        rows = [row for row in shown if row.trainer_name == name and row.busy is not None]
        trainer = rows[0].trainer
        takes = f", which takes {trainer.median:,.0f} images/s" if trainer is not None else ""
        title = f"Accelerator busy: share of the time that it has work ({name}{takes})"
        lanes = [
            _lane(result, row, row.busy.median, percent(row.busy.median), rows, gpu_price)
            for row in rows
            if row.busy is not None
        ]
        drawn.append((title, lanes))
    if not names:
        most = max(row.loader.median for row in shown)
        rates = ((row, row.loader.median) for row in shown)
        lanes = [_lane(result, row, rate / most, f"{rate:,.0f}", shown, None) for row, rate in rates]
        drawn.append(("Images per second, each loader alone", lanes))
    return "".join(
        f'<figure class="busy"><figcaption>{escape(title)}</figcaption>{"".join(lanes)}</figure>'
        for title, lanes in drawn
    )


def _lane(
    result: Result, row: Row, share: float, text: str, rows: Sequence[Row], gpu_price: float | None
) -> str:
    gain = None if is_disturbed(other_cpu(result.settings)) else find_gain(rows)
    today = gain.today if gain is not None else None
    kind = " today" if row is today else " best" if gain is not None and row in gain.best else ""
    saves = "" if today is None else _saves(row, today, gpu_price)
    return (
        f'<div class="lane{kind}"><div class="name">{escape(result.title(row))}</div>'
        f'<div class="track">{page.bar(share)}</div>'
        f'<div class="share">{text}</div><div class="saves">{escape(saves)}</div></div>'
    )


def _saves(row: Row, today: Row, gpu_price: float | None) -> str:
    """What an hour of training becomes, in minutes and dollars."""
    if row is today:
        return "what people have today"
    if row.backend == SYNTHETIC or (row.peer and today.ratio is not None):
        return ""
    saved = saved_share(row, today)
    if row.ratio is None:
        return f"{times(row.rate.median / today.rate.median)} as many" if saved is not None else ""
    if saved is None:
        slower = row.rate.high < today.rate.low
        return "slower than today" if slower else "as today, within noise"
    money = "" if gpu_price is None else f", ${saved * gpu_price:,.2f} an hour"
    return f"saves {60 * saved:.0f} of 60 min{money}"


def _details(result: Result) -> Iterator[str]:
    """A folded section for each loader: its bottleneck, what would help, its charts."""
    for number, row in enumerate(result.rows):
        if row.backend == SYNTHETIC:  # noise: nothing to advise
            continue
        figures = dict(_figures(row))
        told = [row.advice] * bool(row.advice) + observations(row)
        if figures or told:
            said = " ".join(told)
            shown = [page.paragraphs([said[:1].upper() + said[1:]]), _changes(row)]
            shown += [pages.charts(figures, f"row{number}")] if figures else []
            yield page.folded(f"In detail: {result.title(row)}", "".join(shown))


def _changes(row: Row) -> str:
    """A table of what would gain, the fastest first; empty where nothing would."""
    gaining = [change for change in row.changes if gains_over(change, row.now)]
    lines = [
        [
            change.what.rstrip(","),
            f"{change.images_per_s.median:,.0f}",
            ("measured" if change.measured else "predicted")
            + ("" if row.cold is None else f" {files_are(cold=change.cold)}"),
            human_bytes(change.size_bytes) if change.size_bytes else "",
        ]
        for change in sorted(gaining, key=lambda change: -change.images_per_s.median)
    ]
    titles = ("What would gain", "images/s", "how we know", "takes")
    return Table(titles, lines, words=("how we know", "takes")).html() if lines else ""


def _numbers(result: Result) -> str:
    content = json.dumps(result.to_json()).encode()
    return (
        f"{table(result, details=True).html()}{page.paragraphs([f'{legend(result, details=True)}.'])}"
        '<p class="download"><a download="result.json" '
        f'href="data:application/json;base64,{base64.b64encode(content).decode()}">'
        "Everything as JSON</a>: 'bench report' reads it.</p>"
    )


def _facts(result: Result) -> str:
    facts = {**result.machine, **result.settings}
    facts.pop("data", None)  # the conditions name it
    if result.host_to_device_gbps is not None:
        facts["host to device"] = f"{result.host_to_device_gbps:.1f} GB/s"
    return page.facts(facts)


_ALONE = "Images/s of each loader alone: left of a dashed line, the trainer waits"


def _alone(rows: Sequence[Row]) -> go.Figure:
    """Without a trainer, warm and cold, beside each trainer's rate."""
    rows = list({(row.backend, row.data, row.peer): row for row in rows}.values())
    kinds: dict[str, tuple[str, str, list[Estimate | None]]] = {
        "loader alone": (BLUE, "circle", [None if row.peer else row.loader for row in rows]),
        "from a cold disk": (SKY, "diamond", [row.cold for row in rows]),
        "another library, or the limit": (GREY, "square", [row.loader if row.peer else None for row in rows]),
    }
    dots = []
    for name, (colour, symbol, rates) in kinds.items():
        there = [(lane, rate) for lane, rate in enumerate(rates) if rate]
        if there:
            marker = {"color": colour, "symbol": symbol, "size": 12}
            found = [rate for _, rate in there]
            dots.append(
                go.Scatter(
                    x=[rate.median for rate in found],
                    y=[lane for lane, _ in there],
                    mode="markers",
                    marker=marker,
                    error_x=spread(found),
                    name=name,
                )
            )
    names = [f"{escape(_short(row.name))}: {row.loader.median:,.0f}" for row in rows]
    drawn = _lanes(dots, names, "images/s, logarithmic")
    for rate in dict.fromkeys(row.trainer.median for row in rows if row.trainer):
        _mark(drawn, rate, "trainer alone", RED)
    return _logarithmic(drawn, dots)


def _figures(row: Row) -> Iterator[tuple[str, go.Figure]]:
    """Charts of one row by their captions."""
    if row.stages:
        yield "What each stage alone can do: the lowest is the bottleneck", _stages(row)
    if row.step_s:
        yield "Each batch: a high orange bar is a wait", _batches(row)
    yield from _monitored(row.monitor) if row.monitor is not None else ()


def _stages(row: Row) -> go.Figure:
    colours = [ORANGE if stage == row.binds else BLUE for stage in row.stages]
    dots = go.Scatter(
        x=list(row.stages.values()),
        y=list(range(len(row.stages))),
        mode="markers",
        marker={"color": colours, "size": 13},
        name="stage alone",
    )
    names = [
        f"{escape(stage)}: {rate:,.0f}{' (the bottleneck)' if stage == row.binds else ''}"
        for stage, rate in row.stages.items()
    ]
    drawn = _lanes([dots], names, "images/s, logarithmic")
    if row.predicted is not None:
        _mark(drawn, row.predicted, "predicted together", GREEN, "dot")
    if row.together is not None:
        _mark(drawn, row.together.median, "measured together", PURPLE, "solid")
    return _logarithmic(drawn, [dots])


def _batches(row: Row) -> go.Figure:
    """Step and wait of every timed batch, stacked, ms; spikes and first batches of epochs marked."""
    batches, whole_ms = list(range(len(row.step_s))), [seconds * 1e3 for seconds in row.batch_s]
    top_ms = max(whole_ms)
    traces: list[Any] = [
        go.Bar(x=batches, y=[s * 1e3 for s in series], name=name, marker={"color": colour, "line_width": 0})
        for name, series, colour in (("step", row.step_s, BLUE), ("wait", row.wait_s, ORANGE))
    ]
    if row.epoch_starts:
        across = chain.from_iterable((start, start, None) for start in row.epoch_starts)
        up = [0, 1.1 * top_ms, None] * len(row.epoch_starts)
        traces.append(line(list(across), up, "first batch of an epoch", PURPLE, dash="dot"))
    found = row.spikes
    spikes = sorted({*found.wait_spikes.batches, *found.step_spikes.batches}) if found else []
    if spikes:
        above = [whole_ms[batch] + 0.05 * top_ms for batch in spikes]
        marker = {"color": RED, "symbol": "triangle-down", "size": 8}
        traces.append(go.Scatter(x=spikes, y=above, mode="markers", name="spike", marker=marker))
    drawn = figure(traces, _SERIES_PIXELS, "batch", "ms")
    drawn.update_layout(barmode="stack", bargap=0)
    return drawn.update_yaxes(range=[0, 1.15 * top_ms])


def _monitored(sampled: Watched) -> Iterator[tuple[str, go.Figure]]:
    """A chart per unit of what was sampled; series that stayed at zero are left out."""
    found = {name: values for name, values in sampled.series.items() if any(values)}
    for suffix, (caption, factor, ticks) in _UNITS.items():
        names = [name for name in found if next((s for s in _UNITS if name.endswith(s)), "") == suffix]
        cores = [name for name in names if name.removeprefix("cpu_").removesuffix("_share").isdecimal()]
        traces = []
        for number, name in enumerate(cores):  # faint: there may be a hundred
            core = line(sampled.time_s, found[name], "each core", GREY, width=0.7)
            traces.append(core.update(legendgroup="cores", showlegend=number == 0, opacity=0.6))
        for number, name in enumerate(name for name in names if name not in cores):
            words = name.removesuffix(suffix).replace("_", " ").replace("cpu", "CPU").replace("gpu", "GPU")
            dash = "solid" if number < len(COLOURS) else "dot"
            values = [value * factor for value in found[name]]
            traces.append(line(sampled.time_s, values, words, COLOURS[number % len(COLOURS)], dash=dash))
        if traces:
            drawn = figure(traces, _SERIES_PIXELS, "seconds")
            yield caption, drawn.update_yaxes(tickformat=ticks, rangemode="tozero")


def _lanes(traces: Sequence[Any], names: Sequence[str], across: str) -> go.Figure:
    """Horizontal lanes, y = 0, 1, ... from the top, each below its name, so that a phone has room."""
    drawn = figure(traces, _LANE_PIXELS * len(names), across)
    for lane, name in enumerate(names):
        drawn.add_annotation(x=0, xref="paper", xanchor="left", y=lane, yshift=18, text=name, showarrow=False)
    return drawn.update_yaxes(range=[len(names) - 0.6, -0.75], showticklabels=False, showgrid=False)


def _logarithmic(drawn: go.Figure, traces: Sequence[Any]) -> go.Figure:
    """A logarithmic axis, from a little below to a little above what is shown; plotly's own ticks overlap."""
    rates = [*chain.from_iterable(trace.x for trace in traces), *(shape.x0 for shape in drawn.layout.shapes)]
    low, high = log10(min(rates)) - 0.15, log10(max(rates)) + 0.15
    steps = (1,) if high - low > 2 else (1, 2, 5)
    ticks = [step * 10.0**power for power in range(floor(low), ceil(high)) for step in steps]
    return drawn.update_xaxes(type="log", range=[low, high], tickvals=ticks, tickformat=",~s")


def _mark(drawn: go.Figure, rate: float, name: str, colour: str, dash: str = "dash") -> None:
    look = {"color": colour, "dash": dash, "width": 2}
    drawn.add_vline(x=rate, line=look, name=f"{name}: {rate:,.0f}", showlegend=True)
    drawn.update_layout(showlegend=True)


def _short(name: str, longest: int = 30) -> str:
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


_SVG_WIDTH, _SVG_NAME, _SVG_RIGHT, _SVG_TOP = 760, 190, 90, 62
_SVG_STYLE = """
svg { font: 14px system-ui, -apple-system, 'Segoe UI', sans-serif; }
.title { font-size: 16px; font-weight: 600; }
text { fill: #1c1e21; } .soft { fill: #5d636b; font-size: 12px; }
.page { fill: #fff; } .track { fill: #8a8f9822; }
.bar { fill: #2b83c6; } .today { fill: #8a8f98; } .cold { fill: #56b4e9; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e8eb; } .soft { fill: #a3a9b3; }
  .page { fill: #15171a; } .bar { fill: #4a9ad9; } .cold { fill: #8fd0f5; } }
"""


def svg(result: Result) -> str:
    """A picture for a README, which follows light and dark mode: how busy each loader keeps the accelerator.

    Images/s, warm and cold, where no trainer was fed.
    """
    shown = shown_rows(result, details=False)
    fed = [row for row in shown if row.busy is not None]
    most = max(row.loader.median for row in shown)
    title, lanes, height = "How busy each loader keeps an accelerator", [], _SVG_TOP
    trainers = {what_is_fed(result, row) for row in fed}
    if not fed:
        cold = ", and read from a cold disk" if any(row.cold for row in shown) else ""
        title = f"Images per second of each loader{cold}"
    elif len(trainers) == 1:
        title = f"How busy each loader keeps {trainers.pop()}"
    for row in fed or shown:
        bars = [(row.loader.median / most, f"{row.loader.median:,.0f}")]
        if row.busy is not None:
            bars = [(row.busy.median, percent(row.busy.median))]
        elif row.cold is not None:
            bars.append((row.cold.median / most, f"{row.cold.median:,.0f} cold"))
        lanes.append(_svg_lane(result, row, bars, height))
        height += 52 if len(bars) > 1 else 34
    height += 40
    foot = escape(conditions(result)[0])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SVG_WIDTH} {height}" width="{_SVG_WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(title)}"><style>{_SVG_STYLE}</style>'
        f'<rect class="page" width="{_SVG_WIDTH}" height="{height}" rx="8"/>'
        f'<text class="title" x="8" y="28">{escape(title)}</text>{"".join(lanes)}'
        f'<text class="soft" x="8" y="{height - 14}">{foot}</text></svg>\n'
    )


def _svg_lane(result: Result, row: Row, bars: Sequence[tuple[float, str]], top: int) -> str:
    room = _SVG_WIDTH - _SVG_NAME - _SVG_RIGHT
    kind = "today" if row.peer or row.backend == "imagefolder" else "bar"
    parts = [
        f'<text x="8" y="{top + 14}">{escape(_short(result.title(row), 26))}</text>',
        f'<rect class="track" x="{_SVG_NAME}" y="{top}" width="{room}" height="18" rx="3"/>',
    ]
    for number, (share, text) in enumerate(bars):
        y, high, look, words = (top + 20, 12, "cold", "soft") if number else (top, 18, kind, "")
        width = max(2.0, room * min(share, 1.0))
        parts += [
            f'<rect class="{look}" x="{_SVG_NAME}" y="{y}" width="{width:.1f}" height="{high}" rx="3"/>',
            f'<text class="{words}" x="{_SVG_WIDTH - 8}" y="{y + high - 3}" text-anchor="end">'
            f"{escape(text)}</text>",
        ]
    return "".join(parts)
