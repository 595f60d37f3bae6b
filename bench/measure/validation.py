"""The pictures that every model is tried on: decoded once, by torchvision's own recipe for validation."""

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import PIL
import torchvision
from torchvision import transforms
from torchvision.datasets.folder import pil_loader

from bench.measure.imagefolder import shape
from precache.errors import DatasetError
from precache.storage import atomic_write

Pixels = npt.NDArray[np.uint8]


def load(files: Sequence[str], size: int, folder: Path, workers: int) -> Pixels:
    """uint8 [n, size, size, 3] of the pictures `files`, RGB: Resize, CenterCrop, by Pillow.

    They are kept in `folder`, in a file that is named after what made them, and read from there as needed.

    Raises:
        DatasetError: a picture cannot be decoded.
    """
    path = folder / f"validation-{_made_by(files, size)}.npy"
    if not path.exists():
        recipe = transforms.Compose(shape("eval", size))

        def decode(file: str) -> Pixels:
            try:
                return np.asarray(recipe(pil_loader(file)))
            except (OSError, SyntaxError, ValueError) as error:
                raise DatasetError(f"{file}: {error}") from error

        with ThreadPoolExecutor(max(1, workers)) as pool, atomic_write(path) as file:
            pixels = np.empty((len(files), size, size, 3), np.uint8)
            for number, picture in enumerate(pool.map(decode, files)):
                pixels[number] = picture
            np.save(file, pixels)
    return cast(Pixels, np.load(path, mmap_mode="r"))


def _made_by(files: Sequence[str], size: int) -> str:
    stats = [(file, (stat := os.stat(file)).st_size, stat.st_mtime_ns) for file in files]
    told = json.dumps([size, PIL.__version__, torchvision.__version__, stats])
    return hashlib.sha256(told.encode()).hexdigest()[:16]
