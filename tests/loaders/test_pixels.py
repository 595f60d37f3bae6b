"""Backends serve the pixels of torchvision's recipe, to within what the stored pictures allow."""

import itertools
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from loaders.augment import geometry
from loaders.augment.crops import Crops, LateAugmentation, View
from loaders.augment.geometry import centre_boxes, crop_and_resize, resized_side
from loaders.augment.policies import RandomAugmentation
from precache import Recipe, convert
from precache.pictures.jpeg import psnr
from tests import pixel_contract as contract
from tests.building import build_loader

SIZE = 112
STORED = {  # recipes; the tree's pictures have about 300 pixels a side
    "original": {"format": "shards", "size": 448},
    "twice": {"format": "shards", "size": 2 * SIZE},
    "exact": {"format": "shards", "size": 128, "resample": "bilinear"},
    "square": {"format": "shards", "size": 128, "fit": "crop", "resample": "bilinear"},
    "large-square": {"format": "shards", "size": 224, "fit": "crop", "resample": "bilinear"},
    "tars": {"format": "webdataset", "size": 448},
    "records": {"format": "dali", "size": 448},
}
# (backend, what it reads, validation, random crops): for both the smallest and mean distance allowed, in dB
CASES = [
    ("pytorch", "raw", (50, 60), (50, 60)),
    ("dali", "raw", (50, 54), (42, 50)),
    ("shards", "original", (50, 60), (50, 60)),
    ("shards", "twice", (34, 38), (28, 38)),
    ("shards", "exact", (50, 60), (20, 28)),
    ("shards", "square", (50, 60), None),  # the parts beside the square are not stored
    ("shards", "large-square", (30, 36), None),
    ("webdataset", "tars", (30, 40), (30, 40)),
    ("dali", "tars", (30, 40), (30, 40)),
    ("dali", "records", (30, 40), (30, 40)),
]
EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")


