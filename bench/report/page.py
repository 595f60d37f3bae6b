"""HTML page of a result, which needs no network: the answer, a bar for each row, everything else folded.

`precache.page` has the skeleton. Text, grid and background of a chart take their colours from the page's
style, so that they follow dark mode and print. Names from a result are escaped, because plotly reads some
HTML in labels.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import chain
from typing import Any

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from bench.report.result import Activity, Result, Row, format_document
from bench.report.sentences import name_loader
from bench.report.stats import Batches, Estimate
from bench.report.table import COLUMNS, Table, cell, legend, make_table, printable_lines, shown_rows
from bench.report.verdict import training_rate
from precache import page

# Okabe and Ito, "Color Universal Design" (2008): the colours that stand out from black and from white
COLOURS = ("#2b83c6", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
BLUE, ORANGE, GREEN, PURPLE, RED, SKY = COLOURS
GREY = "#8a8f98"
_SERIES_PIXELS = 170
STYLE = """
.charts { margin-bottom: 1.2rem; }
.listed table { font-size: .9rem; } .listed td .title { display: none; }
.listed th, .listed td { padding: .3rem .4rem; }
@media screen and (max-width: 48rem) {
  .listed thead, .listed td:empty { display: none; }
  .listed table, .listed tbody { display: block; font-size: 1rem; }
  .listed tr { display: block; border-bottom: 1px solid var(--line); padding: .4rem 0; }
  .listed td { display: flex; justify-content: space-between; gap: 1rem; text-align: right; border: 0;
    padding: .1rem 0; white-space: normal; }
  .listed td:first-child { font-weight: 600; position: static; text-align: left; max-width: none; }
  .listed td .title { display: inline; color: var(--soft); text-align: left; } }
.js-plotly-plot .main-svg text:not(.hoverlayer *) { fill: var(--fg) !important; }
.js-plotly-plot .annotation .bg { fill: var(--bg) !important; fill-opacity: .8 !important; }
.js-plotly-plot .gridlayer path { stroke: var(--line) !important; }

.busy { max-width: none; margin: 1.8rem 0 1.2rem; } .busy figcaption { margin-bottom: .6rem; }
.lane { display: grid; grid-template-columns: 14rem minmax(8rem, 1fr) 5rem 17rem; gap: 0 .9rem;
  align-items: center; padding: .3rem 0; }
