"""What is done to pictures on their way: what is drawn, how it is done on the CPU, and on a device.

What `augment="train"` draws for a sample depends on `(seed, epoch, sample id)` alone, not on its batch, rank
or backend, so that a resumed run augments as the uninterrupted one would have.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import cv2
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.nn.functional import interpolate

from loaders.deliver import upload
from loaders.settings import AugmentName
from precache.errors import SettingError, check_choice, is_number
from precache.pictures import depth
from precache.pictures.jpeg import Pixels
from precache.pictures.sizes import Size, as_size, sides

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]
Mirrored: TypeAlias = npt.NDArray[np.bool_]
Boxes: TypeAlias = npt.NDArray[Any]
"""int64 or float64 [n, 4]: left, top, width and height in pixels of the stored picture.

Of integers, a crop, which is resized for itself where it is not of the served size; it may reach out of the
picture, which is black there. Of floats, a part of the picture, which is resized with what lies around it."""
BatchFunction: TypeAlias = Callable[..., Any]
"""(images uint8 [n, height, width, channels], see `augment` of `loaders.build`, on the device, ids int64 [n]
on the CPU, epoch) -> images uint8 [n, height, width, channels] on the same device: as many, of the `size`
that `build` was given, or else all of one.

It works on pixels as they are stored, 0-255, or uint16 where these are; what it returns is normalised then,
if `build` was not asked for integers.

