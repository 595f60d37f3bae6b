"""A result as one HTML page that needs no network: the verdict in words, charts, and the figures."""

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from statistics import median

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from bench.findings.result import Result, Row
from bench.findings.stats import Estimate
from bench.findings.verdict import COLD_FETCH, takes
from bench.pages import charts
from bench.pages import table as report

# The charts' text and grid get their colours here, not from plotly: dark mode and print need no script.
_STYLE = """
:root { color-scheme: light dark;
  --fg: #1c1e21; --bg: #fff; --soft: #5d636b; --line: #d9dce1; --tint: #eef3f9; }
@media (prefers-color-scheme: dark) {
  :root { --fg: #e6e8eb; --bg: #15171a; --soft: #a3a9b3; --line: #3a3f47; --tint: #1f2731; } }
@media print { :root { color-scheme: light;
  --fg: #000; --bg: #fff; --soft: #444; --line: #ccc; --tint: #fff; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg);
  max-width: 74rem; margin: 1.5rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; }
.verdict { background: var(--tint); border: 1px solid var(--line); border-radius: 6px; padding: .2rem 1rem; }
.verdict p { margin: .6rem 0; max-width: 60rem; }
.verdict p:first-child { font-size: 1.15rem; font-weight: 600; }
.charts { display: grid; gap: 1rem 2rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 28rem), 1fr)); }
figure { margin: 0; min-width: 0; max-width: 44rem; } figcaption { font-weight: 600; }
.note, small, dt { color: var(--soft); }
.wide { overflow-x: auto; margin-bottom: 1.5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { text-align: right; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid var(--line);
  white-space: nowrap; line-height: 1.3; }
th.words, td.words { text-align: left; white-space: normal; min-width: 6rem; }
th { white-space: normal; vertical-align: bottom; font-weight: 600; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal; min-width: 8rem;
  max-width: 14rem; overflow-wrap: anywhere; position: sticky; left: 0; background: var(--bg); }
.peer { border: 1px solid var(--line); border-radius: 4px; padding: 0 .3rem;
  font-size: .8rem; color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; } dd { margin: 0; }
a { color: inherit; }
.js-plotly-plot .main-svg text:not(.hoverlayer *) { fill: var(--fg) !important; }
.js-plotly-plot .annotation .bg { fill: var(--bg) !important; fill-opacity: .8 !important; }
.js-plotly-plot .gridlayer path { stroke: var(--line) !important; }
@media print {
  @page { margin: 12mm; }
  body { margin: 0; padding: 0; font-size: 12px; }
  .charts { display: block; } figure, .verdict, tr, dl { break-inside: avoid; } h2 { break-after: avoid; }
  .wide { overflow: visible; } table { font-size: 8px; } th, td { padding: .2rem .3rem; white-space: normal; }
  .download, nav { display: none; } small, .peer { font-size: inherit; }
}
"""
_CONFIG = {"responsive": True, "displayModeBar": False}
_NUMBERS: dict[str, Callable[[Row], Estimate | float | None]] = {
    "loader alone, images/s": lambda row: row.loader,
    "cold": lambda row: row.cold,
    "trainer alone": lambda row: row.trainer,
    "together": lambda row: row.together,
    "predicted": lambda row: row.stages.predicted,
    "together / trainer": lambda row: row.ratio,
    "waits, share": lambda row: row.batches.data_wait,
    "computes, share": lambda row: row.batches.utilisation,
    "of the gather limit": lambda row: row.rates.of_limit,
    "first batch, s": lambda row: row.batches.first_batch_s,
    "first step, s": lambda row: row.batches.first_step_s,
    "median batch, s": lambda row: row.batches.batch_s_median,
    "95th percentile, s": lambda row: row.batches.batch_s_p95,
    "longest first of an epoch, s": lambda row: row.batches.epoch_gap_s,
}


def html(result: Result) -> str:
    """The page; what the result lacks is left out."""
    content = "".join(
        (
            "<h1>Does the trainer wait for data?</h1>",
            f'<section class="verdict">{paragraphs(_verdict(result))}</section>',
            _overview(result),
            _details(result),
            _numbers(result),
            _conditions(result),
        )
    )
    return document("Loader benchmark", content)


