"""The model on hand-made cases: each figure can be worked out on paper."""

from dataclasses import replace

import pytest

from bench.report import forecast as model
from bench.report.forecast import Inputs, Prediction, Profile

RAW = Profile(
    name="raw tree", image_bytes=100_000, startup_s=0, image_s=0, shard_images=300,
    loader_images_per_s=1000, cpus=2, serial_s=1e-5, overlap=1, random_reads=True,
)  # fmt: skip
SHARDS = replace(
    RAW, name="shards", image_bytes=200_000, startup_s=1, image_s=0.002, loader_images_per_s=10_000
)
TARS = replace(
    SHARDS, name="webdataset", image_bytes=25_000, image_s=0.003, loader_images_per_s=3000,
    serial_s=1e-4, random_reads=False,
)  # fmt: skip
TODAY = replace(RAW, name="imagefolder", loader_images_per_s=600)
INPUTS = Inputs(
    images=6000, train_images=6000, cpus=2, gpus=1, trainer_images_per_s=2000,
    disk_bytes_per_s=500e6, read_s=0.001, memory_bytes=16e9,
)  # fmt: skip


def predictions(**changes: float) -> dict[str, Prediction]:
    return {p.name: p for p in model.predict([RAW, SHARDS, TARS], replace(INPUTS, **changes))}


def test_sizes_scale_with_the_count() -> None:
    assert [p.bytes for p in predictions().values()] == [6e8, 1.2e9, 1.5e8]
    assert predictions(images=12_000)["shards"].bytes == 2.4e9


def test_a_conversion_takes_its_start_and_the_busiest_workers_pictures() -> None:
    """20 shards of 300 on 2 workers: 3,000 pictures each."""
    found = predictions()
    assert found["raw tree"].conversion_s == 0
    assert found["shards"].conversion_s == pytest.approx(1 + 3000 * 0.002)
    assert found["webdataset"].conversion_s == pytest.approx(1 + 3000 * 0.003)
    # 16 workers: two rounds, as 20 shards need; with 40, one
    assert predictions(cpus=16)["webdataset"].conversion_s == pytest.approx(1 + 600 * 0.003)
    assert predictions(cpus=40)["webdataset"].conversion_s == pytest.approx(1 + 300 * 0.003)


def test_a_conversion_is_no_faster_than_the_disk() -> None:
    assert predictions(disk_bytes_per_s=10e6)["shards"].conversion_s == pytest.approx(1 + 120)


def test_loaders_scale_with_cpus_until_one_thread_binds() -> None:
    rates = {cpus: predictions(cpus=cpus) for cpus in (1, 2, 4, 16)}
    assert [rates[cpus]["webdataset"].warm_images_per_s for cpus in (1, 2, 4)] == [1500, 3000, 6000]
    assert rates[16]["webdataset"].warm_images_per_s == pytest.approx(10_000)  # 1 / serial_s
    assert rates[16]["raw tree"].warm_images_per_s == 8000


def test_a_cold_loader_is_no_faster_than_the_disk() -> None:
    found = predictions()
    # two workers read at random: 1 ms to begin, and 0.2 ms or 0.4 ms for the bytes
    assert found["raw tree"].cold_images_per_s == 1000
    assert found["shards"].cold_images_per_s == pytest.approx(2 / 0.0014)
    assert found["webdataset"].cold_images_per_s == 3000
    slow = predictions(disk_bytes_per_s=50e6, read_s=0)
    assert slow["shards"].cold_images_per_s == pytest.approx(250)
    assert slow["webdataset"].cold_images_per_s == pytest.approx(2000)
    assert slow["raw tree"].cold_images_per_s == pytest.approx(500)


def test_the_trainer_gets_what_the_slower_of_the_two_gives() -> None:
    assert [p.trained_images_per_s for p in predictions().values()] == [1000, 2000, 2000]
    assert [p.trained_images_per_s for p in predictions(gpus=2).values()] == [1000, 4000, 3000]
    assert predictions(trainer_images_per_s=500)["raw tree"].trained_images_per_s == 500
    lossy = model.predict([RAW, replace(TARS, overlap=0.9)], INPUTS)
    assert lossy[1].trained_images_per_s == pytest.approx(1800)


def test_what_does_not_fit_into_memory_is_read_cold_each_epoch() -> None:
    """Half of 2 GB holds the tree's 0.6 GB and not the 1.2 GB of shards."""
    found = predictions(memory_bytes=2e9, trainer_images_per_s=1e6)
    assert [p.cached for p in found.values()] == [True, False, True]
    assert found["shards"].trained_images_per_s == found["shards"].cold_images_per_s
    assert found["webdataset"].trained_images_per_s == 3000


