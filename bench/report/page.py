"""Pages with charts: one file each that needs no network. `precache.page` has the skeleton.

Text, grid and background of a chart take their colours from the page's style, so that they follow dark mode
and print; names that came with a result are escaped, for plotly reads some HTML in labels.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from bench.report.stats import Estimate
from precache import page

# Okabe and Ito, "Color Universal Design" (2008): those that stand out from black and from white
COLOURS = ("#2b83c6", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
BLUE, ORANGE, GREEN, PURPLE, RED, SKY = COLOURS
GREY = "#8a8f98"
_STYLE = """
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
"""
# A chart drawn while it is folded has no width, and before the page is whole perhaps another one: it is drawn
# anew once it has its own. Printing unfolds all.
_SCRIPT = """
addEventListener('load', () => document.querySelectorAll('.js-plotly-plot').forEach(
  chart => { if (chart.offsetParent) Plotly.Plots.resize(chart); }));
addEventListener('toggle', event => event.target.querySelectorAll('.js-plotly-plot').forEach(
  chart => Plotly.Plots.resize(chart)), true);
addEventListener('beforeprint', () => document.querySelectorAll('details').forEach(
  each => { each.open = true; }));
"""
_CONFIG = {"responsive": True, "displayModeBar": False}


def document(title: str, answer: Iterable[str], parts_html: Iterable[str], style: str = "") -> str:
    """A page: the question that `title` asks, the answer in sentences, and what it rests on.

    Args:
        answer: text, with code between backticks.
        style: more CSS.
    """
    said = "".join(f"<p>{page.with_code(line)}</p>" for line in answer)
    content = f'<h1>{escape(title)}</h1><section class="verdict">{said}</section>{"".join(parts_html)}'
    scripts = f"<script>{get_plotlyjs()}</script><script>{_SCRIPT}</script>"
    return page.document(title, content, head_html=scripts, style=_STYLE + style)


def charts(figures: Mapping[str, go.Figure], prefix: str) -> str:
    """Charts below their captions, each a sentence that says what to see; `prefix` begins their ids."""
    shown = []
    for number, (caption, figure) in enumerate(figures.items()):
        chart = plotly.io.to_html(
            figure,
            config=_CONFIG,
            include_plotlyjs=False,
            full_html=False,
            default_height=f"{figure.layout.height}px",
            div_id=f"{prefix}-{number}",
        )
        shown.append(f"<figure><figcaption>{escape(caption)}</figcaption>{chart}</figure>")
    return f'<div class="charts">{"".join(shown)}</div>'


def figure(traces: Sequence[Any], height: int, across: str, up: str = "") -> go.Figure:
    """Traces on axes with these titles; the legend stands above, a line for each entry on a phone."""
    entries = sum(trace.showlegend is not False for trace in traces)
    drawn = go.Figure(traces)
    drawn.update_layout(
        template="none",
        height=height + 60 + 18 * (entries + 1),
        margin={"l": 10, "r": 16, "t": 34, "b": 10},
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        dragmode=False,  # else a finger on a chart cannot scroll the page
        showlegend=entries > 0,
    )
    drawn.update_xaxes(title=across, automargin=True, zeroline=False, tickangle=0)
    drawn.update_yaxes(title=up, automargin=True, zeroline=False)
    return drawn


def line(
    across: Sequence[Any], up: Sequence[Any], name: str, colour: str, *, width: float = 2, **more: Any
) -> go.Scatter:
    """A line; `more` is `dash`, or goes to plotly."""
    look = {"color": colour, "width": width, "dash": more.pop("dash", "solid")}
    return go.Scatter(x=across, y=up, name=escape(name), line=look, **{"mode": "lines", **more})


def spread(rates: Sequence[Estimate]) -> dict[str, Any]:
    """Error bars from the lowest to the highest measurement."""
    return {
        "type": "data",
        "array": [rate.high - rate.median for rate in rates],
        "arrayminus": [rate.median - rate.low for rate in rates],
        "color": GREY,
        "thickness": 1.5,
    }
