import time

import pytest
import torch

from bench.running.trainers import EmulatedTrainer, NullTrainer, Resnet50Trainer, make_trainer
from loaders.batch import Batch
from precache.errors import SettingError

CPU = torch.device("cpu")


def batch_of(count: int, size: int = 8, dtype: torch.dtype = torch.uint8, device: str = "cpu") -> Batch:
    images = torch.randint(0, 256, (count, 3, size, size)).to(device, dtype)
    labels = torch.arange(count, device=device) % 2
    return Batch(images.to(memory_format=torch.channels_last), labels, torch.arange(count))


def test_the_presets_are_those_of_mlperf_storage() -> None:
    """400 samples in 0.224 s (H100) and in 0.435 s (A100)."""
    for name, rate in (("mlperf-h100", 1785.7), ("mlperf-a100", 919.5), ("1786", 1786.0)):
        trainer = make_trainer(f"emulated:{name}", CPU, 10)
        assert isinstance(trainer, EmulatedTrainer)
        assert trainer.images_per_s == pytest.approx(rate, abs=0.05)
        assert trainer.name == f"emulated:{name}"


def test_auto_is_emulated_without_a_gpu_and_real_with_one() -> None:
    assert make_trainer("auto", CPU, 10).name == "emulated:mlperf-h100"
    assert isinstance(make_trainer("none", CPU, 10), NullTrainer)


def test_the_emulated_trainer_holds_a_batch_without_using_the_cpu() -> None:
    trainer = EmulatedTrainer("emulated:100", 100)
    wall, cpu = time.perf_counter(), time.process_time()
    trainer.step(batch_of(20))
    assert time.perf_counter() - wall >= 0.2  # a sleep is never too short
    assert time.process_time() - cpu < 0.1


@pytest.mark.parametrize(
    "name", ["emulated:-5", "emulated:0", "emulated:nan", "emulated:inf", "emulated:v100"]
)
def test_a_bad_rate_is_named(name: str) -> None:
    with pytest.raises(SettingError, match=r"unknown rate .*mlperf-h100, mlperf-a100"):
        make_trainer(name, CPU, 10)


def test_an_unknown_trainer_lists_the_choices() -> None:
    with pytest.raises(
        SettingError, match=r"unknown trainer 'resnet51'; choose from: auto, emulated.*resnet50"
    ):
        make_trainer("resnet51", CPU, 10)


def train(device: torch.device) -> None:
    trainer = Resnet50Trainer(device, classes=2)
    weight = trainer._model.fc.weight
    before = weight.detach().clone()
    trainer.step(batch_of(2, 32, trainer.dtype, device.type))
    assert not torch.equal(before, weight)
    assert torch.isfinite(weight).all()
    assert trainer._model.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert isinstance(trainer._optimizer, torch.optim.SGD)
    assert trainer._optimizer.param_groups[0]["momentum"] == 0.9


def test_resnet50_trains_on_the_cpu_in_float32() -> None:
    assert Resnet50Trainer(CPU, 2).dtype == torch.float32
    train(CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_resnet50_trains_on_the_gpu_in_half_precision() -> None:
    assert Resnet50Trainer(torch.device("cuda"), 2).dtype in (torch.bfloat16, torch.float16)
    train(torch.device("cuda"))
