"""A result as a terminal table, as Markdown, and as one self-contained HTML page."""

from collections.abc import Sequence
from html import escape

from rich.table import Table

from bench.comparison import Result, Row
from bench.stats import Estimate
from bench.verdict import KEEPS_UP, LOADER_BINDS, NOT_DISTINGUISHABLE, waiting_share

_VERSIONS = ("python", "torch", "torchvision", "pillow", "simplejpeg", "webdataset", "nvidia-dali-cuda120")
LEGEND = (
    "loader, trainer, together: images per second of the loader alone, of the trainer alone on a batch "
    "that stays on the device, and of the trainer fed by the loader. ratio: together over trainer, and "
    "the farthest repeat from it. first s: seconds from building the loader to its first batch. "
    "med ms, p95 ms: time per batch, together."
)
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .8rem; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
td:last-child, th:last-child { text-align: left; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dt { opacity: .7; } dd { margin: 0; overflow-wrap: anywhere; }
"""


def headline(result: Result) -> list[str]:
    """What the result says, one sentence per trainer."""
    sentences = []
    for name in dict.fromkeys(row.trainer_name for row in result.rows):
        rows = [row for row in result.rows if row.trainer_name == name and row.trainer is not None]
        keeping = [_label(row) for row in rows if row.verdict == KEEPS_UP]
        waiting = [
            f"{_label(row)} ({waiting_share(row.ratio):.0%} of the time)"
            for row in rows
            if row.verdict == LOADER_BINDS and row.ratio is not None
        ]
        unclear = [_label(row) for row in rows if row.verdict == NOT_DISTINGUISHABLE]
        if waiting:
            sentences.append(f"With {name} the trainer waits for {', '.join(waiting)}.")
        if unclear:
            sentences.append(f"With {name} not distinguishable from keeping up: {', '.join(unclear)}.")
        if keeping:
            sentences.append(f"With {name} these keep up: {', '.join(keeping)}.")
    return sentences


def columns(result: Result) -> list[str]:
    """Column titles; the trainer's name is one only where several were measured."""
    titles = ["backend", "data", "loader", "trainer", "together", "ratio"]
    titles += ["first s", "med ms", "p95 ms", "verdict"]
    return ["step", *titles] if _several_trainers(result) else titles


def cells(result: Result) -> list[list[str]]:
    """The rows as text."""
    table = []
    for row in result.rows:
        values = [
            row.backend,
            row.data,
            _rate(row.loader),
            _rate(row.trainer),
            _rate(row.together),
            _ratio(row.ratio),
            f"{row.first_batch_s.median:.2f}",
            f"{row.batch_s_median * 1e3:.1f}",
            f"{row.batch_s_p95 * 1e3:.1f}",
            _verdict(row),
        ]
        table.append([row.trainer_name, *values] if _several_trainers(result) else values)
    return table


def terminal_table(result: Result) -> Table:
    """A rich table."""
    table = Table(box=None, pad_edge=False)
    left = {"step", "backend", "data", "verdict"}
    for title in columns(result):
        table.add_column(title, justify="left" if title in left else "right", no_wrap=True)
    for row in cells(result):
        table.add_row(*row)
    return table


def markdown(result: Result) -> str:
    """A Markdown table, with the conditions below it."""
    titles = columns(result)
    lines = [_markdown_row(titles), _markdown_row(["---"] * len(titles))]
    lines += [_markdown_row(row) for row in cells(result)]
    lines += ["", f"{conditions(result)}."]
    return "\n".join(lines)


def conditions(result: Result) -> str:
    """Under which conditions the figures hold, on one line."""
    settings, machine = result.settings, result.machine
    versions = [f"{name} {machine[name]}" for name in _VERSIONS if name in machine]
    return "; ".join(
        (
            f"{machine['cpu']}, {machine['memory']}, accelerator: {machine['accelerator']}",
            ", ".join(versions),
            f"trainer {', '.join(settings['trainers'])}",
            f"batch {settings['batch_size']} of {settings['size']}x{settings['size']}, "
            f"{settings['workers']} workers, page cache {settings['page_cache']}",
            f"median of {settings['repeats']} interleaved runs of {settings['batches']} batches",
            machine["date"],
        )
    )


def html(result: Result) -> str:
    """One page that needs no network."""
    head = "".join(f"<th>{escape(title)}</th>" for title in columns(result))
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells(result)
    )
    verdicts = "".join(f"<p>{escape(sentence)}</p>" for sentence in headline(result))
    skipped = "".join(
        f"<p>Skipped {escape(name)}: {escape(reason)}</p>" for name, reason in result.skipped.items()
    )
    facts = {**result.machine, **{name: str(value) for name, value in result.settings.items()}}
    details = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Loader benchmark</title><style>{_STYLE}</style></head><body>"
        f"<h1>Does the trainer wait for data?</h1>{verdicts}"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f"<p>{escape(LEGEND)}</p>"
        f"{skipped}<h2>Conditions</h2><dl>{details}</dl></body></html>\n"
    )


def _ratio(ratio: Estimate | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio.median:.2f} ±{max(ratio.high - ratio.median, ratio.median - ratio.low):.2f}"


def _verdict(row: Row) -> str:
    if row.verdict == NOT_DISTINGUISHABLE:
        return "unclear"
    if row.ratio is None or row.verdict != LOADER_BINDS:
        return row.verdict
    return f"waits {waiting_share(row.ratio):.0%}"


def _label(row: Row) -> str:
    return f"{row.backend} on {row.data}"


def _rate(rate: Estimate | None) -> str:
    return "-" if rate is None else f"{rate.median:,.0f}"


def _several_trainers(result: Result) -> bool:
    return len({row.trainer_name for row in result.rows}) > 1


def _markdown_row(row: Sequence[str]) -> str:
    return "| " + " | ".join(row) + " |"