With a parameter called `labels` (as of `Batch`, on the device) it returns images and labels: [n], or soft
ones, float [n, classes], as CutMix and MixUp make them. With one called `view` it is told which it makes."""
_TRIES = 10  # of torchvision
_BOX_DRAWS = 4 * _TRIES
_DRAWS = _BOX_DRAWS + 1 + 4
_MOST_VIEWS = 1 << 16
_BYTE: np.dtype[Any] = np.dtype(np.uint8)
_MOST_SURPLUS = 4  # how many times what is kept may be resized; of longer pictures Pillow resizes the part
_COLORS = (3, 4)  # channels for which torch's kernel works on pixels as they lie
_CHUNK = 32  # pictures at a time: bounds the memory of their float copies


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomAugmentation:
    """Random crop, flip and colour jitter; the defaults are what `augment="train"` stands for.

    Distributions are those of torchvision's `RandomResizedCrop`, `RandomHorizontalFlip` and `ColorJitter`
    with arguments of the same names; jitter is applied in the order brightness, contrast, saturation,
    hue, which torchvision draws.

    Attributes:
        scale: least and largest share of the stored picture's area that a crop has; None: a crop has the
            size that is served, and is not resized.
        ratio: least and largest width over height of a crop, where there is a scale.
        flip: how likely a picture is mirrored.
        brightness, contrast, saturation: factors are drawn from 1 - value to 1 + value, at least 0.
        hue: shifts are drawn from -hue to hue, as a share of the circle; at most 0.5.
    """

    # with these ImageNet is trained: https://arxiv.org/abs/1409.4842, section 6
    scale: tuple[float, float] | None = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __post_init__(self) -> None:
        for name, pair, most in (("scale", self.scale or (1.0, 1.0), 1.0), ("ratio", self.ratio, math.inf)):
            are_two = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(map(is_number, pair))
            if not (are_two and 0 < pair[0] <= pair[1] <= most):
                raise SettingError(f"{name} must be two numbers, 0 < low <= high <= {most}, got {pair!r}")
        for name in ("flip", "brightness", "contrast", "saturation", "hue"):
            value, most = getattr(self, name), {"flip": 1.0, "hue": 0.5}.get(name, math.inf)
            if not (is_number(value) and 0 <= value <= most):
                raise SettingError(f"{name} must be from 0 to {most}, got {value!r}")

    @property
    def jitters(self) -> bool:
        """Whether colours change."""
        return max(self.brightness, self.contrast, self.saturation, self.hue) > 0


def draw(
    settings: RandomAugmentation, stored: Size | Integers, size: Size, seed: int, epoch: int, ids: Integers
) -> tuple[Integers, Mirrored, Floats]:
    """What the samples `ids` get in `epoch`, served as `size`; `stored` as of `crop_boxes`.

    Returns:
        int64 [n, 4], left, top, width and height of the crop, in pixels of the stored picture; bool [n],
        whether mirrored; float64 [n, 4], factors of brightness, contrast, saturation, and the shift of hue.
    """
    uniform = uniforms(seed, epoch, ids, _DRAWS)
    ranges = np.array([settings.brightness, settings.contrast, settings.saturation, settings.hue])
    neutral = np.array([1.0, 1.0, 1.0, 0.0])
    low, high = np.maximum(neutral - ranges, (0, 0, 0, -1)), neutral + ranges
    if settings.scale is None:
        boxes = window_boxes(stored, uniform[:, 2 * _TRIES : _BOX_DRAWS : _TRIES], size)
    else:
        boxes = crop_boxes(stored, uniform[:, :_BOX_DRAWS], settings.scale, settings.ratio)
    colors = low + (high - low) * uniform[:, _BOX_DRAWS + 1 :]
    return boxes, uniform[:, _BOX_DRAWS] < settings.flip, colors


def crop_boxes(
    stored: Size | Integers, draws: Floats, scale: tuple[float, float], ratio: tuple[float, float]
) -> Integers:
    """[n, 4], left, top, width, height of random crops, as of torchvision's `RandomResizedCrop.get_params`.

    Args:
        stored: size of all pictures, or int64 [n, 2], height and width of each.
        draws: [n, 4 * tries], uniform in [0, 1).
    """
    area_draw, ratio_draw, left_draw, top_draw = np.split(draws, 4, axis=1)
    high_side, wide_side = _columns(stored)
    area = high_side * wide_side * (scale[0] + (scale[1] - scale[0]) * area_draw)
    low, high = np.log(ratio)
    aspect = np.exp(low + (high - low) * ratio_draw)
    width, height = np.round(np.sqrt(area * aspect)), np.round(np.sqrt(area / aspect))
    fits = (width > 0) & (width <= wide_side) & (height > 0) & (height <= high_side)
    first = fits.argmax(axis=1)  # the first try that fits
    rows = np.arange(len(draws))
    found = fits[rows, first]
    high_side, wide_side = high_side[:, 0], wide_side[:, 0]
    # none fits: the largest centred box of the nearest ratio
    widest = np.clip(np.round(high_side * ratio[1]), 1, wide_side)
    highest = np.clip(np.round(wide_side / ratio[0]), 1, high_side)
    width = np.where(found, width[rows, first], widest)
    height = np.where(found, height[rows, first], highest)
    left_room, top_room = wide_side - width, high_side - height
    left = np.where(found, np.floor(left_draw[rows, first] * (left_room + 1)), left_room // 2)
    top = np.where(found, np.floor(top_draw[rows, first] * (top_room + 1)), top_room // 2)
    return np.stack((left, top, width, height), axis=1).astype(np.int64)


def draw_keys(ids: Integers, view: int = 0, places: Integers | None = None) -> Integers:
    """What to draw by instead of `ids`, so that each view, and each of the `places`, draws for itself.

    The first view draws by the id, where there are no places: int64 [n], else a hash.
    """
    numbers = np.full(len(ids), view) if places is None else places * _MOST_VIEWS + view
    if not numbers.any():
        return ids
    with np.errstate(over="ignore"):
        hashed = _mix(_mix(ids.astype(np.uint64)) ^ numbers.astype(np.uint64))
    return np.where(numbers == 0, ids, hashed.view(np.int64))


def window_boxes(stored: Size | Integers, draws: Floats, size: Size) -> Integers:
    """[n, 4], left, top, width, height of boxes of `size`, as torchvision's `RandomCrop` takes them.

    Where a picture is smaller it lies in the midst, and the box reaches out of it. `draws`: [n, 2], uniform
    in [0, 1), of left and top; `stored` as of `crop_boxes`.
    """
    height, width = sides(size)
    room = np.concatenate(_columns(stored)[::-1], axis=1) - (width, height)
    corners = np.where(room < 0, -(-room // 2), np.floor(draws * (room + 1))).astype(np.int64)
    return np.concatenate((corners, np.broadcast_to((width, height), corners.shape)), axis=1)


def centre_boxes(stored: Size | Integers, size: Size, crop_ratio: float) -> Floats:
    """What torchvision's `Resize(size / crop_ratio)` and `CenterCrop(size)` show, in pixels of the picture.

    [n, 4], or [1, 4] of one size: left, top, width, height; `stored` as of `crop_boxes`. Sizes and offsets
    round as in torchvision 0.29 (`_compute_resized_output_size`, `center_crop`); where nothing is resized,
    they are integers.
    """
    rows, columns = sides(resized_side(size, crop_ratio))
    height, width = _columns(stored)
    fills_width = columns * height >= rows * width
    wide = np.where(fills_width, columns, np.floor(rows * width / height))
    high = np.where(fills_width, np.floor(columns * height / width), rows)
    resized, window = np.hstack((wide, high)), sides(size)[::-1]
    scale = np.hstack((width, height)) / resized
    return np.hstack((np.round((resized - window) / 2) * scale, window * scale))


def resized_side(size: Size, crop_ratio: float) -> Size:
    """What a picture is resized to, so that it just covers this, before `size` is cut out of its middle."""
    height, width = sides(size)
    return as_size(round(height / crop_ratio), round(width / crop_ratio))


def _columns(stored: Size | Integers) -> tuple[Integers, Integers]:
    """Height and width, each [n, 1], or [1, 1] of one size."""
    shapes = stored if isinstance(stored, np.ndarray) else np.array([sides(stored)], np.int64)
    return shapes[:, :1], shapes[:, 1:]


def uniforms(seed: int, epoch: int, ids: Integers, count: int) -> Floats:
    """[n, count] uniform in [0, 1): a hash of seed, epoch, sample id and number of the draw.

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
    """What is served of stored pictures.

    Attributes:
        stored: their size; None: each has its own.
        size: of what is served; None: all of each picture, as it is.
        random: draws crops and flips; None: the middle.
        seed: of the draws.
        views: how many times each picture is drawn.
        crop_ratio: of the middle: how much of the shorter side is served.
    """

    stored: Size | None
    size: Size | None
    random: RandomAugmentation | None = None
    seed: int = 0
    views: int = 1
    crop_ratio: float = 1.0

    def of(
        self, epoch: int, ids: Integers, shapes: Integers | None = None, places: Integers | None = None
    ) -> tuple[Boxes, Mirrored]:
        """Boxes [n, 4] and whether mirrored, bool [n].

        Args:
            shapes: int64 [n, 2], height and width of each, where each has its own.
            places: as of `loaders.batch.Request`.

        Of several views, one behind the other: [views * n].
        """
        stored = shapes if self.stored is None else self.stored
        assert stored is not None
        if self.random is not None and self.size is not None:
            keys = np.concatenate([draw_keys(ids, view, places) for view in range(self.views)])
            if isinstance(stored, np.ndarray):
                stored = np.tile(stored, (self.views, 1))
            return draw(self.random, stored, self.size, self.seed, epoch, keys)[:2]
        boxes: Boxes
        if self.size is None:
            assert shapes is not None
            boxes = np.concatenate((np.zeros_like(shapes), shapes[:, ::-1]), axis=1)
        else:
            boxes = centre_boxes(stored, self.size, self.crop_ratio)
            if (boxes[:, :1:-1] == sides(self.size)).all():
                boxes = boxes.astype(np.int64)
        return np.broadcast_to(boxes, (len(ids), 4)), np.zeros(len(ids), bool)


