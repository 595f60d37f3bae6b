"""Every kind of run feeds its trainer full batches, past the end of epochs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.cli import main
from bench.measure import sweep_trial
from bench.measure.full_batches import LAST, endless
from bench.measure.run import measure as measure_trial
from bench.measure.spec import TrialSpec
from bench.measure.trainers import EmulatedTrainer
from bench.report.grid import Point
from loaders.batch import Batch
from precache.console import commandline
from precache.errors import SettingError
from tests.bench.settings import sweep_settings
from tests.building import build_loader
from tests.conftest import IMAGES

BATCH = 32
BATCHES = 2 * IMAGES // BATCH  # over the end of an epoch
TRAINER = "emulated:100000"


def trial(path: Path, out: Path) -> None:
    spec = TrialSpec(
        backend="shards", path=path, trainer=TRAINER, classes=5, batch_size=BATCH, workers=1, size=32,
        warmup=1, batches=BATCHES, device=torch.device("cpu"),
    )  # fmt: skip
    run = measure_trial(spec)
    assert run.images == BATCHES * BATCH
    assert run.served is not None
    assert run.served.ids == IMAGES // BATCH * BATCH, "an epoch serves no picture twice"


def sweep(path: Path, out: Path) -> None:
    settings = sweep_settings(trainer=TRAINER, size=32, warmup=1, batches=BATCHES)
    sweep_trial.both(sweep_trial.at_point(settings, Point("shards", str(path), BATCH, None, None, 1), 5))


def recommend(path: Path, out: Path) -> None:
    """By the clock, not by a number of batches."""
    spec = TrialSpec(
        backend="shards", path=path, trainer=TRAINER, classes=5, batch_size=BATCH, workers=1, size=32,
        warmup=0, batches=1, warmup_s=0.1, seconds=0.3, device=torch.device("cpu"), check="never",
    )  # fmt: skip
    assert sum(measure_trial(spec).batch_s) > 0.2


def profile(path: Path, out: Path) -> None:
    sizes = ("--batch-size", BATCH, "--size", 32, "--workers", 1, "--warmup", 1, "--steps", BATCHES)
    arguments = ["profile", path, "--trainer", TRAINER, "--device", "cpu", "--out", out, *sizes]
    assert commandline.run(main, "bench", list(map(str, arguments))) == 0


@pytest.mark.parametrize("measure", [trial, sweep, recommend, profile])
def test_trainers_are_fed_full_batches(
    converted: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    measure: Callable[[Path, Path], None],
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(EmulatedTrainer, "step", lambda _, batch: sizes.append(len(batch.labels)))
    measure(converted["shards"], tmp_path)
    assert len(sizes) > BATCHES
    assert set(sizes) == {BATCH}


def test_an_epoch_without_a_full_batch_is_an_error_and_no_endless_loop(converted: dict[str, Path]) -> None:
    refused = pytest.raises(SettingError, match=r"batch_size 71 is more than the 70 pictures.*smaller one")
    with build_loader(converted["shards"], batch_size=IMAGES + 1, last=LAST) as loader, refused:
        next(endless(loader))
    with build_loader(converted["shards"], batch_size=IMAGES, last=LAST) as loader:
        batches: list[tuple[Batch, bool]] = [batch for batch, _ in zip(endless(loader), range(2))]  # noqa: B905
    assert [(len(batch.labels), first) for batch, first in batches] == [(IMAGES, True)] * 2
