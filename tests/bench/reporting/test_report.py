"""A result as a terminal table."""

from dataclasses import replace

import pytest
from rich.console import Console

from bench.reporting import report
from bench.reporting.result import Result
from tests.bench.rich_result import around, rich_result, row


def printed(result: Result) -> list[str]:
    """The table's lines, on a terminal that is wider than it may be."""
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(report.terminal_table(result))
    return [line.rstrip() for line in capture.get().splitlines()]


def starred(lines: list[str]) -> list[str]:
    return [line.split()[1] for line in lines if line.startswith("*")]


def plain_result() -> Result:
    """A rich result with names as folders have them."""
    rich = rich_result()
    return replace(rich, rows=tuple(replace(r, data="dali") if r.backend == "dali" else r for r in rich.rows))


def wide_result() -> Result:
    """Every column that there is, with large rates and long names."""
    names = ("emulated:mlperf-h100", "resnet50")
    rows = tuple(
        row(backend, data, 1_234_567, trainer_name=name, trainer=around(1_234_567), cold=around(1_234_567))
        for name in names
        for backend, data in (
            ("webdataset", "webdataset"),
            ("pytorch", "raw tree"),
            ("synthetic", "raw tree"),
        )
    )
    return replace(rich_result(), rows=(*rows, *rich_result().rows[-1:]))


@pytest.mark.parametrize("result", [plain_result(), wide_result()], ids=["plain", "wide"])
def test_the_table_has_a_row_per_row_and_at_most_100_columns(result: Result) -> None:
    header, *rows = printed(result)
    assert len(rows) == len(result.rows)
    assert {"loader", "together", "ratio", "verdict"} <= set(header.split())
    assert all(len(line) <= report.WIDTH == 100 for line in (header, *rows))
    assert not any("…" in line for line in (header, *rows))


def test_the_best_row_has_a_star_and_what_overlaps_with_it_too() -> None:
    result = plain_result()
    assert starred(printed(result)) == ["shards", "dali"]  # 2,430 and 2,300, 4% to either side
    assert "*: the most images per second" in report.legend(result)
    pytorch, shards, dali, *others = result.rows
    slower = replace(dali, together=around(2_200))
    assert starred(printed(replace(result, rows=(pytorch, shards, slower, *others)))) == ["shards"]


def test_noise_other_libraries_and_a_single_loader_have_no_star() -> None:
    result = plain_result()
    noise = row("synthetic", "raw tree", 1e6, together=around(1e6))
    assert starred(printed(replace(result, rows=(*result.rows, noise)))) == ["shards", "dali"]
    alone = replace(result, rows=(noise, *result.rows[1:2], *result.rows[-1:]))
    assert starred(printed(alone)) == []
    assert "*" not in report.legend(alone)
