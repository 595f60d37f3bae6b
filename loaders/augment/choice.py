"""What `augment` of `loaders.build` stands for: a name, random draws, or a function of the caller's."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from loaders.augment.draw import RandomAugmentation
from precache.errors import SettingError, check_choice
from precache.pictures.sizes import Size, as_size, sides

BatchFunction: TypeAlias = Callable[..., Any]
"""(images uint8 [n, height, width, channels], see `augment` of `loaders.build`, on the
device, ids int64 [n] on the CPU,
epoch) -> images uint8 [n, height, width, channels] on the same device: as many, of the `size` that `build`
was given, or else all of one.

With a parameter called `labels` (as of `Batch`, on the device) it returns images and labels: [n], or soft
ones, float [n, classes], as CutMix and MixUp make them. With one called `view` it is told which it makes."""

NAMES = ("crop", "eval", "train")


def choose(
    augment: str | RandomAugmentation | BatchFunction | None,
) -> RandomAugmentation | BatchFunction | None:
    """What `loaders.build` was asked for; None: the centre, unchanged.

    Raises:
        SettingError: an unknown name.
    """
    if augment is None or isinstance(augment, RandomAugmentation):
        return augment
    if isinstance(augment, str):
        check_choice("augment", augment, NAMES)
        return {"crop": RandomAugmentation(scale=None), "eval": None, "train": RandomAugmentation()}[augment]
    if callable(augment):
        return augment
    raise SettingError(
        f"augment must be a name, a RandomAugmentation, a function or None, got {augment!r}; "
        f"names: {', '.join(NAMES)}"
    )


class CheckedFunction:
    """A function of the caller's, of which what it returns is looked at: not the pixels, nothing waits.

    Args:
        size: that it must return; None: that of the first batch.
    """

    def __init__(self, function: BatchFunction, size: Size | None) -> None:
        self._function = function
        self._size = size
        self._name = getattr(function, "__qualname__", type(function).__name__)
        try:
            parameters = set(inspect.signature(function).parameters)
        except ValueError:  # of a function written in C
            parameters = set()
        self._takes_view = "view" in parameters
        self.takes_labels = "labels" in parameters

    def apply(
        self, images: torch.Tensor, ids: torch.Tensor, epoch: int, labels: torch.Tensor, view: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and labels that the function returns.

        Raises:
            SettingError: they are not what `BatchFunction` says.
        """
        more: dict[str, Any] = {"view": view} if self._takes_view else {}
        if not self.takes_labels:
            return self._checked(self._function(images, ids, epoch, **more), images), labels
        returned = self._function(images, ids, epoch, labels=labels, **more)
        if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
            raise SettingError(
                f"augment function {self._name} takes labels, so it must return images and labels, got "
                f"{type(returned).__name__}"
            )
        mixed = returned[1]
        if not isinstance(mixed, torch.Tensor) or mixed.shape[:1] != labels.shape[:1] or mixed.ndim > 2:
            got = [*mixed.shape] if isinstance(mixed, torch.Tensor) else type(mixed).__name__
            raise SettingError(
                f"augment function {self._name} must return labels [{len(labels)}] or "
                f"[{len(labels)}, classes], got {got}"
            )
        return self._checked(returned[0], images), mixed

    def _checked(self, returned: object, images: torch.Tensor) -> torch.Tensor:
        height, width = ("height", "width") if self._size is None else sides(self._size)
        wanted = (
            f"{_name(images.dtype)} [{len(images)}, {height}, {width}, {images.shape[3]}] on {images.device}"
        )
        if not isinstance(returned, torch.Tensor):
            got, remedy = type(returned).__name__, "return a torch tensor"
        else:
            remedy = _flaw(returned, images, self._size)
            if not remedy:
                self._size = as_size(*returned.shape[1:3])
                return returned
            got = f"{_name(returned.dtype)} {list(returned.shape)} on {returned.device}"
        raise SettingError(f"augment function {self._name} must return {wanted}, got {got}; {remedy}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _flaw(returned: torch.Tensor, images: torch.Tensor, size: Size | None) -> str:
    """What the caller's function has to change; nothing if it is right."""
    shape = [*returned.shape] if returned.ndim == 4 else [0] * 4
    channels = images.shape[3]
    flaws = {
        "this is NCHW: return images.permute(0, 2, 3, 1), NHWC": shape[1] == channels != shape[3],
        "return NHWC, with as many channels as it was given": shape[3] != channels,
        "return as many pictures as it was given, in their order": shape[0] != len(images),
        f"return 0-{torch.iinfo(images.dtype).max:,}; the loader normalises for dtype='float32'": (
            returned.dtype != images.dtype
        ),
        "leave them on the device that they came on": returned.device != images.device,
        "return the size that the loader was built with, or that of the first batch": (
            size is not None and sides(size) != (shape[1], shape[2])
        ),
    }
    return next((remedy for remedy, applies in flaws.items() if applies), "")
