"""The training that `bench accuracy` does, all of it: models, optimizer, schedule, step, validation.

Everything that decides how good the model gets stands in this file or is an argument; where the pictures
come from is all that differs between two trainings that are compared. SGD with Nesterov momentum and no
weight decay on norms and biases, label smoothing, a linear warm-up and a cosine to 0: the recipe of
torchvision's references/classification and of Goyal et al., "Accurate, Large Minibatch SGD" (2017). No EMA.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import PIL
import torch
import torchvision
from torch import nn
from torchvision import transforms
from torchvision.datasets.folder import pil_loader
from torchvision.models import resnet18, resnet50
from torchvision.models.resnet import BasicBlock, ResNet

from bench.machine.hardware import DTYPES
from bench.measure.imagefolder import shape
from loaders.batch import Batch
from loaders.transfer import normalise
from precache.errors import DatasetError, SettingError, check_choice, check_range
from precache.storage import atomic_write

MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4
LABEL_SMOOTHING = 0.1
WARM_UP = 0.1
"""Share of the steps."""
_EVALUATED = 250  # pictures at a time
Pixels = npt.NDArray[np.uint8]


def _resnet10(classes: int) -> Any:
    """For CPUs and small pictures: one basic block a stage, half of ResNet-18's width, stem 3x3 and max-pool.

    1.2 million weights, 17 million multiply-adds for a picture of 64x64.
    """
    net = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=classes)
    width = net.conv1.out_channels // 2
    net.inplanes = width
    net.conv1 = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
    net.bn1 = nn.BatchNorm2d(width)
    for number in range(4):
        layer = net._make_layer(BasicBlock, width << number, 1, stride=1 if number == 0 else 2)
        setattr(net, f"layer{number + 1}", layer)
    net.fc = nn.Linear(width << 3, classes)
    for module in net.modules():  # as ResNet does with those that it made
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net


MODELS: dict[str, Callable[[int], Any]] = {
    "resnet10": _resnet10,
    "resnet18": lambda classes: resnet18(num_classes=classes),
    "resnet50": lambda classes: resnet50(num_classes=classes),
}
"""Name -> what makes one of so many classes, weights drawn from torch's generator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What one training does, but for its seed and where its pictures come from.

    Attributes:
        model: of MODELS.
        size: side of the pictures, pixels.
        epochs: each of all full batches.
        batch_size: samples per step.
        lr: the highest learning rate.
        amp: precision that the model computes in: "bf16", "fp16", or "off" for float32.
        workers: of each loader.
    """

    model: str
    size: int
    epochs: int
    batch_size: int
    lr: float
    amp: str
    device: torch.device
    workers: int

    def __post_init__(self) -> None:
        check_choice("model", self.model, MODELS)
        check_choice("amp", self.amp, DTYPES)
        for name in ("size", "epochs", "batch_size"):
            check_range(name, getattr(self, name), 1)
        if not 0 < self.lr < math.inf:
            raise SettingError(f"lr must be positive, got {self.lr}")

    @property
    def conditions(self) -> dict[str, Any]:
        """JSON: what must be the same for two trainings to be compared."""
        return {**asdict(self), "device": str(self.device), "threads": torch.get_num_threads()}


class Training:
    """One model while it is trained.

    Args:
        classes: of the pictures.
        steps: of the whole training.
        seed: of the weights: the same for every source of pictures.
    """

    def __init__(self, recipe: Recipe, classes: int, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        model = MODELS[recipe.model](classes).to(recipe.device)
        self.model: nn.Module = model.to(memory_format=torch.channels_last)
        weights = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": weights, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.SGD(groups, lr=recipe.lr, momentum=MOMENTUM, nesterov=True)
        self.loss = nn.CrossEntropyLoss(label_smoothing=LABEL_SMOOTHING)
        self.device, self.steps, self.step, self.lr = recipe.device, steps, 0, recipe.lr
        self.dtype = DTYPES[recipe.amp]
        # float16 gradients underflow without scaling; bfloat16 and float32 have range enough
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)

    def train(self, batches: Iterable[Batch]) -> None:
        """One step a batch: images float32 [n, 3, side, side], normalised, labels int64 [n], anywhere."""
        self.model.train()
        for batch in batches:
            images, labels = batch.to(self.device, non_blocking=True)
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * schedule(self.step / self.steps)
            with self._autocast():
                loss = self.loss(self.model(images), labels)
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.step += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # or the clock would stop before the work does

    def top1(self, images: Pixels, labels: npt.NDArray[np.int64]) -> float:
        """Per cent of `images`, [n, side, side, 3], that the model puts first into their class."""
        self.model.eval()
        right = 0
        with torch.inference_mode(), self._autocast():
            for start in range(0, len(images), _EVALUATED):
                pixels = torch.from_numpy(np.array(images[start : start + _EVALUATED])).to(self.device)
                scores = self.model(normalise(pixels.permute(0, 3, 1, 2), torch.float32))
                wanted = torch.from_numpy(labels[start : start + _EVALUATED]).to(self.device)
                right += int((scores.argmax(1) == wanted).sum())
        return 100 * right / len(labels)

    def state(self) -> dict[str, Any]:
        """All that the rest of the training depends on."""
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        return {"step": self.step, **{name: part.state_dict() for name, part in parts.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


def schedule(done: float) -> float:
    """Share of the highest learning rate after that share of the steps: up linearly, then a cosine to 0."""
    if done < WARM_UP:
        return (done + 1e-3) / (WARM_UP + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


def validation_pictures(files: Sequence[str], size: int, folder: Path, workers: int) -> Pixels:
    """uint8 [n, size, size, 3], RGB: what every model is tried on, by torchvision's own recipe and Pillow.

    They are decoded once, and kept in a file of `folder` that is named after what made them.

    Raises:
        DatasetError: a picture cannot be decoded.
    """
    stats = [(file, (stat := os.stat(file)).st_size, stat.st_mtime_ns) for file in files]
    made_by = json.dumps([size, PIL.__version__, torchvision.__version__, stats])
    path = folder / f"validation-{hashlib.sha256(made_by.encode()).hexdigest()[:16]}.npy"
    if not path.exists():
        recipe = transforms.Compose(shape("eval", size))

        def decode(file: str) -> Pixels:
            try:
                return np.asarray(recipe(pil_loader(file)))
            except (OSError, SyntaxError, ValueError) as error:
                raise DatasetError(f"{file}: {error}") from error

        with ThreadPoolExecutor(max(1, workers)) as pool, atomic_write(path) as kept:
            pixels = np.empty((len(files), size, size, 3), np.uint8)
            for number, picture in enumerate(pool.map(decode, files)):
                pixels[number] = picture
            np.save(kept, pixels)
    return cast(Pixels, np.load(path, mmap_mode="r"))
