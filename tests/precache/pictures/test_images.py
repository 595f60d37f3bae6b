"""Pixels are those of the reference: decoded by Pillow, resized and cropped by Pillow or torchvision."""

import io
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import ExifTags, Image, ImageOps
from torchvision.transforms import CenterCrop, InterpolationMode, Resize

from precache import Recipe
from precache.errors import ImageError
from precache.pictures import images, jpeg
from precache.pictures.images import Rendering, Size
from precache.sources.tree import scan_tree
from tests.precache.pictures.drawing import chunk, encode_image, load, noise, png

SIDES = [(90, 60), (60, 90), (64, 64), (333, 41), (20, 10), (48, 48), (48, 301), (1, 30), (30, 1)]


@pytest.mark.parametrize("size", [64, 300])
def test_cropped_pixels_are_torchvisions_within_rounding(raw_tree: Path, size: int) -> None:
    """Allow values that differ by 1, and at least 50 dB: the bound that the README states."""
    for sample in scan_tree(raw_tree).samples:
        path = f"{raw_tree}/{sample.path}"
        upright = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
        resized = Resize(size, InterpolationMode.BILINEAR, antialias=True)(upright)
        difference = np.abs(load(path, size).astype(int) - np.asarray(CenterCrop(size)(resized)))
        assert difference.max() <= 1, path
        assert 255**2 / max(np.square(difference).mean(), 1e-9) > 10 ** (50 / 10), path


def fitted(picture: Image.Image, rendering: Rendering) -> Image.Image:
    """Make the picture that is to be stored, by resizing and cropping the whole picture."""
    width, height = picture.size
    rows, columns = rendering.size if isinstance(rendering.size, tuple) else (rendering.size, rendering.size)
    by_width = columns * height >= rows * width
    if rendering.fit == "crop":
        covering = (
            (int(height * columns / width), columns) if by_width else (rows, int(width * rows / height))
        )
        return CenterCrop((rows, columns))(Resize(covering)(picture))
    if rendering.fit == "stretch":
        return picture.resize((columns, rows), images.RESAMPLING[rendering.resample])
    if rendering.fit == "keep":
        return Resize(rows)(picture) if rendering.enlarge or min(picture.size) > rows else picture
    scale = min(columns / width, rows / height)
    inner = picture.resize((max(1, round(width * scale)), max(1, round(height * scale))), Image.BILINEAR)
    if rendering.fit == "keep-longer":
        return inner if rendering.enlarge or max(picture.size) > rows else picture
    padded = Image.new(picture.mode, (columns, rows))
    padded.paste(inner, (round((columns - inner.width) / 2), round((rows - inner.height) / 2)))
    return padded


@pytest.mark.parametrize("channels", images.CHANNELS)
@pytest.mark.parametrize("fit", images.FITS)
def test_render_gives_the_pixels_of_the_whole_picture_resized(fit: str, channels: str) -> None:
    """Allow values that differ by 1 with fit `crop`, which resizes only the part that is kept."""
    sizes: list[Size] = [48] if fit in images.KEEPING_FITS else [48, (36, 60)]
    for number, (width, height) in enumerate(SIDES):
        picture = Image.fromarray(noise(height, width, 3)).convert(["RGB", "L", "LA"][number % 3])
        for size in sizes:
            for option in (False, True):
                rendering = Rendering(size=size, fit=fit, channels=channels)
                if option and fit != "stretch":
                    rendering = replace(rendering, enlarge=fit in images.KEEPING_FITS)
                elif option:
                    rendering = replace(rendering, resample="area")
                pixels, original = images.render(encode_image(picture), "x", rendering)
                expected = np.asarray(fitted(picture.convert(images.MODES[channels]), rendering))
                if channels == "grey":
                    pixels = pixels[..., 0]
                assert pixels.shape == expected.shape
                assert np.abs(pixels.astype(int) - expected).max() <= (fit == "crop")
                assert original == (width, height)


def test_default_recipe_keeps_pictures_whole_and_shrinks_by_lanczos() -> None:
    for width, height, stored in ((672, 450, (669, 448)), (440, 3000, (440, 3000))):
        picture = Image.fromarray(noise(height, width, 3))
        pixels, _ = images.render(encode_image(picture), "x", Recipe(format="shards").rendering)
        resized = picture if stored == picture.size else picture.resize(stored, Image.Resampling.LANCZOS)
        assert np.array_equal(pixels, np.asarray(resized))


ORIENTED = [
    *(("JPEG", mode) for mode in ("RGB", "L", "CMYK")),
    *(("TIFF", mode) for mode in ("RGB", "L", "I;16", "P", "1", "CMYK")),
    *((kind, "RGB") for kind in ("PNG", "WEBP", "AVIF")),  # not HEIF, whose own orientation replaces EXIF's
]


