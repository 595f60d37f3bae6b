"""What is not a picture, or a damaged or too large one: a table of bytes and of what is said of them."""

import struct
from pathlib import Path

import pytest
from PIL import Image, PngImagePlugin, features

from precache.errors import ImageError
from precache.pictures import images, kinds
from precache.pictures.images import Rendering
from tests.precache.pictures.drawing import encoded, noise, png, rendered_within, tiff

SVG = b'<?xml version="1.0"?>\n<!-- made by hand -->\n<svg xmlns="http://www.w3.org/2000/svg"/>\n'
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
DRAWN = r": cannot be decoded \({}: a drawing, not a picture; render it first\)"
UNKNOWN = r": cannot be decoded \(not a known image format\)"


def text_that_inflates() -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("bomb", "a" * (80 << 20), zip=True)
    return encoded(noise(8, 8, 3), pnginfo=info)


def gif_frame(width: int, height: int) -> bytes:
    """A screen of 8 x 8 with a frame of so many pixels."""
    data = bytearray(encoded(Image.new("P", (8, 8)), "GIF"))
    at = data.index(b",\0\0\0\0\x08\0\x08\0")
    data[at + 5 : at + 9] = struct.pack("<HH", width, height)
    return bytes(data)


def webp_canvas(width: int, height: int) -> bytes:
    frames = [Image.new("RGBA", (8, 8), color) for color in ("#01020304", "red")]
    body = bytearray(encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]))
    assert body[12:16] == b"VP8X"
    body[24:27], body[27:30] = (width - 1).to_bytes(3, "little"), (height - 1).to_bytes(3, "little")
    return bytes(body)


def icon_of(picture: bytes) -> bytes:
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 0, 0, 0, 0, 1, 32, len(picture), 22) + picture


def tiff_tile(side: int) -> bytes:
    """8 x 8 pixels, in a tile of `side` x `side`."""
    data = bytes(17)
    return tiff(
        data, (256, 8), (257, 8), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side), (324, -1),
        (325, len(data)),
    )  # fmt: skip


JPEG, PNG = encoded(noise(64, 64, 3), "JPEG"), encoded(noise(64, 64, 3))
BOMBS = {
    "png": png(13_000, 13_000, bytes(1000)),
    "thin png": png(1, 170_000_000, bytes(1000)),
    "png of 2**62 pixels": png(2**31 - 1, 2**31 - 1, bytes(1000)),
    "icon": icon_of(png(13_000, 13_000, bytes(1000))),
    "gif": gif_frame(60_000, 60_000),
    "tiff tile": tiff_tile(60_000),
    **({"webp": webp_canvas(16_383, 16_383)} if features.check("webp") else {}),
}
"""Few bytes that say that they are very many pixels."""

UNREAD = (
    *(b"SIMPLE  =                    T", b"\x89HDF\r\n\x1a\n", b"GRIB", b"BUFR", b"\xd7\xcd\xc6\x9a\0\0"),
    *(b"\0\0\x01\xb3", b"8BPS\0\1", b"icns", b"/* XPM */\nstatic", b"#define x_width 8\n"),
)
"""What Pillow opens besides: stubs, renderers and work files."""
BAD = {
    "empty": (b"", "the file is empty"),
    "error page": (b"<html>404</html>", UNKNOWN),
    "half a JPEG": (JPEG[: len(JPEG) // 2], "truncated or damaged: "),
    **{f"JPEG of {n} bytes": (JPEG[:n], r": cannot be decoded \(.*[a-z]{3}") for n in range(3, 600, 40)},
    "half a PNG": (PNG[:3000], ": cannot be decoded"),
    "text that inflates": (text_that_inflates(), ": cannot be decoded"),
    "SVG": (SVG, DRAWN.format("SVG")),
    "SVG with a mark": (b"\xef\xbb\xbf" + SVG, DRAWN.format("SVG")),
    "PDF": (b"%PDF-1.4\n", DRAWN.format("PDF")),
    "EPS": (EPS, UNKNOWN),
    **{f"{mark!r}": (mark + bytes(64), UNKNOWN) for mark in UNREAD},
    **{f"bomb: {name}": (data, r": is too large \(") for name, data in BOMBS.items()},
    "bilevel bomb": (encoded(Image.new("1", (20_000, 20_000))), ": is too large .* allows 100,000,000"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_is_one_line_with_its_path_and_the_reason(name: str) -> None:
    data, reason = BAD[name]
    deep = Rendering(size=8, channels="grey", dtype="uint16")
    for how in (Rendering(size=8), Rendering(size=8, channels="rgba"), deep):
        said = reason.replace("truncated or damaged: ", "truncated") if how is deep else reason
        with pytest.raises(ImageError, match=f"^folder/x.jpg{said}|^folder/x.jpg: .*{said}") as caught:
            images.render(data, "folder/x.jpg", how)
        assert caught.value.path == "folder/x.jpg"
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_without_its_memory(name: str, tmp_path: Path) -> None:
    (tmp_path / "bomb").write_bytes(BOMBS[name])
    answer = rendered_within(30_000_000, tmp_path / "bomb")
    assert answer.startswith("ImageError x: is too large ("), answer


@pytest.mark.parametrize(
    "kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM", "TGA", "WEBP", "AVIF", "JPEG2000"]
)
def test_a_picture_of_more_pixels_is_refused_by_size_and_option(kind: str) -> None:
    name = "x.tga" if kind == "TGA" else "x"
    for mode in ("L", "RGB", "CMYK", "RGBA"):
        try:
            data = encoded(Image.new(mode, (40, 50)), kind)
        except (OSError, ValueError, KeyError):
            continue  # this Pillow writes no such picture
        assert images.render(data, name, Rendering(size=8, max_pixels=2000))[1] == (40, 50)
        with pytest.raises(ImageError, match=r"40x50 is 2,000 pixels, --max-pixels allows 1,999"):
            images.render(data, name, Rendering(size=8, max_pixels=1999))


@pytest.mark.parametrize("kind", ["PNG", *kinds.DECODER_PACKAGES])
def test_a_kind_without_its_decoder_is_named_with_what_installs_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = {"AVIF": b"\0\0\0\x20ftypavif\0\0\0\0avif", "HEIF": b"\0\0\0\x1cftypheic\0\0\0\0mif1"}
    for lacking in ("PNG", "AVIF", "HEIF"):
        monkeypatch.delitem(Image.OPEN, lacking, raising=False)
    remedy = kinds.DECODER_PACKAGES.get(kind, "'precache doctor' prints")
    with pytest.raises(ImageError, match=rf"this Pillow has no decoder for {kind}.*{remedy}"):
        images.decode(marks.get(kind, PNG) + bytes(64), "x")