def crop_into(
    pictures: list[Pixels],
    boxes: list[Any],
    mirrored: list[bool],
    out: Pixels | list[Pixels],
    dtype: np.dtype[Any] = _BYTE,
) -> None:
    """Put a box, as of `Boxes`, of each picture into its place in `out`.

    What is copied into one array goes there by one call: threads that ask for the interpreter's lock again
    for each picture wait for each other longer than copying takes.

    Args:
        pictures: uint8 [height, width, bytes] each, of values of `dtype`; as `out`.
    """
    shapes = [out.shape[1:]] * len(out) if isinstance(out, np.ndarray) else [space.shape for space in out]
    parts = [_as_stored(*each) for each in zip(pictures, boxes, shapes, strict=True)]
    if isinstance(out, np.ndarray) and parts and all(part is not None for part in parts):
        cv2.vconcat(parts, dst=out.reshape(-1, *out.shape[2:]))
    else:
        for picture, box, part, space in zip(pictures, boxes, parts, out, strict=True):
            left, top, width, height = box
            if part is not None:
                space[:] = part
            elif not isinstance(left, int):
                space[:] = _resized_part(picture.view(dtype), box, space.shape[:2]).view(np.uint8)
            else:
                inside = picture[max(top, 0) : top + height, max(left, 0) : left + width]
                if inside.shape[:2] == (height, width):
                    resize(inside.view(dtype), space.view(dtype))
                else:  # it reaches out of a small picture
                    space[:] = 0
                    around = space[max(-top, 0) :, max(-left, 0) :]
                    around[: len(inside), : inside.shape[1]] = inside
    for number, turned in enumerate(mirrored):
        if turned:
            cv2.flip(out[number], 1, dst=out[number])