@pytest.mark.parametrize(("kind", "mode"), ORIENTED)
def test_decode_and_upright_shape_apply_exif_orientation(kind: str, mode: str) -> None:
    """Compare with the saved picture turned by Pillow; some kinds are lossy."""
    if kind not in {*Image.SAVE}:
        pytest.skip(f"no encoder of {kind} is installed")
    image = Image.new("RGB", (40, 24))
    image.paste((255, 255, 255), (0, 0, 16, 8))
    stored = Image.fromarray(np.asarray(image.convert("L"), np.uint16) * 257)
    if mode != "I;16":
        stored = image.convert(mode)
    for orientation in range(1, 9):
        data = encode_image(stored, kind, exif=orientation, quality=95)
        upright = images.decode(data, "x")
        assert (upright.size, upright.mode) == ((40, 24) if orientation < 5 else (24, 40), "RGB")
        assert images.upright_shape(data, "x") == upright.size[::-1]
        saved = image.copy()
        saved.getexif()[ExifTags.Base.Orientation] = orientation
        expected = np.asarray(ImageOps.exif_transpose(saved)).astype(int)
        assert np.abs(np.asarray(upright) - expected).mean() < 4, orientation


def of_palette(kind: str, **options: Any) -> bytes:
    """Make a picture with a palette, whose left half has the first colour, its right half the second."""
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([10, 200, 30, 0, 0, 255])
    palette.paste(1, (4, 0, 8, 8))
    return encode_image(palette, kind, **options)


def animated(kind: str) -> bytes:
    """Make an animation whose first frame is the two halves, and its second one noise."""
    frames = [of_palette("PNG"), encode_image(noise(8, 8, 3))]
    first, second = (Image.open(io.BytesIO(frame)).convert("RGB") for frame in frames)
    return encode_image(first, kind, save_all=True, append_images=[second])


