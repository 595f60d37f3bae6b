"""A result made by hand, as the terminal shows it."""

import pytest

from bench.report.result import COLUMNS, Showing, legend, next_step, show, table
from bench.report.row import Result
from tests.bench.report.test_gain import ALONE, fed
from tests.bench.report.test_gain import result as gain_result
from tests.bench.rich_result import altered, around, peer, rich_result, row

ROWS = (
    fed("shards", "shards", 0.99, cold=around(10_500)),
    fed("imagefolder", "raw tree", 0.31, cold=around(780)),
    fed("pytorch", "raw tree", 0.5),
    row("synthetic", "raw tree", 90_000),
    peer("ffcv-raw", "raw pixels", 20_000),
    peer("gather", "shards", 40_000),
)


def quick_result(**settings: object) -> Result:
    return gain_result(*ROWS, **settings)


def test_a_newcomer_sees_five_columns_and_what_people_have_today_first() -> None:
    shown = table(quick_result())
    assert shown.titles == ["loader", "images/s", "accelerator busy", "from a cold disk", "first batch"]
    assert shown.rows == [
        ["imagefolder (torchvision)", "20,000", "31%", "780", "0.40 s"],
        ["shards (ours)", "20,000", "99%", "10,500", "0.40 s"],
        ["pytorch (ours, raw tree)", "20,000", "50%", "not measured", "0.40 s"],
        ["ffcv-raw", "20,000", "not measured", "not measured", "0.40 s"],
    ]
    assert list(shown.bold) == [1]
    assert list(table(quick_result(other_cpu=0.4)).bold) == []
    both = table(gain_result(ROWS[1], altered(ROWS[1], trainer_name="resnet50"))).rows
    assert [line[0].partition(", ")[2] for line in both] == ["fed to emulated:2480", "fed to resnet50"]
    assert [line[0] for line in table(gain_result(ROWS[3])).rows] == ["synthetic (noise)"]  # all there is


def test_details_have_every_row_and_column_that_was_measured() -> None:
    shown = table(rich_result(), details=True)
    assert set(shown.titles) == {"loader", *(column.title for column in COLUMNS)}
    assert len(shown.rows) == len(rich_result().rows)
    for line in shown.rows:
        assert "" not in line
    warm = table(gain_result(fed("shards", "shards", 0.99)))
    assert warm.titles == ["loader", "images/s", "accelerator busy", "first batch"]


def test_every_column_that_is_shown_is_explained_and_no_other() -> None:
    for details in (True, False):
        for result in (rich_result(), quick_result(), gain_result(row("shards", "shards", 9, **ALONE))):
            said, titles = legend(result, details=details), table(result, details=details).titles
            for column in COLUMNS:
                assert (f"{column.title}: {column.means}" in said) == (column.title in titles)


def test_what_to_do_next_is_the_line_that_gains_most_or_what_converting_would_bring() -> None:
    places = ("imagefolder on raw tree", "pytorch on raw tree", "shards on shards")
    data = {place: {"samples": 9, "digest": "0", "path": place.split()[-1]} for place in places}
    shards, today, line, *_ = ROWS
    assert next_step(gain_result(today, line, shards, data=data)) == (
        "Next: loaders.build('shards') in your training code."
    )
    raw = gain_result(today, fed("pytorch", "raw tree", 0.3), data=data)
    assert next_step(raw) == "Next: 'bench recommend tree' says what converting would bring."
    for nothing in (
        gain_result(fed("imagefolder", "raw tree", 0.99), shards, data=data),
        gain_result(today, shards, data=data, other_cpu=0.4),
        gain_result(shards, data=data),
    ):
        assert next_step(nothing) == ""


@pytest.mark.parametrize("details", [True, False])
def test_it_is_shown_in_100_columns_the_answer_first(
    details: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    show(quick_result(), Showing(details=details, gpu_price=2.5))
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert lines[0].startswith("ImageFolder and DataLoader keep an emulated accelerator")
    assert lines.index("") < next(number for number, line in enumerate(lines) if line.startswith("loader "))
    assert ("everything else: --details, or a page with --html FILE" in lines) != details
