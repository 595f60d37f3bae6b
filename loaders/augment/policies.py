"""Settings of augmentation, by name, and what they draw for each picture."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import torch

from loaders.augment.draws import Floats, Integers, uniforms
from loaders.augment.geometry import Mirrored, fixed_size_boxes, random_boxes
from loaders.augment.operations import Operation, Operations
from loaders.settings import AugmentName
from precache.errors import SettingError, check_range, check_share, is_number
from precache.pictures.images import MAX_SIZE, Size, check_size, sides

_MAX_VIEWS = 64
_MAX_ALPHA = 1000  # of MixUp and CutMix: nearly all draws are one half, and NumPy's fail far above
_JITTERED = {
    "brightness": Operation.BRIGHTNESS,
    "contrast": Operation.CONTRAST,
    "saturation": Operation.SATURATION,
    "hue": Operation.HUE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomAugmentation:
    """Random crop, flip, and what follows them; the defaults are those of `augment="train"`.

    Each picture is cropped and mirrored; then come the policy, jitter of colours, grey, blur, solarize and
    erase, in this order. Crop, flip and jitter are distributed as in torchvision's `RandomResizedCrop`,
    `RandomHorizontalFlip` and `ColorJitter` with arguments of the same names.

    Attributes:
        scale: smallest and largest share of the stored picture's area that a crop has; None: a crop has the
            size that is served, and is not resized.
        ratio: smallest and largest width over height of a crop; unused if `scale` is None.
        flip: probability that a picture is mirrored.
        policy: operations that are drawn from a list. `"trivial"`: one operation of torchvision's
            `TrivialAugmentWide`. `"three"`: grey, solarize or blur, as likely each, DeiT III's ThreeAugment.
            `"rand-m7-mstd0.5-inc1"`: RandAugment as timm writes it. Its keys: m, the magnitude, 0 to 10
            (default 10); n, the number of operations (2); p, the probability of each (0.5); mstd, the
            standard deviation of the magnitude (0; above 100: uniform from 0 to m); mmax, the largest
            magnitude (10); inc, 1 for operations that all get stronger with the magnitude (0).
        jitter: probability that brightness, contrast, saturation and hue change, in an order that is drawn.
        brightness: factors are drawn from 1 - value to 1 + value, at least 0.
        contrast: as brightness.
        saturation: as brightness.
        hue: shifts are drawn from -hue to hue, as a share of the circle; at most 0.5.
        grey: probability that a picture loses its colours.
        blur: probability of a Gaussian blur, whose sigma is drawn from 0.1 to 2 pixels.
        solarize: probability that all values of at least 128 are inverted.
        erase: probability that a rectangle is erased, of 2 to 33% of the picture, as by torchvision's
            `RandomErasing`; to ImageNet's mean colour, (124, 116, 104).
        mixup: alpha of the Beta distribution by which MixUp blends pictures of a batch; 0: no MixUp. Labels
            are mixed as the first view is.
        cutmix: alpha of the Beta distribution by which CutMix puts a part of a picture into another; 0: no
            CutMix.
        views: how many times each picture is drawn, at most 64; or settings of each view.
        size: size that is served of this view; None: that of the loader.

    Raises:
        SettingError: a value is out of range or unknown.
    """

    # the usual values for ImageNet: https://arxiv.org/abs/1409.4842, section 6
    scale: tuple[float, float] | None = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    policy: str | None = None
    jitter: float = 1.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    grey: float = 0.0
    blur: float = 0.0
    solarize: float = 0.0
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    views: "int | Sequence[RandomAugmentation]" = 1
    size: Size | None = None

    def __post_init__(self) -> None:
        if self.scale is not None:
            object.__setattr__(self, "scale", _check_pair("scale", self.scale, 1.0))
        object.__setattr__(self, "ratio", _check_pair("ratio", self.ratio, math.inf))
        for name in ("flip", "jitter", "grey", "blur", "solarize", "erase"):
            check_share(name, getattr(self, name))
        self._check_jitter()
        for name in ("mixup", "cutmix"):
            value = getattr(self, name)
            if not (is_number(value) and 0 <= value <= _MAX_ALPHA):
                raise SettingError(f"{name} must be a number from 0 to {_MAX_ALPHA:,}, got {value!r}")
        if self.policy is not None and self.policy not in ("trivial", "three"):
            parse_rand_augment(self.policy)
        if self.size is not None:
            object.__setattr__(self, "size", check_size("size", self.size, MAX_SIZE))
        if isinstance(self.views, (list, tuple)):
            object.__setattr__(self, "views", tuple(self.views))
            self._check_settings_of_views(self.views)
        else:
            views = check_range("views", self.views, 1, _MAX_VIEWS)  # type: ignore[arg-type]  # it checks
            object.__setattr__(self, "views", views)

    def _check_jitter(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            value = getattr(self, name)
            if not (is_number(value) and 0 <= value < math.inf):
                raise SettingError(f"{name} must be a number of at least 0, got {value!r}")
        if not (is_number(self.hue) and 0 <= self.hue <= 0.5):
            raise SettingError(f"hue must be from 0 to 0.5, got {self.hue!r}")
        if 0 < self.jitter < 1 and not self.jitters:
            raise SettingError(
                f"jitter {self.jitter} is the probability that colours change, and nothing says by how much",
                remedy="give brightness, contrast, saturation or hue",
            )

    def _check_settings_of_views(self, views: "Sequence[RandomAugmentation]") -> None:
        check_range("number of views", len(views), 1, _MAX_VIEWS)
        for number, view in enumerate(views):
            name = f"views[{number}]"
            if not isinstance(view, RandomAugmentation):
                raise SettingError(f"{name} must be a loaders.RandomAugmentation(...), got {view!r}")
            if view.views != 1:
                raise SettingError(f"{name} has views of its own", remedy="give all views in one list")
            if view.mixes:
                raise SettingError(
                    f"{name} has mixup or cutmix, which mix a whole batch", remedy="give them beside views"
                )
        for setting in fields(self):
            is_common = setting.name in ("views", "mixup", "cutmix")
            if not is_common and getattr(self, setting.name) != setting.default:
                raise SettingError(
                    f"{setting.name} is given beside settings of each view",
                    remedy="give it in the settings of each view",
                )

    @property
    def view_settings(self) -> "tuple[RandomAugmentation, ...]":
        """Settings of each view, which have one view themselves."""
        if isinstance(self.views, int):
            return (replace(self, views=1),) * self.views
        return tuple(self.views)

    @property
    def _distinct_views(self) -> "tuple[RandomAugmentation, ...]":
        return (self,) if isinstance(self.views, int) else tuple(self.views)

    @property
    def jitters(self) -> bool:
        """Whether brightness, contrast, saturation or hue change."""
        return self.jitter > 0 and max(self.brightness, self.contrast, self.saturation, self.hue) > 0

    @property
    def has_operations(self) -> bool:
        """Whether a view has anything beside crop and flip."""
        return any(
            view.policy is not None
            or view.jitters
            or max(view.grey, view.blur, view.solarize, view.erase) > 0
            for view in self._distinct_views
        )

    @property
    def mixes(self) -> bool:
        """Whether pictures of a batch are mixed."""
        return self.mixup > 0 or self.cutmix > 0

    @property
    def needs_colour(self) -> tuple[str, ...]:
        """Names of what does nothing on grey pictures: saturation, hue and grey, also those of a policy."""
        policies = {view.policy for view in self._distinct_views if view.policy is not None}
        names = [
            f"{'grey' if name == 'three' else 'saturation'} of policy {name!r}" for name in sorted(policies)
        ]
        for name in ("saturation", "hue", "grey"):
            if any(getattr(view, name) > 0 for view in self._distinct_views):
                names.append(name)
        return tuple(names)


def _check_pair(name: str, pair: object, high: float) -> tuple[float, float]:
    """Return a pair of numbers, in a tuple or list, as a tuple, or raise SettingError."""
    numbers = tuple(pair) if isinstance(pair, (tuple, list)) else ()
    if not (len(numbers) == 2 and all(map(is_number, numbers)) and 0 < numbers[0] <= numbers[1] <= high):
        raise SettingError(f"{name} must be two numbers, 0 < low <= high <= {high}, got {pair!r}")
    return numbers


@dataclass(frozen=True, slots=True)
class RandAugment:
    """RandAugment of timm, as a policy names it; see `RandomAugmentation.policy`.

    Attributes:
        magnitude: strength of the operations.
        steps: number of operations.
        probability: that an operation is applied.
        deviation: standard deviation of the magnitude; above 100: it is uniform from 0 to `magnitude`.
        max_magnitude: bound on drawn magnitudes.
        increasing: whether all operations get stronger with the magnitude.
    """

    magnitude: int = 10
    steps: int = 2
    probability: float = 0.5
    deviation: float = 0.0
    max_magnitude: int = 10
    increasing: bool = False


_MAX_STEPS = 16
_MAX_MAGNITUDE = 30
_RAND_KEYS = ("m", "n", "p", "mstd", "mmax", "inc")


def parse_rand_augment(policy: str) -> RandAugment:
    """Parse a policy such as "rand-m7-mstd0.5-inc1", as `rand_augment_transform` of timm 1.0.31 does.

    Raises:
        SettingError: it is no such policy, or one of its values is out of range.
    """
    if not isinstance(policy, str) or not re.fullmatch(r"rand(-.*)?", policy):
        raise SettingError(
            f"unknown policy {policy!r}; choose 'trivial', 'three' or RandAugment as 'rand-m7-mstd0.5-inc1'"
        )
    numbers: dict[str, float] = {}
    for part in policy.split("-")[1:]:
        match = re.fullmatch(r"([a-z]+?)(\d+(?:\.\d+)?)", part)
        if match is None or match[1] not in _RAND_KEYS:
            raise SettingError(
                f"policy {policy!r}: {part!r} is not one of m, n, p, mstd, mmax, inc with a number, as 'm7'"
            )
        key, number = match[1], float(match[2])
        if key in numbers:
            raise SettingError(f"policy {policy!r}: {key} is given twice")
        if key not in ("p", "mstd") and not number.is_integer():
            raise SettingError(f"policy {policy!r}: {key} must be a whole number")
        numbers[key] = number
    max_magnitude = int(numbers.get("mmax", 10))
    if not 10 <= max_magnitude <= _MAX_MAGNITUDE:
        raise SettingError(f"policy {policy!r}: mmax is from 10 to {_MAX_MAGNITUDE}")
    magnitude = int(numbers.get("m", 10))
    if magnitude > max_magnitude:
        raise SettingError(
            f"policy {policy!r}: magnitudes are 0 to {max_magnitude}",
            remedy=f"timm takes larger ones as {max_magnitude}; 'mmax{_MAX_MAGNITUDE}' beside it allows them",
        )
    steps = int(numbers.get("n", 2))
    if not 1 <= steps <= _MAX_STEPS:
        raise SettingError(f"policy {policy!r}: n is from 1 to {_MAX_STEPS} operations")
    if numbers.get("p", 0.5) > 1:
        raise SettingError(f"policy {policy!r}: p is a probability, from 0 to 1")
    if numbers.get("inc", 0) > 1:
        raise SettingError(f"policy {policy!r}: inc is 0 or 1")
    return RandAugment(
        magnitude=magnitude,
        steps=steps,
        probability=numbers.get("p", 0.5),
        deviation=numbers.get("mstd", 0.0),
        max_magnitude=max_magnitude,
        increasing=numbers.get("inc", 0) == 1,
    )


_DINO_COLOURS = RandomAugmentation(
    jitter=0.8, brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, grey=0.2
)
_DINO_GLOBAL = replace(_DINO_COLOURS, scale=(0.4, 1.0))
_DINO_LOCAL = replace(_DINO_COLOURS, scale=(0.05, 0.4), blur=0.5, size=96)

# Sizes are those that `loaders.build` is given, and so is what pictures are normalised by. No loader smooths
# labels, repeats a sample within a batch as repeated augmentation does, or resizes by a filter other than the
# antialiased bilinear one.
AUGMENTATIONS: dict[AugmentName, RandomAugmentation | None] = {
    "crop": RandomAugmentation(scale=None),
    "eval": None,
    "train": RandomAugmentation(),
    # references/classification of torchvision, as the blog "How to Train State-Of-The-Art Models Using
    # TorchVision's Latest Primitives" calls it (weights IMAGENET1K_V2): --auto-augment ta_wide
    # --random-erase 0.1 --mixup-alpha 0.2 --cutmix-alpha 1.0. Not done here: --train-crop-size 176, which is
    # `size` of `loaders.build`; --label-smoothing 0.1; --ra-sampler with --ra-reps 4. The references erase
    # after normalising, to 0, which is ImageNet's mean colour.
    "torchvision": RandomAugmentation(policy="trivial", erase=0.1, mixup=0.2, cutmix=1.0),
    # "ResNet strikes back", https://arxiv.org/abs/2110.00476, table 2, procedures A1 to A3. RandAugment has
    # magnitude 7 or 6, deviation 0.5, and timm's increasing operations. Not done here: label smoothing 0.1 of
    # A1; repeated augmentation of A1 and A2; size 160 of A3, which is `size` of `loaders.build`; a filter
    # drawn for each resize and each operation, bilinear or bicubic. Validation takes crop_ratio 0.95.
    "timm-a1": RandomAugmentation(policy="rand-m7-mstd0.5-inc1", mixup=0.2, cutmix=1.0),
    "timm-a2": RandomAugmentation(policy="rand-m7-mstd0.5-inc1", mixup=0.1, cutmix=1.0),
    "timm-a3": RandomAugmentation(policy="rand-m6-mstd0.5-inc1", mixup=0.1, cutmix=1.0),
    # DeiT III, https://arxiv.org/abs/2204.07118; augment.py and, for ImageNet-1k, README_revenge.md of
    # https://github.com/facebookresearch/deit: --ThreeAugment --color-jitter 0.3 --mixup .8 --cutmix 1.0
    # --reprob 0.0 --smoothing 0.0. Not done here: --repeated-aug; bicubic resizing; --input-size, which is
    # `size` of `loaders.build`.
    "deit3": RandomAugmentation(
        policy="three", brightness=0.3, contrast=0.3, saturation=0.3, mixup=0.8, cutmix=1.0
    ),
    # SimCLR, https://arxiv.org/abs/2002.05709, appendix A, with colour distortion of strength 1. Sigma of the
    # blur is in pixels, whatever the size. Not done here: bicubic resizing.
    "simclr": RandomAugmentation(
        jitter=0.8, brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, grey=0.2, blur=0.5, views=2
    ),
    # DINO, https://arxiv.org/abs/2104.14294; DataAugmentationDINO in main_dino.py of
    # https://github.com/facebookresearch/dino with its default arguments: two views of the loader's size, 224
    # pixels in DINO, and eight of 96. Not done here: bicubic resizing.
    "dino": RandomAugmentation(
        views=(
            replace(_DINO_GLOBAL, blur=1.0),
            replace(_DINO_GLOBAL, blur=0.1, solarize=0.2),
            *[_DINO_LOCAL] * 8,
        )
    ),
}
"""Settings of each named augmentation, for `dataclasses.replace`; None: the middle of each picture."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Crops, flips and operations that were drawn for several pictures.

    Attributes:
        boxes: int64 [n, 4], left, top, width and height of each crop, in pixels of the stored picture.
        mirrored: bool [n], whether mirrored.
        operations: what follows, in pixels of the served picture.
    """

    boxes: Integers
    mirrored: Mirrored
    operations: Operations


_TRIES = 10  # draws for each crop and each erased rectangle, as in torchvision
_COUNTS = {"box": 4 * _TRIES, "flip": 1, "jitter": 9, "grey": 1, "blur": 2, "solarize": 1, "erase": 41}
"""How many numbers each part takes; those of the policy follow. So a setting changes no draw of another."""
_ENDS = np.cumsum([*_COUNTS.values()])


def draw_augmentation(
    settings: RandomAugmentation, stored: Size | Integers, size: Size, seed: int, epoch: int, ids: Integers
) -> Draws:
    """Draw crop, flip and operations of the samples `ids` in `epoch`, for one view.

    Operations have a column for each step that the settings can ever need: those of the policy first, then
    jitter, grey, blur, solarize and erase.

    Args:
        settings: settings of the view, as of `view_settings`; `size`, `mixup` and `cutmix` are not used.
        stored: size of all pictures, or int64 [n, 2], height and width of each.
        size: size that is served.
        ids: int64 [n], ids of the samples, or keys of `draw_keys`.
    """
    assert isinstance(settings.views, int)
    count = _COUNTS["box"] + _COUNTS["flip"]
    if settings.has_operations:
        count = int(_ENDS[-1]) + _count_policy_draws(settings.policy)
    uniform = uniforms(seed, epoch, ids, count)
    box, flip, jitter, grey, blur, solarize, erase, policy = np.split(uniform, _ENDS, axis=1)
    if settings.scale is None:
        boxes = fixed_size_boxes(stored, box[:, 2 * _TRIES :: _TRIES], size)
    else:
        boxes = random_boxes(stored, box, settings.scale, settings.ratio)

    steps = [_step(np.empty((len(ids), 0), np.int8), np.empty((len(ids), 0)))]
    fill = (0, 0, 0)
    if settings.policy == "trivial":
        steps.append(_draw_trivial(policy))
    elif settings.policy == "three":
        steps.append(_draw_three(policy))
    elif settings.policy is not None:
        steps.append(_draw_rand_augment(parse_rand_augment(settings.policy), policy, size))
        fill = _IMAGENET_MEAN
    if settings.jitters:
        steps.append(_draw_jitter(settings, jitter))
    if settings.grey > 0:
        steps.append(_maybe(Operation.GREY, grey[:, 0] < settings.grey, np.zeros(len(ids))))
    if settings.blur > 0:
        steps.append(_maybe(Operation.BLUR, blur[:, 0] < settings.blur, _sigma(blur[:, 1])))
    if settings.solarize > 0:
        threshold = np.full(len(ids), _THRESHOLD)
        steps.append(_maybe(Operation.SOLARIZE, solarize[:, 0] < settings.solarize, threshold))
    if settings.erase > 0:
        steps.append(_draw_erase(settings.erase, erase, size))
    codes = np.concatenate([step.codes for step in steps], axis=1)
    values = np.concatenate([step.values for step in steps], axis=1)
    return Draws(boxes, flip[:, 0] < settings.flip, Operations(codes, values, fill))


_IMAGENET_MEAN = (124, 116, 104)  # timm's fill: 255 * (0.485, 0.456, 0.406), rounded
_THRESHOLD = 128.0  # from which on values are inverted, in DeiT III and DINO


def _sigma(draws: Floats) -> Floats:
    """Return sigmas of blurs, in pixels: uniform from 0.1 to 2, as in SimCLR, DINO and DeiT III."""
    sigma: Floats = 0.1 + 1.9 * draws
    return sigma


def _step(codes: npt.NDArray[np.integer], values: Floats) -> Operations:
    """Return steps with `codes` [n, steps] and values [n, steps] or [n, steps, 4]; IDENTITY gets zeros."""
    if values.ndim == 2:
        values = np.pad(values[..., None], ((0, 0), (0, 0), (0, 3)))
    return Operations(codes.astype(np.int8), np.where((codes == Operation.IDENTITY)[..., None], 0.0, values))


def _maybe(operation: Operation, applied: npt.NDArray[np.bool_], values: Floats) -> Operations:
    """Return a step that applies an operation to the pictures `applied`, bool [n].

    Args:
        values: float64 [n] or [n, 4].
    """
    return _step(np.where(applied, operation, Operation.IDENTITY)[:, None], values[:, None])


def _draw_jitter(settings: RandomAugmentation, draws: Floats) -> Operations:
    """Draw factors of brightness, contrast and saturation, the shift of hue, and their order.

    They are those of `RandomApply([ColorJitter(...)], jitter)` of torchvision 0.29.

    Args:
        draws: [n, 9]: whether at all, the order, and the values.
    """
    names = [name for name in _JITTERED if getattr(settings, name) > 0]
    codes = np.array([_JITTERED[name] for name in names])
    numbers = [number for number, name in enumerate(_JITTERED) if name in names]
    order = draws[:, 1:5][:, numbers].argsort(axis=1)
    ranges = np.array([getattr(settings, name) for name in names])
    neutral = np.where(codes == Operation.HUE, 0.0, 1.0)
    low = np.where(codes == Operation.HUE, -ranges, np.maximum(1 - ranges, 0))
    values = low + (neutral + ranges - low) * draws[:, 5:9][:, numbers]
    applied = draws[:, :1] < settings.jitter
    return _step(
        np.where(applied, codes[order], Operation.IDENTITY), np.take_along_axis(values, order, axis=1)
    )


def _draw_erase(probability: float, draws: Floats, size: Size) -> Operations:
    """Draw rectangles as torchvision's `RandomErasing` does with its defaults; no rectangle if none fits.

    Args:
        draws: [n, 41]: whether at all, and those of ten tries.
        size: size that is served.
    """
    rows, columns = sides(size)
    area_draws, ratio_draws, left_draws, top_draws = np.split(draws[:, 1:], 4, axis=1)
    area = rows * columns * (0.02 + (0.33 - 0.02) * area_draws)
    low, high = np.log((0.3, 3.3))
    aspect = np.exp(low + (high - low) * ratio_draws)  # height over width
    height, width = np.round(np.sqrt(area * aspect)), np.round(np.sqrt(area / aspect))
    fits = (height < rows) & (width < columns)
    left = np.floor(left_draws * (columns - width + 1))
    top = np.floor(top_draws * (rows - height + 1))
    pictures, first = np.arange(len(draws)), fits.argmax(axis=1)  # the first try that fits
    boxes = np.stack((left, top, width, height), axis=2)[pictures, first]
    return _maybe(Operation.ERASE, (draws[:, 0] < probability) & fits[pictures, first], boxes)


def _count_policy_draws(policy: str | None) -> int:
    if policy is None:
        return 0
    return 2 if policy in ("trivial", "three") else 4 * parse_rand_augment(policy).steps


def _draw_three(draws: Floats) -> Operations:
    """Draw grey, solarize or blur, as likely each; `draws` are [n, 2], the choice and the sigma."""
    operations = np.array([Operation.GREY, Operation.SOLARIZE, Operation.BLUR])
    codes = operations[(draws[:, 0] * 3).astype(int)]
    values = np.select(
        [codes == Operation.SOLARIZE, codes == Operation.BLUR],
        [np.full(len(draws), _THRESHOLD), _sigma(draws[:, 1])],
    )
    return _step(codes[:, None], values[:, None])


_BINS = 31
_SHARES = np.tile(np.linspace(0, 1, _BINS), 2)
_SIGNS = np.repeat([1, -1], _BINS)
_SIGNED = _SHARES * _SIGNS
# torchvision truncates numbers in float32; the middle one is 15.999999 there
_SHIFTS = np.where(_SHARES == 0.5, 15, np.trunc(32 * _SHARES)) * _SIGNS
_TRIVIAL: dict[Operation, Floats] = {
    Operation.IDENTITY: 0 * _SHARES,
    Operation.SHEAR_X: 0.99 * _SIGNED,
    Operation.SHEAR_Y: 0.99 * _SIGNED,
    Operation.TRANSLATE_X: _SHIFTS,
    Operation.TRANSLATE_Y: _SHIFTS,
    Operation.ROTATE: 135 * _SIGNED,
    Operation.BRIGHTNESS: 1 + 0.99 * _SIGNED,
    Operation.SATURATION: 1 + 0.99 * _SIGNED,
    Operation.CONTRAST: 1 + 0.99 * _SIGNED,
    Operation.SHARPNESS: 1 + 0.99 * _SIGNED,
    Operation.POSTERIZE: 8 - np.round(6 * _SHARES),
    Operation.SOLARIZE: np.tile(np.linspace(255, 0, _BINS), 2),
    Operation.AUTOCONTRAST: 0 * _SHARES,
    Operation.EQUALIZE: 0 * _SHARES,
}
"""Operations of torchvision's TrivialAugmentWide, and their values: 31 with sign +, then 31 with sign -."""
_TRIVIAL_CODES = np.array([*_TRIVIAL])
_TRIVIAL_VALUES = np.stack([*_TRIVIAL.values()])  # [14, 62]


