"""Compare served pictures with torchvision's transforms of the original pictures, by PSNR in dB.

The boxes of random crops are drawn by us (another test compares their distribution with torchvision's). The
expected crop is Pillow's `crop` and one antialiased `resize`, as in `RandomResizedCrop`; the expected
validation picture is `Resize` and `CenterCrop`. Pictures that are stored smaller than the original are
further away: each case has its own lowest and mean PSNR.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

import loaders
from bench.lab.stored_sizes import reference_pixels
from loaders.dataset import RAW, open_split
from precache.pictures import images
from precache.pictures.jpeg import psnr

Build = Callable[..., loaders.Loader]


def check_validation(build: Build, tree: Path, size: int, worst: float, mean: float) -> None:
    """Check pictures without augmentation against `Resize(size * 8 / 7)` and `CenterCrop(size)`."""
    recipe = v2.Compose([v2.Resize(math.floor(size / 0.875)), v2.CenterCrop(size)])
    psnrs = {}
    for original, _, served in _originals(build, tree, size=size, crop_ratio=0.875):
        psnrs[original.filename] = min(99.0, psnr(served, np.asarray(recipe(original))))
    _check_distances(psnrs, worst, mean)


def check_random_crops(build: Build, path: Path, tree: Path, size: int, worst: float, mean: float) -> None:
    """Check random crops against the same part of the original, cut out, resized once, and mirrored."""
    data = open_split(path, "train")
    positions = {sample_id: position for position, sample_id in enumerate(np.asarray(data.ids[:]).tolist())}
    psnrs = {}
    for original, sample_id, served in _originals(build, tree, size=size, augment="train"):
        shape = np.array([[original.height, original.width]])
        stored = shape if data.kind == RAW else data.shapes_at(np.array([positions[sample_id]]))
        expected = reference_pixels(original, sample_id, stored, size, random=True)
        psnrs[original.filename] = min(99.0, psnr(served, expected))
    _check_distances(psnrs, worst, mean)


def _check_distances(psnrs: dict[str, float], worst: float, mean: float) -> None:
    """Check the lowest and the mean PSNR of pictures, by file name."""
    assert psnrs
    name = min(psnrs, key=psnrs.__getitem__)
    assert psnrs[name] >= worst, f"{name}: {psnrs[name]:.1f} dB"
    assert np.mean(list(psnrs.values())) >= mean


def _originals(build: Build, tree: Path, **settings: object) -> Iterator[tuple[Image.Image, int, np.ndarray]]:
    """Yield each original, upright and in RGB, its id, and the served picture: uint8 [height, width, 3]."""
    with build(shuffle=False, dtype=torch.uint8, **settings) as loader:
        for batch in loader:
            for picture, sample_id in zip(batch.images, batch.ids.tolist(), strict=True):
                path = tree / loader.path_of(sample_id)
                original = images.decode(path.read_bytes(), str(path))
                original.filename = str(path)
                yield original, sample_id, picture.permute(1, 2, 0).cpu().numpy()
