"""What a page of `bench` adds to `precache.console.page`: charts by plotly, in the page's colours."""

from html import escape

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from precache.console import page

# Text and grid get their colours here, not from plotly: dark mode and print need no script.
_STYLE = """
.js-plotly-plot .main-svg text:not(.hoverlayer *) { fill: var(--fg) !important; }
.js-plotly-plot .annotation .bg { fill: var(--bg) !important; fill-opacity: .8 !important; }
.js-plotly-plot .gridlayer path { stroke: var(--line) !important; }
"""
# A chart drawn while it is folded has no width: it is drawn anew once it has one. Printing unfolds all.
_SCRIPT = """
addEventListener('toggle', event => event.target.querySelectorAll('.js-plotly-plot').forEach(
  chart => Plotly.Plots.resize(chart)), true);
addEventListener('beforeprint', () => document.querySelectorAll('details').forEach(
  each => { each.open = true; }));
"""
_CONFIG = {"responsive": True, "displayModeBar": False}


def document(title: str, content_html: str, style: str = "") -> str:
    """A page of `content_html`, with the style and the scripts that its charts need; `style` is more CSS."""
    scripts = f"<script>{get_plotlyjs()}</script><script>{_SCRIPT}</script>"
    return page.document(title, content_html, head_html=scripts, style=_STYLE + style)


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
