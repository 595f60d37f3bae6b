"""A source of pictures that stand in a list, with any target and any fields: for tests."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from precache.dataset.columns import Column
from precache.sources.base import SampleRef, Samples, Scan, digest_of

ROOT = Path("listed")
CLASSES = ("bird", "cat", "dog")
SHARES = "train=0.75,val=0.25"
SAMPLES = 24

FIELDS: dict[str, list[Any]] = {
    "width": [row * 7 - 30 for row in range(SAMPLES)],  # called as a key of the tars' .json
    "score": [row / 7 for row in range(SAMPLES)],
    "place": [[row, -row, 0.5] for row in range(SAMPLES)],
    "tokens": [list(range(row % 4)) for row in range(SAMPLES)],
    "corners": [[[row, 1.5, 9, number] for number in range(row % 3)] for row in range(SAMPLES)],
    "caption": ["", "naïve 猫\0\n", *(f"number {row}" for row in range(2, SAMPLES))],
}
"""A field of each kind, of the values of each sample."""

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
"""What the samples are labelled with, for each target, and for `number` twice."""


@dataclass(frozen=True)
class ListedSource:
    """Pictures, encoded or None for one that is missing; `target` is a key of TARGETS."""

    pictures: tuple[bytes | None, ...]
    target: str
    values: Sequence[Any] | None
    fields: Mapping[str, Sequence[Any]]
    root: Path = ROOT

    @property
    def paths(self) -> tuple[Path, ...]:
        """No file at all."""
        return ()

    def scan(self) -> Scan:
        """The list."""
        kind = "number" if self.target == "vector" else self.target
        labels = [-1] * len(self.pictures) if kind != "class" or self.values is None else [*self.values]
        refs = [
            SampleRef(row, f"{row}.png", labels[row], -1 if data is None else len(data))
            for row, data in enumerate(self.pictures)
        ]
        targets = None if kind in ("class", "none") or self.values is None else Column.of(self.values)
        columns = {name: Column.of(values) for name, values in self.fields.items()}
        samples = Samples.of(refs, targets, columns)
        classes = CLASSES if kind.startswith("class") else ()
        return Scan(self, classes, samples, (), len(refs), digest_of(samples, classes), target=kind)

    def read(self, ref: SampleRef, max_pixels: int) -> bytes:
        """The picture."""
        from precache.errors import ImageError

        data = self.pictures[ref.id]
        if data is None:
            raise ImageError(self.where(ref), "is not there")
        return data

    def where(self, ref: SampleRef) -> str:
        """Its row."""
        return f"{self.root}: row {ref.id}"


def listed(
    target: str = "class", fields: Mapping[str, Sequence[Any]] | None = None, missing: Sequence[int] = ()
) -> ListedSource:
    """24 pictures of 40 x 32 pixels with all of FIELDS, or these, labelled as TARGETS says."""
    pictures = tuple(None if row in missing else _picture(row) for row in range(SAMPLES))
    return ListedSource(pictures, target, TARGETS[target], FIELDS if fields is None else fields)


def encoded(picture: Image.Image) -> bytes:
    """As PNG."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def _picture(row: int) -> bytes:
    pixels = np.random.default_rng(row + 1).integers(0, 256, (4, 5, 3), np.uint8)
    return encoded(Image.fromarray(pixels).resize((40, 32)))
