from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from precache.errors import SettingError
from precache.example_data.sample_tree import PICTURES_LIKE, make_sample
from precache.sources.tree import scan_tree
from tests.precache.sources.archives import files_of, put


@pytest.mark.parametrize("like", sorted(PICTURES_LIKE))
def test_same_seed_same_bytes_whatever_the_workers(like: str, tmp_path: Path) -> None:
    for name, seed, workers in (("one", 3, 0), ("again", 3, 2), ("other", 4, 0)):
        make_sample(tmp_path / name, images=5, classes=3, seed=seed, like=like, workers=workers)
    one, again, other = (files_of(tmp_path / name) for name in ("one", "again", "other"))
    assert one == again
    assert one.keys() == other.keys()
    assert not {*one.values()} & {*other.values()}
    assert len(one) == 5


def test_the_tree_is_like_caltechs(raw_tree: Path) -> None:
    """Quartiles of Caltech-101 and Caltech-256 lie around these ranges."""
    kinds: Counter[str] = Counter()
    areas, aspects, density = [], [], []
    for sample in scan_tree(raw_tree).samples:
        with Image.open(raw_tree / sample.path) as picture:
            rotated = picture.getexif().get(0x0112, 1) != 1
            kinds[f"{picture.format} {picture.mode}{' rotated' if rotated else ''}"] += 1
            width, height = picture.size
        areas.append(width * height)
        aspects.append(width / height)
        density.append(sample.bytes / (width * height))
    assert set(kinds) == {"JPEG RGB", "JPEG L", "JPEG CMYK", "JPEG RGB rotated", "PNG RGB"}
    assert kinds["JPEG RGB"] > 0.8 * sum(kinds.values())
    assert 60_000 < np.median(areas) < 250_000
    assert max(areas) > 3 * min(areas)
    assert (min(aspects) < 0.9, max(aspects) > 1.4) == (True, True)
    assert 0.1 < np.median(density) < 0.4


def test_photographs_like_imagenets_have_its_sizes_bytes_and_kinds(tmp_path: Path) -> None:
    make_sample(tmp_path / "tree", images=48, classes=4, seed=3, like="imagenet", workers=2)
    sizes, modes, file_bytes = [], Counter[str](), []
    for path in sorted((tmp_path / "tree").glob("*/*")):
        with Image.open(path) as picture:
            assert picture.format == "JPEG"
            sizes.append(picture.size)
            modes[picture.mode] += 1
        file_bytes.append(path.stat().st_size)
    width, height = np.array(sizes).T
    # the mean of ImageNet's training pictures is 470x400 pixels and 110 kB
    assert width.mean() == pytest.approx(470, rel=0.15)
    assert height.mean() == pytest.approx(400, rel=0.15)
    assert np.mean(file_bytes) == pytest.approx(110_000, rel=0.25)
    assert max(file_bytes) > 3 * min(file_bytes)
    assert 0.1 < (height > width).mean() < 0.45
    assert modes == {"RGB": 46, "L": 2}


def test_an_empty_folder_is_filled_and_neighbours_are_spared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, {"photos.partial/mine.jpg": b"mine"})
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path / "photos")
    make_sample(".", images=4, classes=2, workers=0)
    assert files_of(tmp_path / "photos.partial") == {"mine.jpg": b"mine"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "photos.partial"]
    with pytest.raises(SettingError, match="exists and is not empty"):
        make_sample(tmp_path / "photos", images=4, classes=2, workers=0)
    assert len(files_of(tmp_path / "photos")) == 4
