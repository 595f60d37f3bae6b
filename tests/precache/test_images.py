"""Pixels against the reference: Pillow's decode, then torchvision's Resize and CenterCrop."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps, features
from torchvision.transforms import CenterCrop, InterpolationMode, Resize

from precache import images, jpeg
from precache.errors import ImageError, SourceError
from precache.sources.tree import scan_tree


def reference(path: str, size: int) -> np.ndarray:
    image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    resized = Resize(size, InterpolationMode.BILINEAR, antialias=True)(image)
    return np.asarray(CenterCrop(size)(resized))


def noise(width: int, height: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("size", [32, 64, 224, 300])
def test_pixels_are_the_references_but_for_rounding(raw_tree: Path, size: int) -> None:
    """No value off by more than 1, no picture under 50 dB: the bound that the README states."""
    for sample in scan_tree(raw_tree).samples:
        path = f"{raw_tree}/{sample.path}"
        difference = np.abs(images.load(path, size).astype(int) - reference(path, size))
        assert difference.max() <= 1, path
        assert 255**2 / max(np.square(difference).mean(), 1e-9) > 10 ** (50 / 10), path


@pytest.mark.parametrize(
    ("width", "height"), [(300, 200), (200, 300), (64, 64), (64, 201), (1, 500), (37, 64)]
)
def test_any_aspect_gives_a_square_as_torchvision_crops_it(tmp_path: Path, width: int, height: int) -> None:
    path = str(tmp_path / "noise.png")
    Image.fromarray(noise(width, height)).save(path)
    served = images.load(path, 64)
    assert served.shape == (64, 64, 3)
    assert served.dtype == np.uint8
    assert np.abs(served.astype(int) - reference(path, 64)).max() <= 1


def test_an_extreme_aspect_needs_no_extreme_memory() -> None:
    for size in ((1, 30_000), (30_000, 1)):
        for kind in ("PNG", "JPEG"):
            data = encoded(Image.new("RGB", size, "red"), kind)
            pixels, original = images.render(data, "long", images.Rendering(size=256))
            assert original == size
            assert np.abs(pixels.astype(int) - (255, 0, 0)).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_exif_orientation_is_applied(orientation: int, mode: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.new(mode, (40, 20))
    image.paste(Image.new(mode, (20, 10), "white"), (0, 0))
    data = encoded(image, "JPEG", exif=exif, quality=95)
    upright = images.decode(data, "x.jpg")
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert upright.size == ((40, 20) if orientation < 5 else (20, 40))
    assert upright.mode == "RGB"
    assert np.array_equal(np.asarray(upright), np.asarray(expected))


def test_transparency_is_composited_on_white() -> None:
    rgba = np.zeros((8, 8, 4), np.uint8)
    rgba[:, 4:] = (255, 0, 0, 255)
    for image in (
        Image.fromarray(rgba),
        Image.fromarray(rgba).convert("PA"),
        Image.fromarray(rgba).convert("P"),
    ):
        decoded = np.asarray(images.decode(encoded(image.convert("RGBA"), "PNG"), "x.png"))
        assert (decoded[:, :4] == 255).all()
        assert (decoded[:, 4:] == (255, 0, 0)).all()
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([0, 0, 0, 0, 0, 255])
    palette.paste(1, (4, 0, 8, 8))
    decoded = np.asarray(images.decode(encoded(palette, "PNG", transparency=0), "x.png"))
    assert (decoded[:, :4] == 255).all()
    assert (decoded[:, 4:] == (0, 0, 255)).all()


def test_16_bit_grey_keeps_its_upper_bits() -> None:
    grey = (np.arange(64, dtype=np.uint16) * 1000).reshape(8, 8)
    decoded = np.asarray(images.decode(encoded(Image.fromarray(grey), "PNG"), "x.png"))
    assert np.array_equal(decoded[..., 0], grey >> 8)


KINDS = ["GIF", "BMP", "TIFF", "PNG", "JPEG"] + ["WEBP"] * features.check("webp")  # a build can lack it


@pytest.mark.parametrize("kind", KINDS)
def test_content_counts_not_the_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "wrong.jpg"
    path.write_bytes(encoded(Image.new("RGB", (30, 20), (0, 128, 255)), kind))
    assert np.abs(images.load(str(path), 16).astype(int) - (0, 128, 255)).max() < 12


def test_adobe_inverted_cmyk_and_ycck_are_pillows_rgb() -> None:
    inverted = np.zeros((16, 16, 4), np.uint8)
    inverted[:, :8] = (255, 0, 0, 255)  # stored inverted: no cyan, all magenta and yellow, no black: red
    inverted[:, 8:] = (0, 0, 255, 255)
    ycck = simplejpeg.encode_jpeg(inverted, quality=100, colorspace="CMYK")
    assert simplejpeg.decode_jpeg_header(ycck)[2] == "YCCK"
    cmyk = encoded(Image.fromarray(255 - inverted, "CMYK"), "JPEG", quality=100)
    for data in (ycck, cmyk):
        decoded = np.asarray(images.decode(data, "x.jpg"))
        assert np.array_equal(decoded, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    red, blue = np.asarray(images.decode(cmyk, "x.jpg"))[8, [4, 12]].astype(int)
    assert np.abs(red - (255, 0, 0)).max() < 12
    assert np.abs(blue - (0, 0, 255)).max() < 12


def test_a_palette_picture_has_its_palettes_colours() -> None:
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 10, 200, 30])
    for kind in ("PNG", "GIF", "BMP", "TIFF"):
        decoded = np.asarray(images.decode(encoded(palette, kind), "x"))
        assert (decoded == (10, 200, 30)).all(), kind


def test_the_first_frame_counts() -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    for kind in set(KINDS) - {"JPEG", "BMP"}:
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        decoded = np.asarray(images.decode(data, "x")).astype(int)
        assert np.abs(decoded - (255, 0, 0)).max() <= 2, kind


def test_progressive_and_baseline_jpegs_give_the_references_pixels() -> None:
    for options in ({"progressive": True}, {"progressive": False}, {"subsampling": 0}, {"subsampling": 1}):
        data = encoded(Image.fromarray(noise(70, 50)), "JPEG", **options)
        expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        assert np.array_equal(np.asarray(images.decode(data, "x.jpg")), expected), options


@pytest.mark.parametrize("mode", ["RGB", "RGBX"])
@pytest.mark.parametrize("picture", ["RGB", "L"])
def test_how_a_jpeg_is_wrapped_does_not_change_its_pixels(
    mode: str, picture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grey stays one channel, and Pillow-SIMD gets four, until the picture is resized."""
    data = encoded(Image.fromarray(noise(90, 60)).convert(picture), "JPEG")
    monkeypatch.setattr(images, "_COLOUR_MODE", mode)
    for fit in images.FITS:
        pixels, _ = images.render(data, "x.jpg", images.Rendering(size=40, fit=fit))
        monkeypatch.setattr(jpeg, "START", b"never")  # as Pillow decodes it
        expected, _ = images.render(data, "x.jpg", images.Rendering(size=40, fit=fit))
        monkeypatch.setattr(jpeg, "START", b"\xff\xd8\xff")
        assert np.array_equal(pixels, expected), fit


