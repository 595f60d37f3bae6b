"""Trials of real loaders: the batches that the trainer gets, and the numbers that are counted."""

from pathlib import Path

import pytest

from bench.measure.settings import LAST, Settings
from bench.measure.trainers import EmulatedTrainer
from bench.measure.trial import measure, measure_trainer, repeat_epochs
from precache.errors import SettingError
from tests.bench.settings import quick
from tests.building import build_loader
from tests.conftest import IMAGES

TRAINER = "emulated:100000"


def shards(converted: dict[str, Path], **changes: object) -> Settings:
    """Return settings of a trial that feeds TRAINER from shards."""
    return quick(**{"trainer": TRAINER, **changes}).for_loader("shards", converted["shards"], 5)


class FakeClock:
    """Clock on which every wait takes 1 s, every step 3 s."""

    def __init__(self) -> None:
        self.marks = 0

    def mark(self) -> None:
        self.marks += 1

    def intervals_s(self) -> tuple[float, ...]:
        return (1.0, 3.0) * (self.marks // 2)


def test_measure_times_waits_and_steps_and_marks_starts_of_epochs(converted: dict[str, Path]) -> None:
    clock = FakeClock()
    trial = measure(shards(converted, batches=16), clock=clock)
    assert clock.marks == 1 + 2 * 16
    assert (trial.series["wait_s"], trial.series["step_s"]) == ((1.0,) * 16, (3.0,) * 16)
    assert trial.batch_s == (4.0,) * 16
    numbers = trial.numbers
    assert (numbers["images"], trial.images_per_s, numbers["wait_share"]) == (16 * 8, 2.0, 0.25)
    # the first batch and a warm-up batch go before the timed ones; 8 batches fill an epoch of 70 pictures
    assert trial.series["epoch_starts"] == (6, 14)
    assert numbers["first_batch_s"] > 0


def test_measure_trainer_times_steps_and_counts_no_ids() -> None:
    trial = measure_trainer(quick(trainer="emulated:2000"))
    assert trial.numbers["images"] == 4 * 8
    assert "served_ids" not in trial.numbers
    assert sum(trial.series["step_s"]) > 3 * 8 / 2000, "what was overslept before shortens one step at most"


def test_a_first_epoch_is_served_before_the_first_timed_batch(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer gets the first batch, and then batches of the second epoch."""
    batch_ids: list[list[int]] = []
    monkeypatch.setattr(EmulatedTrainer, "step", lambda _, batch: batch_ids.append(batch.ids.tolist()))
    measure(shards(converted, first_epoch=True))
    with build_loader(converted["shards"], batch_size=8, size=32, last=LAST) as loader:
        first_epoch, second_epoch = [[batch.ids.tolist() for batch in loader] for _ in range(2)]
    assert batch_ids == [first_epoch[0], *second_epoch[: 1 + 4]]


BATCH = 32
BATCHES = 2 * IMAGES // BATCH  # more than an epoch has


@pytest.fixture
def batch_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each batch of an emulated trainer adds its size."""
    sizes: list[int] = []
    monkeypatch.setattr(EmulatedTrainer, "step", lambda _, batch: sizes.append(len(batch.labels)))
    return sizes


def test_a_trial_of_batches_has_full_ones_past_the_end_of_an_epoch(
    converted: dict[str, Path], batch_sizes: list[int]
) -> None:
    trial = measure(shards(converted, batch_size=BATCH, batches=BATCHES))
    assert trial.numbers["served_ids"] == IMAGES // BATCH * BATCH, "an epoch serves no picture twice"
    assert len(batch_sizes) > BATCHES
    assert set(batch_sizes) == {BATCH}


def test_a_trial_of_seconds_has_full_batches_for_as_long(
    converted: dict[str, Path], batch_sizes: list[int]
) -> None:
    settings = shards(converted, batch_size=BATCH, warmup=0, batches=1, warmup_s=0.1, seconds=0.3)
    assert sum(measure(settings).batch_s) > 0.2
    assert set(batch_sizes) == {BATCH}


def test_repeat_epochs_refuses_an_epoch_without_a_full_batch(converted: dict[str, Path]) -> None:
    raises = pytest.raises(SettingError, match="batch_size 71 is more than the 70 pictures")
    with build_loader(converted["shards"], batch_size=IMAGES + 1, last=LAST) as loader, raises:
        next(repeat_epochs(loader))