def _draw_trivial(draws: Floats) -> Operations:
    """Draw one operation of TrivialAugmentWide; `draws` are [n, 2], the operation and its value."""
    rows = (draws[:, 0] * len(_TRIVIAL_CODES)).astype(int)
    columns = (draws[:, 1] * 2 * _BINS).astype(int)
    return _step(_TRIVIAL_CODES[rows][:, None], _TRIVIAL_VALUES[rows, columns][:, None])


def _draw_rand_augment(policy: RandAugment, draws: Floats, size: Size) -> Operations:
    """Draw the operations of RandAugment, as timm's `RandAugment` and `AugmentOp` do.

    Args:
        draws: [n, 4 * steps]: for each step which operation, whether it is applied, magnitude and sign.
        size: size that is served.
    """
    choice, chance, strength, sign = np.moveaxis(draws.reshape(len(draws), policy.steps, 4), 2, 0)
    magnitude = np.full(choice.shape, float(policy.magnitude))
    if policy.deviation > 100:
        magnitude = magnitude * strength
    elif policy.deviation > 0:
        normal = torch.special.ndtri(torch.from_numpy(strength.copy())).numpy()
        magnitude = magnitude + policy.deviation * normal
    magnitude = np.clip(magnitude, 0, policy.max_magnitude)
    values = _rand_augment_values(magnitude / 10, np.where(sign > 0.5, -1.0, 1.0), policy.increasing, size)
    codes = np.array([*values])
    numbers = (choice * len(codes)).astype(int)
    drawn = np.take_along_axis(np.stack([*values.values()], axis=2), numbers[..., None], axis=2)[..., 0]
    return _step(np.where(chance < policy.probability, codes[numbers], Operation.IDENTITY), drawn)


