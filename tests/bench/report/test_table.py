"""A result made by hand, as the terminal shows it."""

from dataclasses import replace

import pytest
from rich.console import Console

from bench.measure.monitor import find_limits
from bench.report import table as report
from bench.report.result import Result, Row
from bench.report.stats import Estimate
from bench.report.verdict import COLD_FETCH, KEEPS_UP
from tests.bench.rich_result import altered, around, rich_result, row, waiting_row

FLAGS = find_limits({"gpu_memory_share": 0.93}, {"cpu_share": 0.99}, 5 << 20)


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
    return replace(rich, rows=tuple(altered(r, data="dali") if r.backend == "dali" else r for r in rich.rows))


def wide_result() -> Result:
    """Every column that there is, with large rates and long names."""
    names = ("emulated:h100", "resnet50")
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
    slower = altered(dali, together=around(2_200))
    assert starred(printed(replace(result, rows=(pytorch, shards, slower, *others)))) == ["shards"]


def test_noise_other_libraries_and_a_single_loader_have_no_star() -> None:
    result = plain_result()
    noise = row("synthetic", "raw tree", 1e6, together=around(1e6))
    assert starred(printed(replace(result, rows=(*result.rows, noise)))) == ["shards", "dali"]
    alone = replace(result, rows=(noise, *result.rows[1:2], *result.rows[-1:]))
    assert starred(printed(alone)) == []
    assert "*" not in report.legend(alone)


def findings(*rows: Row) -> list[str]:
    return report.findings(replace(rich_result(), rows=rows))


def keeping_row() -> Row:
    """Its trainer waits 1% of the time."""
    return row(
        "shards", "shards", 24_000, data_wait=around(0.01), utilisation=around(0.98), predicted=2480.0,
        ratio=Estimate(0.99, 0.985, 0.995), first_step_s=around(0.31), step_s=[0.0257] * 3,
        stalls={"fetch": 0.0, "prep": 0.0003, "transfer": 0.0},
    )  # fmt: skip


def test_the_legend_explains_the_columns_that_fit() -> None:
    plain = plain_result()
    narrow = replace(plain, rows=plain.rows[1:2])
    for result, fits in ((narrow, True), (plain, False)):
        assert ("p95 ms" in printed(result)[0]) == ("p95 ms: " in report.legend(result)) == fits


def test_the_conditions_name_augmentation_and_order_where_they_are_not_the_usual() -> None:
    rich = rich_result()
    assert "augment" not in report.conditions(rich)
    for settings in ({"augment": "eval", "shuffle": "window"}, {"augment": "train", "shuffle": "auto"}):
        text = report.conditions(replace(rich, settings={**rich.settings, **settings}))
        assert ("augment train" in text) == (settings["augment"] == "train")
        assert ("shuffle window" in text) == (settings["shuffle"] == "window")


def test_the_legend_explains_an_unclear_verdict() -> None:
    unclear = altered(waiting_row(), ratio=Estimate(0.56, 0.34, 1.0))
    result = replace(rich_result(), rows=(unclear,))
    assert "unclear" in report.cells(result)[0]
    assert "unclear: some runs keep up" in report.legend(result)


def test_where_a_waiting_trainers_time_goes_is_one_line() -> None:
    waiting = altered(waiting_row(), data_wait=around(0.45), utilisation=around(0.52), together=around(1_130))
    assert (
        "pytorch on raw tree: waited 45% of the time, accelerator busy 52% (MLPerf Storage asks for 90%); "
        "predicted 1,160 images/s, measured 1,130 (-3%); first step 3,210 ms, then 25.7 ms; "
        "waited per batch for fetch 4.0 ms, prep 19.0 ms, transfer 0.6 ms."
    ) in findings(waiting)
    cold = altered(waiting, stalls={**waiting.stages.stalls, COLD_FETCH: 0.159})
    assert any(line.endswith("transfer 0.6 ms; a cold disk adds 159 ms.") for line in findings(cold))


def test_a_row_that_keeps_up_has_a_shorter_line() -> None:
    keeping = keeping_row()
    assert keeping.verdict == KEEPS_UP
    assert findings(keeping) == [
        "shards on shards: waited 1% of the time, accelerator busy 98% (MLPerf Storage asks for 90%); "
        "predicted 2,480 images/s, measured 2,430 (-2%); first step 310 ms, then 25.7 ms."
    ]


def test_of_a_row_that_keeps_up_busy_cores_alone_are_no_limit() -> None:
    keeping = altered(keeping_row(), monitor={"time_s": [], "flags": FLAGS})
    waiting = altered(waiting_row(), monitor={"time_s": [], "flags": FLAGS})
    flags = [line for line in findings(keeping, waiting) if line.startswith(tuple("GAT"))]
    both = "shards on shards, pytorch on raw tree."
    gpu, swap, cores = flags
    assert gpu.startswith("GPU memory was filled to 93%")
    assert swap.startswith("The machine swapped 5 MiB")
    assert gpu.endswith(both)
    assert swap.endswith(both)
    assert cores.startswith("All cores were busy (99% on average)")
    assert cores.endswith(": pytorch on raw tree.")


def test_of_a_row_without_batch_times_nothing_is_said() -> None:
    assert findings(row("shards", "shards", 24_000)) == []


def test_beside_other_busy_processes_no_winner_is_named() -> None:
    rich = rich_result()
    assert report.best_rows(rich)
    disturbed = replace(rich, settings={**rich.settings, "other_cpu": 0.31})
    assert report.best_rows(disturbed) == []
    (sentence,) = report.headline(disturbed)
    assert sentence.startswith("Other processes took 31% of the CPUs")
    quiet = replace(rich, settings={**rich.settings, "other_cpu": 0.1})
    assert report.headline(quiet) == report.headline(rich)


@pytest.mark.parametrize(
    ("predicted", "said"),
    [(1000.0, ""), (1400.0, "the prediction is 40% too high: "), (600.0, "the prediction is 40% too low: ")],
)
def test_a_prediction_that_is_far_off_says_so_and_why(predicted: float, said: str) -> None:
    rich = rich_result()
    stages = replace(rich.rows[1].stages, predicted=predicted)
    rates = replace(rich.rows[1].rates, together=around(1000))
    fed = replace(rich.rows[1], stages=stages, rates=rates)
    (line,) = report.findings(replace(rich, rows=(fed,)))
    assert said in line
    assert ("too " in line) == bool(said)