.lane .track { background: var(--tint); border-radius: 4px; height: 1.4rem; overflow: hidden; }
.lane .track div { background: var(--bar); height: 100%; border-radius: 4px; min-width: 2px; }
.lane.today .track div { background: #8a8f98; }
.lane .share { text-align: right; font-weight: 600; white-space: nowrap; font-variant-numeric: tabular-nums; }
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
# suffix of a monitor's series -> caption of the chart, factor to its unit, format of its ticks
_UNITS = {
    "_share": ("Cores, GPU and memory: a share near 100% is a limit that was met", 1.0, ".0%"),
    "_bytes_per_s": ("Disk, network and swap, MB/s: what the loader read meanwhile", 1e-6, ",.3~r"),
    "_bytes": ("Memory, GiB: a rising line is a leak", 2**-30, ",.3~r"),
    "_w": ("Power, W: it falls where the GPU waits", 1.0, ",.3~r"),
    "_mhz": ("Clocks, MHz: they fall where the GPU is too hot", 1.0, ","),
}
# A chart that is drawn while folded has no width, and before the page is whole perhaps a wrong one, so it is
# drawn again once its width is final. Printing unfolds every section.
_SCRIPT = """
addEventListener('load', () => document.querySelectorAll('.js-plotly-plot').forEach(
  chart => { if (chart.offsetParent) Plotly.Plots.resize(chart); }));
addEventListener('toggle', event => event.target.querySelectorAll('.js-plotly-plot').forEach(
  chart => Plotly.Plots.resize(chart)), true);
addEventListener('beforeprint', () => document.querySelectorAll('details').forEach(
  each => { each.open = true; }));
"""
_CONFIG = {"responsive": True, "displayModeBar": False}


def make_page(result: Result) -> str:
    """Write the page of a result."""
    notes = [*result.conditions, *(f"skipped {name}: {reason}" for name, reason in result.skipped.items())]
    parts = [
        _draw_bars(result),
        charts(dict(_draw_workers(result)), "chart"),
        page.paragraphs(result.next_step.splitlines()),
        f'<p class="note">{"<br>".join(map(escape, notes))}</p>',
        page.collapsible("All numbers", _draw_numbers(result)),
        *_draw_details(result),
        page.collapsible("Machine, versions and settings", _draw_facts(result)),
    ]
    content = f"<h1>{escape(result.question)}</h1>{_draw_answer(result)}{''.join(parts)}"
    scripts = f"<script>{get_plotlyjs()}</script><script>{_SCRIPT}</script>"
    return page.document(result.question, content, head_html=scripts, style=STYLE)


def draw_summary(result: Result) -> str:
    """Draw the answer and a bar for each row, for another page that has STYLE."""
    return _draw_answer(result) + _draw_bars(result)


def _draw_answer(result: Result) -> str:
    """Draw the answer; the first sentence of each paragraph is a paragraph of its own."""
    paragraphs = []
    for first, *more in result.answer:
        paragraphs.append(first)
        if more:
            paragraphs.append(" ".join(more))
    answer = "".join(f"<p>{page.format_code(paragraph)}</p>" for paragraph in paragraphs)
    return f'<section class="verdict">{answer}</section>' if answer else ""


def _draw_bars(result: Result) -> str:
    """Draw the first chart, a bar for each row with the value `result.bars`, as HTML without a script."""
    name = result.bars
    rows = [row for row in shown_rows(result, details=False) if name in row.values]
    if not rows:
        return ""
    column = COLUMNS[name]
    title = f"{column.title[:1].upper()}{column.title[1:]}"
    if column.means:
        title += f", {column.means}"
    largest = max(row.values[name].median for row in rows)
    whole = 1.0 if name.endswith("_share") else largest or 1.0
    figures = []
    for group in dict.fromkeys(str(row.key.get("trainer", "")) for row in rows):
        bars = []
        for row in rows:
            if str(row.key.get("trainer", "")) != group:
                continue
            kind = " today" if row.baseline else " best" if result.is_best(row) else ""
            bars.append(
                f'<div class="lane{kind}"><div class="name">{escape(row.name)}</div>'
                f'<div class="track">{page.bar(min(1.0, row.values[name].median / whole))}</div>'
                f'<div class="share">{escape(cell(row, name))}</div>'
                f'<div class="saves">{escape(row.texts.get("saves", ""))}</div></div>'
            )
        fed = f" ({group})" if group not in ("", "none") else ""
        figures.append(
            f'<figure class="busy"><figcaption>{escape(title + fed)}</figcaption>{"".join(bars)}</figure>'
        )
    return "".join(figures)


def _draw_workers(result: Result) -> Iterator[tuple[str, go.Figure]]:
    """Draw images/s over workers for each loader that was measured with several numbers of workers."""
    loaders: dict[tuple[str, str, str], list[Row]] = {}
    for row in shown_rows(result, details=False):
        if "workers" in row.key:
            key = (str(row.key.get("backend")), str(row.key.get("data")), str(row.key.get("trainer")))
            loaders.setdefault(key, []).append(row)
    for (backend, data, _), rows in loaders.items():
        counts = sorted({row.key["workers"] for row in rows})
        if len(counts) < 2:
            continue
        traces = []
        for number, batch_size in enumerate(sorted({row.key["batch_size"] for row in rows})):
            series = [row for row in rows if row.key["batch_size"] == batch_size]
            series.sort(key=lambda row: row.key["workers"])
            colour, across = COLOURS[number % len(COLOURS)], [str(row.key["workers"]) for row in series]
            rates = [training_rate(row) for row in series]
            traces.append(
                line(
                    across,
                    [rate.median for rate in rates],
                    f"batch {batch_size:,}",
                    colour,
                    mode="lines+markers",
                    error_y=spread(rates),
                )
            )
            alone = [row.values["trainer_images_per_s"].median for row in series if row.batches is not None]
            if len(alone) == len(series):
                traces.append(
                    line(across, alone, "the trainer alone", colour, width=1, dash="dot", showlegend=False)
                )
        chart = figure(traces, 280, "workers", "images/s")
        chart.update_xaxes(type="category", categoryarray=[str(count) for count in counts])
        loader = name_loader(backend, data)
        yield (
            f"{loader}: a flat line gains nothing from more workers; dotted: the trainer alone",
            chart.update_yaxes(rangemode="tozero"),
        )


def _draw_numbers(result: Result) -> str:
    document = base64.b64encode(format_document(result.to_json()).encode()).decode()
    return (
        f"{make_table(result, details=True).html()}{page.paragraphs([legend(result, details=True)])}"
        f'<p class="download"><a download="result.json" href="data:application/json;base64,{document}">'
        "Everything as JSON</a>: 'bench report' reads it.</p>"
    )


def _draw_details(result: Result) -> Iterator[str]:
    """Draw a folded section for each row with sentences, charts or lines to paste."""
    for number, row in enumerate(result.rows):
        figures = {}
        if row.batches is not None and row.batches.step_s:
            figures["Each batch: a high orange bar is a wait"] = _draw_batches(row.batches)
        if row.activity is not None:
            figures |= dict(_draw_activity(row.activity))
        sentences = " ".join(row.sentences)
        if not sentences and not figures and not row.paste:
            continue
        parts = [page.paragraphs([sentences[:1].upper() + sentences[1:]]), _draw_stages(row)]
        if row.paste:
            parts.append(f"<pre>{escape(printable_lines(row))}</pre>")
        if figures:
            parts.append(charts(figures, f"row{number}"))
        yield page.collapsible(f"In detail: {row.name}", "".join(parts), shown=bool(row.paste))


def _draw_facts(result: Result) -> str:
    # the conditions name the data, and the line for `loaders.build` is the next step
    settings = {name: value for name, value in result.settings.items() if name not in ("data", "build")}
    return page.facts({**result.machine, **settings})


def _draw_stages(row: Row) -> str:
    """Draw a table of images/s of each stage alone, the slowest first; empty where none was timed."""
    rows = [
        (stage.value, f"{rate:,.0f}", "the bottleneck" if stage == row.bottleneck else "")
        for stage, rate in sorted(row.stages.items(), key=lambda pair: pair[1])
    ]
    return Table(("stage alone", "images/s", ""), rows, words=("",)).html() if rows else ""


def _draw_batches(timed: Batches) -> go.Figure:
    """Draw step and wait of every timed batch, stacked, in ms; mark spikes and first batches of epochs."""
    numbers = list(range(len(timed.step_s)))
    whole_ms = [(wait + step) * 1e3 for wait, step in zip(timed.wait_s, timed.step_s, strict=True)]
    top_ms = max(whole_ms)
    traces: list[Any] = [
        go.Bar(x=numbers, y=[s * 1e3 for s in series], name=name, marker={"color": colour, "line_width": 0})
        for name, series, colour in (("step", timed.step_s, BLUE), ("wait", timed.wait_s, ORANGE))
    ]
    if timed.epoch_starts:
        across = chain.from_iterable((start, start, None) for start in timed.epoch_starts)
        up = [0, 1.1 * top_ms, None] * len(timed.epoch_starts)
        traces.append(line(list(across), up, "first batch of an epoch", PURPLE, dash="dot"))
    spikes = sorted({*timed.wait_spikes.batches, *timed.step_spikes.batches})
    if spikes:
        above = [whole_ms[batch] + 0.05 * top_ms for batch in spikes]
        marker = {"color": RED, "symbol": "triangle-down", "size": 8}
        traces.append(go.Scatter(x=spikes, y=above, mode="markers", name="spike", marker=marker))
    chart = figure(traces, _SERIES_PIXELS, "batch", "ms")
    chart.update_layout(barmode="stack", bargap=0)
    return chart.update_yaxes(range=[0, 1.15 * top_ms])


def _draw_activity(activity: Activity) -> Iterator[tuple[str, go.Figure]]:
    """Draw a chart for each unit of the sampled series; a series that stays at zero is left out."""
    series = {name: values for name, values in activity.series.items() if any(values)}
    for suffix, (caption, factor, ticks) in _UNITS.items():
        names = [name for name in series if next((s for s in _UNITS if name.endswith(s)), "") == suffix]
        cores = [name for name in names if name.removeprefix("cpu_").removesuffix("_share").isdecimal()]
        traces = []
        for number, name in enumerate(cores):  # faint lines, because there may be a hundred
            core = line(activity.time_s, series[name], "each core", GREY, width=0.7)
            traces.append(core.update(legendgroup="cores", showlegend=number == 0, opacity=0.6))
        for number, name in enumerate(name for name in names if name not in cores):
            words = name.removesuffix(suffix).replace("_", " ").replace("cpu", "CPU").replace("gpu", "GPU")
            dash = "solid" if number < len(COLOURS) else "dot"
            values = [value * factor for value in series[name]]
            traces.append(line(activity.time_s, values, words, COLOURS[number % len(COLOURS)], dash=dash))
        if traces:
            chart = figure(traces, _SERIES_PIXELS, "seconds")
            yield caption, chart.update_yaxes(tickformat=ticks, rangemode="tozero")


def charts(figures: Mapping[str, go.Figure], prefix: str) -> str:
    """Write charts as HTML, each below its caption.

    Args:
        figures: charts by their captions, which say what to look for.
        prefix: beginning of the ids of the charts.
    """
    parts = []
    for number, (caption, figure) in enumerate(figures.items()):
        chart = plotly.io.to_html(
            figure,
            config=_CONFIG,
            include_plotlyjs=False,
            full_html=False,
            default_height=f"{figure.layout.height}px",
            div_id=f"{prefix}-{number}",
        )
        parts.append(f"<figure><figcaption>{escape(caption)}</figcaption>{chart}</figure>")
    return f'<div class="charts">{"".join(parts)}</div>'


def figure(traces: Sequence[Any], height: int, across: str, up: str = "") -> go.Figure:
    """Make a chart of traces; the legend stands above, on a phone with a line for each entry.

    Args:
        traces: plotly's traces.
        height: pixels of the axes.
        across, up: titles of the axes.
    """
    entries = sum(trace.showlegend is not False for trace in traces)
    chart = go.Figure(traces)
    chart.update_layout(
        template="none",
        height=height + 60 + 18 * (entries + 1),
        margin={"l": 10, "r": 16, "t": 34, "b": 10},
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        dragmode=False,  # a finger on a chart has to scroll the page
        showlegend=entries > 0,
    )
    chart.update_xaxes(title=across, automargin=True, zeroline=False, tickangle=0)
    chart.update_yaxes(title=up, automargin=True, zeroline=False)
    return chart


def line(
    across: Sequence[Any], up: Sequence[Any], name: str, colour: str, *, width: float = 2, **more: Any
) -> go.Scatter:
    """Make a line; `more` is `dash` and further arguments of plotly's Scatter."""
    look = {"color": colour, "width": width, "dash": more.pop("dash", "solid")}
    return go.Scatter(x=across, y=up, name=escape(name), line=look, **{"mode": "lines", **more})


def spread(rates: Sequence[Estimate]) -> dict[str, Any]:
    """Make error bars from the lowest to the highest measurement."""
    return {
        "type": "data",
        "array": [rate.high - rate.median for rate in rates],
        "arrayminus": [rate.median - rate.low for rate in rates],
        "color": GREY,
        "thickness": 1.5,
    }
