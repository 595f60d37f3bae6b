"""What another loader, and converting, gain: the sentences for whoever pays for the accelerator."""

import random
from dataclasses import replace
from typing import Any

from bench.report.row import Result, Row
from bench.report.stats import Estimate, exceeds
from bench.report.verdict import (
    answers,
    epochs_to_pay,
    find_gain,
    saved_share,
    sentences,
)
from tests.bench.rich_result import LIMIT, altered, peer, rich_result, row

SAMPLES = 30_607
ALONE: dict[str, Any] = {"trainer_name": "none", "trainer": None, "together": None, "ratio": None}


def fed(backend: str, data: str, share: float, spread: float = 0.005, **fields: Any) -> Row:
    """A loader that keeps the trainer busy for `share` of the time."""
    busy = Estimate(share, share - spread, share + spread)
    together = Estimate(*(LIMIT * part for part in (share, share - spread, share + spread)))
    return row(backend, data, 20_000, together=together, ratio=busy, **fields)


def result(*rows: Row, repeats: int = 5, **settings: Any) -> Result:
    rich = rich_result()
    data = {row.label: {"samples": SAMPLES, "digest": "0"} for row in rows if not row.peer}
    return replace(rich, rows=rows, settings={**rich.settings, "repeats": repeats, "data": data, **settings})


TODAY = fed("imagefolder", "raw tree", 0.31)
LINE = fed("pytorch", "raw tree", 0.5)
SHARDS = fed("shards", "shards", 0.99, convert_s=24.2, size_bytes=300e6)
ALREADY = fed("imagefolder", "raw tree", 0.99)
NOISE = fed("synthetic", "raw tree", 0.995)
PEER = altered(peer("imagefolder", "raw tree", 1_100), **ALONE)


def one_answer(*rows: Row, price: float | None = None, **settings: Any) -> str:
    (text,) = sentences(result(*rows, **settings), price)
    return text


def test_what_is_said() -> None:
    for rows, settings, text in (
        (
            (TODAY, LINE, SHARDS),
            {},
            "ImageFolder and DataLoader keep an emulated accelerator of 2,480 images/s busy 31% of the time. "
            "Change that line to `loaders.build`: it is busy 50%, and training ends 1.6 times sooner than "
            "today. Convert to shards (24.2 s, 286 MiB), too: it is busy 99%, and training ends 3.2 times "
            "sooner than today. Converting pays after 1 epoch.",
        ),
        ((TODAY, fed("pytorch", "raw tree", 0.987), SHARDS), {}, "Converting gains no more."),
        ((ALREADY, SHARDS), {}, "neither another loader nor converting gains anything."),
        ((TODAY, fed("shards", "shards", 0.5, 0.2)), {}, "ranges of 5 runs overlap"),
        ((TODAY, SHARDS), {"other_cpu": 0.4}, "Other processes took 40% of the CPUs"),
        ((row("pytorch", "raw tree", 3_300, **ALONE), PEER), {}, "3,300 images/s, 3.0 times as many."),
    ):
        assert text in one_answer(*rows, **settings)


def test_money_is_that_of_the_time_saved_and_each_trainer_has_its_answer() -> None:
    text = one_answer(TODAY, fed("shards", "shards", 0.93), price=3.0)
    assert "what costs $100 today then costs $33: $2.00 saved of every hour." in text
    other = [altered(one, trainer_name="resnet50") for one in (ALREADY, SHARDS)]
    first, second = answers(result(TODAY, SHARDS, *other))
    assert first[0].startswith("emulated:2480: ImageFolder and DataLoader keep")
    assert second[0].startswith("resnet50: ImageFolder and DataLoader already keep")
    for conversion_s, count in ((4.9, 1), (5.1, 2), (32.0, 7)):  # an epoch: 10 s today, 5 s then
        assert epochs_to_pay(conversion_s, 1000, 100.0, 200.0) == count


def test_what_gains_is_faster_in_every_run_whatever_was_measured() -> None:
    rng = random.Random(5)
    kinds = [("pytorch", "raw tree"), ("dali", "raw tree"), ("shards", "shards"), ("dali", "dali")]
    for _ in range(100):
        today = fed("imagefolder", "raw tree", rng.uniform(0.1, 1))
        rows = [fed(*kind, rng.uniform(0.1, 1), rng.uniform(0, 0.3)) for kind in kinds]
        rng.shuffle(rows)
        gain = find_gain([*rows, NOISE, peer("ffcv", "pixels", 1e6), today])
        assert gain.today is today
        assert all(exceeds(one.rate, today.rate) for one in gain.best)
        assert all(saved_share(one, today) for one in gain.best)
        assert gain.line is None or all(exceeds(one.rate, gain.line.rate) for one in gain.converted)
        assert all(one.data != "raw tree" for one in gain.converted)
        for one in rows:  # by so much that all others' ranges lie below it
            if all(one.rate.low > other.rate.high * 1.05 for other in (*rows, today) if other is not one):
                assert gain.best == (one,)
