"""Pictures whose pixels determine their masks and boxes, wherever crops and flips put them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from precache.pictures.jpeg import Pixels

SIZES = ((60, 44), (44, 60), (50, 50), (97, 33), (40, 40), (33, 64))
"""Width and height of the pictures, in turns."""
PICTURES = 12
BLOCK, STEP = 11, 80
BOXES = ((10, 8, 26, 24), (-7, 8, 9, 30), (12, -5, 31, 11), (20, 20, 200, 200))
"""Boxes (left, top, right, bottom) in turns; each is a bright square, and may reach out of the picture."""


@dataclass(frozen=True)
class Trees:
    """Tree of photos, and tree of their masks, with the same names: photos/a/00.png and masks/a/00.png."""

    photos: Path
    masks: Path


def labels_of(number: int) -> Pixels:
    """Draw the mask of a picture: uint8 [height, width], labels 0 to 3 in blocks."""
    width, height = SIZES[number % len(SIZES)]
    blocks = np.random.default_rng(number).integers(0, 4, (height // BLOCK + 1, width // BLOCK + 1))
    return np.kron(blocks, np.ones((BLOCK, BLOCK), int))[:height, :width].astype(np.uint8)


def draw_trees(root: Path) -> Trees:
    """Write pictures of grey STEP * label, and masks of every supported kind; EXIF turns one picture."""
    trees = Trees(root / "photos", root / "masks")
    for number in range(PICTURES):
        folder = "ab"[number % 2]
        for tree in (trees.photos, trees.masks):
            (tree / folder).mkdir(parents=True, exist_ok=True)
        labels = labels_of(number)
        picture = Image.fromarray(labels * STEP).convert("RGB")
        exif = Image.Exif()
        if number == 5:  # stored turned to the left; EXIF says to turn it to the right
            picture = picture.transpose(Image.Transpose.ROTATE_90)
            exif[ExifTags.Base.Orientation] = 6
        picture.save(trees.photos / folder / f"{number:02}.png", exif=exif)
        save_mask(labels, number, trees.masks / folder / f"{number:02}")
    return trees


def save_mask(labels: Pixels, number: int, stem: Path) -> None:
    """Save a mask as 8-bit grey, with a palette, with 16 bits, or as a TIFF, in turns."""
    mask = Image.fromarray(labels)
    if number % 4 == 1:
        mask = Image.frombytes("P", mask.size, mask.tobytes())
        mask.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 9, 9])
    elif number % 4 == 2:
        mask = Image.fromarray(labels.astype(np.uint16))
    mask.save(stem.with_suffix(".tif" if number % 4 == 3 else ".png"))


def draw_box_picture(number: int) -> Image.Image:
    """Draw a black picture with a white square in its box."""
    width, height = SIZES[number % len(SIZES)]
    pixels = np.zeros((height, width, 3), np.uint8)
    left, top, right, bottom = BOXES[number % len(BOXES)]
    pixels[max(top, 0) : bottom, max(left, 0) : right] = 255
    return Image.fromarray(pixels)


def check_labels(picture: Any, mask: Any, tolerance: float = 4, reach: int = 1) -> float:
    """Check that a picture has the grey of the mask's label wherever the label is the same all around.

    Args:
        tolerance: largest difference of a pixel.
        reach: how many pixels around a pixel have to have its label.

    Returns:
        The share of the picture that was checked.
    """
    grey, labels = np.asarray(picture, float), np.asarray(mask).astype(int)
    assert grey.shape == labels.shape
    window = (2 * reach + 1, 2 * reach + 1)
    around = np.lib.stride_tricks.sliding_window_view(labels, window)
    inside = around.min(axis=(2, 3)) == around.max(axis=(2, 3))
    assert reach > 1 or inside.mean() > 0.1
    error = np.abs(grey - labels * STEP)[reach:-reach, reach:-reach][inside]
    assert not error.size or error.max() <= tolerance
    return float(inside.mean())
