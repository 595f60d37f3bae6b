"""Recognition of loaders that `loaders.build` can stand in for: an ImageFolder with plain transforms.

This module looks at live objects in the processes of a script that `bench watch` started, and imports the
standard library alone. It finds arguments of `loaders.build` by name, as they are written in a call:

    RandomResizedCrop(224), RandomHorizontalFlip()      {"size": "224", "augment": "'train'"}
    ColorJitter(0.4), RandomGrayscale(), ...            {"augment": "loaders.RandomAugmentation(...)"}
    Resize(256), CenterCrop(224)                        {"size": "224"}
    ToTensor(), or what v2 has for it                   {}
    Normalize(mean, std)                                {} for ImageNet's, else {"normalize": "(mean, std)"}
    DataLoader(data, 32, shuffle=True, drop_last=True)  {"batch_size": "32", "sampling": ...}

Of anything else it says why there are none.
"""

import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_SCALE, _RATIO, _FLIP = (0.08, 1.0), (3 / 4, 4 / 3), 0.5  # of `augment="train"`
_CROP_RATIO = 224 / 256  # default of `loaders.Serving`
_KINDS = ("", "policy", "jitter", "grey", "blur", "solarize", "erase")
"""Kinds of operations behind the crop, in the order in which `loaders.RandomAugmentation` applies them."""
_MIN_KERNEL = 13  # smallest odd size that holds 3 sigmas on each side, for sigmas of at most 2


class NotPlainError(Exception):
    """`loaders.build` is not known to serve the same; the message is the reason, as a clause."""


def describe_batches(loader: Any) -> dict[str, Any]:
    """Describe the batches of a DataLoader that a script has just made: `arguments`, or else the `reason`."""
    try:
        return {"arguments": _batch_arguments(loader)}
    except NotPlainError as error:
        return {"reason": str(error)}


def describe_build(batches: dict[str, Any], dataset: Any) -> dict[str, Any]:
    """Describe the call of `loaders.build` that serves what a DataLoader serves.

    Args:
        batches: what `describe_batches` returned for the DataLoader.
        dataset: its dataset.

    Returns:
        `arguments` by name, the number of `samples`, and `classes`, their checksum by `classes_checksum`; or
        the `reason` why there is no such call, as a clause.
    """
    if "reason" in batches:
        return batches
    try:
        arguments = batches["arguments"] | _picture_arguments(dataset)
    except NotPlainError as error:
        return {"reason": str(error)}
    if _count_ranks() == 1 and sys.modules["torch"].cuda.is_initialized():
        arguments["device"] = "'cuda'"
    classes = classes_checksum(dataset.classes, (label for _, label in dataset.samples))
    return {"arguments": arguments, "samples": len(dataset.samples), "classes": classes}


def classes_checksum(classes: Sequence[str], labels: Iterable[int]) -> int:
    """Checksum of the names of classes, and how many samples each of them has."""
    counts = Counter(labels)
    return zlib.crc32(json.dumps([[name, counts[label]] for label, name in enumerate(classes)]).encode())


def _batch_arguments(loader: Any) -> dict[str, str]:
    data, folder = sys.modules["torch.utils.data"], sys.modules.get("torchvision.datasets.folder")
    if type(loader) is not data.DataLoader:
        raise NotPlainError(f"the loader is a {type(loader).__name__}")
    sampler, collate, ranks = loader.sampler, loader.collate_fn, _count_ranks()
    if folder is None or type(loader.dataset) is not folder.ImageFolder:
        raise NotPlainError(f"the dataset is a {type(loader.dataset).__name__}, not an ImageFolder itself")
    if collate is not data.default_collate:
        raise NotPlainError(f"the batches are made by {getattr(collate, '__name__', 'a function')}")
    if type(loader.batch_sampler) is not data.BatchSampler or loader.batch_size is None:
        raise NotPlainError("the script makes its batches itself")
    if loader.generator is not None:
        raise NotPlainError("the order is that of the script's generator")
    kind = type(sampler)
    if kind is data.DistributedSampler:
        is_plain = (sampler.shuffle, sampler.drop_last, sampler.seed) == (True, False, 0)
        is_plain = is_plain and sampler.num_replicas == ranks > sampler.rank
    elif ranks > 1:
        raise NotPlainError("each rank reads all samples")
    elif kind is data.RandomSampler:
        is_plain = not sampler.replacement and sampler.generator is None
        is_plain = is_plain and len(sampler) == len(loader.dataset)
    else:
        is_plain = kind is data.SequentialSampler and len(sampler) == len(loader.dataset)
    if not is_plain:
        raise NotPlainError(f"the samples are chosen by a {kind.__name__} of the script")
    arguments = {"batch_size": str(loader.batch_size)}
    if kind is data.SequentialSampler:
        arguments["shuffle"] = "False"
    if loader.drop_last:
        arguments["sampling"] = "loaders.Sampling(last='drop')"
    return arguments


def _count_ranks() -> int:
    distributed = sys.modules["torch"].distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())


