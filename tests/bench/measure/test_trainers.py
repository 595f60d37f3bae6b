"""Trainers: rates of emulated accelerators, errors of their names, precision of models."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.measure import trainers
from bench.measure.trainers import (
    EAGER_LAUNCHES,
    PRESETS,
    EmulatedTrainer,
    ModelTrainer,
    NullTrainer,
    choose_launches,
    make_trainer,
    resolve_trainer,
)
from bench.measure.trial import measure
from loaders.batch import Batch
from loaders.examples.models import MODELS, Model
from precache.errors import SettingError
from tests.bench.settings import quick

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def make_tiny(classes: int) -> nn.Module:
    """Return a model whose step takes a millisecond."""
    stem = [nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))


@pytest.fixture
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the model `tiny` to those that can be trained."""
    monkeypatch.setitem(MODELS, "tiny", Model(make=make_tiny, lr=0.1))
    monkeypatch.setattr(trainers, "MODELS", (*MODELS,))


def test_the_names_of_models_are_those_of_the_examples() -> None:
    assert tuple(MODELS) == trainers.MODELS


RATES = {name: preset.images_per_s for name, preset in PRESETS.items()}
RATES |= {"1786": 1786, "1786.5x2": 3573, "h100x1024": 7_329_792}


@pytest.mark.parametrize("name", RATES)
def test_an_emulated_accelerator_has_its_published_rate_times_its_number(name: str) -> None:
    trainer = make_trainer(f"emulated:{name}", CPU, 10)
    assert isinstance(trainer, EmulatedTrainer)
    assert trainer.images_per_s == RATES[name]
    assert trainer.name == f"emulated:{name}"


@pytest.mark.parametrize("name", ["-5", "nan", "v100x8", "h100x1", "h100x1025"])
def test_an_unknown_rate_or_number_of_accelerators_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match=r"x2 to|h100, h200, a100"):  # what the choices are
        make_trainer(f"emulated:{name}", CPU, 10)


class OversleepingClock:
    """Clock that stands still but for sleeping, which takes `overslept_s` too long."""

    def __init__(self, overslept_s: float) -> None:
        self.now_s = 100.0
        self.overslept_s = overslept_s

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + self.overslept_s


BATCH = Batch(torch.zeros(8, 3, 2, 2), torch.zeros(8), torch.arange(8))


def step_seconds(monkeypatch: pytest.MonkeyPatch, waits_s: list[float], overslept_s: float) -> list[float]:
    """Return the seconds of each step of 8 ms, as its caller sees it, after these waits for batches."""
    clock = OversleepingClock(overslept_s)
    monkeypatch.setattr(trainers, "time", clock)
    trainer = make_trainer("emulated:1000", CPU, 10)
    steps_s = []
    for wait_s in waits_s:
        clock.now_s += wait_s
        start_s = clock.now_s
        trainer.step(BATCH)
        steps_s.append(clock.now_s - start_s)
    return steps_s


def test_a_step_makes_up_for_the_time_that_the_one_before_overslept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert step_seconds(monkeypatch, [0.0] * 50, 0.003) == pytest.approx([0.011, *[0.008] * 49])


def test_a_step_on_a_late_batch_takes_as_long_as_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert step_seconds(monkeypatch, [0.02] * 5, 0.003) == pytest.approx([0.011] * 5)


def test_a_step_takes_as_long_as_launching_where_that_is_longer() -> None:
    trainer = make_trainer("emulated:1000000", CPU, 10, launches=500)
    assert isinstance(trainer, EmulatedTrainer)
    start_s = time.perf_counter()
    trainer.step(BATCH)
    assert 8e-6 < trainer.launch_s[0] <= time.perf_counter() - start_s


@pytest.mark.parametrize(
    ("name", "launches"),
    [("emulated:h100", 0), ("emulated:h100x8", 0), ("emulated:2500", EAGER_LAUNCHES), ("resnet50", 0)],
)
def test_a_rate_launches_by_default_and_a_named_accelerator_does_not(name: str, launches: int) -> None:
    assert choose_launches(None, name) == launches


def test_launches_are_refused_for_a_trainer_that_is_not_emulated() -> None:
    assert choose_launches(5, "emulated:h100") == 5
    with pytest.raises(SettingError, match="launches 5"):
        choose_launches(5, "resnet50")


def test_the_trainer_auto_is_emulated_on_a_cpu_and_resnet50_on_a_gpu() -> None:
    assert make_trainer("auto", CPU, 10).name == "emulated:h100"
    assert resolve_trainer("auto", CUDA) == "resnet50"


def test_the_trainer_none_drops_batches() -> None:
    assert isinstance(make_trainer("none", CPU, 10), NullTrainer)


@pytest.mark.usefixtures("tiny_model")
def test_a_loader_serves_the_precision_of_the_trainer(converted: dict[str, Path]) -> None:
    settings = quick(trainer="tiny", amp="bf16").for_loader("shards", converted["shards"], 5)
    assert measure(settings).facts["shapes"] == "3x32x32 torch.bfloat16"


@pytest.mark.usefixtures("tiny_model")
@pytest.mark.parametrize(("amp", "dtype"), [("fp16", torch.float16), ("off", torch.float32)])
def test_a_model_computes_in_the_chosen_precision(amp: str, dtype: torch.dtype) -> None:
    trainer = ModelTrainer("tiny", CPU, 2, amp)
    output_dtypes: list[torch.dtype] = []
    trainer.learner.model.register_forward_hook(lambda _, __, output: output_dtypes.append(output.dtype))
    trainer.step(Batch(torch.rand(2, 3, 8, 8).to(trainer.dtype), torch.arange(2), torch.arange(2)))
    assert trainer.dtype == dtype
    assert output_dtypes == [dtype]
