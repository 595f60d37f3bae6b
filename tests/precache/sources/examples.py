"""Datasets of 24 small pictures in memory for tests, with labels of any target and fields of any kind."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from precache import SourceOptions, open_source
from precache.sources.base import Source
from tests.precache.pictures.drawing import encode_image
from tests.precache.sources.objects import Items

CLASSES = ("bird", "cat", "dog")
SAMPLES = 24

FIELDS: dict[str, list[Any]] = {
    "width": [row * 7 - 30 for row in range(SAMPLES)],  # also the name of a key in the tars' .json
    "score": [row / 7 for row in range(SAMPLES)],
    "place": [[row, -row, 0.5] for row in range(SAMPLES)],
    "tokens": [list(range(row % 4)) for row in range(SAMPLES)],
    "corners": [[[row, 1.5, 9, number] for number in range(row % 3)] for row in range(SAMPLES)],
    "caption": ["", "naïve 猫\0\n", *(f"number {row}" for row in range(2, SAMPLES))],
}
"""Values of each sample in a field of each kind."""

KINDS = {
    "width": "int",
    "score": "float",
    "place": "vector",
    "tokens": "ragged",
    "corners": "ragged",
    "caption": "text",
}

TARGETS: dict[str, Any] = {
    "class": [row % 3 for row in range(SAMPLES)],
    "classes": [[number for number in range(3) if row >> number & 1] for row in range(SAMPLES)],
    "number": [row / 3 for row in range(SAMPLES)],
    "vector": [[row, 2 * row] for row in range(SAMPLES)],
    "none": None,
}
"""Labels of the samples for each target; `vector` is the target `number`, too."""


def source_of_pictures(
    pictures: Sequence[bytes | None], target: str, values: Sequence[Any] | None, fields: Mapping[str, Any]
) -> Source:
    """Open a dataset of encoded pictures, or None for missing ones, with labels and fields.

    Args:
        target: a key of TARGETS.
        values: labels of the samples; None for a dataset without labels.
    """
    columns = {"image": pictures, **fields}
    if values is not None:
        columns["label"] = values
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    attributes = {"classes": list(CLASSES)} if target.startswith("class") else {}
    dataset = Items(rows, **attributes)
    options = SourceOptions(
        target="number" if target == "vector" else target,
        label=None if values is None else "label",
        fields=tuple(fields),
    )
    return open_source(dataset, options)


def example_source(
    target: str = "class", fields: Mapping[str, Sequence[Any]] | None = None, missing: Sequence[int] = ()
) -> Source:
    """Open 24 pictures of 40 x 32 pixels with FIELDS, or these fields, and the labels in TARGETS.

    Args:
        missing: rows without a picture.
    """
    pictures = [None if row in missing else _picture(row) for row in range(SAMPLES)]
    return source_of_pictures(pictures, target, TARGETS[target], FIELDS if fields is None else fields)


def _picture(row: int) -> bytes:
    pixels = np.random.default_rng(row + 1).integers(0, 256, (4, 5, 3), np.uint8)
    return encode_image(Image.fromarray(pixels).resize((40, 32)))
