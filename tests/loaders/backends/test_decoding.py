"""How a picture of a raw tree is decoded for a batch."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from loaders.backends import decoding
from precache import images
from precache.errors import ImageError, SourceError


@pytest.fixture(params=[True, False], ids=["torch", "pillow"], autouse=True)
def by_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(decoding, "torch_is_faster", lambda: request.param)
    if request.param:  # as with stock Pillow: Pillow-SIMD wants a fourth channel, which torch does not
        monkeypatch.setattr(images, "_COLOUR_MODE", "RGB")
    return bool(request.param)


SIDEWAYS = bytes.fromhex("45786966 0000 4D4D002A 00000008 0001 0112 0003 00000001 0006 0000 00000000")  # EXIF


def saved(path: Path, size: tuple[int, int], mode: str = "RGB", exif: bytes = b"") -> tuple[str, Image.Image]:
    """A smooth picture with some noise, as a JPEG, and what Pillow decodes of it."""
    width, height = size
    rng = np.random.default_rng(size)
    rows, columns = np.mgrid[:height, :width]
    pixels = np.stack([rows * 255 / height, columns * 255 / width, np.full(rows.shape, 128)], axis=2)
    noisy = (pixels + rng.normal(0, 8, pixels.shape)).clip(0, 255).astype(np.uint8)
    Image.fromarray(noisy).convert(mode).save(path, quality=90, exif=exif)
    with Image.open(path) as image:
        return str(path), image.convert("RGB")


@pytest.mark.parametrize(
    "size", [(300, 200), (200, 300), (301, 223), (97, 61), (64, 64), (1000, 707), (200, 1000)]
)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pixels_are_those_of_torchvisions_resize_and_crop(
    size: tuple[int, int], mode: str, tmp_path: Path
) -> None:
    path, image = saved(tmp_path / "x.jpg", size, mode)
    loaded = decoding.load(path, 64)
    assert (loaded.dtype, loaded.shape) == (np.uint8, (64, 64, 3))
    gap = np.abs(loaded.astype(int) - images.reference(image, 64))
    assert gap.max() <= 1
    assert (gap > 0).mean() < 0.05


def test_torch_writes_rows_of_rgb(by_torch: bool, tmp_path: Path) -> None:
    """Planes, which it writes where it does not see the batch as channels-last, take longer to copy."""
    path, _ = saved(tmp_path / "x.jpg", (300, 200))
    strides = decoding.load(path, 64).strides
    assert strides[1:] == (3, 1)
    assert (strides[0] > 64 * 3) == by_torch, "a cut out of a wider picture, where torch resized it"


def test_what_torch_does_not_resize_goes_to_pillow(tmp_path: Path) -> None:
    long, _ = saved(tmp_path / "long.jpg", (8, 4000))  # whole, it would be 64 x 32,000
    png, turned = str(tmp_path / "x.png"), str(tmp_path / "turned.jpg")
    Image.open(long).crop((0, 0, 8, 60)).save(png)
    _, upright = saved(Path(turned), (120, 90), exif=SIDEWAYS)
    for path in (long, png, turned):
        assert np.array_equal(decoding.load(path, 64), images.load(path, 64))
    rotated = upright.transpose(Image.Transpose.ROTATE_270)
    assert np.abs(decoding.load(turned, 64).astype(int) - images.reference(rotated, 64)).max() <= 1


def test_what_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.jpg"
    damaged.write_bytes(b"\xff\xd8\xff\xe0 no picture")
    with pytest.raises(ImageError, match=str(damaged)):
        decoding.load(str(damaged), 64)
    with pytest.raises(SourceError, match=str(tmp_path / "gone.jpg")):
        decoding.load(str(tmp_path / "gone.jpg"), 64)
