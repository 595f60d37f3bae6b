"""Every backend shows what torchvision's recipe shows, as near as what is stored allows."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from loaders.augment import cpu
from precache import Recipe, convert
from precache.pictures.jpeg import psnr
from tests import pixel_contract as contract
from tests.building import build_loader

SIZE = 112
STORED = {  # of the tree's pictures, which have 300 pixels or so
    "original": {"format": "shards", "size": 448},
    "twice": {"format": "shards", "size": 2 * SIZE},
    "exact": {"format": "shards", "size": 128, "resample": "bilinear"},
    "square": {"format": "shards", "size": 128, "fit": "crop", "resample": "bilinear"},
    "large-square": {"format": "shards", "size": 224, "fit": "crop", "resample": "bilinear"},
    "tars": {"format": "webdataset", "size": 448},
    "records": {"format": "dali", "size": 448},
}
# backend, what it reads, and the least worst and mean distance in dB of validation, and of random crops
CASES = [
    ("pytorch", "raw", (50, 60), (50, 60)),
    ("dali", "raw", (50, 54), (42, 50)),
    ("nvjpeg", "raw", (40, 50), (40, 50)),
    ("shards", "original", (50, 60), (50, 60)),
    ("shards", "twice", (34, 38), (28, 38)),
    ("shards", "exact", (50, 60), (20, 28)),
    ("shards", "square", (50, 60), None),  # it lacks what lies beside it
    ("shards", "large-square", (30, 36), None),
    ("webdataset", "tars", (30, 40), (30, 40)),
    ("dali", "tars", (30, 40), (30, 40)),
    ("dali", "records", (30, 40), (30, 40)),
]
EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")


@pytest.fixture(scope="module")
def stored(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What the tree became, by name of STORED."""
    root = tmp_path_factory.mktemp("stored")

    @cache
    def made(name: str) -> Path:
        if name == "raw":
            return raw_tree
        convert(raw_tree, root / name, Recipe(**STORED[name]), workers=0)
        return root / name

    return made


def opener(backend: str, path: Path) -> contract.Build:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")
    if backend == "nvjpeg" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    device = "cuda" if backend == "nvjpeg" else "cpu"
    return partial(build_loader, path, backend=backend, device=device, workers=1, batch_size=32)


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
        pytest.skip("a square is another picture: its crops are compared with nothing")
    path = stored(name)
    contract.check_random_crops(opener(backend, path), path, raw_tree, SIZE, *distances)


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    """Blocks of some six pixels."""
    rng = np.random.default_rng((height, width))
    coarse = rng.integers(0, 255, (height // 6 + 1, width // 6 + 1, channels), np.uint8)
    return np.ascontiguousarray(coarse[np.arange(height) // 6][:, np.arange(width) // 6])


@pytest.mark.parametrize("torch_is_fast", [True, False])
@pytest.mark.parametrize(("height", "width"), [(300, 400), (40, 30), (20, 300), (112, 112), (1, 1), (3, 900)])
def test_a_crop_is_resized_as_pillow_resizes_it(
    monkeypatch: pytest.MonkeyPatch, torch_is_fast: bool, height: int, width: int
) -> None:
    monkeypatch.setattr(cpu, "torch_is_fast", lambda: torch_is_fast)
    for channels, mode in ((1, "L"), (3, "RGB")):
        part, out = noise(height, width, channels), np.empty((112, 100, channels), np.uint8)
        cpu.resize(part, out)
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
