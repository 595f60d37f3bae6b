"""What `loaders.build` is to be told so that it serves what a list of torchvision's transforms does. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from precache.pictures.sizes import Size, as_size

Step: TypeAlias = Mapping[str, Any]
"""A transform, see `bench.watch.describe`."""

BUILD_HAS = (
    "RandomResizedCrop, Resize with CenterCrop, RandomCrop, RandomHorizontalFlip, ColorJitter, ToTensor "
    "and Normalize"
)
_IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
_CROP_RATIO = 0.875  # that `loaders.build` has by default
_SCALE, _RATIO = [0.08, 1.0], [3 / 4, 4 / 3]  # of RandomResizedCrop and `augment="train"`
_PER_PIXEL = (
    *("ColorJitter", "Grayscale", "RandomGrayscale", "RandomHorizontalFlip", "RandomVerticalFlip", "RGB"),
    *("ToImage", "ToTensor", "PILToTensor", "ToDtype", "ConvertImageDtype"),
)
"""Transforms that do the same to a picture of fewer pixels."""


@dataclass(kw_only=True, slots=True)
class Pictures:
    """What is done to a picture, as far as `loaders.build` can do it.

    Attributes:
        missing: transforms that it cannot do, as one reads them.
        resize: of Resize: the shorter side, [side], or both, [height, width].
        crop: RandomResizedCrop, CenterCrop or RandomCrop, and its size, [height, width].
        scale, ratio: of RandomResizedCrop.
        flip: how likely it is mirrored.
        jitter: brightness, contrast, saturation and hue.
        values: "pil", "uint8" or "float": what a picture is made of in the end.
        normalize: mean and standard deviation.
    """

    missing: list[str] = field(default_factory=list)
    resize: list[int] | None = None
    crop: str = ""
    crop_size: list[int] = field(default_factory=list)
    scale: list[float] = field(default_factory=lambda: list(_SCALE))
    ratio: list[float] = field(default_factory=lambda: list(_RATIO))
    flip: float = 0.0
    jitter: dict[str, float] = field(default_factory=dict)
    values: str = "pil"
    normalize: tuple[list[float], list[float]] | None = None

    @property
    def is_random(self) -> bool:
        """Whether a picture is another one in each epoch."""
        return bool(self.crop.startswith("Random") or self.flip or self.jitter)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildSettings:
    """Settings of `loaders.build`, as text, and what is to be converted for them.

    Attributes:
        size: that is served.
        arguments: name -> text of the value.
        crop_ratio: text of that of `Serving`; "" where it is the default.
        raw: whether the tree itself can be served so.
        recipe: how pictures are to be stored to be served so; None: it is not possible.
    """

    size: Size
    arguments: Mapping[str, str]
    crop_ratio: str = ""
    raw: bool = True
    recipe: Mapping[str, Any] | None = None


def read_steps(steps: Sequence[Step]) -> Pictures:
    """Go through transforms in their order."""
    found = Pictures()
    for step in steps:
        if not _take(found, step):
            # one that it has, with arguments that it does not have, is named with them
            is_named_alone = step["known"] and step["name"] not in _TAKES
            found.missing.append(step["name"] if is_named_alone else step["text"])
    return found


def _take(found: Pictures, step: Step) -> bool:
    """Note one transform; False: `loaders.build` cannot do it, or not at this place."""
    take = _TAKES.get(step["name"])
    return step["known"] and take is not None and take(found, step["name"], step["arguments"])


def _take_resize(found: Pictures, _: str, given: Mapping[str, Any]) -> bool:
    size = given["size"] if isinstance(given["size"], list) else [given["size"]]
    if found.resize or found.crop or found.jitter or not _is_smooth(found, given):
        return False
    if given.get("max_size") is not None or not all(isinstance(side, int) for side in size):
        return False
    found.resize = size
    return True


def _take_crop(found: Pictures, name: str, given: Mapping[str, Any]) -> bool:
    size = given["size"] if isinstance(given["size"], list) else [given["size"]]
    if len(size) == 1:
        size = [*size, *size]
    if found.crop or found.jitter or not all(isinstance(side, int) for side in size):
        return False
    if name == "RandomCrop" and (given.get("padding") or given.get("pad_if_needed")):
        return False
    if name == "RandomResizedCrop":
        if not _is_smooth(found, given):
            return False
        found.scale, found.ratio = list(given["scale"]), list(given["ratio"])
    found.crop, found.crop_size = name, size
    return True


def _is_smooth(found: Pictures, given: Mapping[str, Any]) -> bool:
    """Whether it resizes as `loaders.build`: bilinear and antialiased, which Pillow always is."""
    antialiased = found.values == "pil" or given.get("antialias", True) is True
    return given.get("interpolation", "bilinear") == "bilinear" and antialiased


def _take_jitter(found: Pictures, _: str, given: Mapping[str, Any]) -> bool:
    if found.jitter or found.normalize is not None:
        return False
    jitter = {}
    for name, neutral in (("brightness", 1.0), ("contrast", 1.0), ("saturation", 1.0), ("hue", 0.0)):
        bounds = given.get(name)
        if bounds is None:
            continue
        least = 0.0 if neutral else -0.5
        width = bounds[1] - neutral
        if width < 0 or abs(bounds[0] - max(least, neutral - width)) > 1e-6:
            return False  # it is not around what leaves colours alone
        jitter[name] = width
    found.jitter = jitter
    return True


def _take_flip(found: Pictures, _: str, given: Mapping[str, Any]) -> bool:
    if found.flip:
        return False
    found.flip = given["p"]
    return True


def _take_normalize(found: Pictures, _: str, given: Mapping[str, Any]) -> bool:
    if found.values != "float" or found.normalize is not None:
        return False
    found.normalize = list(given["mean"]), list(given["std"])
    return True


def _take_tensor(found: Pictures, name: str, _: Mapping[str, Any]) -> bool:
    if found.values != "pil":
        return False
    found.values = "float" if name == "ToTensor" else "uint8"
    return True


def _take_dtype(found: Pictures, name: str, given: Mapping[str, Any]) -> bool:
    is_scaled = name == "ConvertImageDtype" or given.get("scale") is True
    if given["dtype"] == "float32" and found.values == "uint8" and is_scaled:
        found.values = "float"
        return True
    return (found.values, given["dtype"]) in (("uint8", "uint8"), ("float", "float32"))


_TAKES: dict[str, Callable[[Pictures, str, Mapping[str, Any]], bool]] = {
    "ColorJitter": _take_jitter,
    "Normalize": _take_normalize,
    "RandomHorizontalFlip": _take_flip,
    "Resize": _take_resize,
    **dict.fromkeys(("CenterCrop", "RandomCrop", "RandomResizedCrop"), _take_crop),
    **dict.fromkeys(("PILToTensor", "ToImage", "ToTensor"), _take_tensor),
    **dict.fromkeys(("ConvertImageDtype", "ToDtype"), _take_dtype),
    **dict.fromkeys(("Identity", "RGB", "ToPureTensor"), lambda *_: True),  # which change nothing
}
"""What each transform that `loaders.build` can do says of the pictures."""


def settings_for(pictures: Pictures, shape: Sequence[int], stored: Size) -> BuildSettings | str:
    """Settings that serve these pictures, as a batch of this shape has them; else why there are none.

    Args:
        shape: [batch, channels, height, width].
        stored: to convert to, at least, where pictures are cut out of what is stored.
    """
    if pictures.missing:
        return f"it has no {_listed(pictures.missing)} (it has {BUILD_HAS})"
    if pictures.values == "pil" or len(shape) != 4 or shape[1] != 3:
        return f"it makes batches [n, 3, height, width], and these are {list(shape)}"
    sides = [*shape[2:]]
    arguments = {"size": str(as_size(*sides))}
    if pictures.values == "uint8":
        arguments["dtype"] = '"uint8"'
    elif pictures.normalize != _IMAGENET:
        arguments["normalize"] = _numbers(pictures.normalize)
    part = _shown_part(pictures, sides, shape[0])
    if isinstance(part, str):
        return part
    if pictures.is_random:
        arguments["augment"] = _augment(pictures, part.is_whole)
    recipe = part.recipe
    if recipe is not None and "size" not in recipe:
        least = stored if isinstance(stored, int) else max(stored)
        recipe = {"size": max(least, *(pictures.resize or [1]))}
    return BuildSettings(
        size=as_size(*sides),
        arguments=arguments,
        crop_ratio="" if pictures.is_random else part.crop_ratio,
        raw=part.raw,
        recipe=recipe,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """The part of a picture that is shown.

    Attributes:
        is_whole: whether a random one is not resized.
        recipe: how pictures have to be stored; `{}` in any way, None: they cannot be.
        The others are those of `BuildSettings`.
    """

    crop_ratio: str = ""
    is_whole: bool = False
    raw: bool = True
    recipe: dict[str, Any] | None = field(default_factory=dict)


def _shown_part(pictures: Pictures, sides: list[int], batch: int) -> _Part | str:
    """The part of a picture that `loaders.build` shows as the transforms do; or why it cannot."""
    resize, crop = pictures.resize, pictures.crop
    if crop and pictures.crop_size != sides:
        return f"its pictures are {sides}, not {pictures.crop_size} as {crop} makes them"
    if crop == "CenterCrop":
        return _centre(pictures, sides)
    if not crop:
        return _whole(pictures, batch)
    is_whole = crop == "RandomCrop"
    if resize is not None:  # crops are of what Resize makes, which can be stored
        return _Part(is_whole=is_whole, raw=False, recipe=_stored_as(resize))
    return _Part(is_whole=is_whole, recipe=None if is_whole else {})


def _centre(pictures: Pictures, sides: list[int]) -> _Part | str:
    resize = pictures.resize
    if pictures.is_random:
        return "it mirrors and jitters random crops, and not a CenterCrop"
    if resize is None or resize[0] != resize[-1] or sides[0] != sides[1] or sides[0] > resize[0]:
        return "it has CenterCrop only of a square, after Resize"
    ratio = "" if sides[0] / resize[0] == _CROP_RATIO else f"{sides[0]} / {resize[0]}"
    if len(resize) == 1:
        return _Part(crop_ratio=ratio)
    return _Part(crop_ratio=ratio, raw=False, recipe=_stored_as(resize))


def _whole(pictures: Pictures, batch: int) -> _Part | str:
    resize = pictures.resize
    if batch < 2 and (resize is None or len(resize) == 1):
        return "its pictures may have a size each, as no transform says one"
    if resize is None or (len(resize) == 1 and not pictures.is_random):  # all are alike, or squares
        return _Part(crop_ratio="1.0", is_whole=True)
    return _Part(crop_ratio="1.0", is_whole=True, raw=False, recipe=_stored_as(resize))


def _stored_as(resize: list[int]) -> dict[str, Any]:
    """How pictures are stored that Resize has made."""
    if len(resize) == 2:
        return {"size": as_size(*resize), "fit": "stretch", "resample": "bilinear"}
    return {"size": resize[0], "enlarge": True, "resample": "bilinear"}


def _augment(pictures: Pictures, is_whole: bool) -> str:
    given = {}
    if is_whole:
        given["scale"] = "None"
    elif pictures.scale != _SCALE:
        given["scale"] = str(tuple(pictures.scale))
    if not is_whole and any(abs(a - b) > 1e-9 for a, b in zip(pictures.ratio, _RATIO, strict=True)):
        given["ratio"] = str(tuple(pictures.ratio))
    if pictures.flip != 0.5:
        given["flip"] = str(pictures.flip)
    given |= {name: f"{value:.6g}" for name, value in pictures.jitter.items()}
    if given == {"scale": "None"}:
        return '"crop"'
    if not given:
        return '"train"'
    return "{loaders}.RandomAugmentation(" + ", ".join(f"{name}={text}" for name, text in given.items()) + ")"


def _numbers(normalize: tuple[list[float], list[float]] | None) -> str:
    if normalize is None:
        return "None"
    mean, std = (tuple(part) if len(part) > 1 else part[0] for part in normalize)
    return f"({mean}, {std})"


def keeps_what_is_shown(steps: Sequence[Step]) -> bool:
    """Whether the transforms show the same of a smaller picture: none counts pixels before it is resized."""
    for step in steps:
        if step["name"] in ("Resize", "RandomResizedCrop") and step["known"]:
            return True
        if not step["known"] or step["name"] not in _PER_PIXEL:
            return False
    return False


def resized_to(steps: Sequence[Step]) -> int:
    """The largest side that a Resize among the transforms makes; 0 where there is none."""
    return max((side for step in steps for side in _resizes(step)), default=0)


def _resizes(step: Step) -> Iterator[int]:
    if step["name"] == "Resize" and step["known"]:
        size = step["arguments"]["size"]
        yield from size if isinstance(size, list) else [size]


def _listed(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
