"""Sizes of pictures: an int is the side of a square, (height, width) a rectangle; text is WIDTHxHEIGHT."""

import re
from typing import TypeAlias

from precache.errors import SettingError, check_range

Size: TypeAlias = int | tuple[int, int]
"""In pixels: the side of a square, or (height, width) of another rectangle."""

_TEXT = re.compile(r"([0-9]+)(?:x([0-9]+))?", re.ASCII)


def check_size(name: str, value: object, most: int) -> Size:
    """`value` as a Size: two equal sides are one, and a list, as JSON has it, is a tuple.

    Raises:
        SettingError: it is neither an integer from 1 to `most` nor two of them.
    """
    if not isinstance(value, (tuple, list)):
        return check_range(name, value, 1, most)  # type: ignore[arg-type]  # it looks
    if len(value) != 2:
        raise SettingError(f"{name} must be an integer, or height and width as (240, 320), got {value!r}")
    height, width = value
    return as_size(
        check_range(f"height of {name}", height, 1, most), check_range(f"width of {name}", width, 1, most)
    )


def parse_size(text: str) -> Size:
    """`448`, or `320x240`, which is 320 wide; SettingError if it is something else."""
    match = _TEXT.fullmatch(text.strip())
    if match is None or max(map(len, match.groups(""))) > 9:  # of more digits Python makes no integer
        raise SettingError(f"--size must be pixels as 448, or WIDTHxHEIGHT as 320x240, got {text!r}")
    return as_size(int(match[2] or match[1]), int(match[1]))


def as_size(height: int, width: int) -> Size:
    """The size of what is `height` x `width` pixels."""
    return height if height == width else (height, width)


def sides(size: Size) -> tuple[int, int]:
    """Height and width."""
    return size if isinstance(size, tuple) else (size, size)


def size_text(size: Size) -> str:
    """The size as text that `parse_size` reads."""
    return f"{size[1]}x{size[0]}" if isinstance(size, tuple) else str(size)
