"""What consumes batches: a model's training step, an emulated accelerator, or nothing.

PRESETS are accelerators whose rate is published, to be emulated; bench/README.md has the addresses.
"""

import copy
import re
import time
from dataclasses import dataclass
from typing import Protocol

import torch

from bench.machine.hardware import AMP, DTYPES, resolve_amp
from loaders.batch import Batch
from loaders.examples.models import MODELS, build_model, build_optimizer, check_size
from loaders.examples.train import Learner
from precache.errors import SettingError, check_choice, similar_name


@dataclass(frozen=True, slots=True)
class Preset:
    """How many images/s an accelerator trains on, and who says so, with which software."""

    images_per_s: float
    source: str


PRESETS = {
    "h100": Preset(7158, "ResNet-50, MLPerf Training v4.0, MXNet"),
    "h200": Preset(7941, "ResNet-50, MLPerf Training v4.0, MXNet"),
    "a100": Preset(2470, "ResNet-50, NVIDIA DeepLearningExamples, PyTorch, AMP"),
    "h100-vit-s": Preset(7716, "ViT-S, NVIDIA-BioNeMo nvSubquadratic, compiled"),
    "mlperf-storage-h100": Preset(400 / 0.224, "ResNet-50, the sleep of MLPerf Storage"),
    "mlperf-storage-a100": Preset(400 / 0.435, "ResNet-50, the sleep of MLPerf Storage"),
}
DEFAULT_PRESET = "h100"
# \b keeps click from filling the lines
EPILOG = "\n".join(
    [
        "\b",
        "Emulated accelerators, images/s; x8 behind a name or a rate is 8 of them:",
        *(
            f"  {f'emulated:{name}':29}{preset.images_per_s:6,.0f}  {preset.source}"
            for name, preset in PRESETS.items()
        ),
        "PyTorch without MXNet's tuning is slower: --trainer-rate takes the images/s of your own training.",
    ]
)
"""For the help of commands that take a trainer."""

_SLOWEST = 1e-3  # images/s
_MOST_ACCELERATORS = 1024
_STEPS = 100_000  # of a training whose first steps are measured


CHOICES = f"auto, none, {', '.join(MODELS)}, emulated:IMAGES_PER_S, or emulated:NAME of {', '.join(PRESETS)}"


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


class ModelTrainer:
    """Learns as `loaders.examples.train` does, with one of MODELS, at the rates of a long training's begin.

    The first step on CUDA tunes cuDNN, and a compiled model is compiled in it.
    """

    def __init__(
        self, name: str, device: torch.device, classes: int, amp: str = "auto", *, compiled: bool = False
    ) -> None:
        self.name = name
        self.dtype = DTYPES[resolve_amp(amp, device)]
        model = build_model(name, classes, seed=0).to(device).train()
        optimizer, schedule = build_optimizer(name, model, _STEPS)
        self.learner = Learner(model, optimizer, schedule, dtype=self.dtype, compiled=compiled)

    def distributed(self) -> "ModelTrainer":
        """The same model, trained with gradients that are averaged over the ranks of torch.distributed."""
        trainer = copy.copy(self)
        trainer.learner = copy.copy(self.learner)
        trainer.learner.model = torch.nn.parallel.DistributedDataParallel(self.learner.model)
        return trainer

    def step(self, batch: Batch) -> None:
        """Forward, backward, update."""
        self.learner.step(batch)


def make_trainer(
    name: str, device: torch.device, classes: int, *, amp: str = "auto", compiled: bool = False
) -> Trainer:
    """The trainer called `name`, one of CHOICES; `auto` is ResNet-50 where there is a GPU.

    Args:
        classes: of the data.
        amp: of MODELS, see `resolve_amp`; the others do not compute.
        compiled: whether torch.compile compiles the model.

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
    """The full name of the trainer `name`; SettingError as `make_trainer`, without making it."""
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
    if name not in MODELS:
        asked = {f"amp {amp!r}": amp not in ("auto", "off"), "compile": compiled}
        for setting, wanted in asked.items():
            if wanted:
                raise SettingError(
                    f"{setting} is for trainers that compute, got {name!r}; choose from: {', '.join(MODELS)}"
                )
    else:
        check_size(name, size)


def emulated_images_per_s(argument: str) -> float:
    """Of a preset or a number, as many times as `xN` behind it says; SettingError for anything else."""
    several = re.fullmatch(r"(.+)x(\d+)", argument)
    one, count = (several[1], int(several[2])) if several else (argument, 1)
    if several and not 2 <= count <= _MOST_ACCELERATORS:
        raise SettingError(
            f"emulated:{argument}: several accelerators are x2 to x{_MOST_ACCELERATORS:,}, got x{count}; "
            f"leave it out for one"
        )
    if one in PRESETS:
        return count * PRESETS[one].images_per_s
    try:
        rate = float(one)
    except ValueError:
        rate = 0.0
    if not _SLOWEST <= rate < float("inf"):
        raise SettingError(
            f"unknown rate {argument!r} of the emulated trainer; give images/s, as in 'emulated:1786', "
            f"or one of: {', '.join(PRESETS)}, with x8 behind it for 8 of them"
        )
    return count * rate
