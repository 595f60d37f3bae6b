"""Crop, resize, flip and jitter pictures: drawing the random numbers, the work on the CPU and on a device.

The random numbers that `augment="train"` draws for a sample depend on `(seed, epoch, sample id)` alone, not
on its batch, rank or backend, so that a resumed run augments as the uninterrupted one would have.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import cv2
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.nn.functional import interpolate

from loaders.device import upload
from loaders.settings import AugmentName
from precache.errors import SettingError, check_choice, is_number
from precache.pictures.images import Size, as_size, sides
from precache.pictures.jpeg import Pixels

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]
Mirrored: TypeAlias = npt.NDArray[np.bool_]
Boxes: TypeAlias = npt.NDArray[Any]
"""int64 or float64 [n, 4]: left, top, width and height in pixels of the stored picture.

A box of integers is a crop: its pixels alone are resized, unless it has the served size already; it may reach
out of the picture, and is black there. A box of floats is a part of the picture, resized together with the
pixels around it."""
BatchFunction: TypeAlias = Callable[..., Any]
"""Function given as `augment`: (images, ids, epoch) -> images.

`images` are uint8 [n, height, width, channels] on the loader's device, see `augment` of `loaders.build`;
`ids` int64 [n] on the CPU. It works on pixels as they are stored, and returns as many images of the same
dtype and channels on the same device, of the `size` that `build` was given, or else all of one size. They are
normalised afterwards, unless `build` was asked for uint8.