def _as_stored(picture: Pixels, box: list[int] | list[float], shape: tuple[int, ...]) -> Pixels | None:
    """What `box` shows, if it is served as it is stored, as `shape`, all of it inside of the picture."""
    left, top, width, height = box
    if (height, width) != shape[:2] or left < 0 or top < 0:
        return None
    x, y = int(left), int(top)
    part = picture[y : y + shape[0], x : x + shape[1]]
    return part if part.shape == shape else None


def resize(part: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Put all of `part` into `out`, uint8 or uint16 [height, width, channels], antialiased where it shrinks.

    Each value is that of Pillow's `resize(..., BILINEAR)` give or take one or two.
    """
    if part.shape[0] <= out.shape[0] and part.shape[1] <= out.shape[1]:
        # where nothing shrinks, two pixels are all that an antialiased kernel looks at, too
        cv2.resize(part, out.shape[1::-1], dst=out, interpolation=cv2.INTER_LINEAR)
    elif out.dtype == np.uint8 and out.shape[2] in _COLORS and torch_is_fast():
        # what `interpolate` calls, but it writes where it is told: fresh memory costs a fifth of the time
        torch.ops.aten._upsample_bilinear2d_aa.out(
            _planes(part), [*out.shape[:2]], False, None, None, out=_planes(out)
        )
    else:
        out[:] = _by_pillow(part, (0, 0, part.shape[1], part.shape[0]), out.shape[:2])


def torch_is_fast() -> bool:
    """Whether torch's antialiased kernel for bytes is the fastest: it is with the AVX2 of x86 processors.

    https://pytorch.org/vision/stable/transforms.html#performance-considerations
    """
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")


def _resized_part(
    picture: npt.NDArray[Any], box: list[int] | list[float], shape: tuple[int, int]
) -> npt.NDArray[Any]:
    """The part `box` of `picture`, resized to `shape` with what lies around it; antialiased."""
    left, top, width, height = box
    rows, columns = (
        round(side * n / of) for side, n, of in zip(picture.shape[:2], shape, (height, width), strict=True)
    )
    if (
        picture.dtype == np.uint8
        and picture.shape[2] in _COLORS
        and torch_is_fast()
        and rows * columns <= _MOST_SURPLUS * shape[0] * shape[1]
    ):
        resized = interpolate(_planes(picture), (rows, columns), mode="bilinear", antialias=True)
        x, y = round(left * shape[1] / width), round(top * shape[0] / height)
        return resized[0, :, y : y + shape[0], x : x + shape[1]].permute(1, 2, 0).numpy()
    return _by_pillow(picture, (left, top, left + width, top + height), shape)


def _planes(picture: npt.NDArray[Any]) -> torch.Tensor:
    """[1, channels, height, width] of the same memory."""
    # with this stride of a batch of one torch takes it for channels-last, in which it is twice as fast
    return torch.from_numpy(picture)[None].permute(0, 3, 1, 2)


def _by_pillow(
    picture: npt.NDArray[Any], box: tuple[float, float, float, float], shape: tuple[int, int]
) -> npt.NDArray[Any]:
    if picture.dtype != np.uint8 or picture.shape[2] not in (1, 3):
        return depth.resize(picture, shape[::-1], box, Image.Resampling.BILINEAR)
    image = Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture)
    return np.asarray(image.resize(shape[::-1], Image.Resampling.BILINEAR, box)).reshape(*shape, -1)


NAMED: dict[AugmentName, RandomAugmentation | None] = {
    "crop": RandomAugmentation(scale=None),
    "eval": None,
    "train": RandomAugmentation(),
}
Augment: TypeAlias = AugmentName | RandomAugmentation | BatchFunction | None
"""What `augment` of `loaders.build` may be."""


def choose(augment: Augment) -> RandomAugmentation | BatchFunction | None:
    """What `loaders.build` was asked for; None: the centre, unchanged. SettingError for an unknown name."""
    if augment is None or isinstance(augment, RandomAugmentation):
        return augment
    if isinstance(augment, str):
        check_choice("augment", augment, NAMED)
        return NAMED[augment]
    if callable(augment):
        return augment
    raise SettingError(
        f"augment must be a name, a RandomAugmentation, a function or None, got {augment!r}; "
        f"names: {', '.join(NAMED)}"
    )


class CheckedFunction:
    """A function of the caller's, of which what it returns is looked at: not the pixels, nothing waits.

    Args:
        size: that it must return; None: that of the first batch.
    """

    def __init__(self, function: BatchFunction, size: Size | None) -> None:
        self._function, self._size = function, size
        self._name = getattr(function, "__qualname__", type(function).__name__)
        try:
            self._takes = {"labels", "view"}.intersection(inspect.signature(function).parameters)
        except ValueError:  # of a function written in C
            self._takes = set()
        self.takes_labels = "labels" in self._takes

    def apply(
        self, images: torch.Tensor, ids: torch.Tensor, epoch: int, labels: torch.Tensor, view: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and labels that the function returns.

        Raises:
            SettingError: they are not what `BatchFunction` says.
        """
        given = {"labels": labels, "view": view}
        returned = self._function(images, ids, epoch, **{name: given[name] for name in self._takes})
        if not self.takes_labels:
            return self._checked(returned, images), labels
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
        found = returned if isinstance(returned, torch.Tensor) else None
        shape = [0] * 4 if found is None or found.ndim != 4 else [*found.shape]
        channels, size = images.shape[3], None if self._size is None else sides(self._size)
        flaws = {
            "return a torch tensor": found is None,
            "this is NCHW: return images.permute(0, 2, 3, 1), NHWC": shape[1] == channels != shape[3],
            "return NHWC, with as many channels as it was given": shape[3] != channels,
            "return as many pictures as it was given, in their order": shape[0] != len(images),
            f"return {_name(images.dtype)}, 0-{torch.iinfo(images.dtype).max:,}, as it was given": (
                getattr(found, "dtype", None) != images.dtype
            ),
            "leave them on the device that they came on": getattr(found, "device", None) != images.device,
            "return the size that the loader was built with, or that of the first batch": (
                size is not None and size != (shape[1], shape[2])
            ),
        }
        if found is not None and not any(flaws.values()):
            self._size = as_size(shape[1], shape[2])
            return found
        got = type(returned).__name__
        if found is not None:
            got = f"{_name(found.dtype)} {[*found.shape]} on {found.device}"
        height, width = size or ("height", "width")
        raise SettingError(
            f"augment function {self._name} must return {_name(images.dtype)} [{len(images)}, {height}, "
            f"{width}, {channels}] on {images.device}, got {got}; {next(filter(flaws.get, flaws))}"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def augment_batch(
    settings: RandomAugmentation,
    seed: int,
    size: Size | None,
    images: torch.Tensor,
    ids: torch.Tensor,
    epoch: int,
) -> torch.Tensor:
    """[n, height, width, channels] to the same dtype of `size`, as drawn.

    Without a size crops are taken already, and only colours are left to do.
    """
    served = as_size(*images.shape[1:3]) if size is None else size
    drawn = draw(settings, as_size(*images.shape[1:3]), served, seed, epoch, ids.numpy())
    columns = np.column_stack(drawn).astype(np.float32)
    on_device = upload(torch.from_numpy(columns), images.device)  # in one copy
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
    """float [n, channels, *size] of boxes (left, top, width, height) of float [n, channels, height, width].

    Each is the crop's own antialiased bilinear resize, as `resize`: two products with
    matrices of weights, of shapes that depend on no value, so that nothing waits for the device.
    """
    rows, columns = sides(size)
    left, top, width, height = boxes.T
    down = _weights(top, height, images.shape[2], rows)
    across = _weights(left, width, images.shape[3], columns)
    across = torch.where(mirrored[:, None, None], across.flip(1), across)
    return down[:, None] @ images @ across[:, None].transpose(2, 3)


def _weights(start: torch.Tensor, length: torch.Tensor, side: int, count: int) -> torch.Tensor:
    """float [n, count, side]: how much of each of `side` pixels goes into each of `count`.

    A triangle as wide as two pixels of the coarser side, over `length` pixels from `start` on, floats [n],
    without those around them: Pillow's bilinear filter, see
    https://github.com/python-pillow/Pillow/blob/main/src/libImaging/Resample.c
    """
    scale = (length / count)[:, None, None]
    pixels = torch.arange(side, device=start.device, dtype=torch.float32)
    places = torch.arange(count, device=start.device, dtype=torch.float32)  # whatever torch's default is
    centres = start[:, None, None] + (places[:, None] + 0.5) * scale
    found = (1 - (pixels + 0.5 - centres).abs() / scale.clamp(min=1)).clamp_(min=0)
    first, last = start[:, None, None], (start + length)[:, None, None]
    found = found * ((pixels >= first) & (pixels < last))
    # what lies outside of the picture is made of nothing: black
    return found / found.sum(dim=2, keepdim=True).clamp_(min=torch.finfo(found.dtype).tiny)


def color_jitter(images: torch.Tensor, colors: torch.Tensor, *, shifts_hue: bool = True) -> torch.Tensor:
    """float [n, 3, height, width], 0-255, with factors of brightness, contrast, saturation and shift of hue.

    Each picture with its own, as torchvision's `adjust_*` functions do it with one for all.
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
    """ITU-R BT.601, as torchvision's `rgb_to_grayscale` has it; importing that costs a second."""
    red, green, blue = images[:, :1], images[:, 1:2], images[:, 2:]
    return 0.2989 * red + 0.587 * green + 0.114 * blue


def _shift_hue(images: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Through HSV and back; `shift` [n, 1, 1] is a share of the circle."""
    most, least = images.max(dim=1).values, images.min(dim=1).values
    span = most - least
    red, green, blue = images.unbind(1)
    safe = torch.where(span == 0, torch.ones_like(span), span)
    sector = torch.where(
        most == red,
        (green - blue) / safe,
        torch.where(most == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    sector = (sector + 6 * shift) % 6
    # each channel falls from `most` to `least` and back, a third of the circle after the other
    # https://en.wikipedia.org/wiki/HSL_and_HSV#HSV_to_RGB_alternative
    channels = []
    for number in (5, 3, 1):
        k = (number + sector) % 6
        channels.append(most - span * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, dim=1)