def _picture_arguments(dataset: Any) -> dict[str, str]:
    """Arguments with which `loaders.build` serves the pictures of an ImageFolder as its transforms do."""
    folder = sys.modules["torchvision.datasets.folder"]
    if dataset.loader not in (folder.default_loader, folder.pil_loader):
        raise NotPlainError("its ImageFolder has a reader of its own")
    if dataset.extensions is None or dataset.target_transform is not None:
        raise NotPlainError("its ImageFolder has an is_valid_file or a target_transform")
    effect = _Effect()
    for step in _steps(dataset.transform):
        add = _PLAIN.get(type(step).__name__) if _is_of_torchvision(step) else None
        if add is None or not add(effect, step):
            text = " ".join(repr(step).split())
            raise NotPlainError(f"no setting of loaders.build does what {text[:99]} does there")
    return effect.arguments()


def _steps(transform: Any) -> Iterator[Any]:
    """Yield transforms in their order, without those that only hold others."""
    is_compose = type(transform).__name__ == "Compose"
    if not is_compose or not _is_of_torchvision(transform):
        yield transform
        return
    for step in transform.transforms:
        yield from _steps(step)


@dataclass(slots=True)
class _Effect:
    """Effect of transforms on a picture, step by step.

    Attributes:
        values: what a picture is by now: "picture" of Pillow, "uint8" or "float" tensor.
        resize: side that Resize makes the shorter one.
        crop: name of the crop; "" before it.
        size: height and width of the crop.
        scale, ratio: bounds of RandomResizedCrop.
        flip: probability of mirroring; None: it is not mirrored.
        normalize: mean and standard deviation.
        operations: settings of `loaders.RandomAugmentation` for what follows the crop.
        kind: the last of their kinds so far; "" before them.
    """

    values: str = "picture"
    resize: int | None = None
    crop: str = ""
    size: tuple[int, ...] = ()
    scale: tuple[float, ...] = _SCALE
    ratio: tuple[float, ...] = _RATIO
    flip: float | None = None
    normalize: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    operations: dict[str, Any] = field(default_factory=dict)
    kind: str = ""

    def arguments(self) -> dict[str, str]:
        """Arguments of `loaders.build` for all transforms."""
        if self.values != "float" or not self.crop:
            raise NotPlainError("its transforms have no crop, or do not end in a float32 tensor")
        height, width = self.size
        arguments = {"size": str(height if height == width else (height, width))}
        if self.crop == "RandomResizedCrop":
            arguments["augment"] = self._augment()
        elif self.flip is not None:
            raise NotPlainError("its transforms mirror a CenterCrop")
        elif self.resize is not None and height / self.resize != _CROP_RATIO:
            arguments["serving"] = f"loaders.Serving(crop_ratio={height} / {self.resize})"
        if self.normalize is None:
            arguments["normalize"] = "None"
        elif not all(_are_close(*pair) for pair in zip(self.normalize, _IMAGENET, strict=True)):
            mean, std = (part if len(part) > 1 else part[0] for part in self.normalize)
            arguments["normalize"] = f"({mean}, {std})"
        return arguments

    def _augment(self) -> str:
        settings: dict[str, Any] = {}
        if not _are_close(self.scale, _SCALE):
            settings["scale"] = self.scale
        if not _are_close(self.ratio, _RATIO):
            settings["ratio"] = self.ratio
        if self.flip != _FLIP:
            settings["flip"] = self.flip or 0.0
        settings |= self.operations
        given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return f"loaders.RandomAugmentation({given})" if settings else "'train'"


# each of these adds the effect of a transform; False: not with its settings, or not after those before


def _add_resize(effect: _Effect, step: Any) -> bool:
    sides = _numbers(step.size)
    if effect.resize is not None or effect.crop or len(sides) != 1 or step.max_size is not None:
        return False
    effect.resize = int(sides[0])
    return _is_smooth(effect, step)


def _add_center_crop(effect: _Effect, step: Any) -> bool:
    is_first, effect.crop, effect.size = not effect.crop, "CenterCrop", tuple(step.size)
    height, width = effect.size
    return is_first and effect.resize is not None and height == width <= effect.resize


def _add_random_crop(effect: _Effect, step: Any) -> bool:
    is_first = not effect.crop and effect.resize is None
    effect.crop, effect.size = "RandomResizedCrop", tuple(step.size)
    effect.scale, effect.ratio = tuple(step.scale), tuple(step.ratio)
    return is_first and effect.scale[1] <= 1 and _is_smooth(effect, step)


def _is_smooth(effect: _Effect, step: Any) -> bool:
    """Whether a transform resizes as `loaders.build` does: bilinear and antialiased, as Pillow always is."""
    interpolation = getattr(step.interpolation, "value", step.interpolation)
    return interpolation == "bilinear" and (effect.values == "picture" or step.antialias is True)


def _add_flip(effect: _Effect, step: Any) -> bool:
    is_first, effect.flip = effect.flip is None, float(step.p)
    return is_first


