"""Loaders for training code, one contract over every backend.

import loaders

with loaders.build("data/shards", batch_size=256, device="cuda") as loader:
    for epoch in range(90):
        for images, labels in loader:
            ...
"""

from precache.errors import MissingDependencyError

try:
    from loaders.augment import RandomAugmentation
    from loaders.batch import Batch
    from loaders.build import build
    from loaders.image_dataset import ImageDataset
    from loaders.loader import Loader
    from loaders.read import BACKENDS, READS
    from loaders.settings import Ranks, Reading, Sampling, Serving
except ModuleNotFoundError as error:
    if error.name not in ("cv2", "torch"):  # of the extra; anything else is a fault of ours
        raise
    raise MissingDependencyError(
        f"loaders need {error.name}, which is not installed; run: pip install 'precache[loaders]'"
    ) from None

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
