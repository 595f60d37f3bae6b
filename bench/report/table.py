"""Tables of results: the columns that they can have, and a table as text, Markdown and HTML.

To add a column, add an entry to COLUMNS, and a value of that name to `Row.values` where the rows are made
(`bench.report.loaders` and the like).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from rich.cells import cell_len
from rich.table import Table as RichTable

from bench.report.result import Result, Row
from bench.report.stats import Estimate
from bench.report.words import WIDTH, duration, number, percent
from precache import page
from precache.cli.terminal import new_console
from precache.errors import printable
from precache.reporting import human_bytes


def _rate(value: Estimate) -> str:
    return f"{value.median:,.0f}"


def _ranged_rate(value: Estimate) -> str:
    return value.text(number)


def _whole_range(value: Estimate) -> str:
    return f"{value:,.0f}"


def _ratio(value: Estimate) -> str:
    return f"{value:.2f}"


def _share(value: Estimate) -> str:
    return percent(value.median)


def _seconds(value: Estimate) -> str:
    return f"{value.median:.2f} s"


def _stretch(value: Estimate) -> str:
    return f"{value.median:.2f}x"


def _milliseconds(value: Estimate) -> str:
    return f"{value.median * 1e3:.1f} ms"


def _duration(value: Estimate) -> str:
    return duration(value.median)


def _ranged_duration(value: Estimate) -> str:
    return value.text(duration)


def _bytes(value: Estimate) -> str:
    return human_bytes(value.median)


def _times(value: Estimate) -> str:
    return f"{value.median:.1f}x"


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table: a figure of each row.

    Attributes:
        title: title of the column.
        means: explanation for the legend; empty where the title is enough.
        text: function that formats the figure.
        better: whether more or less of the figure is better; empty where neither is.
    """

    title: str
    means: str
    text: Callable[[Estimate], str] = _rate
    better: Literal["more", "less", ""] = ""


COLUMNS: dict[str, Column] = {
    "loader_images_per_s": Column("images/s", "of the loader alone, files in memory", _rate, "more"),
    "busy_share": Column("accelerator busy", "while the loader feeds it", _share),
    "launch_ratio": Column(
        "launching", "time that launching a step takes beside the loader, over that alone", _stretch
    ),
    "launch_p95_ratio": Column("launching 95%", "the same of the 95th percentiles", _stretch),
    "cold_images_per_s": Column(
        "from a cold disk",
        "images/s, its files dropped from the page cache before",
        _rate,
        "more",
    ),
    "first_batch_s": Column("first batch", "seconds from building the loader to its first batch", _seconds),
    "trainer_images_per_s": Column("trainer", "images/s, alone, on a batch that stays on the device"),
    "launch_share": Column("launches for", "share of its step, alone, that launching takes", _share),
    "fed_images_per_s": Column(
        "training", "images/s while the loader feeds the trainer, and their range", _whole_range, "more"
    ),
    "fed_ratio": Column("ratio", "training over trainer, and its range", _ratio),
    "wait_share": Column("waits", "share of the time that the trainer waits for a batch", _share),
    "images_per_s": Column(
        "images/s", "in training; of a change predicted, and its range", _ranged_rate, "more"
    ),
    "gain": Column("times", "images/s over today's, and its range", _ratio),
    "own_images_per_s": Column("own pace", "images/s of a rank that does not wait for the others"),
    "others_wait_share": Column(
        "waits for others", "share of its own pace that a rank loses in step", _share
    ),
    "speedup": Column("times", "images/s over those of one rank alone", _ratio),
    "batch_s": Column("median", "time per batch", _milliseconds),
    "batch_p95_s": Column("95%", "most batches take no longer", _milliseconds),
    "epoch_gap_ratio": Column("epoch gap", "the longest time of an epoch's first batch, in medians", _times),
    "wait_s": Column("wait", "for a batch", _duration, "less"),
    "step_s": Column("step", "from having a batch to asking for the next one", _duration, "less"),
    "batches": Column("batches", "that were counted"),
    "data": Column("data", ""),
    "made_at": Column("made at", ""),
    "saves": Column("compared with today", "of an hour of training"),
    "convert_s": Column("converting", "takes once", _ranged_duration, "less"),
    "stored_bytes": Column("stored", "size of the data that the loader reads", _bytes),
    "rate": Column("rate", "in brackets the lowest and the highest run"),
    "alone_s": Column("for all pictures", "how long this part alone takes for them", _duration, "less"),
    "how": Column("how", ""),
}
"""Columns by the name of their value, in the order of a table."""


