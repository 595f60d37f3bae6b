import pytest
import torch

from bench.machine.hardware import resolve_amp
from bench.measure.trainers import (
    EPILOG,
    MODELS,
    PRESETS,
    EmulatedTrainer,
    ModelTrainer,
    NullTrainer,
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


def test_emulated_accelerators_take_what_was_published_times_their_number() -> None:
    help_text = " ".join(EPILOG.split())
    rates = {name: one.images_per_s for name, one in PRESETS.items()}
    for name, rate in {**rates, "1786": 1786, "1786.5x2": 3573, "h100x1024": 7_329_792}.items():
        trainer = make_trainer(f"emulated:{name}", CPU, 10)
        assert isinstance(trainer, EmulatedTrainer)
        assert (trainer.images_per_s, trainer.name) == (rate, f"emulated:{name}")
        assert name not in PRESETS or f"emulated:{name} {rate:,.0f} {PRESETS[name].source}" in help_text
    assert make_trainer("auto", CPU, 10).name == "emulated:h100"
    assert resolve("auto", CUDA) == "resnet50"
    assert isinstance(make_trainer("none", CPU, 10), NullTrainer)
    for name in ("-5", "0", "nan", "v100x8", "h100x", "h100x1", "h100x1025"):
        with pytest.raises(
            SettingError, match=r"several accelerators are x2 to|unknown rate .*h100, h200, a100"
        ):
            make_trainer(f"emulated:{name}", CPU, 10)


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


@pytest.mark.parametrize("amp", ["auto", "fp16", "off"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_models_train_on_the_gpu(name: str, amp: str) -> None:
    train(name, CUDA, amp, size=224)


def test_the_forward_pass_computes_in_the_precision_asked_for(tiny: str) -> None:
    for amp, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("off", torch.float32)):
        trainer = ModelTrainer(tiny, CPU, 2, amp)
        outputs: list[torch.dtype] = []
        trainer._model.register_forward_hook(lambda _, __, output, seen=outputs: seen.append(output.dtype))
        trainer.step(batch_of(2, 8, trainer.dtype))
        assert outputs == [trainer.dtype] == [dtype]
        assert all(weight.dtype == torch.float32 for weight in trainer._model.parameters())


def test_a_gpu_that_only_emulates_bfloat16_computes_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert resolve_amp("auto", CUDA) == "bf16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert [resolve_amp(amp, CUDA) for amp in ("auto", "fp16", "off")] == ["fp16", "fp16", "off"]
    with pytest.raises(SettingError, match="amp 'bf16' is only emulated on Tesla V100; use 'fp16'"):
        resolve_amp("bf16", CUDA)
