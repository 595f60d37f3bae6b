"""Trainers: rates of emulated accelerators, errors of their names, precision of models."""

from pathlib import Path

import pytest
import torch
from torch import nn

from bench.measure import trainers
from bench.measure.trainers import (
    PRESETS,
    EmulatedTrainer,
    ModelTrainer,
    NullTrainer,
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
