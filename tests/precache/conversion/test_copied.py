"""JPEGs that need no resizing are stored byte for byte, if all decoders agree on their pixels."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from precache import convert, open_dataset, verify_deep
from precache.conversion.shard_writer import make_stored_picture, predict_bytes
from precache.errors import ImageError
from precache.recipe import Recipe
from precache.sources.tree import scan_tree
from tests.format_contract import stored_samples as stored_in
from tests.precache.destinations import contents

SIZE = (70, 50)  # width, height
DALI, LENIENT = Recipe(format="dali"), Recipe(format="dali", allow_truncated=True)
WEBDATASET = Recipe(format="webdataset")


def encode_jpeg(mode: str = "RGB", size: tuple[int, int] = SIZE, **options: Any) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (9, 9, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).convert(mode).save(
        buffer, "JPEG", **options
    )
    return buffer.getvalue()


def exif_tags(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = orientation
    return tags


COPIED = {
    "colour": encode_jpeg(),
    "4:2:0": encode_jpeg(subsampling=2, quality=60),
    "grey": encode_jpeg("L"),
    "progressive": encode_jpeg(progressive=True),
    "upright": encode_jpeg(exif=exif_tags(1)),
    "colour profile": encode_jpeg(icc_profile=bytes(500_000)),
    "one pixel": encode_jpeg(size=(1, 1)),
}
ENCODED: dict[str, bytes] = {
    "turned": encode_jpeg(exif=exif_tags(6)),
    "turned, or not": encode_jpeg(exif=exif_tags(6)).replace(b"\x01\x12\0\3", b"\x01\x12\0\0"),
    "CMYK": encode_jpeg("CMYK"),
    "stored as RGB": encode_jpeg(keep_rgb=True),
    "followed by more": encode_jpeg() + bytes(20),
    "followed by more that ends as it": encode_jpeg(progressive=True) + b"PK\3\4" + b"\xff\xd9",
    "too large": encode_jpeg(size=(600, 449)),
}


@pytest.mark.parametrize("kind", ENCODED)
def test_jpegs_that_decoders_may_read_differently_are_encoded_again(kind: str) -> None:
    stored, _, pixels = make_stored_picture(ENCODED[kind], "x", DALI, DALI.rendering)
    assert isinstance(stored, bytes)
    assert stored != ENCODED[kind]
    with Image.open(io.BytesIO(stored)) as image:
        assert image.size == pixels.shape[1::-1]
        assert image.getexif().get(ExifTags.Base.Orientation, 1) == 1


def test_a_damaged_jpeg_is_never_copied() -> None:
    """A damaged JPEG is rejected; or, with `allow_truncated`, encoded again without the damage."""
    for whole in (encode_jpeg(), encode_jpeg("L")):
        for damaged in (whole[: len(whole) // 2] + b"\xff\xd9", whole[:-2]):
            with pytest.raises(ImageError) as raised:
                make_stored_picture(damaged, "x", DALI, DALI.rendering)
            assert raised.value.path == "x"
            stored, *_ = make_stored_picture(damaged, "x", LENIENT, LENIENT.rendering)
            assert stored != damaged
            make_stored_picture(stored, "x", DALI, DALI.rendering)  # type: ignore[arg-type]  # bytes of a JPEG


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree of the JPEGs that are copied."""
    for kind, data in COPIED.items():
        folder = tmp_path / "tree" / f"class {len(data) % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{kind.replace(':', '')}.jpg").write_bytes(data)
    return tmp_path / "tree"


def test_a_jpeg_that_needs_no_resizing_is_copied(tree: Path, tmp_path: Path) -> None:
    convert(tree, tmp_path / "out", WEBDATASET, workers=0)
    samples = scan_tree(tree).samples
    for _, sample in stored_in(open_dataset(tmp_path / "out")):
        assert sample.data == (tree / samples[sample.id].path).read_bytes()
    assert verify_deep(tmp_path / "out", tree, workers=0) == []


def test_copied_jpegs_have_the_statistics_of_their_pixels(tree: Path, tmp_path: Path) -> None:
    copied = convert(tree, tmp_path / "out", WEBDATASET, workers=0).manifest
    pixels = convert(tree, tmp_path / "pixels", Recipe(format="shards"), workers=0).manifest
    assert copied.statistics == pixels.statistics


def test_predicted_bytes_are_near_those_of_copied_jpegs(tree: Path, tmp_path: Path) -> None:
    manifest = convert(tree, tmp_path / "out", WEBDATASET, workers=0).manifest
    shard_bytes = sum(file.bytes for shard in manifest.shards for file in shard.files)
    assert predict_bytes(scan_tree(tree), WEBDATASET) == pytest.approx(shard_bytes, rel=0.05)


def test_copied_jpegs_survive_another_format_and_the_way_back(tree: Path, tmp_path: Path) -> None:
    manifest = convert(tree, tmp_path / "out", WEBDATASET, workers=0).manifest
    convert(tmp_path / "out", tmp_path / "other", DALI, workers=0)
    convert(tmp_path / "other", tmp_path / "back", WEBDATASET, workers=0)
    before, after = contents(tmp_path / "out"), contents(tmp_path / "back")
    for shard in manifest.shards:
        assert before[shard.file_name] == after[shard.file_name]
