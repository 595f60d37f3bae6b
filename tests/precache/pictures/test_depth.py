"""Values of 16 bits: kept as the file has them, or made 8 bits by the depth that the file states."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from precache.errors import ImageError
from precache.pictures import images
from precache.pictures.images import Rendering
from tests.command import run
from tests.precache.pictures.drawing import chunk, encode_image, noise

RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)
AS_8_BITS = np.round(RAMP * (255 / 4095)).astype(np.uint8)
DEEP = {"channels": "grey", "dtype": "uint16"}


def with_bits(data: bytes, bits: int) -> bytes:
    """The PNG, which says that so many of its bits are significant."""
    return data[:33] + chunk(b"sBIT", bytes([bits])) + data[33:]


def grey(data: bytes) -> np.ndarray:
    decoded = np.asarray(images.decode(data, "x"))
    assert (decoded == decoded[..., :1]).all()
    return decoded[..., 0]


STATED = {
    "TIFF MaxSampleValue of what it holds": lambda: encode_image(RAMP, "TIFF", tiffinfo={281: 4000}),
    "TIFF SMaxSampleValue": lambda: encode_image(RAMP, "TIFF", tiffinfo={341: 4095}),
    "PNG sBIT": lambda: with_bits(encode_image(RAMP), 12),
    "PGM": lambda: b"P5 64 64 4095\n" + RAMP.astype(">u2").tobytes(),
}


@pytest.mark.parametrize("name", STATED)
def test_decode_scales_a_stated_depth_of_12_bits_to_8(name: str, caplog: pytest.LogCaptureFixture) -> None:
    served = grey(STATED[name]()).astype(int)
    assert np.abs(served - AS_8_BITS).max() <= (1 if name == "PGM" else 0)  # Pillow scales PGM to 16 bits
    assert (served.min(), served.max()) == (0, 255)
    assert caplog.records == []


def test_16_bits_and_what_is_scaled_to_them_keep_their_upper_8(caplog: pytest.LogCaptureFixture) -> None:
    """A PNG that is scaled as its standard asks (12.4) has its significant bits above."""
    full, dark = RAMP * 16, RAMP // 40 * 16
    for pixels, data in (
        (full, encode_image(full)),
        (full, encode_image(full, "TIFF")),
        (full, encode_image(full, "TIFF", tiffinfo={281: 4095})),  # which its values belie
        (full, with_bits(encode_image(full), 12)),
        (dark, with_bits(encode_image(dark), 12)),
    ):
        assert np.array_equal(grey(data), pixels >> 8)
    assert caplog.records == []


def test_convert_warns_once_of_16_bit_files_that_use_fewer_bits(tmp_path: Path) -> None:
    (tmp_path / "tree/a").mkdir(parents=True)
    for number in range(8):
        (tmp_path / f"tree/a/{number}.png").write_bytes(encode_image(RAMP, "PNG"))
    options = ("--format", "shards", "--size", 8, "--shard-bytes", 400, "--workers", 2)
    result = run("precache", "convert", "tree", "out", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("WARNING") == 1, result.stderr
    assert ".png': its values have 16 bits, but none is above 4,095 of 65,535" in result.stderr


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_grey_of_16_bits_is_kept_and_8_bits_become_it_with_white_as_white(kind: str) -> None:
    deep, grey, colour = noise(40, 40, dtype=np.uint16), noise(40, 40), noise(40, 40, 3)
    white = 257 * np.asarray(Image.fromarray(colour).convert("L"), np.uint16)
    for pixels, expected in ((deep, deep), (grey, grey * np.uint16(257)), (colour, white)):
        found, size = images.render(encode_image(pixels, kind), "x", Rendering(size=40, **DEEP))
        assert (found.dtype, found.shape, size) == (np.uint16, (40, 40, 1), (40, 40))
        assert np.array_equal(found[..., 0], expected)


def test_resizing_rounds_once_and_what_has_no_such_range_is_rejected() -> None:
    """Against Pillow's resize of the values in floating point."""
    pixels = noise(90, 70, dtype=np.uint16)
    for name, resample in images.RESAMPLING.items():
        how = Rendering(size=32, fit="stretch", resample=name, **DEEP)
        found, _ = images.render(encode_image(pixels, "PNG"), "x", how)
        floats = Image.fromarray(pixels.astype(np.float32)).resize((32, 32), resample)
        assert np.abs(found[..., 0] - np.asarray(floats).clip(0, 65535)).max() <= 0.51
    for bad in (
        np.full((9, 9), -1, np.int32),
        np.full((9, 9), 70_000, np.int32),
        np.zeros((9, 9), np.float32),
    ):
        with pytest.raises(ImageError, match=r"^x: .* 0 to 65,535"):
            images.render(encode_image(bad, "TIFF"), "x", Rendering(size=8, **DEEP))
