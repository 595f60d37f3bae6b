"""Pictures in grey, and with their transparency: what is stored, and what is refused."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from precache import Recipe, convert, images, open_dataset, verify, verify_deep
from precache.errors import DatasetError, SettingError
from precache.formats import FORMATS
from precache.formats.shards import ShardFile
from precache.images import Rendering
from precache.sources.tree import scan_tree
from tests.command import check_bad_input, run
from tests.conftest import small_recipe
from tests.damage import flip_a_bit


def noise(height: int, width: int, channels: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("JPEG", {"quality": 95}), ("BMP", {})])
def test_grey_is_what_pillow_converts_colour_to(kind: str, options: dict[str, Any]) -> None:
    colour = Image.fromarray(noise(40, 60, 3))
    data = encoded(colour, kind, **options)
    pixels, size = images.render(data, "x", Rendering(size=20, channels="grey"))
    assert (pixels.shape, size) == ((20, 20, 1), (60, 40))
    decoded = Image.open(io.BytesIO(data)).convert("L")
    distance = np.abs(pixels.astype(int) - images.reference(decoded, 20)).max()
    assert distance <= 1  # of the box that is resized alone
    whole, _ = images.render(data, "x", Rendering(size=40, channels="grey", fit="keep"))
    assert np.array_equal(whole[..., 0], np.asarray(decoded))


def test_a_grey_picture_is_the_same_in_grey_as_in_each_channel_of_rgb() -> None:
    for kind in ("PNG", "JPEG"):
        data = encoded(Image.fromarray(noise(50, 40, 1)[..., 0]), kind)
        for fit in ("crop", "pad", "stretch", "keep"):
            grey, _ = images.render(data, "x", Rendering(size=24, channels="grey", fit=fit))
            rgb, _ = images.render(data, "x", Rendering(size=24, fit=fit))
            assert np.array_equal(np.repeat(grey, 3, axis=2), rgb), (kind, fit)


def test_transparency_is_kept_and_colours_are_weighed_with_it() -> None:
    """Where half of what a pixel is made of is transparent, its colour is that of the other half."""
    picture = np.zeros((8, 8, 4), np.uint8)
    picture[:, ::2] = (200, 100, 50, 255)
    picture[:, 1::2] = (0, 255, 0, 0)
    data = encoded(Image.fromarray(picture), "PNG")
    pixels, _ = images.render(data, "x", Rendering(size=4, channels="rgba", resample="area"))
    assert pixels.shape == (4, 4, 4)
    assert np.abs(pixels[..., :3].astype(int) - (200, 100, 50)).max() <= 1
    assert np.abs(pixels[..., 3].astype(int) - 128).max() <= 1
    same, _ = images.render(data, "x", Rendering(size=8, channels="rgba"))
    assert np.array_equal(same, picture)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "P", "LA", "1"])
def test_every_picture_has_four_channels(mode: str) -> None:
    image = Image.fromarray(noise(16, 16, 3)).convert(mode)
    kind = {"CMYK": "TIFF"}.get(mode, "PNG")
    pixels, _ = images.render(encoded(image, kind), "x", Rendering(size=16, channels="rgba"))
    expected = np.asarray(image.convert("RGB").convert("RGBA"))
    assert np.array_equal(pixels, expected)
    jpeg, _ = images.render(encoded(image.convert("RGB"), "JPEG"), "x", Rendering(size=16, channels="rgba"))
    assert (jpeg[..., 3] == 255).all()


def test_a_palette_and_a_colour_key_are_transparent() -> None:
    image = Image.fromarray(noise(16, 16, 1)[..., 0] // 64).convert("P")
    pixels, _ = images.render(encoded(image, "PNG", transparency=2), "x", Rendering(size=16, channels="rgba"))
    assert np.array_equal(pixels[..., 3] == 0, np.asarray(image) == 2)


def test_bars_around_a_transparent_picture_are_transparent() -> None:
    data = encoded(Image.new("RGBA", (20, 10), (9, 9, 9, 255)), "PNG")
    pixels, _ = images.render(data, "x", Rendering(size=20, channels="rgba", fit="pad"))
    assert (pixels[:4] == 0).all()
    assert (pixels[6:14, :, 3] == 255).all()


def alpha_tree(path: Path) -> Path:
    """Seven pictures with transparency in two classes."""
    for number in range(7):
        folder = path / ("a" if number % 2 else "b")
        folder.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(noise(30 + number, 40, 4, seed=number))
        picture.save(folder / f"{number}.png")
    return path


@pytest.mark.parametrize(("channels", "fit"), [("rgba", "crop"), ("rgba", "keep"), ("grey", "keep-longer")])
def test_shards_hold_the_channels_and_stock_readers_see_them(channels: str, fit: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    tree, out = alpha_tree(tmp_path / "tree"), tmp_path / "out"
    recipe = Recipe(format="shards", size=24, channels=channels, fit=fit)
    count = images.CHANNELS[channels]
    manifest = convert(tree, out, recipe, workers=0).manifest
    scan = scan_tree(tree)
    for shard in manifest.shards:
        tensors = load_file(out / shard.file_name)
        for row, sample in enumerate(FORMATS["shards"].read_shard(out / shard.file_name)):
            path = str(tree / scan.samples[sample.id].path)
            expected, _ = images.render(Path(path).read_bytes(), path, recipe.rendering)
            assert np.array_equal(sample.pixels(""), expected)
            if fit == "crop":
                theirs = tensors["images"][row]
            else:
                assert tensors["shapes"][row].tolist() == list(expected.shape)
                start = int(tensors["offsets"][row])
                theirs = tensors["images"][start : start + expected.size].reshape(expected.shape)
            assert np.array_equal(theirs, expected)
    assert len(manifest.statistics["train"].mean) == count
    assert verify(out) == []
    assert verify_deep(out, tree, workers=0).problems == ()


def test_a_smaller_picture_makes_a_larger_shard() -> None:
    """`shard_bytes` are those of the pixels that are stored."""
    for channels, samples in (("grey", 120), ("rgb", 40), ("rgba", 30)):
        recipe = Recipe(format="shards", size=64, fit="crop", shard_bytes=64 * 64 * 120, channels=channels)
        assert recipe.samples_per_shard == samples
    keep = Recipe(format="shards", size=64, channels="grey", fit="keep")
    assert keep.picture_bytes == 64 * 64 * 4 // 3


def test_jpegs_are_grey_to_every_decoder(grey: dict[str, Path]) -> None:
    for name in ("webdataset", "dali"):
        dataset = open_dataset(grey[name])
        for shard in dataset.manifest.shards:
            for sample in FORMATS[name].read_shard(dataset.shard_path(shard)):
                assert isinstance(sample.data, bytes)
                assert simplejpeg.decode_jpeg_header(sample.data)[2] == "Gray"
                assert Image.open(io.BytesIO(sample.data)).mode == "L"


def test_grey_jpegs_are_copied_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "tree/a").mkdir(parents=True)
    grey = encoded(Image.fromarray(noise(16, 16, 1)[..., 0]), "JPEG")
    colour = encoded(Image.fromarray(noise(16, 16, 3)), "JPEG")
    (tmp_path / "tree/a/0.jpg").write_bytes(grey)
    (tmp_path / "tree/a/1.jpg").write_bytes(colour)
    recipe = Recipe(format="dali", size=16, channels="grey")
    manifest = convert(tmp_path / "tree", tmp_path / "out", recipe, workers=0).manifest
    stored = {
        s.id: s.data for s in FORMATS["dali"].read_shard(tmp_path / "out" / manifest.shards[0].file_name)
    }
    assert stored[0] == grey
    assert simplejpeg.decode_jpeg_header(stored[1])[2] == "Gray"  # type: ignore[arg-type]
    assert verify_deep(tmp_path / "out", tmp_path / "tree", workers=0).problems == ()


def test_damage_is_found(grey: dict[str, Path], raw_tree: Path, tmp_path: Path) -> None:
    import shutil

    for name, path in grey.items():
        copy = Path(shutil.copytree(path, tmp_path / name))
        flip_a_bit(copy, shard_number=1, row=1)
        assert len(verify(copy)) == 1, name


@pytest.mark.parametrize("field", ["4", "0", "-1", "true", '"3"', "9999999999"])
def test_a_shard_that_says_other_channels_is_refused(
    grey: dict[str, Path], tmp_path: Path, field: str
) -> None:
    dataset = open_dataset(grey["shards"])
    content = (dataset.shard_path(dataset.manifest.shards[0])).read_bytes()
    shape = content[8:4096].split(b'"shape":[')[1].split(b"]")[0]
    changed = content[:4096].replace(shape, shape[:-1] + field.encode()).ljust(4096)[:4096] + content[4096:]
    (tmp_path / "x.safetensors").write_bytes(changed)
    with pytest.raises(DatasetError, match=r"x.safetensors: (not a shard|expected)"):
        ShardFile(tmp_path / "x.safetensors")


def test_a_wrong_setting_says_what_would_do(raw_tree: Path, tmp_path: Path) -> None:
    for name in ("webdataset", "dali"):
        with pytest.raises(
            SettingError, match=r"channels rgba need format shards, got .*: a JPEG has no alpha"
        ):
            Recipe(format=name, channels="rgba")
    with pytest.raises(
        SettingError,
        match="unknown channels 'gray'; choose from: grey, rgb, rgba, or a number of bands to 64",
    ):
        Recipe(format="shards", channels="gray")
    options = ("--format", "dali", "--channels", "rgba")
    check_bad_input(run("precache", "convert", raw_tree, "out", *options, cwd=tmp_path), "has no alpha")
    assert not (tmp_path / "out").exists()


def test_other_channels_are_another_conversion(raw_tree: Path, grey: dict[str, Path]) -> None:
    with pytest.raises(DatasetError, match="channels grey, asked for rgb"):
        convert(raw_tree, grey["shards"], small_recipe("shards", shard_bytes=12 * 48**2), workers=0)
    assert "--channels grey" in open_dataset(grey["shards"]).manifest.recipe.to_flags()


def test_inspect_shows_pictures_of_any_channels(grey: dict[str, Path], tmp_path: Path) -> None:
    tree = alpha_tree(tmp_path / "tree")
    convert(tree, tmp_path / "alpha", Recipe(format="shards", size=24, channels="rgba"), workers=0)
    for path, words in ((grey["shards"], "grey pixels"), (tmp_path / "alpha", "rgba pixels")):
        result = run("precache", "inspect", path, "--html", "page.html", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        page = (tmp_path / "page.html").read_text()
        assert "data:image/jpeg;base64" in page
        assert words in page
