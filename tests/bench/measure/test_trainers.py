import time

import pytest
import torch
from torch._dynamo.utils import counters

from bench.machine.device import resolve_amp
from bench.measure.trainers import (
    EPILOG,
    MODELS,
    PRESETS,
    EmulatedTrainer,
    FromPageable,
    ModelTrainer,
    NullTrainer,
    check_trainer,
    make_trainer,
    resolve,
)
from loaders.batch import Batch
from precache.errors import SettingError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def batch_of(count: int, size: int = 8, dtype: torch.dtype = torch.uint8, device: str = "cpu") -> Batch:
    images = torch.randint(0, 256, (count, 3, size, size)).to(device, dtype)
    if dtype.is_floating_point:
        images = images / 255
    labels = torch.arange(count, device=device) % 2
    return Batch(images.to(memory_format=torch.channels_last), labels, torch.arange(count))


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("h100", 7158), ("h200", 7941), ("a100", 2470), ("h100-vit-s", 7716),
        ("mlperf-storage-h100", 1785.7), ("mlperf-storage-a100", 919.5),
        ("1786", 1786), ("h100-vit-sx8", 61_728), ("h100x1024", 7_329_792), ("1786.5x2", 3573),
    ],
)  # fmt: skip
def test_emulated_accelerators_take_what_was_published_times_their_number(name: str, rate: float) -> None:
    trainer = make_trainer(f"emulated:{name}", CPU, 10)
    assert isinstance(trainer, EmulatedTrainer)
    assert trainer.images_per_s == pytest.approx(rate, abs=0.05)
    assert trainer.name == f"emulated:{name}"


def test_auto_is_emulated_without_a_gpu_and_real_with_one() -> None:
    assert make_trainer("auto", CPU, 10).name == "emulated:h100"
    assert resolve("auto", CUDA) == "resnet50"
    assert isinstance(make_trainer("none", CPU, 10), NullTrainer)


def test_the_help_names_rate_and_source_of_each_preset() -> None:
    shown = " ".join(EPILOG.split())
    for name, preset in PRESETS.items():
        assert f"emulated:{name} {preset.images_per_s:,.0f} {preset.source}" in shown
    assert "x8 behind a name" in shown
    assert "PyTorch without MXNet's tuning is slower: --trainer-rate" in shown


def test_the_emulated_trainer_holds_a_batch_without_using_the_cpu() -> None:
    trainer = EmulatedTrainer("emulated:100", 100)
    wall, cpu = time.perf_counter(), time.process_time()
    trainer.step(batch_of(20))
    assert time.perf_counter() - wall >= 0.2  # a sleep is never too short
    assert time.process_time() - cpu < 0.1


@pytest.mark.parametrize(
    "name",
    ["emulated:-5", "emulated:0", "emulated:nan", "emulated:inf", "emulated:v100", "emulated:v100x8",
     "emulated:x8", "emulated:h100-vit-sx", "emulated:0x10"],
)  # fmt: skip
def test_a_bad_rate_is_named(name: str) -> None:
    with pytest.raises(SettingError, match=r"unknown rate .*h100, h200, a100, h100-vit-s"):
        make_trainer(name, CPU, 10)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((f"emulated:h100-vit-sx{n}", f"are x2 to x1,024, got x{n}; leave it out") for n in (0, 1, 1025)),
        ("resnet51", "unknown trainer 'resnet51'; choose from: auto, none, resnet18, resnet50, vit_s_16"),
    ],
)
def test_a_bad_name_says_what_would_do(name: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        make_trainer(name, CPU, 10)


def train(name: str, device: torch.device, amp: str = "auto", *, size: int = 32) -> None:
    trainer = ModelTrainer(name, device, 2, amp)
    weights = list(trainer._model.parameters())
    before = [weight.detach().clone() for weight in weights]
    for _ in range(10):  # of float16 the first ones may be skipped, until the loss's scale fits
        trainer.step(batch_of(2, size, trainer.dtype, device.type))
        if any(not torch.equal(old, new) for old, new in zip(before, weights, strict=True)):
            break
    else:
        pytest.fail("no weight has changed")
    assert all(torch.isfinite(weight).all() for weight in weights)
    filters = [weight for weight in weights if weight.ndim == 4]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in filters)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_residual_networks_train_on_the_cpu_in_float32(name: str) -> None:
    assert ModelTrainer(name, CPU, 2).dtype == torch.float32
    train(name, CPU)


