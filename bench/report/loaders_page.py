"""A result of `bench loaders` as one HTML page: the answer, how busy each loader keeps the accelerator, and
everything else folded."""

import base64
import json
from collections.abc import Iterator, Sequence
from html import escape
from itertools import chain
from typing import Any

import plotly.graph_objects as go

from bench.report import page as pages
from bench.report.page import BLUE, COLOURS, GREY, ORANGE, PURPLE, RED, figure, line
from bench.report.result import conditions, findings, legend, next_step, shown_rows, skipped, table
from bench.report.row import SYNTHETIC, Result, Row, Watched
from bench.report.stats import is_disturbed, other_cpu
from bench.report.verdict import answers, find_gain, observations, saved_share, times
from bench.report.words import Table, percent
from precache import page

_SERIES_PIXELS = 170
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
    """A folded section for each loader: its bottleneck, what each stage can do, its charts."""
    for number, row in enumerate(result.rows):
        if row.backend == SYNTHETIC:  # noise: nothing to advise
            continue
        figures = dict(_figures(row))
        told = [row.advice] * bool(row.advice) + observations(row)
        if figures or told:
            said = " ".join(told)
            shown = [page.paragraphs([said[:1].upper() + said[1:]]), _stages(row)]
            shown += [pages.charts(figures, f"row{number}")] if figures else []
            yield page.folded(f"In detail: {result.title(row)}", "".join(shown))


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


def _figures(row: Row) -> Iterator[tuple[str, go.Figure]]:
    """Charts of one row by their captions."""
    if row.step_s:
        yield "Each batch: a high orange bar is a wait", _batches(row)
    yield from _monitored(row.monitor) if row.monitor is not None else ()


def _stages(row: Row) -> str:
    """A table of what each stage alone can do, the lowest first; empty where none was timed."""
    rows = [
        (stage, f"{rate:,.0f}", "the bottleneck" if stage == row.binds else "")
        for stage, rate in sorted(row.stages.items(), key=lambda pair: pair[1])
    ]
    return Table(("stage alone", "images/s", ""), rows, words=("",)).html() if rows else ""


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