def _rand_augment_values(
    strength: Floats, sign: Floats, increasing: bool, size: Size
) -> dict[Operation, Floats]:
    """Return what each operation of timm's RandAugment would have as its value: float64, as `strength`.

    `_RAND_TRANSFORMS`, `_RAND_INCREASING_TRANSFORMS` and `LEVEL_TO_ARG` of
    https://github.com/huggingface/pytorch-image-models/blob/main/timm/data/auto_augment.py. Shifts are
    rounded to whole pixels, which timm's are not. Its positive shifts are to the left and up.

    Args:
        strength: magnitudes divided by 10.
        sign: 1 or -1, of the same shape.
    """
    rows, columns = sides(size)
    bits, threshold = np.floor(strength * 4), np.minimum(256, np.floor(strength * 256))
    factor = strength * 1.8 + 0.1
    if increasing:
        bits, threshold = np.maximum(4 - bits, 0), 256 - threshold
        factor = np.maximum(0.1, 1 + sign * strength * 0.9)
    nothing = np.zeros(strength.shape)
    return {
        Operation.AUTOCONTRAST: nothing,
        Operation.EQUALIZE: nothing,
        Operation.INVERT: nothing,
        Operation.ROTATE: sign * strength * 30,
        Operation.POSTERIZE: np.minimum(bits, 8),
        Operation.SOLARIZE: threshold,
        Operation.SOLARIZE_ADD: np.minimum(128, np.floor(strength * 110)),
        Operation.SATURATION: factor,
        Operation.CONTRAST: factor,
        Operation.BRIGHTNESS: factor,
        Operation.SHARPNESS: factor,
        Operation.SHEAR_X: sign * strength * 0.3,
        Operation.SHEAR_Y: sign * strength * 0.3,
        Operation.TRANSLATE_X: np.round(-sign * strength * 0.45 * columns),
        Operation.TRANSLATE_Y: np.round(-sign * strength * 0.45 * rows),
    }
