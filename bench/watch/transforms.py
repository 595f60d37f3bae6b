"""Recognition of loaders that `loaders.build` can stand in for: an ImageFolder with plain transforms.

This module looks at live objects in the processes of a script that `bench watch` started, and imports the
standard library alone. It finds arguments of `loaders.build` by name, as they are written in a call:

    RandomResizedCrop(224), RandomHorizontalFlip()      {"size": "224", "augment": "'train'"}
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
from dataclasses import dataclass
from typing import Any

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_SCALE, _RATIO, _FLIP = (0.08, 1.0), (3 / 4, 4 / 3), 0.5  # of `augment="train"`
_CROP_RATIO = 224 / 256  # default of `loaders.Serving`


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
        is_known = type(step).__module__.startswith("torchvision.transforms.")
        add = _PLAIN.get(type(step).__name__) if is_known else None
        if add is None or not add(effect, step):
            text = " ".join(repr(step).split())
            raise NotPlainError(f"no setting of loaders.build does what {text[:99]} does there")
    return effect.arguments()


def _steps(transform: Any) -> Iterator[Any]:
    """Yield transforms in their order, without those that only hold others."""
    is_compose = type(transform).__name__ == "Compose"
    if not is_compose or not type(transform).__module__.startswith("torchvision.transforms."):
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
    """

    values: str = "picture"
    resize: int | None = None
    crop: str = ""
    size: tuple[int, ...] = ()
    scale: tuple[float, ...] = _SCALE
    ratio: tuple[float, ...] = _RATIO
    flip: float | None = None
    normalize: tuple[tuple[float, ...], tuple[float, ...]] | None = None

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
        given = ", ".join(f"{name}={value}" for name, value in settings.items())
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
