"""Estimates of figures, and figures and tables as people read them."""

import random

import pytest

from bench.report.stats import Estimate, percentile, quotient, ratio
from bench.report.words import WIDTH, Table, counted, duration, number, percent


def test_ratio_pairs_repeats_and_a_quotient_holds_1_exactly_where_the_ranges_overlap() -> None:
    assert ratio([10.0, 30.0], [20.0, 30.0]) == Estimate(0.75, 0.5, 1.0)
    assert quotient(Estimate(20, 18, 24), Estimate(10, 8, 12)) == Estimate(2, 1.5, 3)
    touching = quotient(Estimate(10, 9, 11), Estimate(12, 11, 13))
    assert touching.high == 1
    assert quotient(Estimate(10, 9, 10.9), Estimate(12, 11, 13)).high < 1
    assert [percentile([float(v) for v in range(1, 101)], share) for share in (0, 0.95, 1)] == [1, 95, 100]


def test_figures_as_people_read_them() -> None:
    assert [number(value) for value in (0.1544, 1.5, 11.62, 1867)] == ["0.154", "1.50", "11.6", "1,867"]
    shares = (0, 0.004, 0.31, 0.996, 0.9996)  # 100% is said of what is
    assert [percent(share) for share in shares] == ["0%", "0.4%", "31%", "99%", "100%"]
    times = (None, 0.0052, 12.3, 250.0, 9000.0, 1e8)
    assert [duration(seconds) for seconds in times] == [
        "-", "5.20 ms", "12.3 s", "4.17 min", "2.50 h", "3.17 years",
    ]  # fmt: skip
    assert [counted(1, "batch", "batches"), counted(1200, "run")] == ["1 batch", "1,200 runs"]


def test_a_table_fits_the_terminal_and_cuts_no_cell_off(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns that do not fit stand in a further table, each beside the first one."""
    rng = random.Random(2)
    for _ in range(40):
        columns = rng.randrange(1, 16)
        titles = [f"title{'x' * rng.randrange(20)} {number}" for number in range(columns)]
        rows = [[f"{row}.{number}{'y' * rng.randrange(30)}" for number in range(columns)] for row in range(3)]
        Table(titles, rows).show()
        lines = capsys.readouterr().out.splitlines()
        assert all(len(line) <= WIDTH for line in lines)
        for cells in (titles, *rows):
            shown = [line for line in lines if line.startswith(cells[0])]
            assert len(shown) >= 1
            assert all(sum(f" {cell} " in f"{line} " for line in shown) == 1 for cell in cells[1:])


def test_cells_are_text_and_no_markup_and_the_same_in_markdown_and_html(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = Table(["loader", "n"], [["[bold]x[/bold] :smile:", "<b>1</b>"]], title="of [red]")
    table.show()
    printed = capsys.readouterr().out
    assert "[bold]x[/bold] :smile:" in printed
    assert "of [red]" in printed
    assert "&lt;b&gt;1" in table.html()
    assert "<b>" not in table.html()
    table = Table(["loader", "images/s", "note"], [["shards", "20,000", ""]], words=("note",))
    assert table.markdown() == "| loader | images/s | note |\n| --- | --- | --- |\n| shards | 20,000 |  |"
    assert '<td><span class="title">images/s</span>20,000</td>' in table.html()
    assert '<td class="words"></td>' in table.html()  # nothing of an empty cell, which a phone leaves out
