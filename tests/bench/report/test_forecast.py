"""Predictions for small cases, in which each figure can be worked out on paper."""

from dataclasses import replace
from typing import Any

import pytest

from bench.report import forecast
from bench.report.forecast import MODEL_ERROR, Inputs, Profile, Turn, choose_format, predict
from bench.report.result import Row
from bench.report.stats import exceeds
from bench.report.verdict import training_rate


def turns(rate: float, serial_s: float = 1e-5, overlap: float = 1.0) -> list[Turn]:
    return [Turn(rate, 1e9, rate * overlap, serial_s)]


RAW = Profile(name="raw", image_bytes=100_000, turns=turns(1000), cpus=2)
SHARDS = Profile(name="shards", image_bytes=200_000, startup_s=1, image_s=0.002, turns=turns(10_000), cpus=2)
TARS = Profile(
    name="webdataset", image_bytes=25_000, startup_s=1, image_s=0.003, turns=turns(3000, 1e-4), cpus=2
)
TODAY = replace(RAW, name="imagefolder", turns=turns(600))
INPUTS = Inputs(
    images=6000, train_images=6000, cpus=2, gpus=1, trainer_images_per_s=2000,
    disk_bytes_per_s=500e6, read_s=0.001, memory_bytes=16e9,
)  # fmt: skip


def predictions(*profiles: Profile, **changes: Any) -> dict[str, Row]:
    rows = predict(profiles or [RAW, SHARDS, TARS], replace(INPUTS, **changes))
    return {"imagefolder" if row.key["backend"] == "imagefolder" else row.key["data"]: row for row in rows}


def convert_s(row: Row) -> float | None:
    """The bound, without what a conversion may be slower than the sample says."""
    return row.values["convert_s"].high / (1 + MODEL_ERROR) if "convert_s" in row.values else None


def test_conversion_takes_start_up_plus_the_slower_of_cpus_and_disk() -> None:
    for changes, shards_s, tars_s in (
        ({}, 1 + 3000 * 0.002, 1 + 3000 * 0.003),
        ({"cpus": 16}, 1 + 1.2e9 / 500e6, 1 + 375 * 0.003),  # shards are as fast as the disk
        ({"disk_bytes_per_s": 10e6}, 1 + 120, 1 + 15),
    ):
        rows = predictions(**changes).values()
        assert [row.values["stored_bytes"].median for row in rows] == [6e8, 1.2e9, 1.5e8]
        assert [convert_s(row) for row in rows] == [None, pytest.approx(shards_s), pytest.approx(tars_s)]


def training_rates(**changes: Any) -> list[float]:
    return [training_rate(row).median for row in predictions(**changes).values()]


def test_training_is_as_fast_as_the_slower_of_loader_and_trainer() -> None:
    assert training_rates() == [1000, 2000, 2000]
    assert training_rates(gpus=2) == [1000, 4000, 3000]
    assert training_rates(trainer_images_per_s=500) == [500, 500, 500]


def test_data_larger_than_half_of_the_memory_is_read_cold() -> None:
    # half of 2 GB holds the tree's 0.6 GB, but not the 1.2 GB of shards
    rates = training_rates(memory_bytes=2e9, trainer_images_per_s=1e6)
    assert rates == [1000, pytest.approx(2 / 0.0014), 3000]


def test_training_loses_what_loader_and_trainer_lost_together() -> None:
    overlapping = predictions(replace(TARS, turns=turns(3000, 1e-4, 0.9)))["webdataset"]
    assert training_rate(overlapping).median == pytest.approx(1800)


def test_loader_scales_with_cpus_until_its_serial_thread_is_busy() -> None:
    for cpus, rate in ((1, 1500), (4, 6000), (16, 10_000)):  # one thread is always busy: 1 / serial_s
        assert predictions(cpus=cpus)["webdataset"].values["loader_images_per_s"].median == pytest.approx(
            rate
        )


def test_advice_is_the_fastest_format_that_is_converted_soonest() -> None:
    for changes, name in (
        ({}, "shards"),  # both keep up: shards are converted sooner
        ({"gpus": 2}, "shards"),
        ({"trainer_images_per_s": 1015}, None),  # 1,000 images/s are enough: nothing to convert
        ({"memory_bytes": 2e9, "disk_bytes_per_s": 100e6}, "webdataset"),  # shards are read from a slow disk
    ):
        best = choose_format(list(predictions(**changes).values()))
        assert (best.key["data"] if best else None) == name
    rows = predict([TODAY, RAW, SHARDS], INPUTS)
    wide = predict([TODAY, RAW, replace(SHARDS, turns=[*SHARDS.turns, *turns(9000), *turns(900)])], INPUTS)
    assert (choose_format(rows), choose_format(wide)) == (rows[2], None), "repeats disagree"


def test_start_up_and_rate_are_fitted_to_two_conversions() -> None:
    """A conversion takes 1.5 s to start and 2 ms a picture on each of two CPUs."""
    fit = forecast.fit_conversion((1.524, 24), (1.5 + 600 * 0.002, 1200), 2)
    assert fit == (pytest.approx(1.5), pytest.approx(0.002))


def test_one_turn_predicts_a_range_and_ranges_that_overlap_do_not_win() -> None:
    raw, close, far = (replace(RAW, turns=turns(rate)) for rate in (1000, 1200, 1400))
    rates = [
        training_rate(row) for row in predict([raw, close, far], replace(INPUTS, trainer_images_per_s=1e6))
    ]
    assert all(rate.low < rate.median < rate.high for rate in rates)
    assert [exceeds(rate, rates[0]) for rate in rates] == [False, False, True]
    # no loader feeds a trainer faster than it trains
    limited = training_rate(predictions(SHARDS)["shards"])
    assert (limited.median, limited.high) == (2000, 2000)
