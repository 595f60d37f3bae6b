"""Translation of a list of torchvision's transforms into settings of `loaders.build`. Pure.

`read_steps` collects what the transforms do to a picture, and `settings_for` finds the settings that serve
the same pictures, or raises `UnservableError`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from precache.pictures.sizes import Size, as_size

Step: TypeAlias = Mapping[str, Any]
"""Record of a transform, see `bench.watch.describe`."""

BUILD_HAS = (
    "RandomResizedCrop, Resize with CenterCrop, RandomCrop, RandomHorizontalFlip, ColorJitter, ToTensor "
    "and Normalize"
)
"""Transforms that `loaders.build` can do, for sentences."""
_IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
_CROP_RATIO = 0.875  # default of `loaders.build`
_SCALE, _RATIO = [0.08, 1.0], [3 / 4, 4 / 3]  # defaults of RandomResizedCrop and `augment="train"`
_PER_PIXEL = (
    *("ColorJitter", "Grayscale", "RandomGrayscale", "RandomHorizontalFlip", "RandomVerticalFlip", "RGB"),
    *("ToImage", "ToTensor", "PILToTensor", "ToDtype", "ConvertImageDtype"),
)
"""Transforms that do the same to a picture with fewer pixels."""


class UnservableError(Exception):
    """`loaders` cannot serve the same pictures; the message is the reason, as a clause."""


@dataclass(kw_only=True, slots=True)
class Pictures:
    """Effect of transforms on a picture, as far as `loaders.build` can do the same.

    Attributes:
        missing: texts of the transforms that it cannot do.
        resize: size of Resize: the shorter side, [side], or both sides, [height, width].
        crop: name of the crop: RandomResizedCrop, CenterCrop or RandomCrop.
        crop_size: size of the crop, [height, width].
        scale, ratio: bounds of RandomResizedCrop.
        flip: probability of mirroring.
        jitter: strengths by name: brightness, contrast, saturation and hue.
        values: type of the result: "pil", "uint8" or "float".
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
        """Whether a picture looks different in each epoch."""
        return bool(self.crop.startswith("Random") or self.flip or self.jitter)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildSettings:
    """Settings of `loaders.build` that serve the same pictures as transforms.

    Attributes:
        size: size that is served.
        arguments: text of the value of each argument, by name; '{loaders}' in it stands for the module.
        crop_ratio: text of the value of `Serving.crop_ratio`; "" where it is the default.
        raw: whether the tree can be served with these settings.
        recipe: fields of the recipe to convert with, to serve shards with these settings; None: none does.
    """

    size: Size
    arguments: Mapping[str, str]
    crop_ratio: str = ""
    raw: bool = True
    recipe: Mapping[str, Any] | None = None


def read_steps(steps: Sequence[Step]) -> Pictures:
    """Collect the effect of transforms in their order."""
    pictures = Pictures()
    for step in steps:
        if not _take(pictures, step):
            # the arguments matter for a transform that `loaders.build` has, but not with all arguments
            is_unknown = step["known"] and step["name"] not in _TAKES
            pictures.missing.append(step["name"] if is_unknown else step["text"])
    return pictures


def _take(pictures: Pictures, step: Step) -> bool:
    """Add the effect of a transform; False: `loaders.build` cannot do it, or not after the ones before."""
    take = _TAKES.get(step["name"])
    return step["known"] and take is not None and take(pictures, step["name"], step["arguments"])


def _take_resize(pictures: Pictures, _: str, arguments: Mapping[str, Any]) -> bool:
    size = arguments["size"] if isinstance(arguments["size"], list) else [arguments["size"]]
    if pictures.resize or pictures.crop or pictures.jitter or not _is_smooth(pictures, arguments):
        return False
    if arguments.get("max_size") is not None or not all(isinstance(side, int) for side in size):
        return False
    pictures.resize = size
    return True


def _take_crop(pictures: Pictures, name: str, arguments: Mapping[str, Any]) -> bool:
    size = arguments["size"] if isinstance(arguments["size"], list) else [arguments["size"]]
    if len(size) == 1:
        size = [*size, *size]
    if pictures.crop or pictures.jitter or not all(isinstance(side, int) for side in size):
        return False
    if name == "RandomCrop" and (arguments.get("padding") or arguments.get("pad_if_needed")):
        return False
    if name == "RandomResizedCrop":
        if not _is_smooth(pictures, arguments):
            return False
        pictures.scale, pictures.ratio = list(arguments["scale"]), list(arguments["ratio"])
    pictures.crop, pictures.crop_size = name, size
    return True


