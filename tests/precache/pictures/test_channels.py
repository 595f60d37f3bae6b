"""Pictures in grey, and with their transparency: what is stored, and what is refused."""

import io
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image
from safetensors.numpy import load_file

from precache import Recipe, convert, open_dataset, verify, verify_deep
from precache.errors import DatasetError, SettingError
from precache.formats import FORMATS
from precache.formats.shards import ShardFile
from precache.pictures import images
from precache.pictures.images import Rendering
from precache.sources.tree import scan_tree
from tests.command import run_here as run
from tests.precache.pictures.drawing import encoded, noise


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP"])
def test_grey_is_what_pillow_converts_colour_to(kind: str) -> None:
    data = encoded(noise(40, 60, 3), kind)
    pixels, size = images.render(data, "x", Rendering(size=20, channels="grey"))
    assert (pixels.shape, size) == ((20, 20, 1), (60, 40))
    decoded = Image.open(io.BytesIO(data)).convert("L")
    distance = np.abs(pixels.astype(int) - images.reference(decoded, 20)).max()
    assert distance <= 1  # of the box that is resized alone
    whole, _ = images.render(data, "x", Rendering(size=40, channels="grey", fit="keep"))
    assert np.array_equal(whole[..., 0], np.asarray(decoded))


@pytest.mark.parametrize("fit", images.FITS)
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_grey_picture_is_the_same_in_grey_as_in_each_channel_of_rgb(kind: str, fit: str) -> None:
    data = encoded(noise(50, 40), kind)
    grey, _ = images.render(data, "x", Rendering(size=24, channels="grey", fit=fit))
    rgb, _ = images.render(data, "x", Rendering(size=24, fit=fit))
    assert np.array_equal(np.repeat(grey, 3, axis=2), rgb)


def test_transparency_is_kept_and_colours_are_weighed_with_it() -> None:
    """Where half of what a pixel is made of is transparent, its colour is that of the other half."""
    picture = np.zeros((8, 8, 4), np.uint8)
    picture[:, ::2] = (200, 100, 50, 255)
    picture[:, 1::2] = (0, 255, 0, 0)
    pixels, _ = images.render(encoded(picture), "x", Rendering(size=4, channels="rgba", resample="area"))
    assert np.abs(pixels.astype(int) - (200, 100, 50, 128)).max() <= 1
    same, _ = images.render(encoded(picture), "x", Rendering(size=8, channels="rgba"))
    assert np.array_equal(same, picture)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [*((mode, "PNG") for mode in ("RGB", "L", "P", "LA", "1")), ("CMYK", "TIFF"), ("RGB", "JPEG")],
)
def test_every_picture_has_four_channels(mode: str, kind: str) -> None:
    data = encoded(Image.fromarray(noise(16, 16, 3)).convert(mode), kind)
    pixels, _ = images.render(data, "x", Rendering(size=16, channels="rgba"))
    assert np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(data)).convert("RGB").convert("RGBA")))


