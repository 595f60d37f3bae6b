"""How pictures of a raw tree are read and decoded; what is served of them is in `tests.pixel_contract`."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from loaders.read import decoding
from precache.errors import ImageError, SourceError
from precache.pictures import images


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpg", "png"])
def test_the_shape_is_known_before_it_is_decoded(orientation: int, kind: str, tmp_path: Path) -> None:
    """Upright, as `precache.pictures.images` decodes it."""
    path = tmp_path / f"x.{kind}"
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    Image.fromarray(pixels).save(path, exif=exif)
    picture = decoding.read(str(path))
    assert picture.shape == ((20, 30) if orientation < 5 else (30, 20))
    assert np.array_equal(picture.decode(), np.asarray(images.decode(path.read_bytes(), str(path))))


def test_what_cannot_be_decoded_is_named_when_it_is(tmp_path: Path) -> None:
    damaged, path = tmp_path / "damaged.jpg", tmp_path / "x.png"
    damaged.write_bytes(b"\xff\xd8\xff\xe0 no picture")
    picture = decoding.read(str(damaged))
    with pytest.raises(ImageError, match=str(damaged)):
        picture.decode()
    Image.new("RGB", (30, 20)).save(path)
    other = replace(decoding.read(str(path)), shape=(21, 30))
    with pytest.raises(ImageError, match=f"{path}: is 30x20, expected 30x21"):
        other.decode()
    with pytest.raises(SourceError, match=str(tmp_path / "gone.jpg")):
        decoding.read(str(tmp_path / "gone.jpg"))
