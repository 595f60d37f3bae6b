"""OpenCV reads WebP where Pillow cannot, with Pillow's pixels."""

import io
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps, features

from precache.errors import ImageError
from precache.pictures import images, kinds, opencv, own_pillow
from tests.precache.pictures.drawing import noise

LOSSLESS = 101  # a quality above 100


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    """Make a WebP of these chunks."""
    body = b"".join(
        kind + len(content).to_bytes(4, "little") + content + b"\0" * (len(content) % 2)
        for kind, content in chunks
    )
    return b"RIFF" + (4 + len(body)).to_bytes(4, "little") + b"WEBP" + body


def webp(pixels: np.ndarray, quality: int = LOSSLESS, orientation: int = 0, flags: int = 0) -> bytes:
    """Encode pixels, RGB or RGBA, with an EXIF orientation and flags of VP8X."""
    order = [2, 1, 0, 3][: pixels.shape[2]]
    _, encoded = cv2.imencode(".webp", pixels[..., order], [cv2.IMWRITE_WEBP_QUALITY, quality])
    data = encoded.tobytes()
    start = data.index(b"VP8L" if quality == LOSSLESS else b"VP8 ")
    size = int.from_bytes(data[start + 4 : start + 8], "little")
    height, width = (side - 1 for side in pixels.shape[:2])
    if orientation:
        flags |= 8
    if pixels.shape[2] == 4:
        flags |= 16  # it has alpha
    canvas = bytes((flags, 0, 0, 0)) + width.to_bytes(3, "little") + height.to_bytes(3, "little")
    chunks = [(b"VP8X", canvas), (data[start : start + 4], data[start + 8 : start + 8 + size])]
    if orientation:
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        chunks.append((b"EXIF", exif.tobytes()))
    return riff(*chunks)


@pytest.fixture(autouse=True)
def pillow_without_webp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(own_pillow.Image.OPEN, "WEBP", (opencv.open_webp, lambda _: True))


@pytest.mark.parametrize("orientation", range(9))
def test_webp_is_read_upright_with_its_pixels(orientation: int) -> None:
    pixels = noise(24, 40, 3)
    upright = Image.fromarray(pixels)
    upright.getexif()[ExifTags.Base.Orientation] = orientation or 1
    expected = np.asarray(ImageOps.exif_transpose(upright))
    data = webp(pixels, orientation=orientation)
    assert np.array_equal(np.asarray(images.decode(data, "x.webp")), expected)
    assert images.upright_shape(data, "x.webp") == expected.shape[:2]


def test_transparent_webp_is_put_on_the_background() -> None:
    pixels = noise(8, 8, 4)
    pixels[..., 3] = 255
    pixels[:4, :, 3] = 0
    shown = np.asarray(images.decode(webp(pixels), "x.webp"))
    assert (shown[:4] == 255).all()
    assert np.array_equal(shown[4:], pixels[4:, :, :3])


def test_animated_webp_lacks_a_decoder() -> None:
    with pytest.raises(ImageError) as raised:
        images.decode(webp(noise(8, 8, 3), flags=2), "x.webp")
    assert kinds.kind_without_decoder(raised.value.reason) == "WEBP"


@pytest.mark.parametrize("share", [0.3, 0.7, 0.99])
def test_webp_that_breaks_off_is_damaged(share: float) -> None:
    data = webp(noise(40, 40, 3))
    with pytest.raises(ImageError) as raised:
        images.decode(data[: int(len(data) * share)], "x.webp")
    assert kinds.kind_without_decoder(raised.value.reason) is None


@pytest.mark.skipif(not features.check("webp"), reason="this Pillow reads no WebP")
@pytest.mark.parametrize("quality", [30, 90, LOSSLESS])
@pytest.mark.parametrize("channels", [3, 4])
def test_opencv_gives_pillows_pixels(quality: int, channels: int) -> None:
    smooth = np.asarray(Image.fromarray(noise(9, 7, channels)).resize((50, 37), Image.Resampling.BICUBIC))
    _, encoded = cv2.imencode(".webp", smooth, [cv2.IMWRITE_WEBP_QUALITY, quality])
    data = encoded.tobytes()
    expected = np.asarray(Image.open(io.BytesIO(data)))
    assert np.array_equal(np.asarray(opencv.open_webp(io.BytesIO(data), "")), expected)


def test_a_missing_opencv_is_no_damage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = webp(noise(8, 8, 3))
    (tmp_path / "cv2.py").write_text("raise AttributeError('made for another NumPy')")
    monkeypatch.delitem(sys.modules, "cv2")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImageError) as raised:
        images.decode(data, "x.webp")
    assert kinds.kind_without_decoder(raised.value.reason) == "WEBP"
