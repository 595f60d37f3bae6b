"""The pure part of a sweep on hand-made cases: the grid, pruning, the plateau, what to choose, its page."""

import random
from dataclasses import replace

import pytest

from bench.report.row import SYNTHETIC, Row
from bench.report.stats import Estimate
from bench.report.sweep import Found, Point, answer, choose, html, prune, tables
from tests.bench.rich_result import HOSTILE

TRAINER = 1000.0


def point(workers: int, batch: int = 64, backend: str = "pytorch") -> Point:
    return Point(backend, "data/raw", batch, workers)


One = tuple[Point, Row]


def measured(at: Point, *rates: float, trainer: float | None = TRAINER) -> One:
    values = sorted(rates)

    def estimate(scale: float) -> Estimate:
        return Estimate(values[len(values) // 2] / scale, values[0] / scale, values[-1] / scale)

    row = Row(backend=at.backend, data=at.data, trainer_name="", loader=estimate(1), together=estimate(1))
    if trainer is None:
        return at, row
    return at, replace(row, trainer=Estimate(trainer, trainer, trainer), ratio=estimate(trainer))


def found(*measured: One, left_out: dict[Point, str] | None = None) -> Found:
    points = [*(at for at, _ in measured), *(left_out or {})]
    return Found(points, dict(measured), left_out or {}, None)


def test_what_cannot_be_of_use_is_left_out() -> None:
    rising = [measured(point(1), 500), measured(point(2), 700)]
    small = [measured(point(0, 32), 200), measured(point(1, 32), 420), measured(point(2, 32), 410)]
    cases: list[tuple[Point, list[One], list[Point], str | None]] = [
        (point(4), [measured(point(2), 985)], [], "the trainer does not wait with 2 workers"),
        (point(4), [measured(point(2), 975)], [], None),
        (point(1), [measured(point(2), 985)], [], None),  # fewer may be enough
        *((point(4), [measured(other, 999)], [], None) for other in (  # another series
            point(2, 32), point(2, backend="shards"))),
        (point(8), [*rising, measured(point(4), 620)], [], "4 workers gave less than 2"),
        (point(8), [*rising, measured(point(4), 640)], [], None),
        (point(0, 64), small, [], "with batch 32 0 workers gave 48% of the best"),
        (point(0, 16), small, [], None),  # smaller batches are another matter
        (point(1, 256), [], [point(1, 128)], "batch 128 did not fit into memory"),
        (point(1, 64), [], [point(1, 128)], None),
    ]  # fmt: skip
    for at, before, too_large, why in cases:
        said = prune(at, dict(before), too_large)
        assert (said is None) == (why is None)
        assert why is None or (said or "").startswith(why)


def series(*rates: tuple[int, float], trainer: float | None = TRAINER) -> list[One]:
    return [measured(point(workers), rate, trainer=trainer) for workers, rate in rates]


BATCHES = {
    (32, 1): 500, (32, 2): 900, (32, 4): 940, (64, 1): 500, (64, 2): 981, (64, 4): 985,
    (128, 1): 500, (128, 2): 990, (128, 4): 1000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("trials", "chosen", "said"),
    [
        (
            [measured(point(workers, batch), rate) for (batch, workers), rate in BATCHES.items()],
            point(2, 64),
            "choose 2 workers, batch 64: 981 images/s, 98% of the best (1,000 with 4 workers, batch 128); "
            "the trainer does not wait.",
        ),
        (
            series((0, 200), (1, 400), (2, 595), (4, 600)),
            point(2),
            "; the trainer waits with every number of workers: it gets 40% fewer images/s than alone.",
        ),
        (
            [measured(point(1), 500, 510, 520), measured(point(2), 960, 970, 990), measured(point(4), 965)],
            point(2),
            "choose 2 workers, batch 64: 970 images/s; the trainer may wait: the trials disagree.",
        ),
    ],
)  # fmt: skip
def test_the_smallest_batch_near_the_best_and_the_fewest_workers_that_keep_up_are_chosen(
    trials: list[One], chosen: Point, said: str
) -> None:
    for seed in range(5):  # in whatever order they were measured
        random.Random(seed).shuffle(trials)
        assert choose(dict(trials))[0] == chosen
        (text,) = answer(found(*trials))
        assert text.startswith("pytorch on data/raw: choose ")
        assert text.endswith(said)


def test_tables_and_page_have_workers_down_batch_sizes_across_and_the_answer_first() -> None:
    left_out = {point(4): "the trainer does not wait", point(1, 128): "batch 128 does not fit into memory"}
    hostile = Point(SYNTHETIC, HOSTILE, 64, 1)
    other = measured(hostile, 2000, trainer=None)
    sweep = found(measured(point(1), 500), measured(point(2), 985), other, left_out=left_out)
    first, second = tables(sweep)
    assert (first.title, second.title) == ("pytorch on data/raw", f"synthetic on {HOSTILE}")
    assert first.titles == ["workers", "batch 64", "batch 128"]
    assert first.rows == [["1", "500 (waits 50%)", "too large"], ["2", "985 chosen", "-"], ["4", "-", "-"]]
    assert second.rows == [["1", "2,000 chosen"]]
    page = html(sweep, "one run each")
    shown = page.partition("<body>")[2]
    assert HOSTILE not in page
    assert shown.index("pytorch on data/raw: choose 2 workers") < shown.index("<figure")
    assert shown.count("<figcaption>") == 2
    assert shown.count("<tr>") == 1 + 3 + 1 + 1, "a row for each number of workers"
    assert "one run each" in shown
    (busy,) = answer(replace(sweep, other_cpu=0.11))
    assert busy.startswith("Other processes took 11% of the CPUs")
    assert "chosen" not in str(tables(replace(sweep, other_cpu=0.11)))
    assert answer(found()) == []
