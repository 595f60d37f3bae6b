"""Damaged, foreign and too large files are refused with a reason, and large ones decoded one at a time."""

import multiprocessing
import struct
import time
from pathlib import Path

import pytest
from PIL import Image, PngImagePlugin, features

import precache
from precache.errors import ImageError
from precache.pictures import images, jpeg
from precache.pictures.images import Rendering
from precache.pictures.large_pictures import LARGE_PIXELS, large_picture_lock
from tests.conftest import small_recipe
from tests.precache.pictures.drawing import encode_image, error_within_memory, noise, png, tiff

SVG = b'\xef\xbb\xbf<?xml version="1.0"?>\n<!-- made by hand -->\n<svg xmlns="http://www.w3.org/2000/svg"/>\n'
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
UNKNOWN = r": cannot be decoded \(not a known image format\)"


def text_that_inflates() -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("bomb", "a" * (80 << 20), zip=True)
    return encode_image(noise(8, 8, 3), pnginfo=info)


JPEG, PNG = encode_image(noise(64, 64, 3), "JPEG"), encode_image(noise(64, 64, 3))
BAD = {
    "empty": (b"", r": cannot be decoded \(the file is empty\)"),
    "error page": (b"<html>404</html>", UNKNOWN),
    **{f"JPEG of {n} bytes": (JPEG[:n], r": cannot be decoded \(.*[a-z]{3}") for n in range(3, 600, 150)},
    "half a PNG": (PNG[:3000], ": cannot be decoded"),
    "text that inflates": (text_that_inflates(), ": cannot be decoded"),
    "SVG": (SVG, r": cannot be decoded \(SVG: a drawing, not a picture; render it first\)"),
    "EPS": (EPS, UNKNOWN),
    **{f"{mark!r}": (mark + bytes(64), UNKNOWN) for mark in (b"GRIB", b"\xd7\xcd\xc6\x9a\0\0", b"8BPS\0\1")},
}
"""Content -> part of the message; the last kinds are those that Pillow opens by stubs or other programs."""


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("channels", images.CHANNELS)
def test_render_raises_image_error_with_path_and_reason(channels: str, name: str) -> None:
    data, reason = BAD[name]
    with pytest.raises(ImageError, match=f"^folder/x.jpg{reason}") as raised:
        images.render(data, "folder/x.jpg", Rendering(size=8, channels=channels))
    assert raised.value.path == "folder/x.jpg"
    assert str(raised.value).isprintable()


def gif_frame(width: int, height: int) -> bytes:
    """Make a GIF with a screen of 8 x 8 pixels and a frame of this size."""
    data = bytearray(encode_image(Image.new("P", (8, 8)), "GIF"))
    at = data.index(b",\0\0\0\0\x08\0\x08\0")
    data[at + 5 : at + 9] = struct.pack("<HH", width, height)
    return bytes(data)


def webp_canvas(width: int, height: int) -> bytes:
    frames = [Image.new("RGBA", (8, 8), color) for color in ("#01020304", "red")]
    body = bytearray(encode_image(frames[0], "WEBP", save_all=True, append_images=frames[1:]))
    assert body[12:16] == b"VP8X"
    body[24:27], body[27:30] = (width - 1).to_bytes(3, "little"), (height - 1).to_bytes(3, "little")
    return bytes(body)


def icon_of(picture: bytes) -> bytes:
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 0, 0, 0, 0, 1, 32, len(picture), 22) + picture


TILE = ((256, 8), (257, 8), (258, 8), (259, 8), (262, 1), (277, 1), (322, 60_000), (323, 60_000), (324, -1))
BOMBS = {
    "png": png(13_000, 13_000, bytes(1000)),
    "icon": icon_of(png(13_000, 13_000, bytes(1000))),
    "gif": gif_frame(60_000, 60_000),
    "tiff tile": tiff(bytes(17), *TILE, (325, 17)),
    **({"webp": webp_canvas(16_383, 16_383)} if features.check("webp") else {}),
}
"""Small files that state very many pixels; the TIFF states a large tile of 8 x 8 pixels."""


@pytest.mark.parametrize("name", BOMBS)
def test_decompression_bomb_is_refused_without_allocating_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "bomb").write_bytes(BOMBS[name])
    error = error_within_memory(30_000_000, tmp_path / "bomb")
    assert error.startswith("ImageError x: is too large ("), error


@pytest.fixture(scope="module")
def tree_with_large_picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tree with a picture of 180 million pixels, which is more than Pillow opens by default."""
    tree = tmp_path_factory.mktemp("large") / "tree"
    (tree / "a").mkdir(parents=True)
    (tree / "a/0.png").write_bytes(encode_image(Image.new("1", (18_000, 10_000), 1)))
    Image.new("RGB", (9, 9)).save(tree / "a/1.png")
    return tree


def test_check_and_convert_reject_pictures_above_max_pixels(
    tree_with_large_picture: Path, tmp_path: Path
) -> None:
    report = precache.check(tree_with_large_picture, max_pixels=179_000_000, workers=0)
    recipe = small_recipe("shards", size=8, max_pixels=179_000_000)
    result = precache.convert(tree_with_large_picture, tmp_path / "a", recipe, workers=0, max_rejects=1)
    for (rejected,) in (result.manifest.rejected, report.rejected):
        assert rejected.path == "a/0.png"
        assert "180,000,000 pixels, --max-pixels allows 179,000,000" in rejected.reason


def test_render_opens_more_pixels_than_pillow_and_restores_its_limit(tree_with_large_picture: Path) -> None:
    pillow_limit = Image.MAX_IMAGE_PIXELS
    data = (tree_with_large_picture / "a/0.png").read_bytes()
    pixels, size = images.render(data, "x.png", Rendering(size=8, max_pixels=180_000_000))
    assert (size, (pixels == 255).all()) == ((18_000, 10_000), True)
    assert pillow_limit == Image.MAX_IMAGE_PIXELS


def hold_lock_and_log(log: Path, hold_s: float) -> None:
    with large_picture_lock():
        with open(log, "a") as file:
            file.write("begins\n")
        time.sleep(hold_s)
        with open(log, "a") as file:
            file.write("ends\n")


def test_processes_decode_large_pictures_one_at_a_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=hold_lock_and_log, args=(tmp_path / "log", 0.05)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert (tmp_path / "log").read_text().split() == ["begins", "ends"] * 4


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_render_of_a_large_picture_waits_until_the_lock_holder_dies(kind: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    holder = context.Process(target=hold_lock_and_log, args=(tmp_path / kind, 60))
    holder.start()
    while not (tmp_path / kind).exists():
        time.sleep(0.01)
    small = encode_image(Image.new("L", (5000, 500)), kind)
    images.render(small, "x", Rendering(size=8))  # does not wait
    large = encode_image(Image.new("L", (5000, LARGE_PIXELS // 5000 + 1)), kind)
    waiting = context.Process(target=images.render, args=(large, "x", Rendering(size=8)))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    holder.kill()
    waiting.join(10)
    assert waiting.exitcode == 0
    holder.join()


def test_orientation_of_a_jpeg_with_broken_exif_gives_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    exif = b"Exif\0\0MM\0*\xff\xff\xff\xff\0\0"
    data = JPEG[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + JPEG[2:]
    assert jpeg.orientation(data) == 1
    assert not recwarn.list
