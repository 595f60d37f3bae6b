"""A result as one picture for a README: bars by loader, in SVG text that follows light and dark mode."""

from dataclasses import dataclass
from html import escape

from bench.report import summary, table
from bench.report.gain import busy
from bench.report.row import Result, Row
from bench.report.words import percent

_WIDTH, _NAME, _RIGHT = 760, 190, 90
_LANE, _BAR, _COLD_LANE, _COLD_BAR = 34, 18, 52, 12
_TOP, _FOOT = 62, 40
_STYLE = """
svg { font: 14px system-ui, -apple-system, 'Segoe UI', sans-serif; }
.title { font-size: 16px; font-weight: 600; }
text { fill: #1c1e21; } .soft { fill: #5d636b; font-size: 12px; }
.page { fill: #fff; } .track { fill: #8a8f9822; }
.bar { fill: #2b83c6; } .today { fill: #8a8f98; } .cold { fill: #56b4e9; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e8eb; } .soft { fill: #a3a9b3; }
  .page { fill: #15171a; } .bar { fill: #4a9ad9; } .cold { fill: #8fd0f5; } }
"""


@dataclass(frozen=True, slots=True)
class _Bar:
    """Shares of the width, 0 to 1, with their texts."""

    name: str
    kind: str
    share: float
    text: str
    cold: float | None = None
    cold_text: str = ""


def svg(result: Result) -> str:
    """A picture of `_WIDTH` pixels: how busy each loader keeps the accelerator, or images/s without one."""
    shown = summary.rows(result)
    fed = [row for row in shown if row.ratio is not None]
    title, bars = _busy(result, fed) if fed else _alone(result, shown)
    lane = _LANE if all(bar.cold is None for bar in bars) else _COLD_LANE
    height = _TOP + lane * len(bars) + _FOOT
    lanes = "".join(_lane(bar, _TOP + lane * number) for number, bar in enumerate(bars))
    foot = escape("; ".join(summary.note(result)[:1]))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(title)}"><style>{_STYLE}</style>'
        f'<rect class="page" width="{_WIDTH}" height="{height}" rx="8"/>'
        f'<text class="title" x="8" y="28">{escape(title)}</text>{lanes}'
        f'<text class="soft" x="8" y="{height - 14}">{foot}</text></svg>\n'
    )


def _busy(result: Result, rows: list[Row]) -> tuple[str, list[_Bar]]:
    bars = []
    for row in rows:
        share = busy(row)
        assert share is not None
        bars.append(_Bar(table.title(result, row), _kind(row), share.median, percent(share.median)))
    trainer = rows[0].trainer
    rate = (
        f" of {trainer.median:,.0f} images/s" if trainer and len({r.trainer_name for r in rows}) == 1 else ""
    )
    return f"How busy each loader keeps an accelerator{rate}", bars


def _alone(result: Result, rows: list[Row]) -> tuple[str, list[_Bar]]:
    most = max(row.loader.median for row in rows)
    bars = [
        _Bar(
            table.title(result, row),
            _kind(row),
            row.loader.median / most,
            f"{row.loader.median:,.0f}",
            None if row.cold is None else row.cold.median / most,
            "" if row.cold is None else f"{row.cold.median:,.0f} cold",
        )
        for row in rows
    ]
    cold = ", and read from a cold disk" if any(bar.cold is not None for bar in bars) else ""
    return f"Images per second of each loader{cold}", bars


def _kind(row: Row) -> str:
    return "today" if row.peer or row.backend == "imagefolder" else "bar"


def _lane(bar: _Bar, top: int) -> str:
    room = _WIDTH - _NAME - _RIGHT
    width = max(2.0, room * min(bar.share, 1.0))
    name = bar.name if len(bar.name) <= 26 else f"{bar.name[:25]}…"
    parts = [
        f'<text x="8" y="{top + 14}">{escape(name)}</text>',
        f'<rect class="track" x="{_NAME}" y="{top}" width="{room}" height="{_BAR}" rx="3"/>',
        f'<rect class="{bar.kind}" x="{_NAME}" y="{top}" width="{width:.1f}" height="{_BAR}" rx="3"/>',
        f'<text x="{_WIDTH - 8}" y="{top + 14}" text-anchor="end">{escape(bar.text)}</text>',
    ]
    if bar.cold is not None:
        cold = max(2.0, room * min(bar.cold, 1.0))
        below = top + _BAR + 2
        parts += [
            f'<rect class="cold" x="{_NAME}" y="{below}" width="{cold:.1f}" height="{_COLD_BAR}" rx="3"/>',
            f'<text class="soft" x="{_WIDTH - 8}" y="{below + 11}" text-anchor="end">'
            f"{escape(bar.cold_text)}</text>",
        ]
    return "".join(parts)
