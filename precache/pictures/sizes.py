"""Sizes of pictures: an int for a square, (height, width) for a rectangle, and WIDTHxHEIGHT as text."""

import re
from typing import TypeAlias

from precache.errors import SettingError, check_range

Size: TypeAlias = int | tuple[int, int]
"""Size in pixels: the side of a square, or (height, width) of a rectangle that is no square."""

_TEXT = re.compile(r"([0-9]+)(?:x([0-9]+))?", re.ASCII)


def check_size(name: str, value: object, max_side: int) -> Size:
    """Convert the value of a setting to a Size; two equal sides become an int, and a list becomes a tuple.

    Args:
        name: name of the setting, for messages.
        value: value to convert.
        max_side: maximal length of a side.

    Raises:
        SettingError: the value is neither an integer from 1 to `max_side`, nor two of these.
    """
    if not isinstance(value, (tuple, list)):
        return check_range(name, value, 1, max_side)  # type: ignore[arg-type]  # which it checks
    if len(value) != 2:
        raise SettingError(f"{name} must be an integer, or height and width as (240, 320), got {value!r}")
    height = check_range(f"height of {name}", value[0], 1, max_side)
    width = check_range(f"width of {name}", value[1], 1, max_side)
    return as_size(height, width)


def parse_size(text: str) -> Size:
    """Parse '448', or '320x240', which is 320 wide; SettingError for any other text."""
    match = _TEXT.fullmatch(text.strip())
    if match is None or max(map(len, match.groups(""))) > 9:  # Python refuses to parse very many digits
        raise SettingError(f"--size must be pixels as 448, or WIDTHxHEIGHT as 320x240, got {text!r}")
    return as_size(int(match[2] or match[1]), int(match[1]))


def as_size(height: int, width: int) -> Size:
    """Size of a picture of `height` x `width` pixels: an int if it is square."""
    return height if height == width else (height, width)


def sides(size: Size) -> tuple[int, int]:
    """Height and width of a size."""
    return size if isinstance(size, tuple) else (size, size)


def size_text(size: Size) -> str:
    """Size as text that `parse_size` parses."""
    return f"{size[1]}x{size[0]}" if isinstance(size, tuple) else str(size)
