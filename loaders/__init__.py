"""Loaders for training code, one contract over every backend.

import loaders

with loaders.build("data/shards", batch_size=256, device="cuda") as loader:
    for epoch in range(90):
        for images, labels in loader:
            ...
"""

from precache.packages import check_package

try:
    from loaders.augment import RandomAugmentation
    from loaders.batch import Batch
    from loaders.build import build
    from loaders.image_dataset import ImageDataset
    from loaders.loader import Loader
    from loaders.read import BACKENDS, READS
    from loaders.settings import Ranks, Reading, Sampling, Serving
except ImportError as error:
    check_package(error, "loaders", "loaders")
    raise

__all__ = [
    "BACKENDS",
    "READS",
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
