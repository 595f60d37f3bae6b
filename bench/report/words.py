"""Figures, machines and tables as people read them. Pure, but for `Table.show` and `say`, which print."""

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

import click
from rich.cells import cell_len
from rich.table import Table as RichTable

from precache import page
from precache.cli.terminal import new_console
from precache.errors import printable

WIDTH = 100
"""Columns of a terminal that text and tables fit into."""
_PERIODS = (
    ("years", 31_557_600.0),
    ("days", 86_400.0),
    ("h", 3600.0),
    ("min", 60.0),
    ("s", 1.0),
    ("ms", 1e-3),
)
_GPU = {"driver": "driver", "cuda": "CUDA", "cudnn": "cuDNN", "nccl": "NCCL"}


def number(value: float) -> str:
    """Three digits, or all before the point: 0.154, 11.6, 1,867."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def percent(share: float) -> str:
    """Whole per cent; below 1% one digit more, and 100% only of what is."""
    if 0 < share < 0.01:
        return f"{share:.1%}"
    return f"{share:.0%}" if share >= 0.9995 else f"{min(share, 0.994):.0%}"


def duration(seconds: float | None) -> str:
    """A time in the unit that suits it: 5.20 ms, 12.3 s, 4.1 h, 3.2 years; '-' for None."""
    if seconds is None:
        return "-"
    unit, length = next(((u, n) for u, n in _PERIODS if seconds >= 2 * n), _PERIODS[-1])
    return f"{number(seconds / length)} {unit}"


def counted(count: int, one: str, several: str = "") -> str:
    """`1 run`, `2 runs`; `several` where its plural has more than an s."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def accelerator_of(machine: Mapping[str, str]) -> str:
    """The accelerator of `bench.machine.hardware.describe_machine`, with what drives it."""
    versions = ", ".join(f"{title} {machine[name]}" for name, title in _GPU.items() if name in machine)
    return f"{machine['accelerator']} ({versions})" if versions else machine["accelerator"]


def versions_of(machine: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """'torch 2.15.0' and so on, of those that the machine has; Pillow-SIMD by its own name."""
    called = {"pillow": machine.get("pillow_flavour", "pillow")}
    return [f"{called.get(name, name)} {machine[name]}" for name in names if name in machine]


def machine_line(machine: Mapping[str, str], versions: Iterable[str] = ("torch", "pillow")) -> str:
    """The machine, its accelerator, versions and the date: what goes with every figure."""
    gpu = accelerator_of(machine)
    parts = [machine["cpu"], machine["memory"], "no accelerator" if gpu == "none" else gpu]
    return ", ".join([*parts, *versions_of(machine, versions), machine["date"]])


def say(text: str) -> None:
    """Print a text on lines of at most WIDTH columns, unbroken words apart."""
    click.echo(textwrap.fill(printable(text), WIDTH, break_long_words=False, break_on_hyphens=False))


@dataclass(frozen=True, slots=True)
class Table:
    """Titles and rows of text, for a terminal, as Markdown and as HTML.

    Attributes:
        rows: a text for each title.
        words: titles of columns that hold words, which stand to the left; so does the first column.
        bold: numbers of the rows that stand out.
        title: above it.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[str] = ()
    bold: Collection[int] = field(default=())
    title: str = ""

    def show(self) -> None:
        """Print it; columns that WIDTH has no room for stand in a further table below."""
        widths = [max(map(cell_len, column)) for column in zip(self.titles, *self.rows, strict=True)]
        console = new_console(width=sum(widths) + 2 * len(widths) + cell_len(self.title))  # cuts off nothing
        if self.title:  # not the table's own, which breaks it to the width of the columns
            console.print(self.title, style="bold")
        for number, columns in enumerate(_that_fit(widths)):
            table = RichTable(box=None, pad_edge=False)
            for at in columns:
                left = at == 0 or self.titles[at] in self.words
                table.add_column(self.titles[at], justify="left" if left else "right", no_wrap=True)
            for at, row in enumerate(self.rows):
                table.add_row(*(row[column] for column in columns), style="bold" if at in self.bold else "")
            if number:
                console.print()
            console.print(table)

    def markdown(self) -> str:
        """Lines of a Markdown table."""
        ruled = (self.titles, ["---"] * len(self.titles), *self.rows)
        return "\n".join(f"| {' | '.join(row)} |" for row in ruled)

    def html(self) -> str:
        """An HTML table. On a phone each row is a list: each cell has its title with it, hidden elsewhere."""
        kinds = ["words" if title in self.words else "" for title in self.titles]
        shown = [escape(title) for title in self.titles]
        labels = ["", *(f'<span class="title">{title}</span>' for title in shown[1:])]
        cells = (
            [label + page.with_code(cell) if cell else "" for label, cell in zip(labels, row, strict=True)]
            for row in self.rows
        )
        return f'<div class="listed">{page.html_table(shown, cells, kinds)}</div>'


def _that_fit(widths: Sequence[int]) -> list[list[int]]:
    """The columns of each table, at most WIDTH wide where that can be; the first one is in all of them."""
    tables = [[0]]
    for column in range(1, len(widths)):
        wide = sum(widths[one] + 2 for one in tables[-1]) + widths[column]
        if wide > WIDTH and len(tables[-1]) > 1:
            tables.append([0])
        tables[-1].append(column)
    return tables