If it has a parameter called `labels`, it gets those of `Batch`, on the device, and returns images and labels:
[n], or soft ones, float [n, classes], as CutMix and MixUp make them. If it has one called `view`, it gets the
number of the view that it makes."""
_TRIES = 10  # draws for each crop, as in torchvision
_BOX_DRAWS = 4 * _TRIES
_DRAWS = _BOX_DRAWS + 1 + 4
_MAX_VIEWS = 1 << 16
_MAX_SURPLUS = 4  # resized pixels per pixel kept; above that Pillow, which resizes the part alone, is faster
_COLOR = 3  # channels; for pictures of one, torch's kernel is not the fastest
_TRANSFORM_PACKAGES = ("albumentations", "kornia", "torchvision")
_CHUNK = 32  # pictures at a time: bounds the memory of their float copies


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomAugmentation:
    """Random crop, flip and colour jitter; the defaults are those of `augment="train"`.

    Distributions are those of torchvision's `RandomResizedCrop`, `RandomHorizontalFlip` and `ColorJitter`
    with arguments of the same names. Jitter is applied in the order brightness, contrast, saturation, hue;
    torchvision draws the order.

    Attributes:
        scale: smallest and largest share of the stored picture's area that a crop has; None: a crop has the
            size that is served, and is not resized.
        ratio: smallest and largest width over height of a crop; unused if `scale` is None.
        flip: probability that a picture is mirrored.
        brightness: factors are drawn from 1 - value to 1 + value, at least 0.
        contrast: as brightness.
        saturation: as brightness.
        hue: shifts are drawn from -hue to hue, as a share of the circle; at most 0.5.
    """

    # the usual values for ImageNet: https://arxiv.org/abs/1409.4842, section 6
    scale: tuple[float, float] | None = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __post_init__(self) -> None:
        for name, pair, high in (("scale", self.scale or (1.0, 1.0), 1.0), ("ratio", self.ratio, math.inf)):
            are_two = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(map(is_number, pair))
            if not (are_two and 0 < pair[0] <= pair[1] <= high):
                raise SettingError(f"{name} must be two numbers, 0 < low <= high <= {high}, got {pair!r}")
        for name in ("flip", "brightness", "contrast", "saturation", "hue"):
            value, high = getattr(self, name), {"flip": 1.0, "hue": 0.5}.get(name, math.inf)
            if not (is_number(value) and 0 <= value <= high):
                raise SettingError(f"{name} must be from 0 to {high}, got {value!r}")

    @property
    def jitters(self) -> bool:
        """Whether colours change."""
        return max(self.brightness, self.contrast, self.saturation, self.hue) > 0


def draw_augmentation(
    settings: RandomAugmentation, stored: Size | Integers, size: Size, seed: int, epoch: int, ids: Integers
) -> tuple[Integers, Mirrored, Floats]:
    """Draw crop, flip and jitter of the samples `ids` in `epoch`.

    Args:
        stored: size of all pictures, or int64 [n, 2], height and width of each.
        size: size that is served.

    Returns:
        int64 [n, 4], left, top, width and height of the crop, in pixels of the stored picture; bool [n],
        whether mirrored; float64 [n, 4], factors of brightness, contrast, saturation, and the shift of hue.
    """
    uniform = uniforms(seed, epoch, ids, _DRAWS)
    ranges = np.array([settings.brightness, settings.contrast, settings.saturation, settings.hue])
    neutral = np.array([1.0, 1.0, 1.0, 0.0])
    low, high = np.maximum(neutral - ranges, (0, 0, 0, -1)), neutral + ranges
    if settings.scale is None:
        boxes = fixed_size_boxes(stored, uniform[:, 2 * _TRIES : _BOX_DRAWS : _TRIES], size)
    else:
        boxes = random_boxes(stored, uniform[:, :_BOX_DRAWS], settings.scale, settings.ratio)
    colors = low + (high - low) * uniform[:, _BOX_DRAWS + 1 :]
    return boxes, uniform[:, _BOX_DRAWS] < settings.flip, colors


def random_boxes(
    stored: Size | Integers, draws: Floats, scale: tuple[float, float], ratio: tuple[float, float]
) -> Integers:
    """Return random crops as torchvision's `RandomResizedCrop.get_params` draws them.

    Args:
        stored: size of all pictures, or int64 [n, 2], height and width of each.
        draws: [n, 4 * tries], uniform in [0, 1).
        scale: smallest and largest share of the picture's area.
        ratio: smallest and largest width over height.

    Returns:
        int64 [n, 4]: left, top, width and height in pixels of the stored picture.
    """
    area_draws, ratio_draws, left_draws, top_draws = np.split(draws, 4, axis=1)
    picture_height, picture_width = _columns(stored)
    area = picture_height * picture_width * (scale[0] + (scale[1] - scale[0]) * area_draws)
    low, high = np.log(ratio)
    aspect = np.exp(low + (high - low) * ratio_draws)
    width, height = np.round(np.sqrt(area * aspect)), np.round(np.sqrt(area / aspect))
    fits = (width > 0) & (width <= picture_width) & (height > 0) & (height <= picture_height)
    first = fits.argmax(axis=1)  # the first try that fits
    rows = np.arange(len(draws))
    any_fits = fits[rows, first]
    picture_height, picture_width = picture_height[:, 0], picture_width[:, 0]
    # if none fits: the largest centred box of the nearest ratio
    max_width = np.clip(np.round(picture_height * ratio[1]), 1, picture_width)
    max_height = np.clip(np.round(picture_width / ratio[0]), 1, picture_height)
    width = np.where(any_fits, width[rows, first], max_width)
    height = np.where(any_fits, height[rows, first], max_height)
    left_room, top_room = picture_width - width, picture_height - height
    left = np.where(any_fits, np.floor(left_draws[rows, first] * (left_room + 1)), left_room // 2)
    top = np.where(any_fits, np.floor(top_draws[rows, first] * (top_room + 1)), top_room // 2)
    return np.stack((left, top, width, height), axis=1).astype(np.int64)


def draw_keys(ids: Integers, view: int = 0, places: Integers | None = None) -> Integers:
    """Return keys to draw by in the place of `ids`, int64 [n], so that views and repeats differ.

    The keys of the first view are the ids if there are no `places`; all others are hashes.

    Args:
        places: see `loaders.batch.Request`.
    """
    numbers = np.full(len(ids), view) if places is None else places * _MAX_VIEWS + view
    if not numbers.any():
        return ids
    with np.errstate(over="ignore"):
        hashes = _mix(_mix(ids.astype(np.uint64)) ^ numbers.astype(np.uint64))
    return np.where(numbers == 0, ids, hashes.view(np.int64))


def fixed_size_boxes(stored: Size | Integers, draws: Floats, size: Size) -> Integers:
    """Return random crops of `size` as torchvision's `RandomCrop` draws them.

    A picture that is smaller lies in the middle of its box, which reaches out of it.

    Args:
        stored: size of all pictures, or int64 [n, 2], height and width of each.
        draws: [n, 2], uniform in [0, 1), for left and top.

    Returns:
        int64 [n, 4]: left, top, width and height in pixels of the stored picture.
    """
    height, width = sides(size)
    room = np.concatenate(_columns(stored)[::-1], axis=1) - (width, height)
    corners = np.where(room < 0, -(-room // 2), np.floor(draws * (room + 1))).astype(np.int64)
    return np.concatenate((corners, np.broadcast_to((width, height), corners.shape)), axis=1)


def centre_boxes(stored: Size | Integers, size: Size, crop_ratio: float) -> Boxes:
    """Return the part that torchvision's `Resize(size / crop_ratio)` and `CenterCrop(size)` show.

    Sizes and offsets round as in torchvision 0.29 (`_compute_resized_output_size`, `center_crop`).

    Args:
        stored: size of all pictures, or int64 [n, 2], height and width of each.

    Returns:
        [n, 4], or [1, 4] for one size: integers if no picture is resized.
    """
    rows, columns = sides(resized_side(size, crop_ratio))
    height, width = _columns(stored)
    fills_width = columns * height >= rows * width
    resized_width = np.where(fills_width, columns, np.floor(rows * width / height))
    resized_height = np.where(fills_width, np.floor(columns * height / width), rows)
    resized, window = np.hstack((resized_width, resized_height)), sides(size)[::-1]
    scale = np.hstack((width, height)) / resized
    boxes = np.hstack((np.round((resized - window) / 2) * scale, window * scale))
    return boxes.astype(np.int64) if (boxes[:, 2:] == window).all() else boxes


_centre_box = lru_cache(centre_boxes)  # of pictures of one size: computed once, not for each batch


def resized_side(size: Size, crop_ratio: float) -> Size:
    """Return the size that a picture is resized to cover before `size` is cut out of its middle.

    It is rounded down, as timm does with its crop_pct.
    """
    # a ratio such as 224 / 235 is itself rounded: without the small number it could give 234
    return as_size(*(math.floor(side / crop_ratio + 1e-9) for side in sides(size)))


def _columns(stored: Size | Integers) -> tuple[Integers, Integers]:
    """Return height and width of pictures, each int64 [n, 1], or [1, 1] for one size."""
    shapes = stored if isinstance(stored, np.ndarray) else np.array([sides(stored)], np.int64)
    return shapes[:, :1], shapes[:, 1:]


def uniforms(seed: int, epoch: int, ids: Integers, count: int) -> Floats:
    """Return float64 [n, count], uniform in [0, 1): hashes of seed, epoch, sample id and number of the draw.

    SplitMix64, whose output for counters is the random sequence: https://doi.org/10.1145/2660193.2660195
    """
    with np.errstate(over="ignore"):  # 64-bit arithmetic that wraps is the point
        start = _mix(_mix(np.uint64(seed % 2**64)) + np.uint64(epoch))
        state = (
            _mix(start + ids.astype(np.uint64))[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        )
        draws: Floats = (_mix(state) >> np.uint64(11)) * 2.0**-53
        return draws


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(state: npt.NDArray[np.uint64] | np.uint64) -> npt.NDArray[np.uint64]:
    mixed: npt.NDArray[np.uint64] = np.asarray(state) + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed


@dataclass(frozen=True, slots=True)
class Crops:
    """Rule for the part of each stored picture that is served.

    Attributes:
        stored: size of the stored pictures; None: each has its own.
        size: size that is served.
        random: settings of random crops and flips; None: the middle of each picture.
        seed: seed of the random draws.
        views: how many times each picture is drawn.
        crop_ratio: share of the shorter side that is served of the middle.
    """

    stored: Size | None
    size: Size
    random: RandomAugmentation | None = None
    seed: int = 0
    views: int = 1
    crop_ratio: float = 1.0

    def boxes_and_flips(
        self, epoch: int, ids: Integers, shapes: Integers | None = None, places: Integers | None = None
    ) -> tuple[Boxes, Mirrored]:
        """Return the boxes to serve, [n, 4], and which pictures to mirror, bool [n].

        Those of several views are one view behind the other: [views * n].

        Args:
            shapes: int64 [n, 2], height and width of each picture; needed if each has its own size.
            places: see `loaders.batch.Request`.
        """
        stored = shapes if self.stored is None else self.stored
        assert stored is not None
        if self.random is not None:
            keys = np.concatenate([draw_keys(ids, view, places) for view in range(self.views)])
            if isinstance(stored, np.ndarray):
                stored = np.tile(stored, (self.views, 1))
            return draw_augmentation(self.random, stored, self.size, self.seed, epoch, keys)[:2]
        if self.stored is None:
            boxes: Boxes = centre_boxes(stored, self.size, self.crop_ratio)
        else:
            boxes = _centre_box(self.stored, self.size, self.crop_ratio)
        return np.broadcast_to(boxes, (len(ids), 4)), np.zeros(len(ids), bool)


def crop_all_into(
    pictures: Sequence[Pixels], boxes: Sequence[Any], mirrored: Sequence[bool], out: Pixels
) -> None:
    """Crop several pictures, see `crop_into`; crops that are not resized are copied by one call.

    Threads that took the interpreter's lock again for each picture would wait for each other longer than the
    copies take.

    Args:
        out: uint8 [n, height, width, channels].
    """
    crops = []
    for picture, box in zip(pictures, boxes, strict=True):
        crop = _unresized_crop(picture, box, out.shape[1:])
        if crop is None:
            break
        crops.append(crop)
    if len(crops) < len(pictures):
        for picture, box, is_mirrored, space in zip(pictures, boxes, mirrored, out, strict=True):
            crop_into(picture, box, is_mirrored, space)
        return
    cv2.vconcat(crops, dst=out.reshape(-1, *out.shape[2:]))
    for slot, is_mirrored in enumerate(mirrored):
        if is_mirrored:
            cv2.flip(out[slot], 1, dst=out[slot])


def crop_into(picture: Pixels, box: list[int] | list[float], mirrored: bool, out: Pixels) -> None:
    """Crop a picture to its box, resize and mirror it, and put it into `out`.

    Args:
        picture: uint8 [height, width, channels].
        box: see `Boxes`.
        out: uint8 [height, width, channels].
    """
    crop = _unresized_crop(picture, box, out.shape)
    if crop is not None:  # it is copied once
        if mirrored:
            cv2.flip(crop, 1, dst=out)
        else:
            cv2.copyTo(crop, None, dst=out)
        return
    left, top, width, height = box
    if not isinstance(left, (int, np.integer)):
        out[:] = _resized_part(picture, box, out.shape[:2])
    else:
        inside = picture[max(top, 0) : top + height, max(left, 0) : left + width]
        if inside.shape[:2] == (height, width):
            resize(inside, out)
        else:  # the box reaches out of a small picture
            out[:] = 0
            around = out[max(-top, 0) :, max(-left, 0) :]
            around[: len(inside), : inside.shape[1]] = inside
    if mirrored:
        cv2.flip(out, 1, dst=out)


def _unresized_crop(picture: Pixels, box: list[int] | list[float], shape: tuple[int, ...]) -> Pixels | None:
    """Return the crop `box` if it has `shape` as it is stored and lies inside of the picture, else None."""
    left, top, width, height = box
    if (height, width) != shape[:2] or left < 0 or top < 0:
        return None
    x, y = int(left), int(top)
    part = picture[y : y + shape[0], x : x + shape[1]]
    return part if part.shape == shape else None


def resize(part: Pixels, out: Pixels) -> None:
    """Resize `part` into `out`, both uint8 [height, width, channels], antialiased where it shrinks.

    Values differ from those of Pillow's `resize(..., BILINEAR)` by at most one or two.
    """
    if part.shape[0] <= out.shape[0] and part.shape[1] <= out.shape[1]:
        # where nothing shrinks, an antialiased kernel reads two pixels only, as this one does
        cv2.resize(part, out.shape[1::-1], dst=out, interpolation=cv2.INTER_LINEAR)
    elif out.shape[2] == _COLOR and torch_is_fast():
        # the operator behind `interpolate`, with `out`: fresh memory would cost a fifth of the time
        torch.ops.aten._upsample_bilinear2d_aa.out(
            _planes(part), [*out.shape[:2]], False, None, None, out=_planes(out)
        )
    else:
        out[:] = _by_pillow(part, (0, 0, part.shape[1], part.shape[0]), out.shape[:2])


def torch_is_fast() -> bool:
    """Return whether torch's antialiased kernel for bytes is the fastest: it is on x86 processors with AVX2.

    https://pytorch.org/vision/stable/transforms.html#performance-considerations
    """
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")


def _resized_part(picture: Pixels, box: list[int] | list[float], shape: tuple[int, int]) -> Pixels:
    """Return the part `box` of `picture` as `shape`, resized with the pixels around it, antialiased."""
    left, top, width, height = box
    # the size of the whole picture, resized as its part is
    rows = round(picture.shape[0] * shape[0] / height)
    columns = round(picture.shape[1] * shape[1] / width)
    if (
        picture.shape[2] == _COLOR
        and torch_is_fast()
        and rows * columns <= _MAX_SURPLUS * shape[0] * shape[1]
    ):
        resized = interpolate(_planes(picture), (rows, columns), mode="bilinear", antialias=True)
        x, y = round(left * shape[1] / width), round(top * shape[0] / height)
        part: Pixels = resized[0, :, y : y + shape[0], x : x + shape[1]].permute(1, 2, 0).numpy()
        return part
    return _by_pillow(picture, (left, top, left + width, top + height), shape)


def _planes(picture: Pixels) -> torch.Tensor:
    """Return `picture` as a tensor [1, channels, height, width] of the same memory."""
    if not picture.flags.writeable:  # torch would warn, though nothing is written to a mapped picture
        picture = picture.view()
        picture.flags.writeable = True
    # the stride of this batch of one makes torch treat it as channels-last, which is twice as fast
    return torch.from_numpy(picture)[None].permute(0, 3, 1, 2)


def _by_pillow(picture: Pixels, box: tuple[float, float, float, float], shape: tuple[int, int]) -> Pixels:
    image = Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture)
    return np.asarray(image.resize(shape[::-1], Image.Resampling.BILINEAR, box)).reshape(*shape, -1)


AUGMENTATIONS: dict[AugmentName, RandomAugmentation | None] = {
    "crop": RandomAugmentation(scale=None),
    "eval": None,
    "train": RandomAugmentation(),
}
"""Settings of each named augmentation; None: the middle of each picture."""
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


def augment_batch(
    settings: RandomAugmentation,
    seed: int,
    size: Size | None,
    images: torch.Tensor,
    ids: torch.Tensor,
    epoch: int,
) -> torch.Tensor:
    """Augment a batch on its device as drawn for its ids, and return it as uint8.

    Args:
        size: size to crop and resize to; None: the images are cropped already, only colours are changed.
        images: uint8 [n, height, width, channels].
        ids: int64 [n], on the CPU; ids of the samples, or keys of `draw_keys`.
    """
    served = as_size(*images.shape[1:3]) if size is None else size
    draws = draw_augmentation(settings, as_size(*images.shape[1:3]), served, seed, epoch, ids.numpy())
    columns = np.column_stack(draws).astype(np.float32)
    on_device = upload(torch.from_numpy(columns), images.device)  # all in one copy
    boxes, mirrored, colors = on_device[:, :4], on_device[:, 4] > 0, on_device[:, 5:]
    shape = (len(images), *sides(served), images.shape[3])
    out = torch.empty(shape, dtype=images.dtype, device=images.device)
    for start in range(0, len(images), _CHUNK):
        part = slice(start, start + _CHUNK)
        floats = images[part].permute(0, 3, 1, 2).to(torch.float32)
        if size is not None:
            floats = crop_and_resize(floats, boxes[part], mirrored[part], size)
        if settings.jitters:
            floats = color_jitter(floats, colors[part], shifts_hue=settings.hue > 0)
        out[part] = floats.round_().to(images.dtype).permute(0, 2, 3, 1)
    return out


def crop_and_resize(
    images: torch.Tensor, boxes: torch.Tensor, mirrored: torch.Tensor, size: Size
) -> torch.Tensor:
    """Crop each picture to its box, resize it to `size`, antialiased and bilinear, and mirror it.

    Two products with matrices of weights, whose shapes depend on no value, so that no thread waits for the
    device. Values are those of `resize`.

    Args:
        images: float [n, channels, height, width].
        boxes: float [n, 4], left, top, width and height.
        mirrored: bool [n].

    Returns:
        float [n, channels, *size].
    """
    rows, columns = sides(size)
    left, top, width, height = boxes.T
    row_weights = _resize_weights(top, height, images.shape[2], rows)
    column_weights = _resize_weights(left, width, images.shape[3], columns)
    column_weights = torch.where(mirrored[:, None, None], column_weights.flip(1), column_weights)
    return row_weights[:, None] @ images @ column_weights[:, None].transpose(2, 3)


def _resize_weights(start: torch.Tensor, length: torch.Tensor, side: int, count: int) -> torch.Tensor:
    """Return float [n, count, side]: the weight of each of `side` pixels in each of `count` resized ones.

    A triangle as wide as two pixels of the coarser side, over `length` pixels from `start` on, floats [n],
    without the pixels around them: Pillow's bilinear filter, see
    https://github.com/python-pillow/Pillow/blob/main/src/libImaging/Resample.c
    """
    scale = (length / count)[:, None, None]
    # float32 also if torch's default dtype is another
    pixels = torch.arange(side, device=start.device, dtype=torch.float32)
    steps = torch.arange(count, device=start.device, dtype=torch.float32)
    centres = start[:, None, None] + (steps[:, None] + 0.5) * scale
    weights = (1 - (pixels + 0.5 - centres).abs() / scale.clamp(min=1)).clamp_(min=0)
    first, last = start[:, None, None], (start + length)[:, None, None]
    weights = weights * ((pixels >= first) & (pixels < last))
    # a pixel outside of the picture has no weights at all, and gets black
    return weights / weights.sum(dim=2, keepdim=True).clamp_(min=torch.finfo(weights.dtype).tiny)


def color_jitter(images: torch.Tensor, colors: torch.Tensor, *, shifts_hue: bool = True) -> torch.Tensor:
    """Return the images with each picture's own brightness, contrast, saturation and hue.

    Values are those of torchvision's `adjust_*` functions, which take one factor for all pictures.

    Args:
        images: float [n, 3, height, width], 0-255.
        colors: float [n, 4], factors of brightness, contrast and saturation, and the shift of hue.
        shifts_hue: whether to apply the shifts of hue.
    """
    brightness, contrast, saturation, hue = colors.T[:, :, None, None, None]
    images = (images * brightness).clamp_(0, 255)
    mean = _grey(images).floor().mean(dim=(1, 2, 3), keepdim=True)
    images = _blend(images, mean, contrast)
    images = _blend(images, _grey(images).floor(), saturation)
    return _shift_hue(images, hue[..., 0]) if shifts_hue else images


def _blend(images: torch.Tensor, other: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (images * factor + other * (1 - factor)).clamp_(0, 255)


def _grey(images: torch.Tensor) -> torch.Tensor:
    """Return the luma, ITU-R BT.601, as torchvision's `rgb_to_grayscale`, whose import takes a second."""
    red, green, blue = images[:, :1], images[:, 1:2], images[:, 2:]
    return 0.2989 * red + 0.587 * green + 0.114 * blue


def _shift_hue(images: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Shift the hue, through HSV and back, by `shift` [n, 1, 1], a share of the circle."""
    high, low = images.max(dim=1).values, images.min(dim=1).values
    span = high - low
    red, green, blue = images.unbind(1)
    divisor = torch.where(span == 0, torch.ones_like(span), span)
    sector = torch.where(
        high == red,
        (green - blue) / divisor,
        torch.where(high == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    sector = (sector + 6 * shift) % 6
    # each channel falls from `high` to `low` and rises back, a third of the circle apart
    # https://en.wikipedia.org/wiki/HSL_and_HSV#HSV_to_RGB_alternative
    channels = []
    for number in (5, 3, 1):
        k = (number + sector) % 6
        channels.append(high - span * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, dim=1)
