"""A result as one HTML page that needs no network: the verdict in words, charts, and the figures."""

import base64
import json
from collections.abc import Callable, Iterator
from html import escape
from statistics import median

import plotly.graph_objects as go

from bench.report import busy, charts, skeleton, summary
from bench.report import table as report
from bench.report.gain import busy as busy_share
from bench.report.gain import sentences
from bench.report.row import Result, Row
from bench.report.stats import Estimate
from bench.report.trust import miss, why_together
from bench.report.verdict import COLD_FETCH, files_are, takes
from bench.report.words import percent
from bench.report.workers import without_former_advice
from precache.console import page

_NUMBERS: dict[str, Callable[[Row], Estimate | float | None]] = {
    "loader alone, images/s": lambda row: row.loader,
    "cold": lambda row: row.cold,
    "trainer alone": lambda row: row.trainer,
    "together": lambda row: row.together,
    "predicted": lambda row: row.stages.predicted,
    "accelerator busy, share": busy_share,
    "waits, share": lambda row: row.batches.data_wait,
    "of the gather limit": lambda row: row.rates.of_limit,
    "first batch, s": lambda row: row.batches.first_batch_s,
    "first step, s": lambda row: row.batches.first_step_s,
    "median batch, s": lambda row: row.batches.batch_s_median,
    "95th percentile, s": lambda row: row.batches.batch_s_p95,
    "longest first of an epoch, s": lambda row: row.batches.epoch_gap_s,
}


def html(result: Result, gpu_price: float | None = None) -> str:
    """The page: the sentence, how busy each loader keeps the accelerator, and the rest folded.

    Args:
        gpu_price: dollars per hour of the accelerator; None leaves money out.
    """
    skipped = page.paragraphs(f"Skipped {name}: {reason}" for name, reason in summary.skipped(result).items())
    said = "".join(f"<p>{page.with_code(line)}</p>" for line in _verdict(result, gpu_price))
    content = "".join(
        (
            "<h1>Does the trainer wait for data?</h1>",
            f'<section class="verdict">{said}</section>',
            busy.figures(result, gpu_price),
            f'<p class="note">{"<br>".join(f"{escape(line)}." for line in summary.note(result))}</p>',
            skipped,
            page.folded("The table", _table(result)),
            page.folded("The bottleneck of each loader, and what would fix it", _advice(result)),
            page.folded("Images/s: fed to the trainer, and alone", _overview(result)),
            *_details(result),
            page.folded("All numbers", _numbers(result)),
            page.folded("Machine, versions and settings", _conditions(result)),
        )
    )
    return skeleton.document("Loader benchmark", content, busy.STYLE)


def _verdict(result: Result, gpu_price: float | None) -> Iterator[str]:
    """Sentences: what converting gains; which loader is fastest, where none could be compared."""
    said = sentences(result, gpu_price)
    yield from said
    if not said:
        best = max(summary.rows(result), key=lambda row: row.loader.median)
        yield f"The fastest loader is {report.label(best)}: {best.loader.median:,.0f} images/s alone."


def _table(result: Result) -> str:
    lines = ([escape(cell) for cell in line] for line in summary.cells(result))
    titles = summary.titles(result)
    return page.html_table(titles, lines, [""] * len(titles))


def _advice(result: Result) -> str:
    """Who waits, what would help, and how other libraries compare."""
    advice = (f"{report.title(result, row)}: {row.advice.text}" for row in result.rows if row.advice.text)
    return page.paragraphs([*report.headline(result), *advice, *report.comparisons(result)])


def _overview(result: Result) -> str:
    figures = {}
    for name in dict.fromkeys(row.trainer_name for row in result.rows):
        rows = [row for row in result.rows if row.trainer_name == name and row.trainer and row.together]
        if rows:
            figures[f"Fed to {name}: images/s, and how busy that keeps the accelerator"] = charts.fed(rows)
    figures["Loaders alone: images/s"] = charts.alone(result.rows)
    return skeleton.draw(figures, "overview")


def _details(result: Result) -> Iterator[str]:
    """A folded section for each row that has more than the overview shows."""
    for number, row in enumerate(result.rows):
        figures = _row_figures(row, result.settings["batch_size"])
        if figures:
            words = page.paragraphs([" ".join(_findings(row))])
            shown = f"{words}{_changes(row)}{skeleton.draw(figures, f'row{number}')}"
            yield page.folded(f"In detail: {report.title(result, row)}", shown)


