"""Rectangles, and pictures that keep their aspect ratio: what is stored of them, and what is refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import CenterCrop, Resize

from precache import convert, open_dataset, verify, verify_deep
from precache.conversion.shard_writer import store
from precache.dataset.manifest import write_manifest
from precache.errors import DatasetError, ImageError, SettingError
from precache.formats import FORMATS
from precache.formats.shards import DATA_START
from precache.pictures import images
from precache.pictures.images import Rendering
from precache.pictures.sizes import check_size, parse_size, sides, written
from precache.recipe import Recipe
from tests.building import build_loader
from tests.command import check_bad_input, run_here
from tests.conftest import IMAGES, RECTANGLE, STORED_SIZE, small_recipe
from tests.precache.pictures import drawing
from tests.precache.pictures.drawing import encoded

SIDES = [(90, 60), (60, 90), (64, 64), (333, 41), (20, 10), (48, 48), (48, 301), (1, 30), (30, 1)]


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(drawing.noise(height, width, 3))


@pytest.mark.parametrize(("width", "height"), SIDES)
def test_keep_stores_what_torchvision_resizes_to_and_enlarges_when_told(width: int, height: int) -> None:
    picture = noise(width, height)
    resized = np.asarray(Resize(48)(picture))
    how = Rendering(size=48, fit="keep", enlarge=True)
    pixels, original = images.render(encoded(picture), "x", how)
    assert np.array_equal(pixels, resized)
    assert original == (width, height)
    pixels, original = images.render(encoded(picture), "x", replace(how, enlarge=False))
    assert np.array_equal(pixels, resized if min(width, height) > 48 else np.asarray(picture))
    assert original == (width, height)


@pytest.mark.parametrize(("width", "height"), SIDES)
def test_keep_longer_stores_all_of_a_picture_with_its_longer_side_at_the_size(
    width: int, height: int
) -> None:
    picture = noise(width, height)
    how = Rendering(size=48, fit="keep-longer", enlarge=True)
    pixels, _ = images.render(encoded(picture), "x", how)
    at_most, _ = images.render(encoded(picture), "x", replace(how, enlarge=False))
    assert np.array_equal(at_most, pixels if max(width, height) > 48 else np.asarray(picture))
    rows, columns = pixels.shape[:2]
    assert max(rows, columns) == 48
    shorter = 48 * min(width, height) / max(width, height)
    assert min(rows, columns) == pytest.approx(max(1, shorter), abs=0.5)
    assert np.array_equal(pixels, np.asarray(picture.resize((columns, rows), Image.Resampling.BILINEAR)))


@pytest.mark.parametrize(("width", "height"), SIDES)
def test_a_rectangle_is_the_centre_of_the_picture_that_just_covers_it(width: int, height: int) -> None:
    picture = noise(width, height)
    pixels, _ = images.render(encoded(picture), "x", Rendering(size=RECTANGLE))
    rows, columns = RECTANGLE
    by_width = columns / width >= rows / height
    covering = (int(height * columns / width), columns) if by_width else (rows, int(width * rows / height))
    expected = np.asarray(CenterCrop(RECTANGLE)(Resize(covering)(picture)))
    assert pixels.shape == expected.shape == (*RECTANGLE, 3)
    assert np.abs(pixels.astype(int) - expected).max() <= 1


def test_by_default_pictures_are_kept_whole_and_shrunk_by_lanczos() -> None:
    for width, height, stored in ((1344, 900, (669, 448)), (440, 3000, (440, 3000)), (9, 7, (9, 7))):
        picture = noise(width, height)
        pixels, *_ = store(encoded(picture), "x", Recipe(format="shards"))
        resized = picture if stored == picture.size else picture.resize(stored, Image.Resampling.LANCZOS)
        assert np.array_equal(pixels, np.asarray(resized))


def test_a_rectangle_pads_and_stretches_as_a_square_does() -> None:
    picture = noise(60, 60)
    padded, _ = images.render(encoded(picture), "x", Rendering(size=RECTANGLE, fit="pad"))
    assert np.array_equal(padded[:, 12:48], np.asarray(picture.resize((36, 36), Image.Resampling.BILINEAR)))
    assert padded[:, :12].max() == padded[:, 48:].max() == 0
    stretched, _ = images.render(encoded(picture), "x", Rendering(size=RECTANGLE, fit="stretch"))
    assert np.array_equal(stretched, np.asarray(picture.resize((60, 36), Image.Resampling.BILINEAR)))


def test_a_turned_jpeg_is_reduced_by_the_side_that_it_will_have() -> None:
    """60 wide and 36 high are wanted of what is stored 250 wide and 400 high, and lies on its side."""
    smooth = noise(40, 25).resize((250, 400), Image.Resampling.BICUBIC)
    data = encoded(smooth, "JPEG", exif=6, quality=95)
    for rectangle, reduction in (((40, 64), 2), ((64, 40), 1)):
        how = Rendering(size=rectangle, scaled_decode=True)
        assert images.decode_for(data, "x", how).reduction == reduction


def test_two_equal_sides_are_a_square() -> None:
    assert Recipe(format="shards", size=(48, 48)) == Recipe(format="shards", size=48)
    rectangle = Recipe(format="shards", size=[36, 60], fit="crop")  # type: ignore[arg-type]  # as JSON has it
    assert rectangle.size == (36, 60)
    assert Recipe(**rectangle.to_json()) == rectangle
    assert rectangle.to_flags() == "--format shards --size 60x36 --fit crop"
    assert parse_size("60x36") == (36, 60)
    assert (parse_size("48x48"), parse_size(" 48 "), written(48), sides(48)) == (48, 48, "48", (48, 48))
    for wrong in ((1, 2, 3), (0, 5), (5, 8193), (True, 5), (5.0, 5), "60x36", None, ()):
        with pytest.raises(SettingError, match="size"):
            check_size("size", wrong, 8192)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        *(([f"--size={text}"], "320x240") for text in ("5x", "x5", "5x5x5", "6X4", "-3", "", "1e3")),
        (["--size=" + "9" * 5000], "320x240"),
        *(([f"--size={text}"], "1 to 8,192, got") for text in ("0x5", "9000x10")),
        *((["--size=60x36", "--fit", fit], f"fit {fit} takes one side") for fit in images.KEPT),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_size_that_is_none_is_refused_in_one_line(
    flags: list[str], said: str, raw_tree: Path, tmp_path: Path
) -> None:
    result = run_here("precache", "convert", raw_tree, "out", "--format", "dali", *flags, cwd=tmp_path)
    check_bad_input(result, "size", said)
    assert list(tmp_path.iterdir()) == []


def test_enlarging_is_for_the_fits_that_do_not_enlarge() -> None:
    for fit in images.FITS:
        if fit in images.KEPT:
            assert Recipe(format="dali", fit=fit, enlarge=True).to_flags().endswith(" --enlarge")
        else:
            with pytest.raises(SettingError, match=f"enlarge is for fit keep and keep-longer; fit {fit}"):
                Recipe(format="dali", fit=fit, enlarge=True)


def test_what_would_be_kept_too_large_is_rejected_by_name_and_size() -> None:
    how = Rendering(size=256, fit="keep", enlarge=True)
    for width, height in ((1, 400), (400, 1)):
        with pytest.raises(ImageError, match=f"long.png: of {width} x {height} pixels would be kept as") as e:
            images.render(encoded(Image.new("RGB", (width, height))), "long.png", how)
        assert "102,400" in str(e.value)
        data = encoded(Image.new("RGB", (width, height)))
        assert max(images.render(data, "x", replace(how, fit="keep-longer"))[0].shape) == 256
        assert images.render(data, "x", replace(how, enlarge=False))[0].shape == (height, width, 3)
        assert images.render(data, "x", Rendering(size=256))[0].shape == (256, 256, 3)


def test_the_index_knows_the_size_of_everything_stored(shaped: dict[str, Path]) -> None:
    for name in FORMATS:
        dataset = open_dataset(shaped[f"keep-{name}"])
        read_shard = FORMATS[name].read_shard
        shapes = [
            sample.pixels("").shape[:2]
            for shard in dataset.manifest.shards
            for sample in read_shard(dataset.shard_path(shard))
        ]
        assert np.array_equal(dataset.read_index().shapes, shapes)
        assert len(set(shapes)) > 5
        assert {min(shape) for shape in shapes} == {STORED_SIZE}
        assert open_dataset(shaped[f"rectangle-{name}"]).read_index().shapes is None


def tail_start(shard: Path) -> int:
    """The byte of a shard where its offsets begin."""
    header = json.loads(shard.read_bytes()[8:DATA_START])
    return DATA_START + int(header["offsets"]["data_offsets"][0])


def changed(place: int, bit: int) -> Callable[[bytearray, int, int], None]:
    """A bit that many bytes behind the offsets, or before their end."""

    def change(content: bytearray, start: int, count: int) -> None:
        content[start + 8 * count + place] ^= bit

    return change


def all_turned(content: bytearray, start: int, count: int) -> None:
    """Height for width: offsets still fit."""
    shapes = np.frombuffer(content[start + 8 * count :], "<i4").reshape(-1, 2)
    content[start + 8 * count :] = shapes[:, ::-1].tobytes()


DAMAGE = {
    "an offset": changed(-6, 1), "a height": changed(0, 1), "a negative height": changed(3, 0x80),
    "a width": changed(4, 1), "all turned": all_turned,
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_offsets_are_found(damage: str, shaped: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(shaped["keep-shards"], tmp_path / "copy"))
    dataset = open_dataset(path)
    entry = dataset.manifest.shards[1]
    shard = dataset.shard_path(entry)
    content = bytearray(shard.read_bytes())
    DAMAGE[damage](content, tail_start(shard), entry.samples)
    shard.write_bytes(content)
    assert [str(shard) in problem for problem in verify(path)] == [True]
    if damage != "all turned":
        with pytest.raises(DatasetError, match=f"{shard}: its offsets do not fit its pictures"):
            list(FORMATS["shards"].read_shard(shard))
    for check in ("first-read", "never"):
        with (
            build_loader(path, check=check, workers=1, shuffle=False) as loader,
            pytest.raises(DatasetError, match=f"{shard}: .*'?precache verify"),
        ):
            list(loader)


def test_verify_deep_finds_a_picture_of_another_size(
    shaped: dict[str, Path], raw_tree: Path, tmp_path: Path
) -> None:
    """The same tree at another size, under this one's manifest."""
    convert(raw_tree, tmp_path / "small", small_recipe("webdataset", size=40, fit="keep"), workers=0)
    manifest = open_dataset(tmp_path / "small").manifest
    recipe = replace(manifest.recipe, size=STORED_SIZE)
    write_manifest(tmp_path / "small", replace(manifest, recipe=recipe))
    report = verify_deep(tmp_path / "small", raw_tree, workers=0)
    assert len(report.problems) == IMAGES
    assert "pixels, expected" in report.problems[0]