def test_a_colour_key_and_bars_are_transparent() -> None:
    image = Image.fromarray(noise(16, 16) // 64).convert("P")
    pixels, _ = images.render(encoded(image, transparency=2), "x", Rendering(size=16, channels="rgba"))
    assert np.array_equal(pixels[..., 3] == 0, np.asarray(image) == 2)
    data = encoded(Image.new("RGBA", (20, 10), (9, 9, 9, 255)))
    pixels, _ = images.render(data, "x", Rendering(size=20, channels="rgba", fit="pad"))
    assert (pixels[:4] == 0).all()
    assert (pixels[6:14, :, 3] == 255).all()


@pytest.fixture(scope="module")
def alpha_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven pictures with transparency in two classes."""
    path = tmp_path_factory.mktemp("alpha") / "tree"
    for number in range(7):
        folder = path / ("a" if number % 2 else "b")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(encoded(noise(30 + number, 40, 4, seed=number)))
    return path


@pytest.mark.parametrize(("channels", "fit"), [("rgba", "crop"), ("rgba", "keep"), ("grey", "keep-longer")])
def test_shards_hold_the_channels_and_stock_readers_see_them(
    channels: str, fit: str, alpha_tree: Path, tmp_path: Path
) -> None:
    out, recipe = tmp_path / "out", Recipe(format="shards", size=24, channels=channels, fit=fit)
    manifest = convert(alpha_tree, out, recipe, workers=0).manifest
    scan = scan_tree(alpha_tree)
    for shard in manifest.shards:
        tensors = load_file(out / shard.file_name)
        for row, sample in enumerate(FORMATS["shards"].read_shard(out / shard.file_name)):
            path = str(alpha_tree / scan.samples[sample.id].path)
            expected, _ = images.render(Path(path).read_bytes(), path, recipe.rendering)
            assert np.array_equal(sample.pixels(""), expected)
            if fit == "crop":
                theirs = tensors["images"][row]
            else:
                assert tensors["shapes"][row].tolist() == list(expected.shape)
                start = int(tensors["offsets"][row])
                theirs = tensors["images"][start : start + expected.size].reshape(expected.shape)
            assert np.array_equal(theirs, expected)
    assert len(manifest.statistics["train"].mean) == images.CHANNELS[channels]
    assert verify(out) == []
    assert verify_deep(out, alpha_tree, workers=0).problems == ()
    result = run("precache", "inspect", out, "--html", "page.html", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "page.html").read_text()
    assert "data:image/jpeg;base64" in page
    assert f"{channels} pixels" in page


def test_a_smaller_picture_makes_a_larger_shard() -> None:
    """`shard_bytes` are those of the pixels that are stored."""
    for channels, samples in (("grey", 120), ("rgb", 40), ("rgba", 30)):
        recipe = Recipe(format="shards", size=64, fit="crop", shard_bytes=64 * 64 * 120, channels=channels)
        assert recipe.samples_per_shard == samples
    keep = Recipe(format="shards", size=64, channels="grey", fit="keep")
    assert keep.picture_bytes == 64 * 64 * 4 // 3


@pytest.mark.parametrize("name", ["webdataset", "dali"])
def test_jpegs_are_grey_to_every_decoder_and_grey_ones_alone_are_copied(name: str, tmp_path: Path) -> None:
    (tmp_path / "tree/a").mkdir(parents=True)
    grey, colour = encoded(noise(16, 16), "JPEG"), encoded(noise(16, 16, 3), "JPEG")
    (tmp_path / "tree/a/0.jpg").write_bytes(grey)
    (tmp_path / "tree/a/1.jpg").write_bytes(colour)
    recipe = Recipe(format=name, size=16, channels="grey")
    (shard,) = convert(tmp_path / "tree", tmp_path / "out", recipe, workers=0).manifest.shards
    stored = {s.id: s.data for s in FORMATS[name].read_shard(tmp_path / "out" / shard.file_name)}
    assert stored[0] == grey
    assert simplejpeg.decode_jpeg_header(stored[1])[2] == "Gray"  # type: ignore[arg-type]
    assert Image.open(io.BytesIO(stored[1])).mode == "L"  # type: ignore[arg-type]
    assert verify_deep(tmp_path / "out", tmp_path / "tree", workers=0).problems == ()


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


CHOICES = "; choose from: grey, rgb, rgba"
BAD_SETTINGS = [
    ({"format": "webdataset", "channels": "rgba"}, "channels rgba need format shards, got webdataset"),
    ({"format": "dali", "channels": "rgba"}, "need format shards, got dali: a JPEG has no alpha"),
    ({"format": "shards", "channels": "gray"}, f"unknown channels 'gray'{CHOICES}"),
    *(({"format": "shards", "channels": c}, f"unknown channels .*{CHOICES}") for c in ("5", 5, None, True)),
    ({"format": "dali", "channels": "grey", "dtype": "uint16"}, "dtype uint16 needs format shards, got dali"),
    ({"format": "shards", "dtype": "uint16"}, "dtype uint16 is for channels grey, got rgb"),
    ({"format": "shards", "dtype": "float32"}, "unknown dtype 'float32'; choose from: uint16, uint8"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "said"), BAD_SETTINGS, ids=str)
def test_a_wrong_setting_says_what_would_do(settings: dict[str, object], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        Recipe(**settings)  # type: ignore[arg-type]
