"""Values of 16 bits are reduced to 8 bits by the depth that the file states."""

from pathlib import Path

import numpy as np
import pytest

from precache.errors import ImageError
from precache.pictures import images
from precache.pictures.images import Rendering
from tests.command import run
from tests.precache.pictures.drawing import chunk, encode_image

RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)
AS_8_BITS = np.round(RAMP * (255 / 4095)).astype(np.uint8)


def with_bits(data: bytes, bits: int) -> bytes:
    """Add a chunk to a PNG that states the number of its significant bits."""
    return data[:33] + chunk(b"sBIT", bytes([bits])) + data[33:]


def grey(data: bytes) -> np.ndarray:
    decoded = np.asarray(images.decode(data, "x"))
    assert (decoded == decoded[..., :1]).all()
    return decoded[..., 0]


FILES_OF_12_BITS = {
    "TIFF MaxSampleValue of its pixels": lambda: encode_image(RAMP, "TIFF", tiffinfo={281: 4000}),
    "TIFF SMaxSampleValue": lambda: encode_image(RAMP, "TIFF", tiffinfo={341: 4095}),
    "PNG sBIT": lambda: with_bits(encode_image(RAMP), 12),
    "PGM": lambda: b"P5 64 64 4095\n" + RAMP.astype(">u2").tobytes(),
}


@pytest.mark.parametrize("name", FILES_OF_12_BITS)
def test_decode_scales_a_stated_depth_of_12_bits_to_8(name: str, caplog: pytest.LogCaptureFixture) -> None:
    served = grey(FILES_OF_12_BITS[name]()).astype(int)
    assert np.abs(served - AS_8_BITS).max() <= (1 if name == "PGM" else 0)  # Pillow scales PGM to 16 bits
    assert (served.min(), served.max()) == (0, 255)
    assert caplog.records == []


FULL, DARK = RAMP * 16, RAMP // 40 * 16
FILES_OF_16_BITS = {
    "PNG": (FULL, lambda: encode_image(FULL)),
    "TIFF": (FULL, lambda: encode_image(FULL, "TIFF")),
    "TIFF whose values exceed its MaxSampleValue": (
        FULL,
        lambda: encode_image(FULL, "TIFF", tiffinfo={281: 4095}),
    ),
    # scaled as the standard asks (12.4): the significant bits are the upper ones
    "PNG of 12 significant bits": (FULL, lambda: with_bits(encode_image(FULL), 12)),
    "dark PNG of 12 significant bits": (DARK, lambda: with_bits(encode_image(DARK), 12)),
}


@pytest.mark.parametrize("name", FILES_OF_16_BITS)
def test_decode_keeps_the_upper_8_of_16_bits(name: str, caplog: pytest.LogCaptureFixture) -> None:
    pixels, make = FILES_OF_16_BITS[name]
    assert np.array_equal(grey(make()), pixels >> 8)
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


@pytest.mark.parametrize(
    "pixels",
    [np.full((9, 9), -1, np.int32), np.full((9, 9), 70_000, np.int32), np.zeros((9, 9), np.float32)],
    ids=["negative", "above 65,535", "floating point"],
)
def test_render_refuses_values_outside_of_16_bits(pixels: np.ndarray) -> None:
    with pytest.raises(ImageError, match=r"^x: .* 0 to 65,535"):
        images.render(encode_image(pixels, "TIFF"), "x", Rendering(size=8))
