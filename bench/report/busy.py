"""The first chart of the page: a bar for each loader, and what it saves. It is HTML and needs no script."""

from collections.abc import Sequence
from html import escape

from bench.report import summary, table
from bench.report.gain import busy, find_gain, rate, saved_share
from bench.report.payback import times
from bench.report.row import Result, Row
from bench.report.trust import is_disturbed, other_cpu
from bench.report.words import percent

STYLE = """
.busy { max-width: none; margin: 1.8rem 0 1.2rem; } .busy figcaption { margin-bottom: .6rem; }
.lane { display: grid; grid-template-columns: 14rem minmax(8rem, 1fr) 3.5rem 17rem; gap: 0 .9rem;
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


def figures(result: Result, gpu_price: float | None) -> str:
    """A chart for each trainer; of images/s where there was none. `gpu_price`: dollars per hour, or None."""
    shown = summary.rows(result)
    names = dict.fromkeys(row.trainer_name for row in shown if row.ratio is not None)
    if not names:
        most = max(row.loader.median for row in shown)
        lanes = [
            _lane(result, row, row.loader.median / most, f"{row.loader.median:,.0f}", shown, None)
            for row in shown
        ]
        return _figure("Images per second, each loader alone", lanes)
    return "".join(_fed(result, [r for r in shown if r.trainer_name == name], gpu_price) for name in names)


def _fed(result: Result, rows: Sequence[Row], gpu_price: float | None) -> str:
    trainer = rows[0].trainer
    takes = f", which takes {trainer.median:,.0f} images/s" if trainer is not None else ""
    title = f"Accelerator busy: share of the time that it has work ({rows[0].trainer_name}{takes})"
    lanes = []
    for row in rows:
        share = busy(row)
        if share is not None:
            lanes.append(_lane(result, row, share.median, percent(share.median), rows, gpu_price))
    return _figure(title, lanes)


def _figure(title: str, lanes: Sequence[str]) -> str:
    return f'<figure class="busy"><figcaption>{escape(title)}</figcaption>{"".join(lanes)}</figure>'


def _lane(
    result: Result, row: Row, share: float, text: str, rows: Sequence[Row], gpu_price: float | None
) -> str:
    gain = None if is_disturbed(other_cpu(result.settings)) else find_gain(rows)
    today = gain.today if gain is not None else None
    kind = " today" if row is today else " best" if gain is not None and row in gain.best else ""
    saves = "" if today is None else _saves(row, today, gpu_price)
    return (
        f'<div class="lane{kind}"><div class="name">{escape(table.title(result, row))}</div>'
        f'<div class="track"><div style="width:{100 * min(share, 1.0):.1f}%"></div></div>'
        f'<div class="share">{text}</div><div class="saves">{escape(saves)}</div></div>'
    )


def _saves(row: Row, today: Row, gpu_price: float | None) -> str:
    """What an hour of training becomes, in minutes and dollars."""
    if row is today:
        return "what people have today"
    if row.backend == "synthetic" or (row.peer and today.ratio is not None):
        return ""
    saved = saved_share(row, today)
    if row.ratio is None:
        return f"{times(rate(row).median / rate(today).median)} as many" if saved is not None else ""
    if saved is None:
        slower = rate(row).high < rate(today).low
        return "slower than today" if slower else "as today, within noise"
    money = "" if gpu_price is None else f", ${saved * gpu_price:,.2f} an hour"
    return f"saves {60 * saved:.0f} of 60 min{money}"
