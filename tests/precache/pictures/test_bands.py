"""Values of 16 bits, and the bands of a TIFF: kept as the file has them."""

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from precache import Recipe, convert, images, open_dataset, verify, verify_deep
from precache.errors import DatasetError, ImageError, MissingDependencyError, SettingError
from precache.formats import FORMATS
from precache.formats.shards import ShardFile
from precache.images import Rendering
from precache.pictures import bands
from tests.command import check_bad_input, run
from tests.damage import flip_a_bit

DEEP = {"channels": "grey", "dtype": "uint16"}


def noise(*shape: int, dtype: Any = np.uint16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max + 1, shape, dtype=dtype)


def grey_file(pixels: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def tiff(pixels: np.ndarray, **options: Any) -> bytes:
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed: pip install tifffile")
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, pixels, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_grey_of_16_bits_is_kept(kind: str) -> None:
    pixels = noise(40, 40)
    found, size = images.render(grey_file(pixels, kind), "x.png", Rendering(size=40, **DEEP))
    assert (found.dtype, found.shape, size) == (np.uint16, (40, 40, 1), (40, 40))
    assert np.array_equal(found[..., 0], pixels)


def test_a_picture_of_8_bits_becomes_one_of_16_with_white_as_white() -> None:
    pixels = noise(16, 16, dtype=np.uint8)
    found, _ = images.render(grey_file(pixels), "x.png", Rendering(size=16, **DEEP))
    assert np.array_equal(found[..., 0], pixels.astype(np.uint16) * 257)
    colour = noise(16, 16, 3, dtype=np.uint8)
    found, _ = images.render(grey_file(colour), "x.png", Rendering(size=16, **DEEP))
    expected = np.asarray(Image.fromarray(colour).convert("L")).astype(np.uint16) * 257
    assert np.array_equal(found[..., 0], expected)


@pytest.mark.parametrize("resample", ["area", "bilinear", "bicubic", "lanczos"])
def test_resizing_rounds_once(resample: str) -> None:
    """Against Pillow's resize of the values in floating point, and of their upper 8 bits."""
    pixels = noise(90, 70)
    how = Rendering(size=32, fit="stretch", resample=resample, **DEEP)
    found, _ = images.render(grey_file(pixels), "x.png", how)
    exact = np.asarray(
        Image.fromarray(pixels.astype(np.float32)).resize((32, 32), images.RESAMPLING[resample])
    ).clip(0, 65535)
    assert np.abs(found[..., 0] - exact).max() <= 0.51
    eight, _ = images.render(
        grey_file((pixels >> 8).astype(np.uint8)),
        "x.png",
        Rendering(size=32, fit="stretch", resample=resample, channels="grey"),
    )
    assert np.abs(found.astype(int) / 256 - eight).max() < 6  # which is rounded and cut off twice


def test_the_area_kernel_gives_the_mean_exactly() -> None:
    pixels = noise(64, 64)
    found, _ = images.render(grey_file(pixels), "x.png", Rendering(size=16, resample="area", **DEEP))
    mean = pixels.reshape(16, 4, 16, 4).mean(axis=(1, 3))
    assert np.abs(found[..., 0] - mean).max() <= 0.5 + 1e-2


@pytest.mark.parametrize("count", [2, 3, 5, 13])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("planes", ["contig", "separate"])
def test_bands_of_a_tiff_are_kept(count: int, dtype: str, planes: str) -> None:
    pixels = noise(30, 40, count, dtype=np.dtype(dtype))
    stored = np.moveaxis(pixels, -1, 0) if planes == "separate" else pixels
    data = tiff(stored, photometric="minisblack", planarconfig=planes)
    how = Rendering(size=30, fit="keep", channels=str(count), dtype=dtype)
    found, size = images.render(data, "x.tif", how)
    assert size == (40, 30)
    assert np.array_equal(found, pixels)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_bands_are_turned_upright_as_pillow_turns_pictures(orientation: int) -> None:
    pixels = noise(20, 30, 3, dtype=np.uint8)
    data = tiff(pixels, photometric="rgb", extratags=[(274, "H", 1, orientation, True)])
    expected, size = images.render(data, "x.tif", Rendering(size=20, fit="keep"))
    found, own = images.render(data, "x.tif", Rendering(size=20, fit="keep", channels="3"))
    assert own == size
    assert np.array_equal(found, expected)


def test_what_has_other_bands_is_rejected_by_name() -> None:
    five = tiff(noise(9, 9, 5), photometric="minisblack", planarconfig="contig")
    floats = tiff(np.zeros((9, 9, 5), np.float32), photometric="minisblack", planarconfig="contig")
    for data, settings, words in (
        (five, {"channels": "4", "dtype": "uint16"}, "has 5 bands, expected 4"),
        (five, {"channels": "5"}, "has bands of 16 bits; convert with --dtype uint16"),
        (floats, {"channels": "5", "dtype": "uint16"}, "has bands of float32, expected uint8 or uint16"),
        (grey_file(noise(9, 9, 3, dtype=np.uint8)), {"channels": "5"}, "has 3 bands, expected 5"),
        (five[:200], {"channels": "5", "dtype": "uint16"}, "x: cannot be decoded"),
        (b"II*\0" + bytes(40), {"channels": "5"}, "x: cannot be decoded"),
    ):
        with pytest.raises(ImageError, match=words) as error:
            images.render(data, "x", Rendering(size=8, **settings))
        assert "\n" not in str(error.value)


def test_a_large_tiff_is_refused_by_its_header() -> None:
    data = tiff(noise(60, 60, 5), photometric="minisblack", planarconfig="contig")
    with pytest.raises(ImageError, match=r"is too large \(60x60 is 3,600 pixels"):
        images.render(data, "x", Rendering(size=8, channels="5", dtype="uint16", max_pixels=3599))


def test_many_bands_count_as_many_pixels() -> None:
    """A few bytes can say that they are gigabytes."""
    bands_of_zeros = np.zeros((60, 60, 64), np.uint16)
    data = tiff(bands_of_zeros, photometric="minisblack", planarconfig="contig", compression="zlib")
    assert len(data) < 3000
    how = Rendering(size=8, channels="64", dtype="uint16", max_pixels=3600)
    with pytest.raises(ImageError, match=r"is too large \(its bands are 460,800 bytes"):
        images.render(data, "x", how)


def test_cut_and_flipped_tiffs_end_in_one_line_or_in_pixels() -> None:
    data = tiff(noise(16, 16, 5), photometric="minisblack", planarconfig="contig")
    how = Rendering(size=16, channels="5", dtype="uint16")
    rng = np.random.default_rng(0)
    messages = []
    for attempt in range(300):
        damaged = bytearray(data)
        if attempt % 3 == 0:
            del damaged[int(rng.integers(8, len(data))) :]
        for place in rng.integers(0, min(400, len(damaged)), 2):
            damaged[place] = rng.integers(256)
        try:
            found, _ = images.render(bytes(damaged), "x", how)
        except ImageError as error:
            messages.append(str(error))
        else:
            assert found.shape == (16, 16, 5)
    assert len(messages) > 100
    assert not [message for message in messages if "\n" in message]


def test_without_tifffile_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(MissingDependencyError, match=r"needs tifffile.*pip install 'precache\[pictures\]'"):
        bands.check_reader("5")
    bands.check_reader("grey")
    (tmp_path / "tree/a").mkdir(parents=True)
    (tmp_path / "tree/a/x.tif").write_bytes(b"II*\0" + bytes(64))
    recipe = Recipe(format="shards", size=8, channels="5")
    with pytest.raises(MissingDependencyError, match="needs tifffile"):
        convert(tmp_path / "tree", tmp_path / "out", recipe, workers=0)
    assert not (tmp_path / "out").exists()


def deep_tree(path: Path) -> Path:
    for number in range(9):
        folder = path / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(grey_file(noise(30 + number, 40, seed=number)))
    return path


@pytest.mark.parametrize("fit", ["crop", "pad", "keep", "keep-longer"])
def test_shards_of_16_bits_are_what_the_source_gives_to_any_reader(fit: str, tmp_path: Path) -> None:
    tree, out = deep_tree(tmp_path / "tree"), tmp_path / "out"
    recipe = Recipe(format="shards", size=24, fit=fit, shard_bytes=4000, **DEEP)
    manifest = convert(tree, out, recipe, workers=2).manifest
    assert verify(out) == []
    assert verify_deep(out, tree, workers=0).problems == ()
    stored = []
    for shard in manifest.shards:
        tensors = load_file(out / shard.file_name)
        assert tensors["images"].dtype == np.uint16
        for row, sample in enumerate(FORMATS["shards"].read_shard(out / shard.file_name)):
            pixels = sample.pixels("")
            if fit.startswith("keep"):
                start = int(tensors["offsets"][row])
                theirs = tensors["images"][start : start + pixels.size].reshape(pixels.shape)
            else:
                theirs = tensors["images"][row]
            assert np.array_equal(pixels, theirs)
            stored.append(pixels.ravel())
    values = np.concatenate(stored) / 65535
    found = manifest.statistics["train"]
    assert found.mean == pytest.approx((values.mean(),), abs=1e-12)
    assert found.std == pytest.approx((values.std(),), abs=1e-12)
    assert len(manifest.shards) > 1


def test_damage_is_found(tmp_path: Path) -> None:
    tree, out = deep_tree(tmp_path / "tree"), tmp_path / "out"
    convert(tree, out, Recipe(format="shards", size=24, **DEEP), workers=0)
    copy = Path(shutil.copytree(out, tmp_path / "copy"))
    flip_a_bit(copy, shard_number=0, row=1)
    assert len(verify(copy)) == 1
    shard = out / open_dataset(out).manifest.shards[0].file_name
    content = shard.read_bytes()
    shard.write_bytes(content.replace(b'"U16"', b'"U8" ', 1))
    with pytest.raises(DatasetError, match="not a shard of this format"):
        ShardFile(shard)


def test_wrong_settings_say_what_would_do(tmp_path: Path) -> None:
    for settings, words in (
        ({"format": "dali", **DEEP}, "dtype uint16 need format shards, got dali: a JPEG has 8 bits"),
        ({"format": "webdataset", "channels": "5"}, "channels 5 need format shards"),
        (
            {"format": "shards", "dtype": "uint16"},
            "dtype uint16 goes with channels grey or a number of bands",
        ),
        ({"format": "shards", "dtype": "float32"}, "unknown dtype 'float32'; choose from: uint16, uint8"),
        *(
            (
                {"format": "shards", "channels": c},
                "unknown channels .*; choose from: grey, rgb, rgba, or a number",
            )
            for c in ("0", "65", "-1", "5.0", "\u0665", 5, None, True)
        ),
    ):
        with pytest.raises(SettingError, match=words):
            Recipe(**settings)  # type: ignore[arg-type]
    (tmp_path / "tree/a").mkdir(parents=True)
    options = ("--format", "dali", "--dtype", "uint16", "--channels", "grey")
    result = run("precache", "convert", "tree", "out", *options, cwd=tmp_path)
    check_bad_input(result, "need format shards")


def test_inspect_shows_them(tmp_path: Path) -> None:
    convert(
        deep_tree(tmp_path / "tree"), tmp_path / "out", Recipe(format="shards", size=24, **DEEP), workers=0
    )
    result = run("precache", "inspect", "out", "--html", "page.html", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "uint16 grey pixels" in (tmp_path / "page.html").read_text()
    assert "--channels grey --dtype uint16" in open_dataset(tmp_path / "out").manifest.recipe.to_flags()
