"""The recipe of a conversion: every setting that changes the bytes of a converted dataset."""

import csv
import io
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from PIL import ImageColor

from precache.errors import SettingError, check_choice, check_range
from precache.formats import FORMATS
from precache.pictures.images import (
    CHANNELS,
    FITS,
    KEEPING_FITS,
    MAX_SIZE,
    RESAMPLING,
    Color,
    Rendering,
    Size,
    check_size,
    sides,
    size_text,
)
from precache.pictures.reading import MAX_PIXELS

DECODES = ("full", "scaled")
DEFAULT_MAX_REJECTS = 0.01
DEFAULT_SPLITS = "train=1"
DEFAULT_SIZE = 448  # pixels: twice the 224 of common models
DEFAULT_QUALITY = 95
_SPLIT_LIST = re.compile(r"list:[0-9a-f]{64}")
SPLIT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{,63}")
"""Pattern of a split's name, with which the names of its files begin."""
_SPLIT = re.compile(rf"({SPLIT_NAME.pattern})=([0-9.]+)")
# a share as people write it: 0.8, 80/20, train:80%
_SHARE = re.compile(rf"(?:({SPLIT_NAME.pattern})[=:\s]+)?([0-9]{{1,9}}(?:\.[0-9]{{0,9}})?|\.[0-9]{{1,9}})")
_USUAL_SPLITS = ("train", "val", "test")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The settings by which a raw tree becomes a converted dataset, checked when it is made.

    Attributes:
        format: `shards`, `webdataset` or `dali`.
        size: stored size in pixels, 1 to 8,192: the most that the shorter or longer side of a picture keeps,
            see `fit`; or the side of a square, or (height, width), that all pictures have.
        quality: JPEG quality of `webdataset` and `dali`, 1 to 100. From 95 on, colour is stored
            in full resolution (4:4:4), below that in a quarter of it (4:2:0).
        shard_bytes: most decoded pixels per shard, in bytes; `keep` counts each picture as one of 4:3 and no
            smaller than `size`. It is the same for all formats, so shard k holds the same samples in each.
        seed: seed of the order in which samples are written, and of the splits.
        splits: names and shares, as `train=0.8,val=0.2`; the shares sum to 1. Each class is split
            by them. A source with `train` and `val` folders keeps its own; `list:` and a SHA-256
            stand for a list file (see `precache.sources.splits`).
        fit: `keep`: the whole picture, shrunk until its shorter side is at most `size`, an integer;
            `keep-longer`: until its longer side is. `crop`: resized until it covers `size`, then the centre;
            `pad`: until it fits into `size`, between black bars; `stretch`: both sides to `size`.
        enlarge: whether `keep` and `keep-longer` enlarge smaller pictures to `size`; the others always do.
        resample: `bilinear`, `bicubic`, `lanczos` or `area`, all antialiased.
        background: colour that transparency is composited on, a CSS name or `#rrggbb`.
        decode: `full`, or `scaled`: JPEGs of at least five times `size` are decoded at 1/2, 1/4 or
            1/8 of their sides, which is faster and a little less exact.
        allow_truncated: convert damaged JPEGs, with grey where data is missing.
        max_pixels: most pixels of a picture; a larger one is rejected by its header, before it is decoded.
        channels: `rgb`; or `grey`, colour as Pillow converts it to L.

    Raises:
        SettingError: a value is out of range or unknown.
    """

    format: str
    size: Size = DEFAULT_SIZE
    quality: int = DEFAULT_QUALITY
    shard_bytes: int = 64 * 2**20
    seed: int = 0
    splits: str = DEFAULT_SPLITS
    fit: str = "keep"
    enlarge: bool = False
    resample: str = "lanczos"
    background: str = "white"
    decode: str = "full"
    allow_truncated: bool = False
    max_pixels: int = MAX_PIXELS
    channels: str = "rgb"

    def __post_init__(self) -> None:
        check_choice("format", self.format, FORMATS)
        object.__setattr__(self, "size", check_size("size", self.size, MAX_SIZE))
        for name, low, high in (
            ("quality", 1, 100),
            ("shard_bytes", 1, None),
            ("seed", 0, None),
            ("max_pixels", 1, None),
        ):
            object.__setattr__(self, name, check_range(name, getattr(self, name), low, high))
        check_choice("fit", self.fit, FITS)
        if self.fit in KEEPING_FITS and isinstance(self.size, tuple):
            raise SettingError(
                f"fit {self.fit} takes one side, as size {DEFAULT_SIZE}, got {size_text(self.size)}",
                remedy="give one number, or choose fit crop, pad or stretch",
            )
        check_choice("resample", self.resample, RESAMPLING)
        check_choice("decode", self.decode, DECODES)
        check_choice("channels", self.channels, CHANNELS)
        parse_color(self.background)
        for name in ("allow_truncated", "enlarge"):
            if not isinstance(getattr(self, name), bool):
                raise SettingError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.enlarge and self.fit not in KEEPING_FITS:
            fits = " and ".join(KEEPING_FITS)
            raise SettingError(f"enlarge is for fit {fits}; fit {self.fit} enlarges as it is")
        if not isinstance(self.splits, str):
            raise SettingError(f"splits must be shares as 'train=0.8,val=0.2', got {self.splits!r}")
        if not self.has_split_list:
            parse_splits(self.splits)

    def to_flags(self) -> str:
        """Return the flags of `precache convert` that give this recipe, to paste into a shell."""
        defaults = {field.name: field.default for field in fields(self)}
        changed = {name: value for name, value in asdict(self).items() if value != defaults[name]}
        for name in self.unused_settings:
            changed.pop(name, None)
        if self.has_split_list:
            changed["splits"] = "LIST.csv"
        if "size" in changed:
            changed["size"] = size_text(self.size)
        return format_flags(changed)

    @property
    def unused_settings(self) -> dict[str, str]:
        """Settings that change nothing beside the others, each with the reason."""
        if FORMATS[self.format].holds_pixels:
            return {"quality": f"is of JPEGs, and format {self.format} holds pixels"}
        return {}

    @property
    def has_split_list(self) -> bool:
        """Whether a list file says which sample belongs to which split."""
        return _SPLIT_LIST.fullmatch(self.splits) is not None

    @property
    def rendering(self) -> Rendering:
        """The settings that say how a picture becomes pixels."""
        return Rendering(
            size=self.size,
            fit=self.fit,
            enlarge=self.enlarge,
            resample=self.resample,
            background=parse_color(self.background),
            allow_truncated=self.allow_truncated,
            scaled_decode=self.decode == "scaled",
            max_pixels=self.max_pixels,
            channels=self.channels,
        )

    @property
    def samples_per_shard(self) -> int:
        """Largest number of samples in a shard; at least one."""
        return max(1, self.shard_bytes // self.picture_bytes)

    @property
    def stored_size(self) -> Size | None:
        """Size of every stored picture; None if sizes vary."""
        return None if self.fit in KEEPING_FITS else self.size

    @property
    def picture_bytes(self) -> int:
        """Bytes of a picture's pixels; for fit `keep` of a large 4:3 picture, for `keep-longer` the most."""
        height, width = sides(self.size)
        pixels_bytes = height * width * CHANNELS[self.channels]
        return pixels_bytes * 4 // 3 if self.fit == "keep" else pixels_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values; `Recipe(**recipe.to_json()) == recipe`."""
        size = list(self.size) if isinstance(self.size, tuple) else self.size
        return {**asdict(self), "size": size}


