"""Grids of worker counts and batch sizes: which points are left out, and which one is chosen."""

import random
from dataclasses import replace

from bench.report import loaders
from bench.report.grid import Point, choose, find_reason_to_skip, point_of
from bench.report.page import make_page
from bench.report.result import Row
from bench.report.sentences import describe_choice
from bench.report.stats import Estimate
from tests.bench.results import (
    HOSTILE,
    MACHINE,
    WORKERS,
    make_row,
    make_settings,
    make_shared_trials,
    make_trials,
)


def measure(workers: int, *rates: float, batch: int = 64) -> Row:
    """Make the row of a point that fed a trainer of 1,000 images/s at these rates."""
    low, middle, high = min(rates), sorted(rates)[len(rates) // 2], max(rates)
    row = make_row(
        "pytorch",
        "raw tree",
        loader_images_per_s=middle,
        fed_images_per_s=Estimate(middle, low, high),
        fed_ratio=Estimate(middle / 1000, low / 1000, high / 1000),
    )
    return replace(row, key={**row.key, "workers": workers, "batch_size": batch})


def test_points_that_cannot_help_are_left_out() -> None:
    rising = [measure(1, 500), measure(2, 700)]
    small = [measure(0, 200, batch=32), measure(1, 420, batch=32)]
    cases: list[tuple[Point, list[Row], list[Point], str]] = [
        (Point(64, 4), [measure(2, 985)], [], "the trainer does not wait with 2 workers"),
        (Point(64, 4), [measure(2, 975)], [], ""),
        (Point(64, 1), [measure(2, 985)], [], ""),  # fewer workers may be enough
        (Point(64, 8), [*rising, measure(4, 620)], [], "4 workers gave less than 2"),
        (Point(64, 8), [*rising, measure(4, 640)], [], ""),
        (Point(64, 0), small, [], "with batch 32 0 workers gave 48% of the best"),
        (Point(256, 1), [], [Point(128, 1)], "batch 128 did not fit into memory"),
    ]
    for point, measured, too_large, expected in cases:
        reason = find_reason_to_skip(point, {point_of(row): row for row in measured}, too_large) or ""
        assert reason.startswith(expected)
        assert bool(reason) == bool(expected)


def test_smallest_batch_and_fewest_workers_that_keep_up_are_chosen() -> None:
    batches = {32: (500, 900, 940), 64: (500, 981, 985), 128: (500, 990, 1000)}
    grid = [
        measure(workers, rate, batch=batch)
        for batch, rates in batches.items()
        for workers, rate in zip((1, 2, 4), rates, strict=True)
    ]
    slow = [measure(workers, rate) for workers, rate in ((0, 200), (1, 400), (2, 595), (4, 600))]
    unsteady = [measure(1, 500, 510, 520), measure(2, 960, 970, 990), measure(4, 965)]
    for rows, end in (
        (grid, "98% of the best (1,000 with 4 workers, batch 128); the trainer does not wait."),
        (slow, "waits with every number of workers: it gets 40% fewer images/s than alone."),
        (unsteady, "the trainer may wait: the runs disagree."),
    ):
        random.Random(0).shuffle(rows)  # the order of measuring does not matter
        chosen, best = choose(rows)
        assert point_of(chosen) == Point(64, 2)
        sentence = describe_choice("pytorch on photos", chosen, best)
        assert sentence.startswith("pytorch on photos: choose 2 workers, batch 64: ")
        assert sentence.endswith(end)


def test_result_of_a_grid_names_the_choice_and_has_a_row_for_each() -> None:
    settings = make_settings(workers=[1, 2], cold=False)
    trials = make_shared_trials()
    for workers, rate in ((1, 1_200), (2, 2_450)):
        for data, backend in (("photos", "pytorch"), (f"data/{HOSTILE}", "dali")):
            trials += make_trials(backend, data, rate, rate, workers=workers)
    result = loaders.make_result(MACHINE, settings, trials, {})
    assert WORKERS not in settings["workers"]
    assert len(result.rows) == 4
    assert {row.name for row in result.rows} >= {
        "pytorch (ours, raw tree), 1 worker",
        "pytorch (ours, raw tree), 2 workers",
    }
    sentences = result.answer[0]
    assert sentences[0].startswith("pytorch on raw tree: choose 2 workers, batch 64: 2,450 images/s")
    assert [result.rows[at].key["workers"] for at in result.best] == [2, 2]
    page = make_page(result)
    assert HOSTILE not in page
    assert "a flat line gains nothing from more workers" in page
