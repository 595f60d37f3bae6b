"""Functions of the caller that augment: what they take and return, checked."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from loaders.augment.policies import AUGMENTATIONS, RandomAugmentation
from loaders.settings import AugmentName
from precache.errors import SettingError, check_choice
from precache.pictures.images import Size, as_size, sides

BatchFunction: TypeAlias = Callable[..., Any]
"""Function given as `augment`: (images, ids, epoch) -> images.

`images` are uint8 [n, height, width, channels] on the loader's device, see `augment` of `loaders.build`;
`ids` int64 [n] on the CPU. It works on pixels as they are stored, and returns as many images of the same
dtype and channels on the same device, of the `size` that `build` was given, or else all of one size. They are
normalised afterwards, unless `build` was asked for uint8.

If it has a parameter called `labels`, it gets those of `Batch`, on the device, and returns images and labels:
[n], or soft ones, float [n, classes], as CutMix and MixUp make them. If it has one called `view`, it gets the
number of the view that it makes."""
_TRANSFORM_PACKAGES = ("albumentations", "kornia", "torchvision")


class CheckedFunction:
    """Augment function of the caller, whose return values are checked, without a wait for their pixels.

    Args:
        size: size that the function must return; None: the size of the first batch.

    Attributes:
        takes_labels: whether the function takes and returns labels.

    Raises:
        SettingError: the function does not take a batch, as a transform of one picture.
    """

    def __init__(self, function: BatchFunction, size: Size | None) -> None:
        self._function, self._size = function, size
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._keywords: set[str] = set()
        try:
            signature = inspect.signature(getattr(function, "forward", function))
        except ValueError:  # a function written in C has no signature
            pass
        else:
            self._keywords = {"labels", "view"}.intersection(signature.parameters)
            self._check_signature(signature)
        self.takes_labels = "labels" in self._keywords

    def _check_signature(self, signature: inspect.Signature) -> None:
        """Raise SettingError if the function cannot take a batch, as a transform of one picture."""
        try:
            signature.bind("images", "ids", "epoch", **dict.fromkeys(self._keywords))
            # torchvision's v2 and others take whatever there is, and would take ids for a picture, too
            module = getattr(self._function, "__module__", None) or ""
            if module.partition(".")[0] not in _TRANSFORM_PACKAGES:
                return
        except TypeError:
            pass
        raise SettingError(
            f"augment takes a function (images, ids, epoch) of a whole batch, uint8 [n, height, width, "
            f"channels], that returns as many; {self._name} takes {signature}",
            remedy="give a transform of one picture to loaders.ImageDataset(path, transform=...), and one of "
            "a batch [n, channels, height, width] as augment=lambda images, ids, epoch: "
            "transform(images.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)",
        )

    def apply(
        self, images: torch.Tensor, ids: torch.Tensor, epoch: int, labels: torch.Tensor, view: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the function, and return the images and labels that it made.

        Raises:
            SettingError: they are not as `BatchFunction` says.
        """
        keywords: dict[str, Any] = {}
        if "labels" in self._keywords:
            keywords["labels"] = labels
        if "view" in self._keywords:
            keywords["view"] = view
        returned = self._function(images, ids, epoch, **keywords)
        if not self.takes_labels:
            return self._check_images(returned, images), labels
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
        return self._check_images(returned[0], images), mixed

    def _check_images(self, returned: object, images: torch.Tensor) -> torch.Tensor:
        """Return `returned` if it is as `BatchFunction` says for `images`, else raise SettingError."""
        size = None if self._size is None else sides(self._size)
        remedy = _image_fault(returned, images, size)
        if isinstance(returned, torch.Tensor) and not remedy:
            self._size = as_size(returned.shape[1], returned.shape[2])
            return returned
        got = type(returned).__name__
        if isinstance(returned, torch.Tensor):
            name = str(returned.dtype).removeprefix("torch.")
            got = f"{name} {[*returned.shape]} on {returned.device}"
        height, width = size or ("height", "width")
        raise SettingError(
            f"augment function {self._name} must return uint8 "
            f"[{len(images)}, {height}, {width}, {images.shape[3]}] on {images.device}, got {got}",
            remedy=remedy,
        )


def _image_fault(returned: object, images: torch.Tensor, size: tuple[int, int] | None) -> str:
    """Return what an augment function should do instead of `returned` for `images`; empty if it is right.

    Args:
        size: height and width to return; None: any.
    """
    if not isinstance(returned, torch.Tensor):
        return "return a torch tensor"
    channels = images.shape[3]
    shape = [*returned.shape] if returned.ndim == 4 else [0] * 4
    fault = ""
    if shape[1] == channels and shape[3] != channels:
        fault = "this is NCHW: return images.permute(0, 2, 3, 1), NHWC"
    elif shape[3] != channels:
        fault = "return NHWC, with as many channels as it was given"
    elif shape[0] != len(images):
        fault = "return as many pictures as it was given, in their order"
    elif returned.dtype != images.dtype:
        fault = "return uint8, 0-255, as it was given"
    elif returned.device != images.device:
        fault = "leave them on the device that they came on"
    elif size is not None and size != (shape[1], shape[2]):
        fault = "return the size that the loader was built with, or that of the first batch"
    return fault


Augment: TypeAlias = AugmentName | RandomAugmentation | BatchFunction | None
"""Type of `augment` of `loaders.build`."""


def find_augmentation(augment: Augment) -> RandomAugmentation | BatchFunction | None:
    """Return the settings or the function that `augment` names or is; None: the middle of each picture.

    Raises:
        SettingError: it is an unknown name, or something else.
    """
    if augment is None or isinstance(augment, RandomAugmentation):
        return augment
    if isinstance(augment, str):
        check_choice("augment", augment, AUGMENTATIONS)
        return AUGMENTATIONS[augment]
    if callable(augment):
        return augment
    raise SettingError(
        f"augment must be a name, a RandomAugmentation, a function or None, got {augment!r}; "
        f"names: {', '.join(AUGMENTATIONS)}"
    )