@pytest.fixture(scope="module")
def stored(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Function from a name of STORED to the folder that the tree is converted into."""
    root = tmp_path_factory.mktemp("stored")

    @cache
    def make(name: str) -> Path:
        if name == "raw":
            return raw_tree
        convert(raw_tree, root / name, Recipe(**STORED[name]), workers=0)
        return root / name

    return make


def opener(backend: str, path: Path) -> contract.Build:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")
    return partial(build_loader, path, backend=backend, device="cpu", workers=1, batch_size=32)


@EACH_CASE
def test_validation_is_resize_and_centre_crop(
    case: tuple, raw_tree: Path, stored: Callable[[str], Path]
) -> None:
    backend, name, distances, _ = case
    contract.check_validation(opener(backend, stored(name)), raw_tree, SIZE, *distances)


@EACH_CASE
def test_random_crops_are_those_of_the_original(
    case: tuple, raw_tree: Path, stored: Callable[[str], Path]
) -> None:
    backend, name, _, distances = case
    if distances is None:
        pytest.skip("crops of a stored square are not crops of the original")
    path = stored(name)
    contract.check_random_crops(opener(backend, path), path, raw_tree, SIZE, *distances)


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    """Return random blocks of about six pixels."""
    rng = np.random.default_rng((height, width))
    coarse = rng.integers(0, 255, (height // 6 + 1, width // 6 + 1, channels), np.uint8)
    return np.ascontiguousarray(coarse[np.arange(height) // 6][:, np.arange(width) // 6])


@pytest.mark.parametrize("torch_is_fast", [True, False])
@pytest.mark.parametrize(("height", "width"), [(300, 400), (40, 30), (20, 300), (112, 112), (1, 1), (3, 900)])
def test_a_crop_is_resized_as_pillow_resizes_it(
    monkeypatch: pytest.MonkeyPatch, torch_is_fast: bool, height: int, width: int
) -> None:
    monkeypatch.setattr(geometry, "torch_is_fast", lambda: torch_is_fast)
    for channels, mode in ((1, "L"), (3, "RGB")):
        part, out = noise(height, width, channels), np.empty((112, 100, channels), np.uint8)
        geometry.resize(part, out)
        image = Image.fromarray(part[..., 0] if mode == "L" else part)
        expected = np.asarray(image.resize((100, 112), Image.Resampling.BILINEAR)).reshape(out.shape)
        assert psnr(out, expected) >= 50


@pytest.mark.parametrize("shape", [(1, 1), (2, 200), (200, 2), (500, 40)])
def test_pictures_of_any_shape_are_served(tmp_path: Path, shape: tuple[int, int]) -> None:
    (tmp_path / "class").mkdir()
    Image.fromarray(noise(*shape)).save(tmp_path / "class/a.png")
    Image.fromarray(noise(*shape)).convert("CMYK").save(tmp_path / "class/b.jpg", quality=95)
    build = partial(build_loader, tmp_path, workers=0, batch_size=2)
    contract.check_validation(build, tmp_path, 32, 50, 50)
    contract.check_random_crops(build, tmp_path, tmp_path, 32, 50, 50)


@pytest.mark.parametrize("side", [8, 24, 64])
def test_a_device_resizes_as_pillow_does(side: int) -> None:
    picture = noise(60, 80)
    boxes = np.array([[0, 0, 80, 60], [3, 7, 50, 20], [79, 59, 1, 1], [10, 0, 5, 60]])
    images = torch.from_numpy(picture).permute(2, 0, 1).expand(len(boxes), -1, -1, -1).float()
    mirrored = torch.tensor([False, True, False, True])
    served = crop_and_resize(images, torch.from_numpy(boxes).float(), mirrored, side).permute(0, 2, 3, 1)
    for crop, (left, top, width, height), is_mirrored in zip(
        served.numpy(), boxes.tolist(), mirrored.tolist(), strict=True
    ):
        part = Image.fromarray(picture).crop((left, top, left + width, top + height))
        expected = np.asarray(part.resize((side, side), Image.Resampling.BILINEAR)).astype(float)
        assert np.abs(crop - (expected[:, ::-1] if is_mirrored else expected)).max() <= 1.5


@pytest.mark.parametrize("size", [8, 13, (9, 40), (30, 5)])
def test_a_device_crops_the_same_pixels_as_the_cpu(size: tuple[int, int] | int) -> None:
    """Crops that are not resized are equal to the byte, the black border of small pictures included."""
    stored, ids, crop = (10, 12), np.arange(20), RandomAugmentation(scale=None)
    pictures = np.random.default_rng(0).integers(0, 256, (len(ids), *stored, 3), np.uint8)
    views = (View(size, crop),)
    crops = LateAugmentation(views, 3, crops_here=True).apply(0, torch.from_numpy(pictures), ids, 1)
    expected = np.empty(crops.shape, np.uint8)
    (draws,) = Crops(stored, views, 3).draw(1, ids)
    for picture, box, mirrored, out in zip(pictures, draws.boxes, draws.mirrored, expected, strict=True):
        geometry.crop_into(picture, box.tolist(), bool(mirrored), out)
    assert np.array_equal(crops.numpy(), expected)


def test_the_resized_side_is_timms_and_that_of_any_pair_of_sides() -> None:
    """timm resizes to floor(size / crop_pct); the sizes are those of its models."""
    for size, crop_pct in itertools.product(
        (224, 240, 256, 260, 288, 299, 300, 320, 336, 380, 384, 448, 456, 512, 518, 600),
        (0.85, 0.875, 0.88, 0.89, 0.9, 0.904, 0.934, 0.94, 0.942, 0.949, 0.95, 0.96, 0.965, 0.98, 1.0),
    ):
        assert resized_side(size, crop_pct) == math.floor(size / crop_pct)
        assert resized_side((size, 96), crop_pct) == (math.floor(size / crop_pct), math.floor(96 / crop_pct))
    for size in range(1, 400):  # what `Resize(resized)` and `CenterCrop(size)` name
        for resized in range(size, 2 * size):
            assert resized_side(size, size / resized) == resized


@pytest.mark.parametrize("size", [32, 64, 224])
def test_centre_boxes_equal_torchvisions_for_any_shape(size: int) -> None:
    """Boxes are those that `Resize` and `CenterCrop` show, for pictures from 1 pixel to ratios of 1:100."""
    rng = np.random.default_rng(0)
    shapes = np.concatenate((rng.integers(1, 700, (200, 2)), [(1, 1), (3, 300), (300, 3), (256, 256)]))
    recipe = v2.Compose([v2.Resize(math.floor(size / 0.875)), v2.CenterCrop(size)])
    for (height, width), box in zip(shapes.tolist(), centre_boxes(shapes, size, 0.875), strict=True):
        if max(height, width) * size / min(height, width) > 20_000:
            continue  # torchvision would make a picture of millions of pixels
        ramps = np.stack(np.meshgrid(np.arange(width), np.arange(height))).astype(np.float32)
        expected = recipe(torch.from_numpy(ramps)).permute(1, 2, 0).numpy()
        left, top, shown_width, shown_height = box.tolist()
        middle = np.array([left + shown_width / 2, top + shown_height / 2]) - 0.5
        assert np.abs(expected.mean(axis=(0, 1)) - middle).max() < 0.51
