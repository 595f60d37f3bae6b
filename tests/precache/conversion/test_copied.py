"""JPEGs that need no resizing are stored byte for byte, where any decoder makes the same of them."""

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
from tests.format_contract import stored as stored_in
from tests.precache.destinations import contents

SIZE = (70, 50)  # width, height
DALI, LENIENT = Recipe(format="dali"), Recipe(format="dali", allow_truncated=True)


def jpeg(mode: str = "RGB", size: tuple[int, int] = SIZE, **options: Any) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (9, 9, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).convert(mode).save(
        buffer, "JPEG", **options
    )
    return buffer.getvalue()


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = orientation
    return tags


COPIED = {
    "colour": jpeg(),
    "4:2:0": jpeg(subsampling=2, quality=60),
    "grey": jpeg("L"),
    "progressive": jpeg(progressive=True),
    "upright": jpeg(exif=exif(1)),
    "colour profile": jpeg(icc_profile=bytes(500_000)),
    "one pixel": jpeg(size=(1, 1)),
}
ENCODED: dict[str, bytes] = {
    "turned": jpeg(exif=exif(6)),
    "turned, or not": jpeg(exif=exif(6)).replace(b"\x01\x12\0\3", b"\x01\x12\0\0"),
    "CMYK": jpeg("CMYK"),
    "stored as RGB": jpeg(keep_rgb=True),
    "followed by more": jpeg() + bytes(20),
    "followed by more that ends as it": jpeg(progressive=True) + b"PK\3\4" + b"\xff\xd9",
    "too large": jpeg(size=(600, 449)),
}


@pytest.mark.parametrize("kind", ENCODED)
def test_what_decoders_may_see_otherwise_is_encoded(kind: str) -> None:
    stored, _, pixels = make_stored_picture(ENCODED[kind], "x", DALI, DALI.rendering)
    assert isinstance(stored, bytes)
    assert stored != ENCODED[kind]
    with Image.open(io.BytesIO(stored)) as image:
        assert image.size == pixels.shape[1::-1]
        assert image.getexif().get(ExifTags.Base.Orientation, 1) == 1


def test_a_damaged_jpeg_is_never_copied() -> None:
    """Rejected, or, where that is allowed, stored as whole as it can be: no reader meets the damage."""
    for whole in (jpeg(), jpeg("L")):
        for damaged in (whole[: len(whole) // 2] + b"\xff\xd9", whole[:-2]):
            with pytest.raises(ImageError, match="truncated or damaged"):
                make_stored_picture(damaged, "x", DALI, DALI.rendering)
            stored, *_ = make_stored_picture(damaged, "x", LENIENT, LENIENT.rendering)
            assert stored != damaged
            make_stored_picture(stored, "x", DALI, DALI.rendering)  # type: ignore[arg-type]  # bytes of a JPEG


def test_a_jpeg_that_needs_no_resizing_is_copied_and_counted_as_what_is_served(tmp_path: Path) -> None:
    """With the statistics of the pixels that `shards` stores, and from one format into the other and back."""
    tree, recipe = tmp_path / "tree", Recipe(format="webdataset")
    for kind, data in COPIED.items():
        folder = tree / f"class {len(data) % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{kind.replace(':', '')}.jpg").write_bytes(data)
    manifest = convert(tree, tmp_path / "out", recipe, workers=0).manifest
    samples = scan_tree(tree).samples
    for _, sample in stored_in(open_dataset(tmp_path / "out")):
        assert sample.data == (tree / samples[sample.id].path).read_bytes()
    report = verify_deep(tmp_path / "out", tree, workers=0)
    assert (report.problems, report.equal) == ((), len(COPIED))
    pixels = convert(tree, tmp_path / "pixels", Recipe(format="shards"), workers=0).manifest
    assert manifest.statistics == pixels.statistics
    written = sum(file.bytes for shard in manifest.shards for file in shard.files)
    assert predict_bytes(scan_tree(tree), recipe) == pytest.approx(written, rel=0.05)
    convert(tmp_path / "out", tmp_path / "other", Recipe(format="dali"), workers=0)
    convert(tmp_path / "other", tmp_path / "back", recipe, workers=0)
    there, back = contents(tmp_path / "out"), contents(tmp_path / "back")
    for shard in manifest.shards:
        assert there[shard.file_name] == back[shard.file_name]
