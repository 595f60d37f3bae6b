"""Loaders for training code, one contract over every backend.

import loaders

with loaders.build("data/shards", batch_size=256, device="cuda") as loader:
    for epoch in range(90):
        for images, labels in loader:
            ...
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from precache.packages import check_package

if TYPE_CHECKING:
    from loaders.augment.functions import per_picture
    from loaders.augment.policies import AUGMENTATIONS, RandomAugmentation
    from loaders.batch import Batch
    from loaders.building import build
    from loaders.image_dataset import ImageDataset
    from loaders.loader import Loader
    from loaders.settings import Ranks, Reading, Sampling, Serving

__all__ = [
    "AUGMENTATIONS",
    "Batch",
    "ImageDataset",
    "Loader",
    "RandomAugmentation",
    "Ranks",
    "Reading",
    "Sampling",
    "Serving",
    "build",
    "per_picture",
]
_MODULES = {
    "AUGMENTATIONS": "augment.policies",
    "Batch": "batch",
    "ImageDataset": "image_dataset",
    "Loader": "loader",
    "RandomAugmentation": "augment.policies",
    **dict.fromkeys(("Ranks", "Reading", "Sampling", "Serving"), "settings"),
    "build": "building",
    "per_picture": "augment.functions",
}
"""Modules of the public names, none of which has such a name: importing it would hide the name."""


for _package in ("torch", "torchvision", "cv2", "psutil"):
    if find_spec(_package) is None:
        _missing = ModuleNotFoundError(f"No module named {_package!r}", name=_package)
        check_package(_missing, "loaders", "loaders")


def __getattr__(name: str) -> object:
    """Import a public name at its first use: what uses a part of this package starts without the others."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(f"loaders.{_MODULES[name]}"), name)
    except ImportError as error:
        check_package(error, "loaders", "loaders")
        raise
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
