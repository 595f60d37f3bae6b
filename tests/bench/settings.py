"""Settings that tests measure with."""

from typing import Any

import torch

from bench.measure.spec import RunSettings


def sweep_settings(*, trainer: str, **given: Any) -> RunSettings:
    """Of a sweep on the CPU; its points say what batches and workers they have."""
    usual: dict[str, Any] = {"batch_size": 1, "workers": 0, "repeats": 1}
    return RunSettings(trainers=(trainer,), **{**usual, **given, "device": torch.device("cpu")})
