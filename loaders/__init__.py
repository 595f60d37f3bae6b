"""Loaders for training code, one contract over every backend.

import loaders

with loaders.build("data/shards", batch_size=256, device="cuda") as loader:
    for epoch in range(90):
        for images, labels in loader:
            ...
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from precache.packages import check_package

if TYPE_CHECKING:
    from loaders.image_dataset import ImageDataset
try:
    from loaders.augment import RandomAugmentation
    from loaders.batch import Batch
    from loaders.build import build
    from loaders.loader import Loader
    from loaders.settings import Ranks, Reading, Sampling, Serving

    if find_spec("torchvision") is None:
        raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")
except ImportError as error:
    check_package(error, "loaders", "loaders")
    raise

__all__ = [
    "Batch",
    "ImageDataset",
    "Loader",
    "RandomAugmentation",
    "Ranks",
    "Reading",
    "Sampling",
    "Serving",
    "build",
]


def __getattr__(name: str) -> object:
    """Import ImageDataset at its first use: torchvision, its base, takes as long to import as torch."""
    if name != "ImageDataset":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from loaders.image_dataset import ImageDataset

    return ImageDataset


def __dir__() -> list[str]:
    return [*globals(), "ImageDataset"]
