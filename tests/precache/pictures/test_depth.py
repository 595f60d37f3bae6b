"""16-bit files that hold fewer bits."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from precache import images
from precache.pictures import depth
from tests.command import run

RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)
AS_8_BITS = np.round(RAMP * (255 / 4095)).astype(np.uint8)


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    depth._said[0] = 0


def encoded(pixels: np.ndarray, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def with_chunk(png: bytes, kind: bytes, content: bytes) -> bytes:
    """The PNG with a chunk after its header."""
    chunk = struct.pack(">I", len(content)) + kind + content
    return png[:33] + chunk + struct.pack(">I", zlib.crc32(kind + content)) + png[33:]


def grey(data: bytes) -> np.ndarray:
    decoded = np.asarray(images.decode(data, "x"))
    assert (decoded == decoded[..., :1]).all()
    return decoded[..., 0]


def tiff_12_bits() -> bytes:
    """The ramp, two values in three bytes: BitsPerSample is 12."""
    pairs = RAMP.reshape(-1, 2).astype(np.uint32)
    joined = pairs[:, 0] << 12 | pairs[:, 1]
    data = np.stack([joined >> 16, joined >> 8 & 255, joined & 255], 1).astype(np.uint8).tobytes()
    tags = [
        (256, 64), (257, 64), (258, 12), (259, 1), (262, 1), (273, 8 + 2 + 12 * 9 + 4), (277, 1),
        (278, 64), (279, len(data)),
    ]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", 0) + data


STATED = {
    "TIFF MaxSampleValue": lambda: encoded(RAMP, "TIFF", tiffinfo={281: 4095}),
    "TIFF MaxSampleValue of what it holds": lambda: encoded(RAMP, "TIFF", tiffinfo={281: 4000}),
    "TIFF SMaxSampleValue": lambda: encoded(RAMP, "TIFF", tiffinfo={341: 4095}),
    "TIFF BitsPerSample": tiff_12_bits,
    "PNG sBIT": lambda: with_chunk(encoded(RAMP, "PNG"), b"sBIT", b"\x0c"),
    "PGM": lambda: b"P5 64 64 4095\n" + RAMP.astype(">u2").tobytes(),
}


@pytest.mark.parametrize("name", STATED)
def test_a_ramp_of_12_bits_is_one_of_8(name: str, caplog: pytest.LogCaptureFixture) -> None:
    served = grey(STATED[name]()).astype(int)
    assert np.abs(served - AS_8_BITS).max() <= (1 if name == "PGM" else 0)  # Pillow scales PGM to 16 bits
    assert (served.min(), served.max()) == (0, 255)
    assert caplog.records == []


@pytest.mark.parametrize("bits", [9, 10, 12, 14, 15])
def test_the_depth_that_is_stated_counts_not_the_brightest_value(bits: int) -> None:
    values = np.arange(1 << bits, dtype=np.uint16)[: 1 << bits - 1].reshape(-1, 16)  # no brighter than half
    expected = np.round(values * (255 / ((1 << bits) - 1))).astype(np.uint8)
    for data in (
        encoded(values, "TIFF", tiffinfo={281: (1 << bits) - 1}),
        with_chunk(encoded(values, "PNG"), b"sBIT", bytes([bits])),
    ):
        assert np.array_equal(grey(data), expected)


def test_a_png_that_is_scaled_as_its_standard_asks_is_not_scaled_again() -> None:
    """Its significant bits are the upper ones (PNG, 12.4), also where it is dark."""
    for original in (RAMP, RAMP // 40):
        for scaled in (original << 4, original << 4 | original >> 8, np.round(original * (65535 / 4095))):
            pixels = scaled.astype(np.uint16)
            data = with_chunk(encoded(pixels, "PNG"), b"sBIT", b"\x0c")
            assert np.array_equal(grey(data), pixels >> 8)


def test_16_bits_keep_their_upper_8_and_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    full = (np.arange(4096) * 16).astype(np.uint16).reshape(64, 64)
    for data in (
        encoded(full, "PNG"),
        encoded(full, "TIFF"),
        encoded(full, "TIFF", tiffinfo={281: 65535}),
        encoded(full, "TIFF", tiffinfo={281: 4095}),  # which its values belie
        encoded(np.zeros_like(full), "PNG"),
    ):
        decoded = grey(data)
        assert np.array_equal(decoded, full >> 8) or not decoded.any()
    assert caplog.records == []


def test_values_that_suggest_fewer_bits_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for kind in ("PNG", "TIFF", "PNG"):
        assert grey(encoded(RAMP, kind)).max() == 15
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "none is above 4,095 of 65,535" in caplog.text
    assert "MaxSampleValue" in caplog.text


def test_deep_colours_that_suggest_fewer_bits_are_said(caplog: pytest.LogCaptureFixture) -> None:
    rows = b"".join(b"\0" + row.tobytes() for row in RAMP.repeat(3, 1).astype(">u2"))
    header = struct.pack(">IIBBBBB", 64, 64, 16, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n"
    for kind, content in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        chunk = kind + content
        data += struct.pack(">I", len(content)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    assert grey(data).max() == 15
    assert "none is above 4,095 of 65,535" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_the_user_of_a_command_reads_it_once(workers: int, tmp_path: Path) -> None:
    (tmp_path / "tree/a").mkdir(parents=True)
    for number in range(8):
        (tmp_path / f"tree/a/{number}.png").write_bytes(encoded(RAMP, "PNG"))
    options = ("--format", "shards", "--size", 8, "--shard-bytes", 400, "--workers", workers)
    for command in (("convert", "tree", "out", *options), ("check", "tree", "--workers", workers)):
        result = run("precache", *command, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stderr.count("WARNING") == 1, result.stderr
        assert ".png': its values have 16 bits, but none is above 4,095 of 65,535" in result.stderr