def test_the_background_shows_through_transparency() -> None:
    data = encoded(Image.new("RGBA", (8, 8), (0, 0, 0, 0)), "PNG")
    pixels, _ = images.render(data, "x.png", images.Rendering(size=8, background=(1, 2, 3)))
    assert (pixels == (1, 2, 3)).all()


def smooth(width: int, height: int) -> Image.Image:
    return Image.fromarray(noise(width // 16, height // 16)).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("fit", images.FITS)
@pytest.mark.parametrize(("width", "height"), [(640, 480), (643, 485)])
def test_a_scaled_decode_stays_near_the_whole_one(
    width: int, height: int, fit: str, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(smooth(width, height), "JPEG", quality=95, exif=exif)
    whole = images.Rendering(size=48, fit=fit)
    pixels, size = images.render(data, "x.jpg", replace(whole, scaled_decode=True))
    expected, expected_size = images.render(data, "x.jpg", whole)
    assert size == expected_size == ((width, height) if orientation == 1 else (height, width))
    assert 10 * np.log10(255**2 / max(np.square(pixels.astype(float) - expected).mean(), 1e-9)) > 45


def test_a_scaled_decode_is_for_large_jpegs_only() -> None:
    how = images.Rendering(size=48, scaled_decode=True)
    for side, reduction in ((64, 1), (239, 1), (240, 2), (480, 4), (960, 8), (2000, 8)):
        data = encoded(Image.new("RGB", (side, side)), "JPEG")
        decoded = images.decode_for(data, "x.jpg", how)
        assert decoded.reduction == reduction, side
        assert (decoded.width, decoded.image.width) == (side, -(-side // reduction))


JPEG = encoded(Image.fromarray(noise(64, 64)), "JPEG")


@pytest.mark.parametrize("damage", ["truncated", "broken off", "without end"])
def test_a_damaged_jpeg_is_rejected_unless_allowed(damage: str) -> None:
    half = JPEG[: len(JPEG) // 2]
    data = {"truncated": half, "broken off": half + b"\xff\xd9", "without end": JPEG[:-2]}[damage]
    how = images.Rendering(size=64)
    with pytest.raises(ImageError, match=r"truncated or damaged: .*[Pp]remature end"):
        images.render(data, "x.jpg", how)
    pixels, _ = images.render(data, "x.jpg", replace(how, allow_truncated=True))
    whole, _ = images.render(JPEG, "x.jpg", how)
    assert np.array_equal(pixels[:15], whole[:15])  # the 16th row's colour reaches into what is missing
    assert (damage == "without end") == np.array_equal(pixels, whole)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"<html>404</html>", "not a known image format"),
        (JPEG[: len(JPEG) // 2], "truncated"),
        (JPEG[:20], "cannot be decoded"),
        (encoded(Image.fromarray(noise(64, 64)), "PNG")[:3000], "cannot be decoded"),
    ],
)
def test_a_damaged_picture_names_path_and_reason(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "bad.jpg"
    path.write_bytes(data)
    with pytest.raises(ImageError, match=reason) as caught:
        images.load(str(path), 32)
    assert caught.value.path == str(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_picture_names_its_path(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"gone\.jpg: disappeared"):
        images.load(str(tmp_path / "gone.jpg"), 32)


def test_a_jpeg_with_harmless_garbage_is_decoded_as_pillow_does() -> None:
    """Real trees hold JPEGs that libjpeg warns about; only Pillow's verdict counts."""
    warned = JPEG[:-2] + b"\x00\x00\x00" + JPEG[-2:]
    expected = np.asarray(Image.open(io.BytesIO(warned)).convert("RGB"))
    assert np.array_equal(np.asarray(images.decode(warned, "x.jpg")), expected)


def test_a_jpeg_breaks_off_where_its_end_is_missing() -> None:
    """One in a header, as that of a thumbnail, is not its own."""
    for options in ({}, {"progressive": True}, {"comment": b"\xff\xd9"}):
        data = encoded(Image.fromarray(noise(64, 48)), "JPEG", **options)
        assert data.count(b"\xff\xd9") == 1 + ("comment" in options)
        assert not jpeg.breaks_off(data)
        assert not jpeg.breaks_off(data + bytes(20)), "what follows the end is harmless"
        for length in (0, 2, 100, len(data) // 2, len(data) - 1):
            assert jpeg.breaks_off(data[:length]), length


def test_a_header_that_breaks_off_is_said_to() -> None:
    data = encoded(Image.fromarray(noise(64, 48)), "JPEG")
    for length in range(len(jpeg.START), 600, 7):
        with pytest.raises(ImageError, match=r"cannot be decoded \(.*[a-z]{3}"):
            images.decode(data[:length], "x.jpg")


def test_a_decompression_bomb_is_refused() -> None:
    with pytest.raises(ImageError, match="is too large"):
        images.decode(encoded(Image.new("1", (20_000, 20_000)), "PNG"), "bomb.png")


def rendered(image: Image.Image, **settings: object) -> np.ndarray:
    how = images.Rendering(**settings)
    return images.fit(images.Decoded(image, *image.size), how)


def test_pad_keeps_the_whole_picture_between_black_bars() -> None:
    served = rendered(Image.new("RGB", (80, 40), "white"), size=32, fit="pad")
    assert (served[8:24] == 255).all()
    assert (served[:8] == 0).all()
    assert (served[24:] == 0).all()


@pytest.mark.parametrize("resample", sorted(images.RESAMPLING))
def test_stretch_is_pillows_resize(resample: str) -> None:
    image = Image.fromarray(noise(80, 40))
    expected = image.resize((32, 32), images.RESAMPLING[resample])
    assert np.array_equal(rendered(image, size=32, fit="stretch", resample=resample), np.asarray(expected))
    assert rendered(image, size=32, fit="crop", resample=resample).shape == (32, 32, 3)