def _add_normalize(effect: _Effect, step: Any) -> bool:
    is_first = effect.values == "float" and effect.normalize is None
    effect.normalize = _numbers(step.mean), _numbers(step.std)
    return is_first


def _add_tensor(effect: _Effect, step: Any) -> bool:
    is_picture = effect.values == "picture"
    effect.values = "float" if type(step).__name__ == "ToTensor" else "uint8"
    return is_picture


def _add_dtype(effect: _Effect, step: Any) -> bool:
    is_uint8, effect.values = effect.values == "uint8", "float"
    return is_uint8 and str(step.dtype) == "torch.float32" and getattr(step, "scale", True)


def _add_operation(effect: _Effect, kind: str, settings: dict[str, Any], is_float: bool = False) -> bool:
    """Add settings of an operation; False: it does not follow the crop and the operations before it."""
    is_next = _KINDS.index(kind) > _KINDS.index(effect.kind) and effect.crop == "RandomResizedCrop"
    effect.kind = kind
    effect.operations |= settings
    return is_next and (effect.values == "float") == is_float


def _add_policy(effect: _Effect, step: Any) -> bool:
    interpolation = getattr(step.interpolation, "value", step.interpolation)
    is_default = (step.num_magnitude_bins, step.fill, interpolation) == (31, None, "bilinear")
    return _add_operation(effect, "policy", {"policy": "trivial"}) and is_default


def _add_jitter(effect: _Effect, step: Any, probability: float = 1.0) -> bool:
    settings, is_symmetric = {}, True
    for name in ("brightness", "contrast", "saturation", "hue"):
        if (bounds := getattr(step, name)) is not None:
            low, high = bounds
            value = round(high if name == "hue" else high - 1, 6)  # 1.4 - 1 is not 0.4
            due = -value if name == "hue" else max(0.0, 1 - value)
            is_symmetric = is_symmetric and value >= 0 and abs(low - due) < 1e-6
            settings[name] = value
    if probability != 1:
        settings["jitter"] = probability
    return _add_operation(effect, "jitter", settings) and is_symmetric


def _add_grey(effect: _Effect, step: Any) -> bool:
    return _add_operation(effect, "grey", {"grey": float(step.p)})


def _add_blur(effect: _Effect, step: Any, probability: float = 1.0) -> bool:
    is_default = tuple(step.sigma) == (0.1, 2.0) and min(step.kernel_size) >= _MIN_KERNEL
    return _add_operation(effect, "blur", {"blur": probability}) and is_default


def _add_choice(effect: _Effect, step: Any) -> bool:
    """Add the effect of RandomApply."""
    add = {"ColorJitter": _add_jitter, "GaussianBlur": _add_blur}.get(type(step.transforms[0]).__name__)
    is_known = len(step.transforms) == 1 and _is_of_torchvision(step.transforms[0])
    return is_known and add is not None and add(effect, step.transforms[0], float(step.p))


def _add_solarize(effect: _Effect, step: Any) -> bool:
    return _add_operation(effect, "solarize", {"solarize": float(step.p)}) and step.threshold == 128


def _add_erase(effect: _Effect, step: Any) -> bool:
    # the colour erased is ImageNet's mean
    erases_to_mean = effect.normalize is not None and _numbers(step.value) == (0,)
    erases_to_mean = erases_to_mean and all(map(_are_close, effect.normalize or (), _IMAGENET))
    is_default = _are_close(step.scale, (0.02, 0.33)) and _are_close(step.ratio, (0.3, 3.3))
    return _add_operation(effect, "erase", {"erase": float(step.p)}, is_float=True) and (
        erases_to_mean and is_default
    )


def _is_of_torchvision(step: Any) -> bool:
    return type(step).__module__.startswith("torchvision.transforms.")


_PLAIN: dict[str, Callable[[_Effect, Any], bool]] = {
    "Resize": _add_resize,
    "CenterCrop": _add_center_crop,
    "RandomResizedCrop": _add_random_crop,
    "RandomHorizontalFlip": _add_flip,
    "ToTensor": _add_tensor,
    "PILToTensor": _add_tensor,
    "ToImage": _add_tensor,
    "ConvertImageDtype": _add_dtype,
    "ToDtype": _add_dtype,
    "Normalize": _add_normalize,
    "ToPureTensor": lambda *_: True,
    "TrivialAugmentWide": _add_policy,
    "ColorJitter": _add_jitter,
    "RandomGrayscale": _add_grey,
    "GaussianBlur": _add_blur,
    "RandomSolarize": _add_solarize,
    "RandomErasing": _add_erase,
    "RandomApply": _add_choice,
}
"""Function that adds the effect of a transform of torchvision, by the name of its class."""


def _numbers(value: Any) -> tuple[float, ...]:
    """Numbers of a list, a tuple, a tensor, or a single number."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _are_close(numbers: Sequence[float], others: Sequence[float]) -> bool:
    return len(numbers) == len(others) and all(
        abs(a - b) < 1e-6 for a, b in zip(numbers, others, strict=True)
    )
