"""Masks are stored with their pictures in every format, and a picture without a valid mask is rejected."""

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

from precache import Recipe, convert, open_dataset, verify, verify_deep
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


def decode_mask(sample: StoredSample, path: Any) -> Any:
    if isinstance(sample.mask, bytes):
        return masks.decode(sample.mask, sample.pixels(str(path)).shape[:2])
    assert sample.mask is not None
    return sample.mask


@pytest.mark.parametrize("fit", FITS)
def test_masks_of_every_format_fit_the_stored_pixels(fit: str, trees: Trees, tmp_path: Path) -> None:
    for name in FORMATS:
        dataset = make(trees, tmp_path / name, name, fit=fit)
        samples = list(format_contract.stored_samples(dataset))
        assert len(samples) == PICTURES
        for path, sample in samples:
            mask = decode_mask(sample, path)
            check_labels(sample.pixels(path)[..., 0], mask, 4 if name == "shards" else 32)
        assert verify(dataset.path) == []
        assert verify_deep(dataset.path, trees.photos, workers=0).problems == ()
    format_contract.check_hold_the_same_samples([open_dataset(tmp_path / name) for name in FORMATS])


@pytest.mark.parametrize("fit", FITS)
def test_tarfile_reads_the_masks_of_webdataset(fit: str, trees: Trees, tmp_path: Path) -> None:
    for path, sample in format_contract.stored_samples(make(trees, tmp_path / "out", "webdataset", fit=fit)):
        with tarfile.open(path) as tar:
            png = tar.extractfile(f"{sample.id:08}.mask.png")
            assert png is not None
            mask = np.asarray(Image.open(io.BytesIO(png.read())))
        assert np.array_equal(mask, decode_mask(sample, path))


def test_safetensors_reads_the_masks_of_shards(trees: Trees, tmp_path: Path) -> None:
    for path, sample in format_contract.stored_samples(make(trees, tmp_path / "out", "shards", fit="crop")):
        tensors = safetensors.numpy.load_file(path)
        mask = decode_mask(sample, path)
        assert np.array_equal(tensors["masks"][tensors["ids"] == sample.id], [mask])


NAMES = {
    "a/00.png": "a/00.PNG",
    "a/02.png": "a/02.png.png",  # annotation tools append their extension
    "a/04.png": "a/04.png.Png",
    "b/03.tif": "b/03.TIFF",
    "b/07.tif": "b/07.tiff",
    "b/11.tif": "b/11.png.TIF",
}
OTHERS = ("a/00.gif", "a/02.png.gif", "a/06.txt", "a/06.png.jpg", "a/006.png", "a/06_mask.png", "a/06.0.png")
"""Files of no picture, or of a picture that has a mask of a likelier name."""


def test_convert_finds_masks_under_the_names_that_tools_give(trees: Trees, tmp_path: Path) -> None:
    copy = Trees(trees.photos, Path(shutil.copytree(trees.masks, tmp_path / "masks")))
    for name, other in NAMES.items():
        (copy.masks / name).rename(copy.masks / other)
    for name in OTHERS:
        (copy.masks / name).touch()
    renamed, usual = make(copy, tmp_path / "renamed", "shards"), make(trees, tmp_path / "usual", "shards")
    assert renamed.manifest.rejected == ()
    assert renamed.read_index().mask_checksums.tolist() == usual.read_index().mask_checksums.tolist()  # type: ignore[union-attr]
    assert verify_deep(renamed.path, trees.photos, workers=0).problems == ()


def test_convert_refuses_masks_of_unknown_names(trees: Trees, tmp_path: Path) -> None:
    copy = Trees(trees.photos, Path(shutil.copytree(trees.masks, tmp_path / "masks")))
    for path in copy.masks.glob("*/*"):
        path.rename(path.with_name(f"{path.stem}_labels{path.suffix}"))
    with pytest.raises(SourceError, match=r"a/00\.png.*--mask COLUMN"):
        make(copy, tmp_path / "none", "shards")


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a/00": (lambda path: path.unlink(), "has no mask .*masks/a/00.png"),
    "a/04": (lambda path: Image.new("L", (30, 40)).save(path), "a/04.png has 30x40 pixels, .* 40x40"),
    "a/08": (lambda path: Image.new("RGB", (40, 40)).save(path), "mode RGB; expected a PNG"),
    "b/03": (lambda path: Image.new("L", (97, 33)).save(path, "JPEG"), "not such a picture; expected a PNG"),
    "a/10": (lambda path: Image.new("I;16", (40, 40), 256).save(path), "256; expected 0 to 255"),
    "b/05": (lambda path: os.truncate(path, 60), "its mask b/05.png cannot be read"),
}


def test_convert_rejects_pictures_without_a_valid_mask(trees: Trees, tmp_path: Path) -> None:
    copy = Trees(trees.photos, Path(shutil.copytree(trees.masks, tmp_path / "masks")))
    for name, (damage, _) in DAMAGES.items():
        damage(next(copy.masks.glob(f"{name}.*")))
    dataset = make(copy, tmp_path / "out", "shards")
    reasons = {rejected.path.partition(".")[0]: rejected.reason for rejected in dataset.manifest.rejected}
    assert reasons.keys() == DAMAGES.keys()
    for name, (_, reason) in DAMAGES.items():
        assert re.search(reason, reasons[name])
        assert "\n" not in reasons[name]
    assert verify_deep(dataset.path, trees.photos, workers=0).problems == ()


def test_verify_deep_finds_a_mask_that_changed_in_the_source(trees: Trees, tmp_path: Path) -> None:
    copy = Trees(trees.photos, Path(shutil.copytree(trees.masks, tmp_path / "masks")))
    dataset = make(copy, tmp_path / "out", "shards")
    labels = np.array(Image.open(copy.masks / "a/02.png"))
    labels[20:30, 20:30] ^= 1
    Image.fromarray(labels).save(copy.masks / "a/02.png")
    (problem,) = verify_deep(dataset.path, trees.photos, workers=0).problems
    assert "(a/02.png) has a mask that differs from its source's" in problem


@pytest.mark.parametrize("name", ["missing", "empty", "the pictures' own"])
def test_convert_refuses_a_folder_without_masks(name: str, trees: Trees, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    folder = trees.photos if name == "the pictures' own" else tmp_path / name
    with pytest.raises(SourceError, match=str(folder)):
        make(Trees(trees.photos, folder), tmp_path / "out", "shards")
    assert not (tmp_path / "out").exists()


def test_convert_refuses_a_destination_inside_the_masks(trees: Trees) -> None:
    with pytest.raises(SettingError, match=str(trees.masks)):
        make(trees, trees.masks / "out", "shards")