def document(title: str, content: str) -> str:
    """A page of `content`, with the style and the script that its charts need."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body>{content}</body></html>\n"
    )


def _verdict(result: Result) -> Iterator[str]:
    """Sentences: who waits, what would help, which limits were met."""
    lines = report.headline(result)
    if lines:
        yield from lines
    else:
        rows = [row for row in result.rows if not row.peer and row.backend != "synthetic"] or result.rows
        best = max(rows, key=lambda row: row.loader.median)
        yield (
            f"Measured without a trainer. The fastest loader is {report.label(best)}: "
            f"{best.loader.median:,.0f} images/s."
        )
    for row in result.rows:
        if row.advice.text:
            yield f"{report.title(result, row)}: {row.advice.text}"
    yield from report.comparisons(result)


def _overview(result: Result) -> str:
    figures = {}
    for name in dict.fromkeys(row.trainer_name for row in result.rows):
        rows = [row for row in result.rows if row.trainer_name == name and row.trainer and row.together]
        if rows:
            figures[f"Fed to {name}: images/s, and share of the trainer's own rate"] = charts.fed(rows)
    figures["Loaders alone: images/s"] = charts.alone(result.rows)
    return f"<h2>How fast</h2>{draw(figures, 'overview')}"


def _details(result: Result) -> str:
    """A section for each row that has more than the overview shows, and links to them."""
    batch_size = result.settings["batch_size"]
    links, sections = [], []
    for number, row in enumerate(result.rows):
        figures = _row_figures(row, batch_size)
        if figures:
            title = escape(report.title(result, row))
            links.append(f'<a href="#row{number}">{title}</a>')
            words = paragraphs([" ".join(_findings(row))])
            shown = f"{words}{_changes(row)}{draw(figures, f'row{number}')}"
            sections.append(f'<h2 id="row{number}">{title}</h2>{shown}')
    return (
        f"<nav>In detail: {', '.join(links)}</nav>{''.join(sections)}"
        if len(links) > 1
        else "".join(sections)
    )


def _row_figures(row: Row, batch_size: int) -> dict[str, go.Figure]:
    figures = {}
    if row.stages.rates:
        figures["What each stage can do alone"] = charts.stages(row)
    if row.stages.stalls and row.trainer and row.together:
        figures["Where a batch's time goes"] = charts.waterfall(row, batch_size)
    if row.batches.step_s:
        figures["Throughput over time"] = charts.throughput(row, batch_size)
        figures["Time of each batch"] = charts.batch_strip(row)
    return figures | charts.monitor(row.monitor)


def _findings(row: Row) -> Iterator[str]:
    times, stages = row.batches, row.stages
    if stages.binds:
        yield f"What binds: {stages.binds}."
    elif stages.rates:
        yield "Which stage binds cannot be told."
    if stages.predicted and row.together:
        measured = row.together.median
        off = measured / stages.predicted - 1
        yield f"Predicted {stages.predicted:,.0f} images/s, measured {measured:,.0f} ({off:+.0%})."
    if times.data_wait:
        yield f"The trainer waited {_percent(times.data_wait)} of the time."
    if times.utilisation:
        yield f"It computed {_percent(times.utilisation)} of the time; MLPerf Storage asks for 90%."
    if COLD_FETCH in stages.stalls:
        yield f"From a cold cache each batch would take {_number(stages.stalls[COLD_FETCH] * 1e3)} ms more."
    yield f"The first batch came after {_number(times.first_batch_s.median * 1e3)} ms."
    if times.first_step_s and times.step_s:
        first_ms, usual_ms = times.first_step_s.median * 1e3, median(times.step_s) * 1e3
        yield f"The first step took {_number(first_ms)} ms, the others {_number(usual_ms)} ms (median)."
    yield from times.spikes.explanation if times.spikes else ()
    yield from row.flags


def _changes(row: Row) -> str:
    """A table of what was considered, the fastest first; empty where nothing was."""
    if not row.advice.changes:
        return ""
    titles = ("What one could do", "images/s", "measured or predicted", "takes")
    head = "".join(f"<th>{title}</th>" for title in titles)
    lines = []
    for change in sorted(row.advice.changes, key=lambda change: -change.images_per_s.median):
        name = escape(change.what.rstrip(","))
        rate = change.images_per_s
        # the range of a prediction would be that of one of its parts
        shown, source = (rate, "measured") if change.measured else (rate.median, "predicted")
        costs = takes(change.seconds, change.size_bytes)
        cells = "".join(f"<td>{cell}</td>" for cell in (name, _cell(shown), source, costs))
        lines.append(f"<tr>{cells}</tr>")
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def draw(figures: dict[str, go.Figure], prefix: str) -> str:
    """Charts by their titles; `prefix` begins their ids on the page."""
    shown = []
    for number, (title, figure) in enumerate(figures.items()):
        chart = plotly.io.to_html(
            figure,
            config=_CONFIG,
            include_plotlyjs=False,
            full_html=False,
            default_height=f"{figure.layout.height}px",
            div_id=f"{prefix}-{number}",
        )
        shown.append(f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>")
    return f'<div class="charts">{"".join(shown)}</div>'


def _numbers(result: Result) -> str:
    rows = result.rows
    shown = {title: get for title, get in _NUMBERS.items() if any(get(row) is not None for row in rows)}
    head = "".join(f"<th>{escape(title)}</th>" for title in ("", *shown))
    lines = []
    for row in rows:
        name = escape(report.title(result, row)) + (
            ' <span class="peer">for comparison</span>' if row.peer else ""
        )
        cells = "".join(f"<td>{_cell(get(row))}</td>" for get in shown.values())
        lines.append(f"<tr><td>{name}</td>{cells}</tr>")
    content = json.dumps(result.to_json()).encode()
    return (
        "<h2>Numbers</h2>"
        f'<p class="note">Medians, and the lowest and highest of {result.settings["repeats"]} repeats.</p>'
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
        '<p class="download"><a download="result.json" '
        f'href="data:application/json;base64,{base64.b64encode(content).decode()}">'
        "Everything as JSON</a>: 'bench report' reads it.</p>"
    )


def _conditions(result: Result) -> str:
    facts = {**result.machine, **result.settings}
    if result.host_to_device_gbps is not None:
        facts["host to device"] = f"{result.host_to_device_gbps:.1f} GB/s"
    skipped = paragraphs(f"Skipped {name}: {reason}" for name, reason in result.skipped.items())
    return f"{skipped}<h2>Machine, versions and settings</h2>{describe(facts)}"


def describe(facts: Mapping[str, object]) -> str:
    """Names and values, a line each."""
    lines = (f"<dt>{escape(name)}</dt><dd>{escape(_text(value))}</dd>" for name, value in facts.items())
    return f"<dl>{''.join(lines)}</dl>"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Titles and cells, as text; numbers to the right, words, with `code` in them, to the left."""
    lines = [list(row) for row in rows]
    words = {
        column
        for line in lines
        for column, cell in enumerate(line)
        if cell[:1].isalpha() or cell[:1] in ("`", "'")
    }
    kinds = [' class="words"' if column in words else "" for column in range(len(titles))]
    head = "".join(f"<th{kind}>{escape(title)}</th>" for kind, title in zip(kinds, titles, strict=True))
    drawn = (
        "".join(f"<td{kind}>{_with_code(cell)}</td>" for kind, cell in zip(kinds, line, strict=True))
        for line in lines
    )
    body = "".join(f"<tr>{cells}</tr>" for cells in drawn)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def paragraphs(lines: Iterable[str]) -> str:
    """Each line one."""
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_text(part)}" for name, part in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _percent(share: Estimate) -> str:
    return f"{share.median:.0%} ({share.low:.0%} to {share.high:.0%})"


def _cell(value: Estimate | float | None) -> str:
    if value is None:
        return ""
    if not isinstance(value, Estimate):
        return _number(value)
    return f"{_number(value.median)}<br><small>{_number(value.low)} to {_number(value.high)}</small>"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _with_code(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
