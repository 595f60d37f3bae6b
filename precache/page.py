"""The HTML skeleton of every page that this project writes: `precache inspect --html` and those of `bench`.

A page is one file that needs no network and no script of its own; it follows the reader's light or dark
mode, and can be printed. Functions here escape the text that they take, and return HTML. Arguments whose
names end in `_html` are HTML already.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from precache.errors import SettingError, os_errors_as
from precache.storage import atomic_write

# Colours are CSS variables, which charts use too: so dark mode and print need no script.
_STYLE = """
:root { color-scheme: light dark;
  --fg: #1c1e21; --bg: #fff; --soft: #5d636b; --line: #d9dce1; --tint: #eef3f9; --bar: #2b83c6; }
@media (prefers-color-scheme: dark) {
  :root { --fg: #e6e8eb; --bg: #15171a; --soft: #a3a9b3; --line: #3a3f47; --tint: #1f2731; --bar: #4a9ad9; } }
@media print { :root { color-scheme: light;
  --fg: #000; --bg: #fff; --soft: #444; --line: #ccc; --tint: #fff; --bar: #2b83c6; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg);
  max-width: 74rem; margin: 1.5rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .3rem; }
a { color: inherit; }
.verdict { background: var(--tint); border: 1px solid var(--line); border-radius: 6px; padding: .2rem 1rem; }
.verdict p { margin: .6rem 0; max-width: 60rem; }
.verdict p:first-child { font-size: 1.15rem; font-weight: 600; }
.charts { display: grid; gap: 1rem 2rem; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 28rem), 1fr)); }
.charts.small { grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
figure { margin: 0; min-width: 0; max-width: 44rem; } figcaption { font-weight: 600; }
.note, small, dt { color: var(--soft); }
.wide { overflow-x: auto; margin-bottom: 1.5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { text-align: right; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid var(--line);
  white-space: nowrap; line-height: 1.3; }
th { white-space: normal; vertical-align: bottom; font-weight: 600; }
th.words, td.words { text-align: left; white-space: normal; min-width: 6rem; overflow-wrap: break-word; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal; min-width: 8rem;
  max-width: 14rem; overflow-wrap: break-word; position: sticky; left: 0; background: var(--bg); }
td.bar { min-width: 4rem; width: 12rem; vertical-align: middle; }
td.bar div { background: var(--bar); height: .8rem; border-radius: 2px; }
.pictures { display: flex; gap: 2px; flex-wrap: wrap; min-width: 12.5rem; }
.pictures img { width: 4rem; height: 4rem; object-fit: cover; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; } dd { margin: 0; }
details { border-top: 1px solid var(--line); padding: .5rem 0; }
summary { cursor: pointer; font-weight: 600; }
@media (max-width: 30rem) {
  dl { display: block; } dd { margin-bottom: .4rem; }
  th:first-child, td:first-child { min-width: 6rem; max-width: 9rem; } }
/* bars, which stand last, are not to be cut off */
@media (max-width: 45rem) {
  .wide:has(td.bar) { font-size: .85rem; } .wide:has(td.bar) table { width: 100%; }
  .wide:has(td.bar) :is(th, td) { padding-right: .2rem; padding-left: .2rem; }
  .wide:has(td.bar) :is(th, td):first-child { padding-left: 0; min-width: 4rem; }
  td.bar { min-width: 2rem; width: 100%; } }
@media print {
  @page { margin: 12mm; }
  body { margin: 0; padding: 0; font-size: 12px; }
  .charts { display: block; } figure, .verdict, tr, dl { break-inside: avoid; } h2 { break-after: avoid; }
  .wide { overflow: visible; } table { font-size: 8px; } th, td { padding: .2rem .3rem; white-space: normal; }
  .download, nav { display: none; } small { font-size: inherit; }
}
"""


def document(title: str, content_html: str, *, head_html: str = "", style: str = "") -> str:
    """Return a page of `content_html`, with scripts in `head_html` and further CSS in `style`."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{style}</style>{head_html}</head>"
        f"<body>{content_html}</body></html>\n"
    )


def paragraphs(lines: Iterable[str]) -> str:
    """Return a paragraph for each line."""
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def facts(values: Mapping[str, object]) -> str:
    """Return a list of names and values, one pair per line; parts of a value stand side by side."""
    lines = (f"<dt>{escape(name)}</dt><dd>{escape(_text(value))}</dd>" for name, value in values.items())
    return f"<dl>{''.join(lines)}</dl>"


def collapsible(title: str, content_html: str, *, shown: bool = False) -> str:
    """Return `content_html` below its title, hidden until a click unless `shown`."""
    return f"<details{' open' if shown else ''}><summary>{escape(title)}</summary>{content_html}</details>"


def html_table(titles_html: Sequence[str], rows_html: Iterable[Sequence[str]], kinds: Sequence[str]) -> str:
    """Return a table; `kinds` holds each column's class: 'words', 'bar', or '' for numbers."""
    classes = [f' class="{kind}"' if kind else "" for kind in kinds]
    head = "".join(f"<th{kind}>{title}</th>" for kind, title in zip(classes, titles_html, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{k}>{cell}</td>' for k, cell in zip(classes, row, strict=True))}</tr>"
        for row in rows_html
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def bar(share: float) -> str:
    """Return a bar that fills the `share`, 0 to 1, of its cell, whose column has the class 'bar'."""
    return f'<div style="width:{100 * min(max(share, 0.0), 1.0):.1f}%"></div>'


def format_code(text: str) -> str:
    """Return `text`, with what stands between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write a page, or another text, whole or not at all; SettingError if `path` cannot be written."""
    with (
        os_errors_as(SettingError, "cannot be written", "name another file", path=path),
        atomic_write(Path(path)) as file,
    ):
        file.write(text.encode(errors="backslashreplace"))  # file names may hold bytes that are no text


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_text(part)}" for name, part in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
