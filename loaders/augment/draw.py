"""What `augment="train"` does to each sample: random crop, flip and colour jitter, drawn without state.

What a sample gets depends on `(seed, epoch, sample id)` alone, not on its batch, rank or backend, so that
a resumed run augments as the uninterrupted one would have. Pure: NumPy only. `loaders.augment.cpu` and
`loaders.augment.device` apply it.
"""

from dataclasses import dataclass
from numbers import Real
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from precache.errors import SettingError
from precache.pictures.sizes import Size, as_size, sides

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]
_TRIES = 10  # of torchvision
_BOX_DRAWS = 4 * _TRIES
_DRAWS = _BOX_DRAWS + 1 + 4
_MOST_VIEWS = 1 << 16


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
        for name, pair in (("scale", self.scale or (1.0, 1.0)), ("ratio", self.ratio)):
            most = 1.0 if name == "scale" else float("inf")
            are_two = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(map(_is_number, pair))
            if not (are_two and 0 < pair[0] <= pair[1] <= most):
                raise SettingError(f"{name} must be two numbers, 0 < low <= high <= {most}, got {pair!r}")
        for name, value, most in (
            ("flip", self.flip, 1.0),
            ("brightness", self.brightness, float("inf")),
            ("contrast", self.contrast, float("inf")),
            ("saturation", self.saturation, float("inf")),
            ("hue", self.hue, 0.5),
        ):
            if not (_is_number(value) and 0 <= value <= most):
                raise SettingError(f"{name} must be from 0 to {most}, got {value!r}")

    @property
    def jitters(self) -> bool:
        """Whether colours change."""
        return max(self.brightness, self.contrast, self.saturation, self.hue) > 0


@dataclass(frozen=True, slots=True)
class Draws:
    """What each of n samples gets.

    Attributes:
        boxes: int64 [n, 4]: left, top, width, height of the crop, in pixels of the stored picture.
        mirrored: bool [n].
        colors: float64 [n, 4]: factors of brightness, contrast and saturation, and the shift of hue.
    """

    boxes: npt.NDArray[np.int64]
    mirrored: npt.NDArray[np.bool_]
    colors: Floats


def draw(
    settings: RandomAugmentation,
    stored: Size | Integers,
    size: Size,
    seed: int,
    epoch: int,
    ids: npt.NDArray[np.int64],
) -> Draws:
    """What the samples `ids` get in `epoch`, served as `size`; `stored` as of `crop_boxes`."""
    uniform = uniforms(seed, epoch, ids, _DRAWS)
    ranges = np.array([settings.brightness, settings.contrast, settings.saturation, settings.hue])
    low = np.maximum(0, 1 - ranges)
    low[3], high = -settings.hue, 1 + ranges
    high[3] = settings.hue
    if settings.scale is None:
        boxes = window_boxes(stored, uniform[:, 2 * _TRIES : _BOX_DRAWS : _TRIES], size)
    else:
        boxes = crop_boxes(stored, uniform[:, :_BOX_DRAWS], settings.scale, settings.ratio)
    return Draws(
        boxes,
        uniform[:, _BOX_DRAWS] < settings.flip,
        low + (high - low) * uniform[:, _BOX_DRAWS + 1 :],
    )


def crop_boxes(
    stored: Size | Integers, draws: Floats, scale: tuple[float, float], ratio: tuple[float, float]
) -> Integers:
    """Boxes of random crops, as `torchvision.transforms.RandomResizedCrop.get_params`.

    Args:
        stored: size of all pictures, or int64 [n, 2], height and width of each.
        draws: [n, 4 * tries], uniform in [0, 1).
        scale, ratio: as of `RandomAugmentation`.

    Returns:
        [n, 4]: left, top, width, height in pixels.
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


def draw_keys(
    ids: npt.NDArray[np.int64], view: int = 0, places: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
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
    """Boxes of `size`, as torchvision's `RandomCrop` takes them.

    Args:
        stored: as of `crop_boxes`.
        draws: [n, 2], uniform in [0, 1), of left and top.

    Returns:
        [n, 4]: left, top, width, height in pixels. Where a picture is smaller it lies in the midst, and the
        box reaches out of it.
    """
    height, width = sides(size)
    room = np.concatenate(_columns(stored)[::-1], axis=1) - (width, height)
    corners = np.where(room < 0, -(-room // 2), np.floor(draws * (room + 1))).astype(np.int64)
    return np.concatenate((corners, np.broadcast_to((width, height), corners.shape)), axis=1)


def shown_boxes(stored: Size | Integers, size: Size, crop_ratio: float) -> Floats:
    """What torchvision's `Resize(size / crop_ratio)` and `CenterCrop(size)` show, in pixels of the picture.

    Args:
        stored: as of `crop_boxes`.

    Returns:
        [n, 4], or [1, 4] of one size: left, top, width, height. Sizes and offsets round as in torchvision
        0.29 (`_compute_resized_output_size`, `center_crop`); where nothing is resized, they are integers.
    """
    rows, columns = sides(resized_side(size, crop_ratio))
    height, width = _columns(stored)
    fills_width = columns * height >= rows * width
    resized = np.concatenate(
        (
            np.where(fills_width, columns, np.floor(rows * width / height)),
            np.where(fills_width, np.floor(columns * height / width), rows),
        ),
        axis=1,
    )
    window = sides(size)[::-1]
    scale = np.concatenate((width, height), axis=1) / resized
    return np.concatenate((np.round((resized - window) / 2) * scale, window * scale), axis=1)


def resized_side(size: Size, crop_ratio: float) -> Size:
    """What a picture is resized to, so that it just covers this, before `size` is cut out of its middle."""
    height, width = sides(size)
    return as_size(round(height / crop_ratio), round(width / crop_ratio))


def _columns(stored: Size | Integers) -> tuple[Integers, Integers]:
    """Height and width, each [n, 1], or [1, 1] of one size."""
    shapes = stored if isinstance(stored, np.ndarray) else np.array([sides(stored)], np.int64)
    return shapes[:, :1], shapes[:, 1:]


def uniforms(seed: int, epoch: int, ids: npt.NDArray[np.int64], count: int) -> Floats:
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


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
