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
    "mlperf-storage-v2-h100": Preset(400 / 0.224, "ResNet-50, the sleep of MLPerf Storage v1 and v2"),
    "mlperf-storage-v2-a100": Preset(400 / 0.435, "ResNet-50, the sleep of MLPerf Storage v1 and v2"),
}
DEFAULT_PRESET = "h100"
EAGER_LAUNCHES = 1000
"""Operations of an eager training step of ResNet-50; `python -m bench.lab.launching --count` counts them."""
MODELS = ("resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "vit_s_16")
"""Names of `loaders.examples.models.MODELS`, which is imported only where a model is trained."""
# \b keeps click from joining the lines
EPILOG = "\n".join(
    [
        "\b",
        "Emulated accelerators, images/s; x8 behind a name or a rate is 8 of them:",
        *(
            f"  {f'emulated:{name}':32}{preset.images_per_s:6,.0f}  {preset.citation}"
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
    """Trainer whose device takes `samples / images_per_s` seconds for a batch, beginning when it has it.

    A step launches operations from Python, as an eager model does, and then sleeps until the device is done:
    it takes as long as the longer of the two. Waking up takes some time, which the next step makes up for,
    so that steps take as long as the device on average. A batch that came later than that is late: its step
    is not shortened, since a device cannot work on what it does not have.

    Args:
        launches: small torch operations of each step; they need the interpreter's lock.

    Attributes:
        launch_s: seconds that launching took in each step so far.
    """

    dtype = torch.uint8

    def __init__(self, name: str, images_per_s: float, device: torch.device, launches: int = 0) -> None:
        self.name = name
        self.images_per_s = images_per_s
        self.launches = launches
        self.launch_s: list[float] = []
        self._operand = torch.zeros(1, device=device)
        self._done_s = self._awake_s = 0.0  # when the device was done, and when this thread knew it

    def step(self, batch: Batch) -> None:
        """Wait until the batch is on the device, launch, then wait for the time of its step."""
        device = batch.labels.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        start_s = time.perf_counter()
        for _ in range(self.launches):
            self._operand.add_(1)
        now_s = time.perf_counter()
        self.launch_s.append(now_s - start_s)
        overslept_s = self._awake_s - self._done_s
        is_late = start_s - self._awake_s > overslept_s
        device_start_s = start_s if is_late else start_s - overslept_s
        self._done_s = max(now_s, device_start_s + len(batch.labels) / self.images_per_s)
        if self._done_s > now_s:  # to sleep for 0 s gives the CPU away, too
            time.sleep(self._done_s - now_s)
        self._awake_s = time.perf_counter()


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
        """Train on the first view of `batch`: forward, backward, update."""
        self.learner.step((batch.views[0], batch.labels))


def make_trainer(
    name: str,
    device: torch.device,
    classes: int,
    *,
    amp: str = "auto",
    compiled: bool = False,
    launches: int = 0,
) -> Trainer:
    """Return the trainer called `name`, one of CHOICES; `auto` is ResNet-50 where there is a GPU.

    Args:
        classes: number of classes of the data.
        amp: precision of a model, see `resolve_amp`; other trainers do not compute.
        compiled: whether torch.compile compiles a model.
        launches: operations that each step of an emulated trainer launches from Python.

    Raises:
        SettingError: unknown name, or a rate that is not a positive number.
    """
    name = resolve_trainer(name, device)
    if name == "none":
        return NullTrainer()
    if name in MODELS:
        return ModelTrainer(name, device, classes, amp, compiled=compiled)
    return EmulatedTrainer(name, emulated_images_per_s(name.partition(":")[2]), device, launches)


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


def choose_launches(launches: int | None, name: str) -> int:
    """Return the operations that each step of the trainer of that full name launches from Python.

    Args:
        launches: number that was asked for; None: that of an eager ResNet-50 for a rate, which is that of a
            training of yours, and none for a name of PRESETS, whose rate says what the accelerator can do.

    Raises:
        SettingError: a number was asked for, and the trainer is none that is emulated.
    """
    kind, _, argument = name.partition(":")
    if launches is None:
        is_rate = kind == "emulated" and re.sub(r"x\d+$", "", argument) not in PRESETS
        return EAGER_LAUNCHES if is_rate else 0
    if launches and kind != "emulated":
        raise SettingError(
            f"launches {launches} is for emulated trainers, got {name!r}", remedy="leave it out"
        )
    return launches


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
