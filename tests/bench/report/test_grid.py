"""The pure part of a sweep on hand-made cases: the grid, pruning, the plateau, what is recommended."""

import random
from dataclasses import replace

import pytest
import torch
from bench.report.grid import (
    Axes,
    Measured,
    Point,
    drop_axes,
    grid,
    plateau,
    prune,
    recommend,
    sentence,
)

from bench.commands.options import parse_amp, parse_numbers, parse_switches
from bench.report.stats import Estimate
from bench.report.verdict import KEEPS_UP, LOADER_BINDS, NO_TRAINER, NOT_DISTINGUISHABLE
from precache.errors import SettingError

TRAINER = 1000.0


def point(
    workers: int, batch: int = 64, amp: str | None = None, pin: bool | None = None, backend: str = "pytorch"
) -> Point:
    return Point(backend, "data/raw", batch, amp, pin, workers)


def measured(at: Point, *rates: float, trainer: float | None = TRAINER) -> Measured:
    values = sorted(rates)

    def estimate(scale: float) -> Estimate:
        return Estimate(values[len(values) // 2] / scale, values[0] / scale, values[-1] / scale)

    if trainer is None:
        return Measured(at, estimate(1))
    return Measured(at, estimate(1), Estimate(trainer, trainer, trainer), estimate(trainer))


def test_the_grid_has_every_combination_once_and_workers_change_fastest() -> None:
    axes = Axes((0, 2), (32, 64), ("bf16", "off"), (True,))
    points = grid([("pytorch", "a"), ("shards", "b")], axes)
    assert len(points) == len(set(points)) == 2 * 2 * 2 * 2
    assert [p.workers for p in points] == [0, 2] * 8
    assert [p.backend for p in points] == ["pytorch"] * 8 + ["shards"] * 8
    assert [p.batch_size for p in points[:8]] == [32] * 4 + [64] * 4


def test_backends_that_decode_on_the_device_have_no_axis_pin() -> None:
    points = grid([("nvjpeg", "a"), ("shards", "b")], Axes((1,), (32,), ("off",), (True, False)))
    assert [(p.backend, p.pin) for p in points] == [("nvjpeg", None), ("shards", True), ("shards", False)]


def test_axes_that_make_no_difference_are_dropped_with_a_line() -> None:
    axes = Axes((1,), (32,), ("bf16", "off"), (True, False))
    assert (
        drop_axes(axes, "cuda", computes=True)
        == drop_axes(axes, "cuda", computes=True, cache="ram")
        == (axes, [])
    )
    kept, notes = drop_axes(axes, "cuda", computes=False)
    assert (kept.amp, kept.pin) == ((None,), (True, False))
    assert notes == ["--amp changes nothing for a trainer that does not compute: it is left out"]
    kept, notes = drop_axes(axes, "cpu", computes=True)
    assert (kept.amp, kept.pin) == (("bf16", "off"), (None,))
    assert notes == ["--pin changes nothing without CUDA: it is left out"]
    kept, notes = drop_axes(axes, "cuda", computes=True, cache="device")
    assert (kept.amp, kept.pin) == (("bf16", "off"), (None,))
    assert notes == ["--pin changes nothing with --cache device: it is left out"]
    assert drop_axes(replace(axes, amp=("off",), pin=(True,)), "cpu", computes=False)[1] == []


def test_more_workers_than_unblock_the_trainer_are_pruned() -> None:
    found = [measured(point(1), 600), measured(point(2), 985)]
    assert prune(point(4), found, {}) == "the trainer does not wait with 2 workers"
    assert prune(point(4), found[:1], {}) is None
    assert prune(point(4), [measured(point(2), 975)], {}) is None
    assert prune(point(1), [measured(point(2), 985)], {}) is None, "fewer may be enough"


def test_without_a_trainer_nothing_saturates() -> None:
    assert prune(point(4), [measured(point(2), 985, trainer=None)], {}) is None


@pytest.mark.parametrize(
    "other", [point(2, 32), point(2, amp="bf16"), point(2, pin=False), point(2, backend="shards")]
)
def test_another_series_says_nothing_about_saturation(other: Point) -> None:
    assert prune(point(4), [measured(other, 999)], {}) is None


def test_after_more_workers_did_harm_still_more_are_pruned() -> None:
    falling = [measured(point(1), 500), measured(point(2), 700), measured(point(4), 620)]
    assert prune(point(8), falling, {}) == "4 workers gave less than 2"
    flat = [*falling[:2], measured(point(4), 640)]
    assert prune(point(8), flat, {}) is None


def test_settings_that_were_hopeless_at_a_smaller_batch_are_pruned_at_all_larger_ones() -> None:
    found = [measured(point(0, 32), 200), measured(point(1, 32), 420), measured(point(2, 32), 410)]
    assert prune(point(0, 64), found, {}) == "with batch 32 these settings gave 48% of the best"
    assert prune(point(2, 64), found, {}) is None
    later = [*found, measured(point(1, 64), 430)]
    assert prune(point(0, 128), later, {}) is not None
    assert prune(point(0, 16), found, {}) is None, "smaller batches are another matter"
    slower_backend = [measured(point(1, 32, backend="shards"), 5000), measured(point(1, 32), 400)]
    assert prune(point(1, 64), slower_backend, {}) is None, "backends are there to be compared"
    amp = [measured(point(1, 32, amp="bf16"), 900), measured(point(1, 32, amp="off"), 400, trainer=450)]
    assert prune(point(1, 64, amp="off"), amp, {}) is not None


def test_batches_that_do_not_fit_prune_larger_ones_with_the_same_amp() -> None:
    failed = {point(1, 128, amp="off"): "batch 128 does not fit into memory"}
    assert prune(point(1, 256, amp="off"), [], failed) == "batch 128 did not fit into memory"
    assert prune(point(2, 128, amp="off"), [], failed) is not None
    assert prune(point(1, 64, amp="off"), [], failed) is None
    assert prune(point(1, 256, amp="bf16"), [], failed) is None


def test_the_plateau_begins_within_2_percent_of_the_most() -> None:
    series = [measured(point(w), rate) for w, rate in ((0, 300), (1, 979), (2, 981), (4, 1000), (8, 990))]
    assert plateau(series).point.workers == 2


def test_the_fewest_workers_that_unblock_the_trainer_with_the_smallest_batch_near_the_best() -> None:
    rates = {
        (32, 1): 500, (32, 2): 900, (32, 4): 940,
        (64, 1): 500, (64, 2): 981, (64, 4): 985,
        (128, 1): 500, (128, 2): 990, (128, 4): 1000,
    }  # fmt: skip
    found = [measured(point(workers, batch), rate) for (batch, workers), rate in rates.items()]
    random.Random(0).shuffle(found)
    (recommendation,) = recommend(found)
    assert recommendation.chosen.point == point(2, 64)
    assert recommendation.best.point == point(4, 128)
    assert recommendation.verdict == KEEPS_UP
    assert sentence(recommendation) == (
        "pytorch on data/raw: choose 2 workers, batch 64: 981 images/s, 98% of the best "
        "(1,000 with 4 workers, batch 128); the trainer does not wait."
    )


def test_where_nothing_unblocks_the_trainer_the_plateau_is_recommended_and_the_wait_said() -> None:
    found = [measured(point(w), rate) for w, rate in ((0, 200), (1, 400), (2, 595), (4, 600))]
    (recommendation,) = recommend(found)
    assert recommendation.chosen.point.workers == 2
    assert recommendation.verdict == LOADER_BINDS
    said = sentence(recommendation)
    assert "the trainer waits with every number of workers: it gets 40% fewer images/s than alone" in said


def test_repeats_that_disagree_are_not_distinguishable() -> None:
    found = [measured(point(1), 500, 510, 520), measured(point(2), 960, 970, 990), measured(point(4), 965)]
    (recommendation,) = recommend(found)
    assert recommendation.chosen.point.workers == 2
    assert recommendation.verdict == NOT_DISTINGUISHABLE
    assert "the trainer may wait: the trials disagree" in sentence(recommendation)


def test_without_a_trainer_the_fewest_workers_on_the_plateau() -> None:
    found = [measured(point(w), rate, trainer=None) for w, rate in ((1, 500), (2, 990), (4, 1000))]
    (recommendation,) = recommend(found)
    assert recommendation.chosen.point.workers == 2
    assert recommendation.verdict == NO_TRAINER


def test_a_slow_trainer_that_never_waits_is_not_preferred_to_a_fast_one() -> None:
    found = [
        measured(point(1, amp="off"), 500, trainer=500),
        measured(point(1, amp="bf16"), 600),
        measured(point(4, amp="bf16"), 990),
    ]
    assert recommend(found)[0].chosen.point == point(4, amp="bf16")


def test_beside_other_busy_processes_nothing_is_recommended() -> None:
    found = [measured(point(1), 500), measured(point(2), 1000)]
    assert recommend(found, 0.11) == []
    assert recommend(found, 0.1) == recommend(found, None) == recommend(found) != []


def test_each_backend_gets_its_own_recommendation() -> None:
    found = [measured(point(1), 500), measured(point(1, backend="shards"), 1000)]
    assert [r.chosen.point.backend for r in recommend(found)] == ["pytorch", "shards"]
    assert recommend([]) == []


def test_lists_of_numbers_and_switches() -> None:
    assert parse_numbers("--workers", "4, 0,2,2") == (0, 2, 4)
    assert parse_switches("--pin", "off,on") == (True, False)
    assert parse_switches("--pin", "off") == (False,)
    cpu = torch.device("cpu")
    assert parse_amp("auto, off,bf16", cpu) == ("off", "bf16"), "auto is off on a CPU"
    with pytest.raises(SettingError, match="unknown amp 'yes'; choose from: auto, bf16, fp16, off"):
        parse_amp("off,yes", cpu)
    with pytest.raises(SettingError, match="--workers must be numbers as in 1,2,4, got 'many'"):
        parse_numbers("--workers", "many")
    with pytest.raises(SettingError, match="--pin must be on, off or on,off, got 'True'"):
        parse_switches("--pin", "True")
    with pytest.raises(SettingError, match="workers must be an integer of at least 0, got -1"):
        Axes((-1,), (32,), (None,), (None,))