@pytest.mark.slow
def test_the_vision_transformer_trains_on_the_cpu() -> None:
    train("vit_s_16", CPU, size=224)


def test_the_vision_transformer_is_the_small_one() -> None:
    """22.05 million parameters with 1,000 classes, as in table 1 of its paper; 224 pixels a side."""
    assert sum(weight.numel() for weight in MODELS["vit_s_16"].make(1000).parameters()) == 22_050_664
    check_trainer("vit_s_16", 224)
    with pytest.raises(SettingError, match="vit_s_16 takes pictures of 224 pixels a side, got size 192; use"):
        check_trainer("vit_s_16", 192)


@pytest.mark.parametrize("amp", ["auto", "fp16", "off"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_models_train_on_the_gpu(name: str, amp: str) -> None:
    train(name, CUDA, amp, size=224)


@pytest.mark.parametrize(
    ("amp", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("off", torch.float32)]
)
def test_the_forward_pass_computes_in_the_precision_asked_for(
    tiny: str, amp: str, dtype: torch.dtype
) -> None:
    trainer = ModelTrainer(tiny, CPU, 2, amp)
    outputs: list[torch.dtype] = []
    trainer._model.register_forward_hook(lambda _module, _inputs, output: outputs.append(output.dtype))
    trainer.step(batch_of(2, 8, trainer.dtype))
    assert outputs == [trainer.dtype] == [dtype]
    assert all(weight.dtype == torch.float32 for weight in trainer._model.parameters())
    assert trainer._scaler.is_enabled() == (amp == "fp16")


def test_float16_scales_the_loss_and_skips_steps_whose_gradients_overflow(tiny: str) -> None:
    trainer = ModelTrainer(tiny, CPU, 2, "fp16")
    weight = next(trainer._model.parameters())
    batch = batch_of(2, 8, torch.float16)
    scale = trainer._scaler.get_scale()
    trainer.step(batch)
    trained = weight.detach().clone()
    trainer.step(Batch(torch.full_like(batch.images, torch.inf), batch.labels, batch.ids))
    assert torch.equal(weight, trained)
    assert torch.isfinite(weight).all()
    before = trainer._scaler.get_scale()
    for _ in range(10):  # at the latest when the scale fits again
        trainer.step(batch)
    assert trainer._scaler.get_scale() <= before < scale
    assert not torch.equal(weight, trained)


@pytest.mark.parametrize(("native", "expected"), [(True, "bf16"), (False, "fp16")])
def test_a_gpu_that_only_emulates_bfloat16_computes_in_float16(
    monkeypatch: pytest.MonkeyPatch, native: bool, expected: str
) -> None:
    def supported(including_emulation: bool = True) -> bool:
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    assert resolve_amp("auto", CUDA) == expected
    assert [resolve_amp(amp, CUDA) for amp in ("fp16", "off")] == ["fp16", "off"]
    if not native:
        with pytest.raises(SettingError, match="amp 'bf16' is only emulated on Tesla V100; use 'fp16'"):
            resolve_amp("bf16", CUDA)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_a_compiled_model_is_compiled_in_its_first_step_alone(tiny: str) -> None:
    trainer = ModelTrainer(tiny, CPU, 2, compiled=True)
    counters.clear()
    for _ in range(3):
        trainer.step(batch_of(2, 8, trainer.dtype))
        assert counters["stats"]["unique_graphs"] == 1


def test_batches_from_pageable_memory_reach_the_trainer_in_its_dtype() -> None:
    class Taking(NullTrainer):
        dtype = torch.bfloat16
        taken: Batch

        def step(self, batch: Batch) -> None:
            self.taken = batch

    trainer = Taking()
    fed = FromPageable(trainer, CPU)
    assert fed.dtype == torch.uint8
    fed.step(batch_of(2, 4))
    assert trainer.taken.images.dtype == torch.bfloat16
    assert trainer.taken.images.is_contiguous(memory_format=torch.channels_last)