def _row_figures(row: Row, batch_size: int) -> dict[str, go.Figure]:
    figures = {}
    if row.stages.rates:
        cold = ", storage from a cold disk" if row.reads_cold else ""
        figures[f"What each stage can do alone{cold}"] = charts.stages(row)
    if row.stages.stalls and row.trainer and row.together:
        figures[f"Where a batch's time goes{_in_memory(row)}"] = charts.waterfall(row, batch_size)
    if row.batches.step_s:
        figures["Throughput over time"] = charts.throughput(row, batch_size)
        figures["Time of each batch"] = charts.batch_strip(row)
    return figures | charts.monitor(row.monitor)


def _findings(row: Row) -> Iterator[str]:
    times, stages = row.batches, row.stages
    where = "" if row.cold is None else f" {files_are(cold=row.reads_cold)}"
    if stages.binds:
        yield f"The bottleneck{where}: {stages.binds}."
    elif stages.rates:
        yield f"No stage stands out as the bottleneck{where}."
    if stages.predicted and row.together:
        measured = row.together.median
        off = measured / stages.predicted - 1
        rates = f"Predicted {stages.predicted:,.0f} images/s, measured {measured:,.0f} ({off:+.0%})"
        yield f"{rates}{_in_memory(row)}."
        missed = miss(stages.predicted, measured, why_together(stages.predicted, measured))
        if missed:
            yield f"{missed[0].upper()}{missed[1:]}."
    if times.data_wait:
        yield f"The trainer waited {_percent(times.data_wait)} of the time."
    if times.utilisation:
        yield f"The accelerator was busy {_percent(times.utilisation)}; MLPerf Storage asks for 90%."
    if COLD_FETCH in stages.stalls:
        yield f"From a cold disk each batch would take {_number(stages.stalls[COLD_FETCH] * 1e3)} ms more."
    yield f"The first batch came after {_number(times.first_batch_s.median * 1e3)} ms."
    if times.first_step_s and times.step_s:
        first_ms, usual_ms = times.first_step_s.median * 1e3, median(times.step_s) * 1e3
        yield f"The first step took {_number(first_ms)} ms, the others {_number(usual_ms)} ms (median)."
    yield from without_former_advice(times.spikes.explanation) if times.spikes else ()
    yield from row.flags


def _in_memory(row: Row) -> str:
    """What a warm figure says beside cold ones."""
    return "" if row.cold is None else ", files in memory"


def _changes(row: Row) -> str:
    """A table of what would gain, the fastest first; empty where nothing would."""
    gaining = [change for change in row.advice.changes if change.gains_over(row.now)]
    if not gaining:
        return ""
    titles = ("What would gain", "images/s", "measured or predicted", "takes")
    lines = []
    for change in sorted(gaining, key=lambda change: -change.images_per_s.median):
        name = escape(change.what.rstrip(","))
        # the range of a prediction would be that of one of its parts
        rate = change.images_per_s
        shown, source = (rate, "measured") if change.measured else (rate.median, "predicted")
        source += "" if row.cold is None else f" {files_are(cold=change.cold)}"
        lines.append((name, _cell(shown), source, takes(change)))
    return page.html_table(titles, lines, ["", "", "words", "words"])


def _numbers(result: Result) -> str:
    rows = result.rows
    shown = {title: get for title, get in _NUMBERS.items() if any(get(row) is not None for row in rows)}
    lines = []
    for row in rows:
        compared = ' <span class="peer">for comparison</span>' if row.peer else ""
        cells = (_cell(get(row)) for get in shown.values())
        lines.append([escape(report.title(result, row)) + compared, *cells])
    content = json.dumps(result.to_json()).encode()
    table = page.html_table(["", *map(escape, shown)], lines, [""] * (1 + len(shown)))
    return (
        f'<p class="note">Medians, and the lowest and highest of {result.settings["repeats"]} repeats.</p>'
        f"{table}"
        '<p class="download"><a download="result.json" '
        f'href="data:application/json;base64,{base64.b64encode(content).decode()}">'
        "Everything as JSON</a>: 'bench report' reads it.</p>"
    )


def _conditions(result: Result) -> str:
    facts = {**result.machine, **result.settings}
    if result.host_to_device_gbps is not None:
        facts["host to device"] = f"{result.host_to_device_gbps:.1f} GB/s"
    return page.facts(facts)


def _percent(share: Estimate) -> str:
    return f"{percent(share.median)} ({percent(share.low)} to {percent(share.high)})"


def _cell(value: Estimate | float | None) -> str:
    if value is None:
        return ""
    if not isinstance(value, Estimate):
        return _number(value)
    return f"{_number(value.median)}<br><small>{_number(value.low)} to {_number(value.high)}</small>"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
