"""Masks go the way of their pictures into every format; what is not a mask of its picture is a reject."""

import io
import os
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from precache import Recipe, convert, open_dataset, verify, verify_across, verify_deep
from precache.dataset.converted import ConvertedDataset
from precache.errors import SettingError, SourceError
from precache.formats import FORMATS, StoredSample
from precache.pictures import masks
from precache.pictures.images import FITS
from precache.sources import SourceOptions
from tests import format_contract
from tests.labelled_pictures import PICTURES, Trees, check_labels, draw_trees


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    return draw_trees(tmp_path_factory.mktemp("labelled"))


def make(trees: Trees, path: Path, name: str, **settings: Any) -> ConvertedDataset:
    usual = {"size": 32, "fit": "crop", "resample": "bilinear", "shard_bytes": 4 * 32 * 32 * 3}  # no ringing
    recipe = Recipe(format=name, **{**usual, **settings})
    options = SourceOptions(mask=str(trees.masks))
    convert(trees.photos, path, recipe, workers=0, max_rejects=1, options=options)
    return open_dataset(path)


def mask_of(sample: StoredSample, path: Any) -> Any:
    if isinstance(sample.mask, bytes):
        return masks.decode(sample.mask, sample.pixels(str(path)).shape[:2])
    assert sample.mask is not None
    return sample.mask


@pytest.mark.parametrize("fit", FITS)
def test_every_format_stores_the_labels_of_the_stored_pixels(fit: str, trees: Trees, tmp_path: Path) -> None:
    """As stock readers see them, too."""
    for name in FORMATS:
        dataset = make(trees, tmp_path / name, name, fit=fit)
        held = list(format_contract.stored_samples(dataset))
        assert len(held) == PICTURES
        for path, sample in held:
            mask = mask_of(sample, path)
            check_labels(sample.pixels(path)[..., 0], mask, 4 if name == "shards" else 32)
            if name == "webdataset":
                with tarfile.open(path) as tar:
                    png = tar.extractfile(f"{sample.id:08}.mask.png")
                    assert png is not None
                    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png.read()))), mask)
            elif name == "shards" and fit == "crop":
                tensors = safetensors.numpy.load_file(path)
                assert np.array_equal(tensors["masks"][tensors["ids"] == sample.id], [mask])
        assert verify(dataset.path) == []
        assert verify_deep(dataset.path, trees.photos, workers=0).problems == ()
    assert verify_across([tmp_path / name for name in FORMATS]) == []


NAMES = {
    "a/00.png": "a/00.PNG",
    "a/02.png": "a/02.png.png",  # as annotation tools append theirs
    "a/04.png": "a/04.png.Png",
    "b/03.tif": "b/03.TIFF",
    "b/07.tif": "b/07.tiff",
    "b/11.tif": "b/11.png.TIF",
}
OTHERS = ("a/00.gif", "a/02.png.gif", "a/06.txt", "a/06.png.jpg", "a/006.png", "a/06_mask.png", "a/06.0.png")
"""Files that belong to no picture, or whose picture has a mask of a likelier name."""


def test_masks_are_found_under_the_names_that_tools_give(trees: Trees, tmp_path: Path) -> None:
    """And a folder where all are called otherwise is refused, with what it would take."""
    copy = Trees(trees.photos, Path(shutil.copytree(trees.masks, tmp_path / "masks")))
    for name, other in NAMES.items():
        (copy.masks / name).rename(copy.masks / other)
    for name in OTHERS:
        (copy.masks / name).touch()
    found, usual = (
        make(each, tmp_path / name, "shards") for each, name in ((copy, "found"), (trees, "usual"))
    )
    assert found.manifest.rejected == ()
    assert found.read_index().mask_checksums.tolist() == usual.read_index().mask_checksums.tolist()  # type: ignore[union-attr]
    assert verify_deep(found.path, trees.photos, workers=0).problems == ()
    for path in copy.masks.glob("*/*"):
        path.rename(path.with_name(f"{path.stem}_labels{path.suffix}"))
    with pytest.raises(SourceError, match=r"a/00\.png.*--mask COLUMN"):
        make(copy, tmp_path / "none", "shards")


SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a/00": (lambda path: path.unlink(), "has no mask .*masks/a/00.png"),
    "a/04": (lambda path: Image.new("L", (30, 40)).save(path), "a/04.png has 30x40 pixels, .* 40x40"),
    "a/08": (lambda path: Image.new("RGB", (40, 40)).save(path), "mode RGB; expected a PNG"),
    "b/03": (lambda path: Image.new("L", (97, 33)).save(path, "JPEG"), "not such a picture; expected a PNG"),
    "a/10": (lambda path: Image.new("I;16", (40, 40), 256).save(path), "256; expected 0 to 255"),
    "b/05": (lambda path: os.truncate(path, 60), "its mask b/05.png cannot be read"),
}


def test_a_picture_without_a_mask_of_its_own_is_a_reject(trees: Trees, tmp_path: Path) -> None:
    """And another mask of a picture that stays is found in depth."""
    copy = Trees(trees.photos, Path(shutil.copytree(trees.masks, tmp_path / "masks")))
    for name, (spoil_it, _) in SPOILT.items():
        spoil_it(next(copy.masks.glob(f"{name}.*")))
    dataset = make(copy, tmp_path / "out", "shards")
    reasons = {rejected.path.partition(".")[0]: rejected.reason for rejected in dataset.manifest.rejected}
    assert reasons.keys() == SPOILT.keys()
    for name, (_, reason) in SPOILT.items():
        assert re.search(reason, reasons[name])
        assert "\n" not in reasons[name]
    assert verify_deep(dataset.path, trees.photos, workers=0).problems == ()
    labels = np.array(Image.open(copy.masks / "a/02.png"))
    labels[20:30, 20:30] ^= 1
    Image.fromarray(labels).save(copy.masks / "a/02.png")
    (problem,) = verify_deep(dataset.path, trees.photos, workers=0).problems
    assert "(a/02.png) has a mask that differs from its source's" in problem


def test_a_folder_without_masks_is_refused(trees: Trees, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder, said in (
        (tmp_path / "none", "no folder of masks"),
        (tmp_path / "empty", r"none of its pictures has a mask; the first would be .*a/00.png"),
        (trees.photos, "is the folder of the pictures"),
    ):
        with pytest.raises(SourceError, match=said):
            make(Trees(trees.photos, folder), tmp_path / "out", "shards")
    assert not (tmp_path / "out").exists()
    with pytest.raises(SettingError, match="overlap"):
        make(trees, trees.masks / "out", "shards")
