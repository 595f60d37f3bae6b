"""Generated image trees."""

from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from precache.errors import SettingError
from precache.example_data.sample_tree import PICTURES_LIKE, make_sample
from tests.precache.sources.tars import files_of, put


@pytest.mark.parametrize("like", sorted(PICTURES_LIKE))
def test_the_same_seed_gives_the_same_bytes_with_any_workers(like: str, tmp_path: Path) -> None:
    for name, seed, workers in (("first", 3, 0), ("again", 3, 2), ("other", 4, 0)):
        make_sample(tmp_path / name, images=5, classes=3, seed=seed, like=like, workers=workers)
    first, again, other = (files_of(tmp_path / name) for name in ("first", "again", "other"))
    assert first == again
    assert first.keys() == other.keys()
    assert not {*first.values()} & {*other.values()}
    assert len(first) == 5


def test_a_sample_has_the_kinds_and_sizes_of_its_model(tmp_path: Path) -> None:
    """The mean of ImageNet's training pictures is 470x400."""
    for like, kinds, pixels in (
        ("caltech", {"JPEG RGB", "JPEG L", "JPEG CMYK", "JPEG RGB rotated", "PNG RGB"}, 110_000),
        ("imagenet", {"JPEG RGB", "JPEG L"}, 188_000),
    ):
        make_sample(tmp_path / like, images=48, classes=4, seed=3, like=like, workers=2)
        found_kinds, areas = set(), []
        for path in (tmp_path / like).glob("*/*"):
            with Image.open(path) as picture:
                rotated = " rotated" if picture.getexif().get(ExifTags.Base.Orientation, 1) != 1 else ""
                found_kinds.add(f"{picture.format} {picture.mode}{rotated}")
                areas.append(picture.width * picture.height)
        assert found_kinds == kinds
        assert np.mean(areas) == pytest.approx(pixels, rel=0.3)


def test_make_sample_fills_an_empty_folder_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, {"photos.partial/mine.jpg": b"mine"})
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path / "photos")
    make_sample(".", images=4, classes=2, workers=0)
    assert files_of(tmp_path / "photos.partial") == {"mine.jpg": b"mine"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "photos.partial"]
    with pytest.raises(SettingError, match=str(tmp_path / "photos")):
        make_sample(tmp_path / "photos", images=4, classes=2, workers=0)
    assert len(files_of(tmp_path / "photos")) == 4
