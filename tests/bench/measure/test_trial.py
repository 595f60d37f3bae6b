"""One measured run, by real loaders: what the trainer gets, and what is counted of it."""

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


def shards(converted: dict[str, Path], **given: object) -> Settings:
    return quick(**{"trainer": TRAINER, **given}).for_loader("shards", converted["shards"], 5)


class Ticking:
    """Every wait takes 1 s, every step 3 s."""

    def __init__(self) -> None:
        self.marks = 0

    def mark(self) -> None:
        self.marks += 1

    def intervals_s(self) -> tuple[float, ...]:
        return (1.0, 3.0) * (self.marks // 2)


def test_waits_and_steps_are_told_apart_and_first_batches_of_epochs_named(converted: dict[str, Path]) -> None:
    clock = Ticking()
    trial = measure(shards(converted, batches=16), clock=clock)
    assert clock.marks == 1 + 2 * 16
    assert (trial.series["wait_s"], trial.series["step_s"]) == ((1.0,) * 16, (3.0,) * 16)
    assert trial.batch_s == (4.0,) * 16
    numbers = trial.numbers
    assert (numbers["images"], trial.images_per_s, numbers["wait_share"]) == (16 * 8, 2.0, 0.25)
    # a first batch, a warm one, then timed: 8 fill an epoch of 70 pictures
    assert trial.series["epoch_starts"] == (6, 14)
    assert numbers["first_batch_s"] > 0
    alone = measure_trainer(quick(trainer="emulated:2000"))
    assert alone.numbers["images"] == 4 * 8
    assert "served_ids" not in alone.numbers
    assert min(alone.series["step_s"]) >= 8 / 2000


def test_a_cache_is_full_before_the_first_timed_batch(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer gets the first batch, then those of the second epoch, when nothing is decoded any more."""
    served: list[list[int]] = []
    monkeypatch.setattr(EmulatedTrainer, "step", lambda _, batch: served.append(batch.ids.tolist()))
    measure(shards(converted, cache="ram"))
    with build_loader(converted["shards"], batch_size=8, size=32, last=LAST) as loader:
        first, second = [[batch.ids.tolist() for batch in loader] for _ in range(2)]
    assert served == [first[0], *second[: 1 + 4]]


BATCH = 32
BATCHES = 2 * IMAGES // BATCH  # over the end of an epoch


def test_every_kind_of_run_feeds_full_batches_past_the_end_of_epochs(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(EmulatedTrainer, "step", lambda _, batch: sizes.append(len(batch.labels)))
    counted = shards(converted, batch_size=BATCH, batches=BATCHES)
    timed = quick(trainer=TRAINER, batch_size=BATCH, warmup=0, batches=1, warmup_s=0.1, seconds=0.3)
    trial = measure(counted)
    assert trial.numbers["served_ids"] == IMAGES // BATCH * BATCH, "an epoch serves no picture twice"
    assert sum(measure(timed.for_loader("shards", counted.path, 5)).batch_s) > 0.2
    assert len(sizes) > BATCHES
    assert set(sizes) == {BATCH}


def test_an_epoch_without_a_full_batch_is_an_error_and_no_endless_loop(converted: dict[str, Path]) -> None:
    refused = pytest.raises(SettingError, match=r"batch_size 71 is more than the 70 pictures.*smaller one")
    with build_loader(converted["shards"], batch_size=IMAGES + 1, last=LAST) as loader, refused:
        next(repeat_epochs(loader))
