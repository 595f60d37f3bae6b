"""The pictures that models are tried on: torchvision's own, decoded once."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision import transforms

from bench.measure import validation
from precache.errors import DatasetError


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    rng = np.random.default_rng(1)
    for number, (height, width) in enumerate(((60, 90), (81, 40), (33, 33))):
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    return [str(tmp_path / f"{number}.png") for number in range(3)]


def test_they_are_what_torchvision_makes_of_them(photos: list[str], tmp_path: Path) -> None:
    pixels = validation.load(photos, 28, tmp_path, 2)
    recipe = transforms.Compose([transforms.Resize(32, antialias=True), transforms.CenterCrop(28)])
    for file, ours in zip(photos, pixels, strict=True):
        assert np.array_equal(ours, np.asarray(recipe(Image.open(file).convert("RGB"))))


def test_they_are_decoded_once_unless_a_file_changed(photos: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    first = np.array(validation.load(photos, 28, out, 1))
    (kept,) = out.iterdir()
    written = kept.stat().st_mtime_ns
    assert np.array_equal(validation.load(photos, 28, out, 1), first)
    assert kept.stat().st_mtime_ns == written
    Image.new("RGB", (50, 50)).save(photos[0])
    os.utime(photos[0], ns=(1, 1))
    assert not np.array_equal(validation.load(photos, 28, out, 1)[0], first[0])
    assert validation.load(photos, 14, out, 1).shape == (3, 14, 14, 3)


def test_a_picture_that_cannot_be_decoded_is_named_and_nothing_is_kept(
    photos: list[str], tmp_path: Path
) -> None:
    Path(photos[1]).write_bytes(b"no picture")
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(DatasetError, match=r"1\.png"):
        validation.load(photos, 28, out, 1)
    assert not list(out.iterdir())
