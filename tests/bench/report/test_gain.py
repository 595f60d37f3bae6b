"""Gain of another loader, and of converting: which rows win, and the sentences on them."""

import random
from typing import Any

from bench.report.gain import epochs_to_pay, find_gain, saved_share
from bench.report.result import Row
from bench.report.sentences import answer
from bench.report.stats import exceeds
from bench.report.verdict import training_rate
from tests.bench.results import LIMIT, SAMPLES, make_fed_row, make_row

TODAY = make_fed_row("imagefolder", "raw tree", 0.31)
LINE = make_fed_row("pytorch", "raw tree", 0.5)
SHARDS = make_fed_row("shards", "shards", 0.99, convert_s=24.2, stored_bytes=300e6)
ALREADY = make_fed_row("imagefolder", "raw tree", 0.99)
NOISE = make_fed_row("synthetic", "raw tree", 0.995)
ALONE = make_row("imagefolder", "raw tree", loader_images_per_s=1_100)


def answer_text(*rows: Row, **changes: Any) -> str:
    arguments: dict[str, Any] = {
        "accelerator": f"an emulated accelerator of {LIMIT:,.0f} images/s",
        "images": SAMPLES,
        "repeats": 5,
        "other_cpu": None,
    }
    return " ".join(answer(rows, **{**arguments, **changes}))


def test_answer_names_todays_loader_and_the_gain_of_each_step() -> None:
    for rows, changes, text in (
        (
            (TODAY, LINE, SHARDS),
            {},
            "ImageFolder and DataLoader keep an emulated accelerator of 2,480 images/s busy 31% of the time. "
            "Replace them by `loaders.build`: the trainer is busy 50% of the time, and training is 1.6 times "
            "as fast. Convert to shards (24.2 s, 286 MiB), too: the trainer is busy 99% of the time, and "
            "training is 3.2 times as fast. Converting pays within 1 epoch.",
        ),
        ((TODAY, make_fed_row("pytorch", "raw tree", 0.987), SHARDS), {}, "Converting gains no more."),
        ((ALREADY, SHARDS), {}, "neither another loader nor converting gains anything."),
        ((TODAY, make_fed_row("shards", "shards", 0.5, 0.2)), {}, "ranges of 5 runs overlap"),
        ((TODAY, SHARDS), {"other_cpu": 0.4}, "Other processes took 40% of the CPUs"),
        ((TODAY, SHARDS), {"repeats": 1}, "One run of each names no winner"),
        (
            (make_row("pytorch", "raw tree", loader_images_per_s=3_300), ALONE),
            {},
            "3,300 images/s, 3.0 times as many.",
        ),
        (
            (TODAY, make_fed_row("shards", "shards", 0.93)),
            {"gpu_price": 3.0},
            "what costs $100 today then costs $33: $2.00 saved of every hour.",
        ),
    ):
        assert text in answer_text(*rows, **changes)


def test_conversion_pays_once_epochs_have_saved_its_time() -> None:
    for conversion_s, count in ((4.9, 1), (5.1, 2), (32.0, 7)):  # an epoch: 10 s today, 5 s then
        assert epochs_to_pay(conversion_s, 1000, 100.0, 200.0) == count
    assert epochs_to_pay(1.0, 1000, 200.0, 100.0) is None


def test_winners_are_faster_than_today_in_every_run() -> None:
    rng = random.Random(5)
    kinds = [("pytorch", "raw tree"), ("dali", "raw tree"), ("shards", "shards"), ("dali", "dali")]
    for _ in range(100):
        today = make_fed_row("imagefolder", "raw tree", rng.uniform(0.1, 1))
        rows = [make_fed_row(*kind, rng.uniform(0.1, 1), rng.uniform(0, 0.3)) for kind in kinds]
        rng.shuffle(rows)
        gain = find_gain([*rows, NOISE, today])
        assert gain.today is today
        assert all(exceeds(training_rate(row), training_rate(today)) for row in gain.best)
        assert all(saved_share(row, today) for row in gain.best)
        if gain.line is not None:
            line = training_rate(gain.line)
            assert all(exceeds(training_rate(row), line) for row in gain.converted)
        assert all(row.key["data"] != "raw tree" for row in gain.converted)
        for row in rows:  # a row whose range lies far above all others has to win
            others = [training_rate(other).high for other in (*rows, today) if other is not row]
            if training_rate(row).low > max(others) * 1.05:
                assert gain.best == (row,)
