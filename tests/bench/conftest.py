"""What the tests of trainers share."""

import os
import shutil

import pytest
import torch

from bench.measure.trainers import MODELS, Model


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a model that is compiled, and computed in any precision, in seconds."""

    def make(classes: int) -> torch.nn.Module:
        flat = (torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), *flat, torch.nn.Linear(8, classes))

    monkeypatch.setitem(MODELS, "tiny", Model(make, MODELS["resnet18"].optimizer))
    return "tiny"


@pytest.fixture
def compiler() -> None:
    """What torch.compile needs on a CPU."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("torch.compile needs a C++ compiler: apt-get install g++")
