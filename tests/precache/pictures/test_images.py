"""Pixels against the reference: Pillow's decode, then torchvision's Resize and CenterCrop."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps, features
from torchvision.transforms import CenterCrop, InterpolationMode, Resize

from precache.errors import ImageError, SourceError
from precache.pictures import images, jpeg
from precache.pictures.images import Rendering
from precache.sources.tree import scan_tree
from tests.precache.pictures.drawing import encoded, load, noise

KINDS = ["GIF", "BMP", "TIFF", "PNG", "JPEG"] + ["WEBP"] * features.check("webp")  # a build can lack it


def reference(picture: str | io.BytesIO, size: int) -> np.ndarray:
    image = ImageOps.exif_transpose(Image.open(picture)).convert("RGB")
    resized = Resize(size, InterpolationMode.BILINEAR, antialias=True)(image)
    return np.asarray(CenterCrop(size)(resized))


def decoded(data: bytes) -> np.ndarray:
    return np.asarray(images.decode(data, "x"))


@pytest.mark.parametrize("size", [32, 64, 224, 300])
def test_pixels_are_the_references_but_for_rounding(raw_tree: Path, size: int) -> None:
    """No value off by more than 1, no picture under 50 dB: the bound that the README states."""
    for sample in scan_tree(raw_tree).samples:
        path = f"{raw_tree}/{sample.path}"
        difference = np.abs(load(path, size).astype(int) - reference(path, size))
        assert difference.max() <= 1, path
        assert 255**2 / max(np.square(difference).mean(), 1e-9) > 10 ** (50 / 10), path


@pytest.mark.parametrize(
    ("width", "height"), [(300, 200), (200, 300), (64, 64), (64, 201), (1, 500), (37, 64)]
)
def test_any_aspect_gives_a_square_as_torchvision_crops_it(width: int, height: int) -> None:
    data = encoded(noise(height, width, 3))
    served, size = images.render(data, "x", Rendering(size=64))
    assert (served.shape, served.dtype, size) == ((64, 64, 3), np.uint8, (width, height))
    assert np.abs(served.astype(int) - reference(io.BytesIO(data), 64)).max() <= 1


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_an_extreme_aspect_needs_no_extreme_memory(kind: str) -> None:
    for size in ((1, 30_000), (30_000, 1)):
        pixels, original = images.render(
            encoded(Image.new("RGB", size, "red"), kind), "x", Rendering(size=256)
        )
        assert original == size
        assert np.abs(pixels.astype(int) - (255, 0, 0)).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_exif_orientation_is_applied(orientation: int, mode: str) -> None:
    image = Image.new(mode, (40, 20))
    image.paste(Image.new(mode, (20, 10), "white"), (0, 0))
    data = encoded(image, "JPEG", exif=orientation, quality=95)
    upright = images.decode(data, "x.jpg")
    assert (upright.size, upright.mode) == ((40, 20) if orientation < 5 else (20, 40), "RGB")
    assert images.upright_shape(data, "x.jpg") == upright.size[::-1]
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert np.array_equal(np.asarray(upright), np.asarray(expected))


def of_palette(kind: str, **options: Any) -> bytes:
    """Left half the first colour, right half the second."""
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([10, 200, 30, 0, 0, 255])
    palette.paste(1, (4, 0, 8, 8))
    return encoded(palette, kind, **options)


def half_transparent(mode: str) -> bytes:
    rgba = np.zeros((8, 8, 4), np.uint8)
    rgba[:, :4, :3] = 10, 200, 30
    rgba[:, 4:] = 0, 0, 255, 255
    return encoded(Image.fromarray(rgba).convert(mode).convert("RGBA"))


cmyk = Image.new("CMYK", (16, 16), (245, 55, 225, 0))
cmyk.paste((255, 255, 0, 0), (8, 0, 16, 16))
HALVES = {
    **{f"palette {kind}": (of_palette(kind), (10, 200, 30)) for kind in ("PNG", "GIF", "BMP", "TIFF")},
    "colour key": (of_palette("PNG", transparency=0), (255, 255, 255)),
    **{f"{mode} on white": (half_transparent(mode), (255, 255, 255)) for mode in ("RGBA", "PA", "P")},
    "CMYK": (encoded(cmyk, "JPEG", quality=100), (10, 200, 30)),  # inverted, as Adobe does
}  # fmt: skip


@pytest.mark.parametrize("name", HALVES)
def test_colours_are_what_pillow_shows(name: str) -> None:
    data, left = HALVES[name]
    halves = decoded(data).astype(int)
    middle = halves.shape[1] // 2
    assert np.abs(halves[:, :middle] - left).max() <= 12 * (name == "CMYK")
    assert np.abs(halves[:, middle:] - (0, 0, 255)).max() <= 12 * (name == "CMYK")


def test_the_background_shows_through_transparency() -> None:
    data = encoded(Image.new("RGBA", (8, 8), (0, 0, 0, 0)))
    pixels, _ = images.render(data, "x", Rendering(size=8, background=(1, 2, 3)))
    assert (pixels == (1, 2, 3)).all()


JPEG = encoded(noise(64, 64, 3), "JPEG")
AS_PILLOW = {
    "progressive": encoded(noise(70, 50, 3), "JPEG", progressive=True),
    **{f"subsampling {n}": encoded(noise(70, 50, 3), "JPEG", subsampling=n) for n in (0, 1, 2)},
    "YCCK": simplejpeg.encode_jpeg(noise(16, 16, 4), quality=100, colorspace="CMYK"),
    "CMYK": encoded(Image.fromarray(noise(16, 16, 4), "CMYK"), "JPEG"),
    # real trees hold JPEGs that libjpeg warns about; only Pillow's verdict counts
    "harmless garbage": JPEG[:-2] + b"\x00\x00\x00" + JPEG[-2:],
}


@pytest.mark.parametrize("name", AS_PILLOW)
def test_any_jpeg_gives_pillows_pixels(name: str) -> None:
    expected = np.asarray(Image.open(io.BytesIO(AS_PILLOW[name])).convert("RGB"))
    assert np.array_equal(decoded(AS_PILLOW[name]), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_content_counts_not_the_name_and_the_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (30, 20), color) for color in ("red", "lime", "blue")]
    options = {"save_all": True, "append_images": frames[1:]} if kind not in ("JPEG", "BMP") else {}
    pixels, _ = images.render(encoded(frames[0], kind, **options), "wrong.jpg", Rendering(size=16))
    assert np.abs(pixels.astype(int) - (255, 0, 0)).max() <= 2


@pytest.mark.parametrize("mode", ["RGB", "RGBX"])
@pytest.mark.parametrize("picture", ["RGB", "L"])
def test_how_a_jpeg_is_wrapped_does_not_change_its_pixels(
    mode: str, picture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grey stays one channel, and Pillow-SIMD gets four, until the picture is resized."""
    data = encoded(Image.fromarray(noise(60, 90, 3)).convert(picture), "JPEG")
    monkeypatch.setattr(images, "_COLOUR_MODE", mode)
    for fit in images.FITS:
        pixels, _ = images.render(data, "x.jpg", Rendering(size=40, fit=fit))
        monkeypatch.setattr(jpeg, "START", b"never")  # as Pillow decodes it
        expected, _ = images.render(data, "x.jpg", Rendering(size=40, fit=fit))
        monkeypatch.setattr(jpeg, "START", b"\xff\xd8\xff")
        assert np.array_equal(pixels, expected), fit


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("fit", images.FITS)
@pytest.mark.parametrize(("width", "height"), [(640, 480), (643, 485)])
def test_a_scaled_decode_stays_near_the_whole_one(
    width: int, height: int, fit: str, orientation: int
) -> None:
    smooth = Image.fromarray(noise(height // 16, width // 16, 3)).resize((width, height))
    data = encoded(smooth, "JPEG", quality=95, exif=orientation)
    whole = Rendering(size=48, fit=fit)
    pixels, size = images.render(data, "x.jpg", replace(whole, scaled_decode=True))
    expected, expected_size = images.render(data, "x.jpg", whole)
    assert size == expected_size == ((width, height) if orientation == 1 else (height, width))
    assert jpeg.psnr(pixels, expected) > 45


def test_a_scaled_decode_is_for_large_jpegs_only() -> None:
    how = Rendering(size=48, scaled_decode=True)
    for side, reduction in ((64, 1), (239, 1), (240, 2), (480, 4), (960, 8), (2000, 8)):
        found = images.decode_for(encoded(Image.new("RGB", (side, side)), "JPEG"), "x.jpg", how)
        assert found.reduction == reduction, side
        assert (found.width, found.image.width) == (side, -(-side // reduction))


@pytest.mark.parametrize("damage", ["truncated", "broken off", "without end"])
def test_a_damaged_jpeg_is_rejected_unless_allowed(damage: str) -> None:
    half = JPEG[: len(JPEG) // 2]
    data = {"truncated": half, "broken off": half + b"\xff\xd9", "without end": JPEG[:-2]}[damage]
    how = Rendering(size=64)
    with pytest.raises(ImageError, match=r"truncated or damaged: .*[Pp]remature end"):
        images.render(data, "x.jpg", how)
    pixels, _ = images.render(data, "x.jpg", replace(how, allow_truncated=True))
    whole, _ = images.render(JPEG, "x.jpg", how)
    assert np.array_equal(pixels[:15], whole[:15])  # the 16th row's colour reaches into what is missing
    assert (damage == "without end") == np.array_equal(pixels, whole)


def test_a_missing_picture_names_its_path(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"gone\.jpg: disappeared"):
        load(str(tmp_path / "gone.jpg"), 32)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"comment": b"\xff\xd9"}])
def test_a_jpeg_breaks_off_where_its_end_is_missing(options: dict[str, Any]) -> None:
    """An end in a header, as that of a thumbnail, is not its own."""
    data = encoded(noise(48, 64, 3), "JPEG", **options)
    assert data.count(b"\xff\xd9") == 1 + ("comment" in options)
    assert not jpeg.breaks_off(data)
    assert not jpeg.breaks_off(data + bytes(20)), "what follows the end is harmless"
    assert all(jpeg.breaks_off(data[:length]) for length in (0, 2, 100, len(data) // 2, len(data) - 1))


def test_pad_keeps_the_whole_picture_between_black_bars() -> None:
    served, _ = images.render(
        encoded(Image.new("RGB", (80, 40), "white")), "x", Rendering(size=32, fit="pad")
    )
    assert (served[8:24] == 255).all()
    assert max(served[:8].max(), served[24:].max()) == 0


@pytest.mark.parametrize("resample", sorted(images.RESAMPLING))
def test_stretch_is_pillows_resize(resample: str) -> None:
    image = Image.fromarray(noise(40, 80, 3))
    expected = np.asarray(image.resize((32, 32), images.RESAMPLING[resample]))
    served, _ = images.render(encoded(image), "x", Rendering(size=32, fit="stretch", resample=resample))
    assert np.array_equal(served, expected)
