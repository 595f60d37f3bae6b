"""Models that the examples and `bench` train, each with its optimizer, learning rate and loss.

The recipe follows torchvision's references/classification and Goyal et al., "Accurate, Large Minibatch SGD"
(2017): label smoothing, linear warm-up and cosine decay of the learning rate, no weight decay on norms and
biases.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchvision.models import VisionTransformer, get_model
from torchvision.models.resnet import BasicBlock, ResNet

from precache.errors import SettingError

WARM_UP = 0.1
"""Share of the steps during which the learning rate rises."""


def resnet10(classes: int) -> Any:
    """Make a ResNet-10 for CPUs and small pictures: one block a stage, half of ResNet-18's width, 3x3 stem.

    It has 1.2 million weights, and needs 17 million multiply-adds for a picture of 64x64.
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
    for module in net.modules():  # the initialisation of torchvision's ResNet
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net


def resnet(layers: int, classes: int) -> Any:
    """Make torchvision's ResNet of so many layers."""
    return get_model(f"resnet{layers}", num_classes=classes)


def vit_s_16(classes: int) -> Any:
    """Make the ViT-S/16 of Touvron et al., "Training data-efficient image transformers" (2021), table 1."""
    return VisionTransformer(
        image_size=224,
        patch_size=16,
        num_layers=12,
        num_heads=6,
        hidden_dim=384,
        mlp_dim=1536,
        num_classes=classes,
    )


def sgd(net: nn.Module, lr: float) -> Optimizer:
    """Make SGD with Nesterov momentum."""
    return SGD(_parameter_groups(net, 5e-4), lr, momentum=0.9, nesterov=True)


def adamw(net: nn.Module, lr: float) -> Optimizer:
    """Make AdamW, the usual optimizer of transformers."""
    return AdamW(_parameter_groups(net, 0.05), lr)


def _parameter_groups(net: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Group the parameters: weights of matrices and convolutions decay, those of norms and biases do not."""
    weights = [weight for weight in net.parameters() if weight.ndim > 1]
    others = [weight for weight in net.parameters() if weight.ndim < 2]
    return [{"params": weights, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model that can be trained, and how.

    Attributes:
        make: makes the model for a number of classes; torch's global generator draws its weights.
        optimizer: makes the optimizer of a model, given the learning rate.
        lr: highest learning rate, for batches of 64.
        size: the only side of pictures that it takes, in pixels; None: it takes any.
    """

    make: Callable[[int], nn.Module]
    optimizer: Callable[[nn.Module, float], Optimizer] = sgd
    lr: float = 0.05
    size: int | None = None


MODELS = {
    "resnet10": Model(make=resnet10, lr=0.2),
    "resnet18": Model(make=partial(resnet, 18)),
    "resnet34": Model(make=partial(resnet, 34)),
    "resnet50": Model(make=partial(resnet, 50)),
    "resnet101": Model(make=partial(resnet, 101)),
    "vit_s_16": Model(make=vit_s_16, optimizer=adamw, lr=1e-3, size=224),
}


def check_size(name: str, size: object) -> None:
    """Raise SettingError if the model called `name` does not take pictures with sides of `size` pixels."""
    required = MODELS[name].size
    if required is not None and size != required:
        raise SettingError(
            f"{name} takes pictures of {required} pixels a side, got size {size}",
            remedy=f"use size {required}, or another model",
        )


def build_model(name: str, classes: int, seed: int) -> nn.Module:
    """Make the model called `name`, in channels-last memory; its first weights depend on `seed`."""
    torch.manual_seed(seed)
    net = MODELS[name].make(classes)
    return net.to(memory_format=torch.channels_last)


def build_optimizer(
    name: str, net: nn.Module, steps: int, lr: float | None = None
) -> tuple[Optimizer, LambdaLR]:
    """Make the optimizer of the model called `name`, and its schedule over all `steps` of the training.

    Args:
        lr: the highest learning rate; by default the model's.
    """
    lr = MODELS[name].lr if lr is None else lr
    if not 0 < lr < math.inf:
        raise SettingError(f"lr must be positive, got {lr}")
    optimizer = MODELS[name].optimizer(net, lr)
    return optimizer, LambdaLR(optimizer, lambda step: learning_rate_factor(step / steps))


def learning_rate_factor(progress: float) -> float:
    """Share of the highest learning rate after a share of the steps: linear warm-up, then a cosine to 0."""
    if progress < WARM_UP:
        return (progress + 1e-3) / (WARM_UP + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))


def smoothed_cross_entropy(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the cross-entropy with label smoothing, a scalar; `scores`: float [n, classes]."""
    return cross_entropy(scores, labels, label_smoothing=0.1)
