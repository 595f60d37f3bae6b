"""Trainers that take batches: a model's training step, an emulated accelerator, or one that drops them.

PRESETS are accelerators to emulate, whose rates are published; bench/README.md has the addresses.
"""

import copy
import re
import time
from dataclasses import dataclass
from typing import Protocol

import torch

from bench.machine.hardware import AMP, DTYPES, resolve_amp
from loaders.batch import Batch
from precache.errors import SettingError, check_choice, similar_name


@dataclass(frozen=True, slots=True)
class Preset:
    """Published images/s of an accelerator in training, with model, publisher and software."""

    images_per_s: float
    citation: str


PRESETS = {
    "h100": Preset(7158, "ResNet-50, MLPerf Training v4.0, MXNet"),
    "h200": Preset(7941, "ResNet-50, MLPerf Training v4.0, MXNet"),
    "a100": Preset(2470, "ResNet-50, NVIDIA DeepLearningExamples, PyTorch, AMP"),
    "h100-vit-s": Preset(7716, "ViT-S, NVIDIA-BioNeMo nvSubquadratic, compiled"),
    "mlperf-storage-h100": Preset(400 / 0.224, "ResNet-50, the sleep of MLPerf Storage"),
    "mlperf-storage-a100": Preset(400 / 0.435, "ResNet-50, the sleep of MLPerf Storage"),
}
DEFAULT_PRESET = "h100"
MODELS = ("resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "vit_s_16")
"""Names of `loaders.examples.models.MODELS`, which is imported only where a model is trained."""
# \b keeps click from joining the lines
EPILOG = "\n".join(
    [
        "\b",
        "Emulated accelerators, images/s; x8 behind a name or a rate is 8 of them:",
        *(
            f"  {f'emulated:{name}':29}{preset.images_per_s:6,.0f}  {preset.citation}"
            for name, preset in PRESETS.items()
        ),
        "PyTorch without MXNet's tuning is slower: --trainer-rate takes the images/s of your own training.",
    ]
)
"""End of the help of commands that take a trainer."""
CHOICES = f"auto, none, {', '.join(MODELS)}, emulated:IMAGES_PER_S, or emulated:NAME of {', '.join(PRESETS)}"
"""Names of trainers, for help and messages."""
_MIN_IMAGES_PER_S = 1e-3
_MAX_ACCELERATORS = 1024
_SCHEDULE_STEPS = 100_000  # steps of the training whose first steps are measured


class Trainer(Protocol):
    """Interface of trainers, which take batches one after the other.

    Attributes:
        name: name as on the command line.
        dtype: dtype of the images that it takes.
    """

    name: str
    dtype: torch.dtype

    def step(self, batch: Batch) -> None:
        """Train on `batch`; on CUDA the work may still run when this returns."""


class NullTrainer:
    """Trainer that drops each batch, so that a loader runs as fast as it can."""

    name = "none"
    dtype = torch.uint8

    def step(self, batch: Batch) -> None:
        """Drop `batch`."""


class EmulatedTrainer:
    """Trainer that keeps each batch for `samples / images_per_s` seconds without using the CPU."""

    dtype = torch.uint8

    def __init__(self, name: str, images_per_s: float) -> None:
        self.name = name
        self.images_per_s = images_per_s

    def step(self, batch: Batch) -> None:
        """Wait until the batch is on the device, then for the time of its step."""
        if batch.images.is_cuda:
            torch.cuda.current_stream(batch.images.device).synchronize()
        time.sleep(len(batch.labels) / self.images_per_s)


class ModelTrainer:
    """Trainer of one of MODELS, as `loaders.examples.train` trains it, in the first steps of a long training.

    The first step on CUDA tunes cuDNN, and compiles the model where `compiled` asks for that.
    """

    def __init__(
        self, name: str, device: torch.device, classes: int, amp: str = "auto", *, compiled: bool = False
    ) -> None:
        from loaders.examples.models import build_model, build_optimizer  # torchvision takes a second
        from loaders.examples.train import Learner

        self.name = name
        self.dtype = DTYPES[resolve_amp(amp, device)]
        model = build_model(name, classes, seed=0).to(device).train()
        optimizer, schedule = build_optimizer(name, model, _SCHEDULE_STEPS)
        self.learner = Learner(model, optimizer, schedule, dtype=self.dtype, compiled=compiled)

    def distributed(self) -> "ModelTrainer":
        """Return a trainer of the same model that averages gradients over the ranks of torch.distributed."""
        trainer = copy.copy(self)
        trainer.learner = copy.copy(self.learner)
        trainer.learner.model = torch.nn.parallel.DistributedDataParallel(self.learner.model)
        return trainer

    def step(self, batch: Batch) -> None:
        """Train on `batch`: forward, backward, update."""
        self.learner.step(batch)


def make_trainer(
    name: str, device: torch.device, classes: int, *, amp: str = "auto", compiled: bool = False
) -> Trainer:
    """Return the trainer called `name`, one of CHOICES; `auto` is ResNet-50 where there is a GPU.

    Args:
        classes: number of classes of the data.
        amp: precision of a model, see `resolve_amp`; other trainers do not compute.
        compiled: whether torch.compile compiles a model.

    Raises:
        SettingError: unknown name, or a rate that is not a positive number.
    """
    name = resolve_trainer(name, device)
    if name == "none":
        return NullTrainer()
    if name in MODELS:
        return ModelTrainer(name, device, classes, amp, compiled=compiled)
    return EmulatedTrainer(name, emulated_images_per_s(name.partition(":")[2]))


def resolve_trainer(name: str, device: torch.device) -> str:
    """Return the full name of the trainer `name`; SettingError for the names that `make_trainer` refuses."""
    if name == "auto":
        name = "resnet50" if device.type == "cuda" else "emulated"
    if name in ("none", *MODELS):
        return name
    kind, _, argument = name.partition(":")
    if kind == "emulated":
        argument = argument or DEFAULT_PRESET
        emulated_images_per_s(argument)
        return f"emulated:{argument}"
    hint = similar_name(name, ["auto", "none", *MODELS, "emulated"])
    raise SettingError(f"unknown trainer {name!r}; choose from: {CHOICES}{hint}")


def check_trainer(name: str, size: int, *, amp: str = "auto", compiled: bool = False) -> None:
    """Raise SettingError where the trainer of that full name takes no such pictures or settings."""
    check_choice("amp", amp, AMP)
    if name in MODELS:
        from loaders.examples.models import check_size

        check_size(name, size)
        return
    if amp not in ("auto", "off"):
        setting = f"amp {amp!r}"
    elif compiled:
        setting = "compile"
    else:
        return
    raise SettingError(
        f"{setting} is for trainers that compute, got {name!r}; choose from: {', '.join(MODELS)}"
    )


def emulated_images_per_s(argument: str) -> float:
    """Return the images/s of an emulated accelerator.

    Args:
        argument: a name of PRESETS or a number of images/s; `xN` behind it means N of them.

    Raises:
        SettingError: anything else.
    """
    single, count = argument, 1
    match = re.fullmatch(r"(.+)x(\d+)", argument)
    if match:
        single, count = match[1], int(match[2])
        if not 2 <= count <= _MAX_ACCELERATORS:
            raise SettingError(
                f"emulated:{argument}: several accelerators are x2 to x{_MAX_ACCELERATORS:,}, got x{count}",
                remedy="leave it out for one",
            )
    if single in PRESETS:
        return count * PRESETS[single].images_per_s
    try:
        rate = float(single)
    except ValueError:
        rate = 0.0
    if not _MIN_IMAGES_PER_S <= rate < float("inf"):
        raise SettingError(
            f"unknown rate {argument!r} of the emulated trainer",
            remedy=f"give images/s, as in 'emulated:1786', or one of: {', '.join(PRESETS)}, with x8 behind "
            f"it for 8 of them",
        )
    return count * rate
