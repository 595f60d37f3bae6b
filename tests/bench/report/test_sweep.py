"""The pure part of a sweep on hand-made cases: the grid, pruning, the plateau, what to choose, its page."""

import random

from bench.report.row import SYNTHETIC, Row
from bench.report.stats import Estimate
from bench.report.sweep import Found, Point, answer, choose, html, prune, tables
from tests.bench.rich_result import HOSTILE

One = tuple[Point, Row]


def point(workers: int, batch: int = 64, backend: str = "pytorch", data: str = "data/raw") -> Point:
    return Point(backend, data, batch, workers)


def measured(at: Point, *rates: float) -> One:
    """With a trainer of 1,000 images/s."""
    low, middle, high = sorted(rates)[0], sorted(rates)[len(rates) // 2], sorted(rates)[-1]
    rate = Estimate(middle, low, high)
    row = Row(
        backend=at.backend,
        data=at.data,
        trainer_name="",
        loader=rate,
        together=rate,
        trainer=Estimate(1000, 1000, 1000),
        ratio=Estimate(middle / 1000, low / 1000, high / 1000),
    )
    return at, row


def found(*measured: One, left_out: dict[Point, str] | None = None) -> Found:
    points = [*(at for at, _ in measured), *(left_out or {})]
    return Found(points, dict(measured), left_out or {}, None)


def test_what_cannot_be_of_use_is_left_out() -> None:
    rising = [measured(point(1), 500), measured(point(2), 700)]
    small = [measured(point(0, 32), 200), measured(point(1, 32), 420)]
    cases: list[tuple[Point, list[One], list[Point], str]] = [
        (point(4), [measured(point(2), 985)], [], "the trainer does not wait with 2 workers"),
        (point(4), [measured(point(2), 975)], [], ""),
        (point(1), [measured(point(2), 985)], [], ""),  # fewer may be enough
        (point(4), [measured(point(2, backend="shards"), 999)], [], ""),  # another series
        (point(8), [*rising, measured(point(4), 620)], [], "4 workers gave less than 2"),
        (point(8), [*rising, measured(point(4), 640)], [], ""),
        (point(0, 64), small, [], "with batch 32 0 workers gave 48% of the best"),
        (point(1, 256), [], [point(1, 128)], "batch 128 did not fit into memory"),
    ]
    for at, before, too_large, why in cases:
        said = prune(at, dict(before), too_large) or ""
        assert said.startswith(why)
        assert bool(said) == bool(why)


def test_the_smallest_batch_near_the_best_and_the_fewest_workers_that_keep_up_are_chosen() -> None:
    batches = {32: (500, 900, 940), 64: (500, 981, 985), 128: (500, 990, 1000)}
    grid = [
        measured(point(workers, batch), rate)
        for batch, rates in batches.items()
        for workers, rate in zip((1, 2, 4), rates, strict=True)
    ]
    slow = [measured(point(workers), rate) for workers, rate in ((0, 200), (1, 400), (2, 595), (4, 600))]
    unsteady = [measured(point(1), 500, 510, 520), measured(point(2), 960, 970, 990), measured(point(4), 965)]
    for trials, said in (
        (grid, "98% of the best (1,000 with 4 workers, batch 128); the trainer does not wait."),
        (slow, "waits with every number of workers: it gets 40% fewer images/s than alone."),
        (unsteady, "the trainer may wait: the trials disagree."),
    ):
        random.Random(0).shuffle(trials)  # in whatever order they were measured
        assert choose(dict(trials))[0] == point(2)
        (text,) = answer(found(*trials))
        assert text.startswith("pytorch on data/raw: choose 2 workers, batch 64: ")
        assert text.endswith(said)


def test_tables_and_page_have_workers_down_batch_sizes_across_and_the_answer_first() -> None:
    left_out = {point(4): "the trainer does not wait", point(1, 128): "batch 128 does not fit into memory"}
    other = measured(point(1, 64, SYNTHETIC, HOSTILE), 2000)
    sweep = found(measured(point(1), 500), measured(point(2), 985), other, left_out=left_out)
    first, second = tables(sweep)
    assert (first.title, second.title) == ("pytorch on data/raw", f"synthetic on {HOSTILE}")
    assert first.titles == ["workers", "batch 64", "batch 128"]
    assert first.rows == [["1", "500 (waits 50%)", "too large"], ["2", "985 chosen", "-"], ["4", "-", "-"]]
    page = html(sweep, "one run each")
    shown = page.partition("<body>")[2]
    assert HOSTILE not in page
    assert shown.index("pytorch on data/raw: choose 2 workers") < shown.index("<figure")