def _is_smooth(pictures: Pictures, arguments: Mapping[str, Any]) -> bool:
    """Whether a transform resizes as `loaders.build` does: bilinear and antialiased, as Pillow always is."""
    antialiased = pictures.values == "pil" or arguments.get("antialias", True) is True
    return arguments.get("interpolation", "bilinear") == "bilinear" and antialiased


def _take_jitter(pictures: Pictures, _: str, arguments: Mapping[str, Any]) -> bool:
    if pictures.jitter or pictures.normalize is not None:
        return False
    jitter = {}
    for name, neutral in (("brightness", 1.0), ("contrast", 1.0), ("saturation", 1.0), ("hue", 0.0)):
        bounds = arguments.get(name)
        if bounds is None:
            continue
        least = 0.0 if neutral else -0.5
        width = bounds[1] - neutral
        if width < 0 or abs(bounds[0] - max(least, neutral - width)) > 1e-6:
            return False  # the range is not centred on the value that leaves colours unchanged
        jitter[name] = width
    pictures.jitter = jitter
    return True


def _take_flip(pictures: Pictures, _: str, arguments: Mapping[str, Any]) -> bool:
    if pictures.flip:
        return False
    pictures.flip = arguments["p"]
    return True


def _take_normalize(pictures: Pictures, _: str, arguments: Mapping[str, Any]) -> bool:
    if pictures.values != "float" or pictures.normalize is not None:
        return False
    pictures.normalize = list(arguments["mean"]), list(arguments["std"])
    return True


def _take_tensor(pictures: Pictures, name: str, _: Mapping[str, Any]) -> bool:
    if pictures.values != "pil":
        return False
    pictures.values = "float" if name == "ToTensor" else "uint8"
    return True


def _take_dtype(pictures: Pictures, name: str, arguments: Mapping[str, Any]) -> bool:
    is_scaled = name == "ConvertImageDtype" or arguments.get("scale") is True
    if arguments["dtype"] == "float32" and pictures.values == "uint8" and is_scaled:
        pictures.values = "float"
        return True
    return (pictures.values, arguments["dtype"]) in (("uint8", "uint8"), ("float", "float32"))


_TAKES: dict[str, Callable[[Pictures, str, Mapping[str, Any]], bool]] = {
    "ColorJitter": _take_jitter,
    "Normalize": _take_normalize,
    "RandomHorizontalFlip": _take_flip,
    "Resize": _take_resize,
    **dict.fromkeys(("CenterCrop", "RandomCrop", "RandomResizedCrop"), _take_crop),
    **dict.fromkeys(("PILToTensor", "ToImage", "ToTensor"), _take_tensor),
    **dict.fromkeys(("ConvertImageDtype", "ToDtype"), _take_dtype),
    **dict.fromkeys(("Identity", "RGB", "ToPureTensor"), lambda *_: True),  # these change nothing
}
"""Function that adds the effect of a transform, by the transform's name."""


def settings_for(pictures: Pictures, shape: Sequence[int], stored: Size) -> BuildSettings:
    """Find the settings of `loaders.build` that serve the same pictures as transforms.

    Args:
        pictures: effect of the transforms.
        shape: shape of a batch, [batch, channels, height, width].
        stored: least size to convert to, where random crops are cut out of the stored pictures.

    Raises:
        UnservableError: there are none.
    """
    if pictures.missing:
        raise UnservableError(f"it has no {_join_names(pictures.missing)} (it has {BUILD_HAS})")
    if pictures.values == "pil" or len(shape) != 4 or shape[1] != 3:
        raise UnservableError(f"it makes batches [n, 3, height, width], and these are {list(shape)}")
    sides = list(shape[2:])
    arguments = {"size": str(as_size(*sides))}
    if pictures.values == "uint8":
        arguments["dtype"] = '"uint8"'
    elif pictures.normalize != _IMAGENET:
        arguments["normalize"] = _normalize_text(pictures.normalize)
    part = _find_part(pictures, sides, shape[0])
    if pictures.is_random:
        arguments["augment"] = _augment_text(pictures, part.is_whole)
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
    """Part of a picture that is shown, and what it takes to show that part.

    Attributes:
        crop_ratio, raw: see `BuildSettings`.
        is_whole: whether a crop keeps the scale of the picture.
        recipe: fields of the recipe that pictures have to be stored with; `{}`: any will do; None: none does.
    """

    crop_ratio: str = ""
    is_whole: bool = False
    raw: bool = True
    recipe: dict[str, Any] | None = field(default_factory=dict)


