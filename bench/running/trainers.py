"""What consumes batches: the ResNet-50 step, an emulated accelerator, or nothing."""

import copy
import time
from typing import Protocol

import torch
from torchvision.models import resnet50

from loaders.batch import Batch
from precache.errors import SettingError

# Samples and seconds of one step of the MLPerf Storage ResNet-50 workload, batch size and
# computation_time of https://github.com/mlcommons/storage, configs/dlio/workload/resnet50_*.yaml
EMULATED_PRESETS = {"mlperf-h100": 400 / 0.224, "mlperf-a100": 400 / 0.435}
_SLOWEST = 1e-3  # images/s
DEFAULT_PRESET = "mlperf-h100"
CHOICES = "auto, emulated, emulated:IMAGES_PER_S, " + ", ".join(
    [*(f"emulated:{preset}" for preset in EMULATED_PRESETS), "none", "resnet50"]
)


class Trainer(Protocol):
    """Takes batches one after the other.

    Attributes:
        name: as given on the command line.
        dtype: of the images that it takes.
    """

    name: str
    dtype: torch.dtype

    def step(self, batch: Batch) -> None:
        """Train on `batch`; on CUDA the work may still run when this returns."""


class NullTrainer:
    """Drops each batch: with it a loader runs as fast as it can."""

    name = "none"
    dtype = torch.uint8

    def step(self, batch: Batch) -> None:
        """Do nothing."""


class EmulatedTrainer:
    """Holds each batch for `batch / images_per_s` seconds without using the CPU."""

    dtype = torch.uint8

    def __init__(self, name: str, images_per_s: float) -> None:
        self.name = name
        self.images_per_s = images_per_s

    def step(self, batch: Batch) -> None:
        """Wait for the batch to arrive, then hold it."""
        if batch.images.is_cuda:
            torch.cuda.current_stream(batch.images.device).synchronize()
        time.sleep(len(batch.labels) / self.images_per_s)


class Resnet50Trainer:
    """torchvision's ResNet-50: SGD with momentum, cross-entropy, channels-last, autocast on CUDA."""

    name = "resnet50"

    def __init__(self, device: torch.device, classes: int, amp: bool = True) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        half = torch.bfloat16 if on_gpu and torch.cuda.is_bf16_supported() else torch.float16
        self.dtype = half if on_gpu and amp else torch.float32
        if on_gpu:
            torch.backends.cudnn.benchmark = True
        model = resnet50(num_classes=classes).to(device)
        self._model: torch.nn.Module = model.to(memory_format=torch.channels_last).train()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._loss = torch.nn.CrossEntropyLoss()
        # float16 gradients underflow without scaling; bfloat16 and float32 have range enough
        self._scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)

    def distributed(self) -> "Resnet50Trainer":
        """The same model, trained with gradients that are averaged over the ranks of torch.distributed."""
        trainer = copy.copy(self)
        trainer._model = torch.nn.parallel.DistributedDataParallel(self._model)
        return trainer

    def step(self, batch: Batch) -> None:
        """Forward, backward, update."""
        with torch.autocast(self._device.type, self.dtype, enabled=self.dtype != torch.float32):
            loss = self._loss(self._model(batch.images), batch.labels)
        self._optimizer.zero_grad(set_to_none=True)
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()


def make_trainer(name: str, device: torch.device, classes: int, *, amp: bool = True) -> Trainer:
    """The trainer called `name`, one of CHOICES; `auto` is the real step where there is a GPU.

    `amp` is whether `resnet50` computes in half precision on CUDA; the others do not compute.

    Raises:
        SettingError: unknown name, or a rate that is not a positive number.
    """
    name = resolve(name, device)
    if name == "none":
        return NullTrainer()
    if name == "resnet50":
        return Resnet50Trainer(device, classes, amp)
    return EmulatedTrainer(name, _images_per_s(name.partition(":")[2]))


def resolve(name: str, device: torch.device) -> str:
    """The full name of the trainer `name`; SettingError as `make_trainer`, without making it."""
    if name == "auto":
        name = "resnet50" if device.type == "cuda" else "emulated"
    if name in ("none", "resnet50"):
        return name
    kind, _, argument = name.partition(":")
    if kind == "emulated":
        argument = argument or DEFAULT_PRESET
        _images_per_s(argument)
        return f"emulated:{argument}"
    raise SettingError(f"unknown trainer {name!r}; choose from: {CHOICES}")


def _images_per_s(argument: str) -> float:
    if argument in EMULATED_PRESETS:
        return EMULATED_PRESETS[argument]
    try:
        rate = float(argument)
    except ValueError:
        rate = 0.0
    if not _SLOWEST <= rate < float("inf"):
        raise SettingError(
            f"unknown rate {argument!r} of the emulated trainer; give images/s, as in 'emulated:1786', "
            f"or one of: {', '.join(EMULATED_PRESETS)}"
        )
    return rate
