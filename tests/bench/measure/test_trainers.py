from pathlib import Path

import pytest
import torch

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
from precache.errors import SettingError
from tests.bench.settings import quick
from tests.bench.squares import TINY

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_emulated_accelerators_take_what_was_published_times_their_number() -> None:
    rates = {name: one.images_per_s for name, one in PRESETS.items()}
    for name, rate in {**rates, "1786": 1786, "1786.5x2": 3573, "h100x1024": 7_329_792}.items():
        trainer = make_trainer(f"emulated:{name}", CPU, 10)
        assert isinstance(trainer, EmulatedTrainer)
        assert (trainer.images_per_s, trainer.name) == (rate, f"emulated:{name}")
    assert make_trainer("auto", CPU, 10).name == "emulated:h100"
    assert resolve_trainer("auto", CUDA) == "resnet50"
    assert isinstance(make_trainer("none", CPU, 10), NullTrainer)
    for name in ("-5", "nan", "v100x8", "h100x1", "h100x1025"):
        with pytest.raises(SettingError, match=r"x2 to|h100, h200, a100"):
            make_trainer(f"emulated:{name}", CPU, 10)


def test_loader_and_forward_pass_compute_in_the_precision_asked_for(converted: dict[str, Path]) -> None:
    settings = quick(trainer=TINY.model, amp="bf16").for_loader("shards", converted["shards"], 5)
    assert measure(settings).facts["shapes"] == "3x32x32 torch.bfloat16"
    for amp, dtype in (("fp16", torch.float16), ("off", torch.float32)):
        trainer = ModelTrainer(TINY.model, CPU, 2, amp)
        outputs: list[torch.dtype] = []
        trainer.learner.model.register_forward_hook(
            lambda _, __, output, seen=outputs: seen.append(output.dtype)
        )
        trainer.step(Batch(torch.rand(2, 3, 8, 8).to(trainer.dtype), torch.arange(2), torch.arange(2)))
        assert outputs == [trainer.dtype] == [dtype]