def _find_part(pictures: Pictures, sides: list[int], batch: int) -> _Part:
    """Find the part of a picture that the transforms show.

    Raises:
        UnservableError: `loaders.build` cannot show it.
    """
    resize, crop = pictures.resize, pictures.crop
    if crop and pictures.crop_size != sides:
        raise UnservableError(f"its pictures are {sides}, not {pictures.crop_size} as {crop} makes them")
    if crop == "CenterCrop":
        return _find_centre(pictures, sides)
    if not crop:
        return _find_whole(pictures, batch)
    is_whole = crop == "RandomCrop"
    if resize is not None:  # the result of Resize can be stored, and crops cut out of it
        return _Part(is_whole=is_whole, raw=False, recipe=_recipe_after(resize))
    return _Part(is_whole=is_whole, recipe=None if is_whole else {})


def _find_centre(pictures: Pictures, sides: list[int]) -> _Part:
    """Find the part that a CenterCrop shows; raise as `_find_part` does."""
    resize = pictures.resize
    if pictures.is_random:
        raise UnservableError("it mirrors and jitters random crops, and not a CenterCrop")
    if resize is None or resize[0] != resize[-1] or sides[0] != sides[1] or sides[0] > resize[0]:
        raise UnservableError("it has CenterCrop only of a square, after Resize")
    ratio = "" if sides[0] / resize[0] == _CROP_RATIO else f"{sides[0]} / {resize[0]}"
    if len(resize) == 1:
        return _Part(crop_ratio=ratio)
    return _Part(crop_ratio=ratio, raw=False, recipe=_recipe_after(resize))


def _find_whole(pictures: Pictures, batch: int) -> _Part:
    """Find the part that is shown without a crop; raise as `_find_part` does."""
    resize = pictures.resize
    if batch < 2 and (resize is None or len(resize) == 1):
        raise UnservableError("its pictures may have a size each, as no transform says one")
    if resize is None or (len(resize) == 1 and not pictures.is_random):  # batches need pictures of one shape
        return _Part(crop_ratio="1.0", is_whole=True)
    return _Part(crop_ratio="1.0", is_whole=True, raw=False, recipe=_recipe_after(resize))


def _recipe_after(resize: list[int]) -> dict[str, Any]:
    """Fields of the recipe that stores pictures as Resize makes them."""
    if len(resize) == 2:
        return {"size": as_size(*resize), "fit": "stretch", "resample": "bilinear"}
    return {"size": resize[0], "enlarge": True, "resample": "bilinear"}


def _augment_text(pictures: Pictures, is_whole: bool) -> str:
    """Text of the argument `augment`, in which '{loaders}' stands for the name of the module."""
    arguments = {}
    if is_whole:
        arguments["scale"] = "None"
    elif pictures.scale != _SCALE:
        arguments["scale"] = str(tuple(pictures.scale))
    if not is_whole and any(abs(a - b) > 1e-9 for a, b in zip(pictures.ratio, _RATIO, strict=True)):
        arguments["ratio"] = str(tuple(pictures.ratio))
    if pictures.flip != 0.5:
        arguments["flip"] = str(pictures.flip)
    arguments |= {name: f"{value:.6g}" for name, value in pictures.jitter.items()}
    if arguments == {"scale": "None"}:
        return '"crop"'
    if not arguments:
        return '"train"'
    given = ", ".join(f"{name}={text}" for name, text in arguments.items())
    return "{loaders}.RandomAugmentation(" + given + ")"


def _normalize_text(normalize: tuple[list[float], list[float]] | None) -> str:
    """Text of the argument `normalize`."""
    if normalize is None:
        return "None"
    mean, std = (tuple(part) if len(part) > 1 else part[0] for part in normalize)
    return f"({mean}, {std})"


def allow_smaller_pictures(steps: Sequence[Step]) -> bool:
    """Whether transforms show the same of a smaller picture: none depends on pixels before it is resized."""
    for step in steps:
        if step["name"] in ("Resize", "RandomResizedCrop") and step["known"]:
            return True
        if not step["known"] or step["name"] not in _PER_PIXEL:
            return False
    return False


def largest_resize(steps: Sequence[Step]) -> int:
    """Largest side that a Resize among the transforms makes; 0 where there is none."""
    sides = [0]
    for step in steps:
        if step["name"] == "Resize" and step["known"]:
            size = step["arguments"]["size"]
            sides += size if isinstance(size, list) else [size]
    return max(sides)


def _join_names(names: Sequence[str]) -> str:
    """Join names like 'A, B and C', each once."""
    names = list(dict.fromkeys(names))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
