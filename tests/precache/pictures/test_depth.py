"""Values of 16 bits: kept as the file has them, or made 8 bits by the depth that the file states."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from precache.errors import ImageError
from precache.pictures import depth, images
from precache.pictures.images import Rendering
from tests.command import run
from tests.precache.pictures.drawing import chunk, encoded, noise, png, tiff

RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)
AS_8_BITS = np.round(RAMP * (255 / 4095)).astype(np.uint8)


@pytest.fixture(autouse=True)
def nobody_was_warned() -> None:
    depth._warned[0] = 0


def with_chunk(data: bytes, kind: bytes, content: bytes) -> bytes:
    """The PNG with a chunk after its header."""
    return data[:33] + chunk(kind, content) + data[33:]


def grey(data: bytes) -> np.ndarray:
    decoded = np.asarray(images.decode(data, "x"))
    assert (decoded == decoded[..., :1]).all()
    return decoded[..., 0]


def tiff_12_bits() -> bytes:
    """The ramp, two values in three bytes: BitsPerSample is 12."""
    pairs = RAMP.reshape(-1, 2).astype(np.uint32)
    joined = pairs[:, 0] << 12 | pairs[:, 1]
    data = np.stack([joined >> 16, joined >> 8 & 255, joined & 255], 1).astype(np.uint8).tobytes()
    return tiff(
        data, (256, 64), (257, 64), (258, 12), (259, 1), (262, 1), (273, -1), (277, 1), (278, 64),
        (279, len(data)),
    )  # fmt: skip


STATED = {
    "TIFF MaxSampleValue of what it holds": lambda: encoded(RAMP, "TIFF", tiffinfo={281: 4000}),
    "TIFF SMaxSampleValue": lambda: encoded(RAMP, "TIFF", tiffinfo={341: 4095}),
    "TIFF BitsPerSample": tiff_12_bits,
    "PGM": lambda: b"P5 64 64 4095\n" + RAMP.astype(">u2").tobytes(),
}


@pytest.mark.parametrize("name", STATED)
def test_a_ramp_of_12_bits_is_one_of_8(name: str, caplog: pytest.LogCaptureFixture) -> None:
    served = grey(STATED[name]()).astype(int)
    assert np.abs(served - AS_8_BITS).max() <= (1 if name == "PGM" else 0)  # Pillow scales PGM to 16 bits
    assert (served.min(), served.max()) == (0, 255)
    assert caplog.records == []


@pytest.mark.parametrize("bits", [9, 12, 15])
def test_the_depth_that_is_stated_counts_not_the_brightest_value(bits: int) -> None:
    """But a PNG that is scaled as its standard asks (12.4) has its significant bits above."""
    values = np.arange(1 << bits, dtype=np.uint16)[: 1 << bits - 1].reshape(-1, 16)  # no brighter than half
    expected = np.round(values * (255 / ((1 << bits) - 1))).astype(np.uint8)
    for data in (
        encoded(values, "TIFF", tiffinfo={281: (1 << bits) - 1}),
        with_chunk(encoded(values, "PNG"), b"sBIT", bytes([bits])),
    ):
        assert np.array_equal(grey(data), expected)
    for original in (values, values // 40):
        scaled = np.round(original * (65535 / ((1 << bits) - 1))).astype(np.uint16)
        for pixels in (scaled, original << 16 - bits):
            data = with_chunk(encoded(pixels, "PNG"), b"sBIT", bytes([bits]))
            assert np.array_equal(grey(data), pixels >> 8)


def test_16_bits_keep_their_upper_8_and_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    full = (np.arange(4096) * 16).astype(np.uint16).reshape(64, 64)
    for data in (
        encoded(full, "PNG"),
        encoded(full, "TIFF"),
        encoded(full, "TIFF", tiffinfo={281: 4095}),  # which its values belie
    ):
        assert np.array_equal(grey(data), full >> 8)
    assert not grey(encoded(np.zeros_like(full), "PNG")).any()
    assert caplog.records == []


def test_values_that_suggest_fewer_bits_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for kind in ("PNG", "TIFF", "PNG"):
        assert grey(encoded(RAMP, kind)).max() == 15
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "none is above 4,095 of 65,535" in caplog.text
    caplog.clear()
    depth._warned[0] = 0
    rows = b"".join(b"\0" + row.tobytes() for row in RAMP.repeat(3, 1).astype(">u2"))
    assert grey(png(64, 64, rows, depth=16, colour=2)).max() == 15, "of colours, too"
    assert "none is above 4,095 of 65,535" in caplog.text


def test_the_user_of_a_command_with_workers_reads_it_once(tmp_path: Path) -> None:
    (tmp_path / "tree/a").mkdir(parents=True)
    for number in range(8):
        (tmp_path / f"tree/a/{number}.png").write_bytes(encoded(RAMP, "PNG"))
    options = ("--format", "shards", "--size", 8, "--shard-bytes", 400, "--workers", 2)
    result = run("precache", "convert", "tree", "out", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("WARNING") == 1, result.stderr
    assert ".png': its values have 16 bits, but none is above 4,095 of 65,535" in result.stderr


# Kept.

DEEP = {"channels": "grey", "dtype": "uint16"}


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_grey_of_16_bits_is_kept_and_8_bits_become_it_with_white_as_white(kind: str) -> None:
    deep, grey, colour = noise(40, 40, dtype=np.uint16), noise(40, 40), noise(40, 40, 3)
    white = 257 * np.asarray(Image.fromarray(colour).convert("L"), np.uint16)
    for pixels, expected in ((deep, deep), (grey, grey * np.uint16(257)), (colour, white)):
        found, size = images.render(encoded(pixels, kind), "x", Rendering(size=40, **DEEP))
        assert (found.dtype, found.shape, size) == (np.uint16, (40, 40, 1), (40, 40))
        assert np.array_equal(found[..., 0], expected)


@pytest.mark.parametrize("resample", sorted(images.RESAMPLING))
def test_resizing_rounds_once(resample: str) -> None:
    """Against Pillow's resize of the values in floating point."""
    pixels = noise(90, 70, dtype=np.uint16)
    how = Rendering(size=32, fit="stretch", resample=resample, **DEEP)
    found, _ = images.render(encoded(pixels, "PNG"), "x", how)
    floats = Image.fromarray(pixels.astype(np.float32)).resize((32, 32), images.RESAMPLING[resample])
    assert np.abs(found[..., 0] - np.asarray(floats).clip(0, 65535)).max() <= 0.51


def test_what_is_no_deep_picture_is_rejected() -> None:
    for data, phrase in (
        (encoded(noise(60, 60, dtype=np.uint16), "PNG"), r"is too large \(60x60 is 3,600 pixels"),
        (encoded(np.full((9, 9), -1, np.int32), "TIFF"), "not within 0 to 65,535"),
        (encoded(np.full((9, 9), 70_000, np.int32), "TIFF"), "not within 0 to 65,535"),
        (encoded(np.zeros((9, 9), np.float32), "TIFF"), "no defined range of 0 to 65,535"),
    ):
        with pytest.raises(ImageError, match=rf"^x: .*{phrase}"):
            images.render(data, "x", Rendering(size=8, max_pixels=3599, **DEEP))