def flag_name(name: str) -> str:
    """Return the flag of `precache convert` for a setting."""
    return "--field" if name == "fields" else "--" + name.replace("_", "-")


def format_flags(settings: Mapping[str, Any]) -> str:
    """Return settings as flags of `precache convert`, to paste into a shell; a list becomes a line of CSV."""
    flags = []
    for name, value in settings.items():
        if value is True:
            flags.append(flag_name(name))
            continue
        text = str(value)
        if isinstance(value, list):
            line = io.StringIO()
            csv.writer(line, lineterminator="").writerow(value)
            text = line.getvalue()
        flags.append(f"{flag_name(name)} {shlex.quote(text)}")
    return " ".join(flags)


def parse_splits(text: str) -> dict[str, float]:
    """Return shares by name from a text like `train=0.8,val=0.2`; SettingError unless they sum to 1."""
    matches = [_SPLIT.fullmatch(part.strip()) for part in text.split(",")]
    try:
        shares = {match[1]: float(match[2]) for match in matches if match is not None}
    except ValueError:
        shares = {}
    if len(shares) != len(matches) or min(shares.values()) <= 0 or abs(sum(shares.values()) - 1) > 1e-9:
        raise SettingError(
            f"splits must be shares that sum to 1, as in {suggest_splits(text)!r}, got {text!r}"
        )
    return shares


def looks_like_splits(text: str) -> bool:
    """Whether `text` is meant as shares, and not as the name of a file."""
    return "=" in text or re.search("[A-Za-z]", text) is None


def suggest_splits(text: str) -> str:
    """Return shares that sum to 1 from the names and numbers in `text`: 'train=0.8,val=0.2' for '80/20'."""
    pairs = _SHARE.findall(text)
    names = [name or usual for (name, _), usual in zip(pairs, _USUAL_SPLITS, strict=False)]
    numbers = [float(number) for _, number in pairs]
    if len(numbers) == 1 and numbers[0] > 1:
        numbers = [numbers[0] / 100]
    unused = [name for name in _USUAL_SPLITS if name not in names]
    if sum(numbers) < 1 and unused:  # the rest becomes a split, too
        names.append(unused[0])
        numbers.append(1 - sum(numbers))
    if len(numbers) < 2 or len(set(names)) < len(numbers) or min(numbers) <= 0:
        return "train=0.8,val=0.2"
    shares = [round(number / sum(numbers), 4) for number in numbers[:-1]]
    shares.append(round(1 - sum(shares), 4))
    if min(shares) <= 0:
        return "train=0.8,val=0.2"
    return ",".join(f"{name}={share:g}" for name, share in zip(names, shares, strict=True))


def parse_color(text: str) -> Color:
    """Return the RGB of a CSS colour name or `#rrggbb`; SettingError for anything else."""
    try:
        color = ImageColor.getrgb(text)
    except (ValueError, AttributeError, TypeError):
        color = (0, 0, 0, 0)
    if len(color) != 3:  # no colour, or one with an alpha value
        raise SettingError(f"background must be a colour as 'black' or '#1e90ff', got {text!r}")
    return color