@dataclass(frozen=True, slots=True)
class Table:
    """Titles and rows of text, to be shown on a terminal, as Markdown or as HTML.

    Attributes:
        titles: titles of the columns.
        rows: rows with a text for each title.
        words: titles of columns that hold words and are aligned to the left, as the first column is.
        bold: positions of the rows that are shown in bold.
        title: title of the table.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[str] = ()
    bold: Collection[int] = field(default=())
    title: str = ""

    def show(self) -> None:
        """Print the table; columns that do not fit into WIDTH follow in a further table below."""
        widths = [max(map(cell_len, column)) for column in zip(self.titles, *self.rows, strict=True)]
        # wide enough for every line: a console cuts off what is wider than itself
        console = new_console(width=sum(widths) + 2 * len(widths) + cell_len(self.title))
        if self.title:  # rich breaks a table's own title to the width of its columns
            console.print(self.title, style="bold")
        for table_number, columns in enumerate(_fit_columns(widths)):
            table = RichTable(box=None, pad_edge=False)
            for column in columns:
                is_left = column == 0 or self.titles[column] in self.words
                table.add_column(self.titles[column], justify="left" if is_left else "right", no_wrap=True)
            for position, row in enumerate(self.rows):
                style = "bold" if position in self.bold else ""
                table.add_row(*(printable(row[column]) for column in columns), style=style)
            if table_number > 0:
                console.print()
            console.print(table)

    def markdown(self) -> str:
        """Write the table as Markdown."""
        ruled = (self.titles, ["---"] * len(self.titles), *self.rows)
        return "\n".join(f"| {' | '.join(row)} |" for row in ruled)

    def html(self) -> str:
        """Write the table as HTML.

        On a phone each row is shown as a list, so each cell holds its title, too, which is hidden elsewhere.
        """
        kinds = ["words" if title in self.words else "" for title in self.titles]
        titles = [escape(title) for title in self.titles]
        labels = ["", *(f'<span class="title">{title}</span>' for title in titles[1:])]
        cells = (
            [label + page.format_code(cell) if cell else "" for label, cell in zip(labels, row, strict=True)]
            for row in self.rows
        )
        return f'<div class="listed">{page.html_table(titles, cells, kinds)}</div>'


def _fit_columns(widths: Sequence[int]) -> list[list[int]]:
    """Split columns into tables of at most WIDTH characters where possible; each has the first column.

    Args:
        widths: characters of each column.

    Returns:
        Positions of the columns of each table.
    """
    tables = [[0]]
    for column in range(1, len(widths)):
        width = sum(widths[other] + 2 for other in tables[-1]) + widths[column]
        if width > WIDTH and len(tables[-1]) > 1:
            tables.append([0])
        tables[-1].append(column)
    return tables


def cell(row: Row, name: str) -> str:
    """Text of the figure `name` of a row; empty where the row has none."""
    if name in row.texts:
        return row.texts[name]
    return COLUMNS[name].text(row.values[name]) if name in row.values else ""


def _cell_or(row: Row, name: str, missing: str) -> str:
    """Text of a figure; `missing` where the row has none, but empty where the row has an empty text."""
    return cell(row, name) or ("" if name in row.texts else missing)


def shown_rows(result: Result, *, details: bool) -> list[Row]:
    """Rows of the table; without `details`, the loaders that a user can choose from."""
    chosen = [row for row in result.rows if details or not row.detail]
    return chosen or list(result.rows)


def shown_columns(result: Result, *, details: bool) -> list[str]:
    """Names of columns that are not empty; without `details`, only those of `result.columns`."""
    rows = shown_rows(result, details=details)
    return [
        name
        for name in COLUMNS
        if (details or name in result.columns)
        and any(name in row.values or row.texts.get(name) for row in rows)
    ]


def make_table(result: Result, *, details: bool = False) -> Table:
    """Make a table with a line for each row of the result, the best rows in bold."""
    rows, names = shown_rows(result, details=details), shown_columns(result, details=details)
    missing = "-" if details else "not measured"
    return Table(
        [result.thing, *(COLUMNS[name].title for name in names)],
        [[row.name, *(_cell_or(row, name, missing) for name in names)] for row in rows],
        words=[COLUMNS[name].title for name in names if any(row.texts.get(name) for row in rows)],
        bold=[position for position, row in enumerate(rows) if result.is_best(row)],
    )


def legend(result: Result, *, details: bool = False) -> str:
    """Explain the columns in a sentence."""
    columns = [COLUMNS[name] for name in shown_columns(result, details=details)]
    parts = [f"{column.title}: {column.means}" for column in columns if column.means]
    if details:
        parts.append("-: not measured")
    return f"{'; '.join(parts)}." if parts else ""


def printable_lines(row: Row) -> str:
    """Lines of a row to paste or to run, with escapes for what does not print."""
    return "\n".join(map(printable, row.paste))
