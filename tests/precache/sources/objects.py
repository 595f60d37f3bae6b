"""Datasets as people write them, of a tree's pictures; importable, for worker processes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image


class Items:
    """Anything with `__len__` and `__getitem__`."""

    def __init__(self, items: Sequence[Any], **attributes: Any) -> None:
        self.items = items
        self.asked: list[int] = []
        for name, value in attributes.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        self.asked.append(row)
        item = self.items[row]
        if isinstance(item, Exception):
            raise item
        return item


class Tensor:
    """What is known of torch's without importing it."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape = array, array.shape

    def detach(self) -> "Tensor":
        return self

    def cpu(self) -> "Tensor":
        return self

    def numpy(self) -> Any:
        return self.array

    def tolist(self) -> Any:
        return self.array.tolist()


def opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        image.load()
        return image


def picture(shade: int) -> Image.Image:
    return Image.new("RGB", (8, 8), (shade, shade, shade))


def numbered(values: list[Any], **attributes: Any) -> Items:
    return Items([(picture(row), value) for row, value in enumerate(values)], **attributes)
