"""What a model is shown, against torchvision's transforms of the original picture, in dB.

The boxes of random crops are ours (their distribution is compared with torchvision's elsewhere); what is to
be made of them is Pillow's `crop` and one antialiased `resize`, as in `RandomResizedCrop`. Validation is
`Resize` and `CenterCrop`. From pictures stored smaller than the original nobody can come as near: each case
names the least distance, and the mean, that it must keep.
"""

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
    """Without augmentation: `Resize(size * 8 / 7)`, `CenterCrop(size)`, as people write it; not zoomed in."""
    recipe = v2.Compose([v2.Resize(round(size / 0.875)), v2.CenterCrop(size)])
    found = {}
    for original, _, served in _each(build, tree, size=size, crop_ratio=0.875):
        found[original.filename] = min(99.0, psnr(served, np.asarray(recipe(original))))
    _check_distances(found, worst, mean)


def check_random_crops(build: Build, path: Path, tree: Path, size: int, worst: float, mean: float) -> None:
    """The same part of the original, cut out and resized once, and mirrored alike."""
    data = open_split(path, "train")
    positions = {sample_id: position for position, sample_id in enumerate(np.asarray(data.ids[:]).tolist())}
    found = {}
    for original, sample_id, served in _each(build, tree, size=size, augment="train"):
        shape = np.array([[original.height, original.width]])
        stored = shape if data.kind == RAW else data.shapes_at(np.array([positions[sample_id]]))
        expected = reference_pixels(original, sample_id, stored, size, random=True)
        found[original.filename] = min(99.0, psnr(served, expected))
    _check_distances(found, worst, mean)


def _check_distances(found: dict[str, float], worst: float, mean: float) -> None:
    assert found
    name = min(found, key=found.__getitem__)
    assert found[name] >= worst, f"{name}: {found[name]:.1f} dB"
    assert np.mean(list(found.values())) >= mean


def _each(build: Build, tree: Path, **settings: object) -> Iterator[tuple[Image.Image, int, np.ndarray]]:
    """Each original, upright and in RGB, with its id and what is served of it: uint8 [height, width, 3]."""
    with build(shuffle=False, dtype=torch.uint8, **settings) as loader:
        for batch in loader:
            for picture, sample_id in zip(batch.images, batch.ids.tolist(), strict=True):
                path = tree / loader.path_of(sample_id)
                original = images.decode(path.read_bytes(), str(path))
                original.filename = str(path)
                yield original, sample_id, picture.permute(1, 2, 0).cpu().numpy()