def half_transparent(side: int) -> bytes:
    rgba = np.zeros((side, side, 4), np.uint8)
    rgba[:, : side // 2, :3] = 10, 200, 30
    rgba[:, side // 2 :] = 0, 0, 255, 255
    return encode_image(rgba, compress_level=1)


cmyk = Image.new("CMYK", (16, 16), (245, 55, 225, 0))
cmyk.paste((255, 255, 0, 0), (8, 0, 16, 16))
HALVES = {
    **{f"palette {kind}": (of_palette(kind), (10, 200, 30)) for kind in ("PNG", "GIF", "BMP", "TIFF")},
    **{f"first frame of {kind}": (animated(kind), (10, 200, 30)) for kind in ("PNG", "GIF", "TIFF")},
    "colour key": (of_palette("PNG", transparency=0), (255, 255, 255)),
    "on white": (half_transparent(8), (255, 255, 255)),
    "on white, in several bands": (half_transparent(2100), (255, 255, 255)),
    "CMYK": (encode_image(cmyk, "JPEG", quality=100), (10, 200, 30)),  # values are inverted, as Adobe's are
}  # fmt: skip


@pytest.mark.parametrize("name", HALVES)
def test_decode_gives_the_colours_of_both_halves(name: str) -> None:
    data, left = HALVES[name]
    halves = np.asarray(images.decode(data, "x")).astype(np.int16)
    middle = halves.shape[1] // 2
    tolerance = 12 if name == "CMYK" else 0
    assert np.abs(halves[:, :middle] - left).max() <= tolerance
    assert np.abs(halves[:, middle:] - (0, 0, 255)).max() <= tolerance


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_transparent_grey_of_a_png_is_transparent_at_any_depth(bits: int) -> None:
    """Name a transparent value in the tRNS chunk, as pixels are stored (PNG 11.3.2.1)."""
    clear = ((1 << bits) - 1) // 3 or 1
    row = "".join(f"{value:0{bits}b}" for value in [clear] * 4 + [0] * 4)
    plain = png(8, 8, (b"\0" + int(row, 2).to_bytes(bits, "big")) * 8, depth=bits, colour=0)
    data = plain[:33] + chunk(b"tRNS", clear.to_bytes(2, "big")) + plain[33:]
    shown, _ = images.render(data, "x", Rendering(size=8, background=(9, 8, 7)))
    assert shown[0].tolist() == [[9, 8, 7]] * 4 + [[0, 0, 0]] * 4
    grey, _ = images.render(data, "x", Rendering(size=8, channels="grey"))
    assert grey[0, :, 0].tolist() == [255] * 4 + [0] * 4


def bmp_without_opacity() -> bytes:
    """Make a BMP of 32 bits as screenshots are: its header (V4) has an opacity, and all of it is 0."""
    rgba = Image.fromarray(noise(8, 8, 4))
    rgba.putalpha(0)
    masks = struct.pack("<4I", 0xFF, 0xFF00, 0xFF0000, 0xFF000000)
    header = struct.pack("<IiiHHIIiiII", 108, 8, -8, 1, 32, 3, 256, 0, 0, 0, 0) + masks + b"BGRs" + bytes(48)
    return b"BM" + struct.pack("<IHHI", 378, 0, 0, 122) + header + rgba.tobytes()


def clear(kind: str, mode: str = "RGBA") -> bytes:
    """Make a picture of noise, all of which is transparent."""
    picture = Image.fromarray(noise(16, 16, 3)).convert(mode)
    picture.putalpha(0)
    return encode_image(picture, kind)


CLEAR = {
    "BMP": bmp_without_opacity(),
    **{kind: clear(kind) for kind in ("TGA", "PNG", "ICO", "TIFF", "DDS")},
    "grey": clear("PNG", "LA"),
    "palette": encode_image(Image.fromarray(noise(8, 8)).convert("P"), transparency=bytes(256)),
}


@pytest.mark.parametrize("name", CLEAR)
def test_picture_transparent_everywhere_shows_its_colours(name: str) -> None:
    path = f"x.{name.lower()}"
    expected = Image.open(io.BytesIO(CLEAR[name])).convert("RGB")
    assert np.array_equal(np.asarray(images.decode(CLEAR[name], path)), np.asarray(expected))
    assert np.asarray(expected).std() > 10


JPEG = encode_image(noise(64, 64, 3), "JPEG", comment=b"\xff\xd9")
"""JPEG with an end-of-image marker within its comment."""
AS_PILLOW = {
    "grey": encode_image(noise(50, 40), "JPEG"),
    "progressive": encode_image(noise(70, 50, 3), "JPEG", progressive=True),
    **{f"subsampling {n}": encode_image(noise(70, 50, 3), "JPEG", subsampling=n) for n in (0, 1, 2)},
    "YCCK": simplejpeg.encode_jpeg(noise(16, 16, 4), quality=100, colorspace="CMYK"),
    "CMYK": encode_image(Image.fromarray(noise(16, 16, 4), "CMYK"), "JPEG"),
    # libjpeg warns about these, and Pillow accepts them: real trees hold many
    "harmless garbage": JPEG[:-2] + b"\x00\x00\x00" + JPEG[-2:],
    "bytes after its end": JPEG + bytes(20),
}


@pytest.mark.parametrize("name", AS_PILLOW)
def test_decode_of_any_jpeg_gives_pillows_pixels(name: str) -> None:
    picture = Image.open(io.BytesIO(AS_PILLOW[name]))
    assert np.array_equal(np.asarray(images.decode(AS_PILLOW[name], "x")), np.asarray(picture.convert("RGB")))
    whole, _ = images.render(AS_PILLOW[name], "x", Rendering(size=99, fit="keep", channels="grey"))
    assert np.array_equal(whole[..., 0], np.asarray(picture.convert("L")))


@pytest.mark.parametrize("fit", images.FITS)
def test_scaled_decode_stays_within_45_db_of_the_full_decode(fit: str) -> None:
    for width, height, orientation in ((640, 480, 1), (640, 480, 6), (643, 485, 6)):
        smooth = Image.fromarray(noise(height // 16, width // 16, 3)).resize((width, height))
        data, whole = encode_image(smooth, "JPEG", quality=95, exif=orientation), Rendering(size=48, fit=fit)
        scaled = replace(whole, scaled_decode=True)
        pixels, size = images.render(data, "x.jpg", scaled)
        expected, expected_size = images.render(data, "x.jpg", whole)
        is_reduced = images.decode_for(data, "x.jpg", scaled).reduction > 1
        assert is_reduced == (width % 8 == 0)  # a turned picture is reduced only if that is exact
        assert size == expected_size == ((width, height) if orientation == 1 else (height, width))
        assert jpeg.psnr(pixels, expected) > 45


HALF = JPEG[: len(JPEG) // 2]
TRUNCATED = {"half": HALF, "half with an end": HALF + b"\xff\xd9", "without end": JPEG[:-2]}


@pytest.mark.parametrize("name", TRUNCATED)
def test_render_refuses_a_truncated_jpeg(name: str) -> None:
    with pytest.raises(ImageError, match=r"^x.jpg: .*truncated or damaged"):
        images.render(TRUNCATED[name], "x.jpg", Rendering(size=64))


@pytest.mark.parametrize("name", TRUNCATED)
def test_allow_truncated_decodes_the_rows_of_a_truncated_jpeg(name: str) -> None:
    pixels, _ = images.render(TRUNCATED[name], "x.jpg", Rendering(size=64, allow_truncated=True))
    whole, _ = images.render(JPEG, "x.jpg", Rendering(size=64))
    assert np.array_equal(pixels[:15], whole[:15])  # the colour of the 16th row depends on missing data
    assert (name == "without end") == np.array_equal(pixels, whole)