def test_epochs_until_a_conversion_pays() -> None:
    """An epoch takes 6 s from the raw tree and 3 s from either format: 7 s are back after 3, 10 s after 4."""
    found = predictions()
    assert found["shards"].epochs_to_pay == 3
    assert found["webdataset"].epochs_to_pay == 4
    assert found["raw tree"].epochs_to_pay is None
    # half the pictures are validation: an epoch saves half as much
    assert predictions(train_images=3000)["shards"].epochs_to_pay == 5
    assert predictions(trainer_images_per_s=1000)["shards"].epochs_to_pay is None


def test_a_conversion_pays_against_imagefolder_and_never_where_the_other_line_is_as_fast() -> None:
    """An epoch takes 10 s with ImageFolder, 6 s from the raw tree otherwise, and 3 s from either format."""
    every = [TODAY, RAW, SHARDS, TARS]
    found = {p.name: p.epochs_to_pay for p in model.predict(every, INPUTS)}
    assert found == {"imagefolder": None, "raw tree": None, "shards": 1, "webdataset": 2}
    slow = {p.name: p.epochs_to_pay for p in model.predict(every, replace(INPUTS, trainer_images_per_s=1000))}
    assert set(slow.values()) == {None}


def test_the_advice_is_the_fastest_and_among_equals_the_quickest_to_have() -> None:
    assert model.best(list(predictions().values())).name == "shards"
    assert model.best(list(predictions(gpus=2).values())).name == "shards"
    # 1,000 images/s are enough for this trainer: nothing to convert
    assert model.best(list(predictions(trainer_images_per_s=1015).values())).name == "raw tree"
    # of what is as fast and there already, what people have
    alike = model.predict([TODAY, RAW, SHARDS], replace(INPUTS, trainer_images_per_s=600))
    assert model.best(alike).name == "imagefolder"
    # shards that are not kept in memory, from a slow disk
    slow = predictions(memory_bytes=2e9, disk_bytes_per_s=100e6)
    assert model.best(list(slow.values())).name == "webdataset"


def test_at_the_crossover_both_load_at_the_same_rate() -> None:
    found = predictions(read_s=0)
    rate = model.crossover_bytes_per_s(found["shards"], found["webdataset"], INPUTS.images)
    assert rate == pytest.approx(3000 * 200_000)
    for factor, faster in ((0.9, "webdataset"), (1.1, "shards")):
        there = predictions(read_s=0, disk_bytes_per_s=rate * factor)
        assert max(("shards", "webdataset"), key=lambda name: there[name].cold_images_per_s) == faster
    there = predictions(read_s=0, disk_bytes_per_s=rate)
    assert there["shards"].cold_images_per_s == pytest.approx(there["webdataset"].cold_images_per_s)


def test_there_is_no_crossover_where_pixels_are_never_faster() -> None:
    slow = replace(predictions()["shards"], warm_images_per_s=2000)
    assert model.crossover_bytes_per_s(slow, predictions()["webdataset"], 6000) is None


def test_start_and_rate_are_recovered_from_two_conversions() -> None:
    """1.5 s to start, 2 ms a picture: 24 pictures by one worker, 1,200 in 4 shards by two."""
    startup_s, image_s = model.fit_conversion(1.548, 24, 1.5 + 600 * 0.002, 1200, 341, 2)
    assert startup_s == pytest.approx(1.5)
    assert image_s == pytest.approx(0.002)
    # noise: the small one took longer
    startup_s, image_s = model.fit_conversion(2.0, 24, 1.0, 1200, 341, 2)
    assert startup_s >= 0
    assert image_s > 0


@pytest.mark.parametrize(
    ("images", "workers", "busiest"), [(600, 1, 600), (600, 2, 300), (601, 2, 2 * 601 / 3), (100, 4, 100)]
)
def test_the_busiest_worker(images: int, workers: int, busiest: float) -> None:
    assert model.rounds(images, 300, workers) == pytest.approx(busiest)


def test_the_time_until_a_read_begins_is_recovered() -> None:
    """0.1 ms, then 500 MB/s."""
    reads = [(size, size / (1e-4 + size / 500e6)) for size in (4096, 131072)]
    assert model.read_time(reads[0], reads[1]) == pytest.approx(1e-4)
    assert model.read_time((4096, 1e9), (131072, 1e9)) == pytest.approx(0, abs=1e-12)
