"""The loader that people have today, over real pictures: its recipe, its place, its honesty."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from bench.measure.candidates import choose_candidates
from bench.measure.comparison import compare
from bench.measure.imagefolder import recipe
from bench.measure.settings import Settings
from bench.measure.trial import measure
from bench.report.result import conditions
from loaders.transfer import IMAGENET_MEAN, IMAGENET_STD
from precache.errors import DatasetError, SettingError
from tests.bench.settings import quick
from tests.conftest import IMAGES


def trial(path: Path, **given: object) -> Settings:
    """Of an epoch."""
    epoch = {"workers": 0, "warmup": 0, "batches": IMAGES // 8 - 1}
    return quick(**{**epoch, **given}).of("imagefolder", path, 5)


@pytest.mark.parametrize("workers", [0, 2])
def test_pictures_are_served_at_most_once_and_a_damaged_one_is_named(
    raw_tree: Path, tmp_path: Path, workers: int
) -> None:
    served = measure(trial(raw_tree, workers=workers)).served
    assert served is not None
    assert (served.ids, served.shapes) == (IMAGES // 8 * 8, ("3x32x32 torch.float32",))
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    bad = sorted(tree.glob("*/*.jpg"))[5]
    bad.write_bytes(b"<html>")
    with pytest.raises(DatasetError, match=rf"^{bad}: cannot identify"):
        measure(trial(tree, workers=workers, batches=20))


def test_the_recipe_is_torchvisions_and_validation_the_centre_of_a_resized_picture() -> None:
    rng = np.random.default_rng((1, 14))
    image = Image.fromarray(rng.integers(0, 256, (256, 256, 3), np.uint8))
    pixels = recipe("eval", 224)(image)  # 256 pixels: nothing to resize
    crop, flip = recipe("train", 224).transforms[:2]
    assert (crop.scale, crop.ratio, crop.size, flip.p) == ((0.08, 1.0), (3 / 4, 4 / 3), (224, 224), 0.5)
    centre = pil_to_tensor(image)[:, 16:240, 16:240] / 255
    mean, std = (torch.tensor(part)[:, None, None] for part in (IMAGENET_MEAN, IMAGENET_STD))
    assert torch.allclose(pixels, (centre - mean) / std, atol=1e-5)


def test_it_is_compared_with_ours_and_the_conditions_say_what_differs(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    """Also that it knows one picture less, by the endings of names."""
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    picture = sorted(tree.glob("*/*.jpg"))[3]
    picture.rename(picture.with_suffix(""))
    chosen = choose_candidates([tree, converted["shards"]], ["imagefolder", "shards"], Path("unused"))
    result = compare(chosen, quick(trainer="emulated:200", batches=3))
    own, shards = result.rows
    assert (own.backend, shards.backend) == ("imagefolder", "shards")
    assert own.stages.keys() >= {"compute", "transfer"}
    assert any(change.what == "Converting to shards" for change in own.changes)
    said = " ".join(conditions(result))
    assert "imagefolder is torchvision's own training recipe with Pillow" in said
    assert f"imagefolder on {tree} knows {IMAGES - 1} of the {IMAGES} pictures, by the endings" in said


@pytest.mark.parametrize(
    ("setting", "value"), [("cache", "ram"), ("shuffle", "window"), ("augment", "crop"), ("last", "pad")]
)
def test_what_it_does_not_have_is_refused(raw_tree: Path, setting: str, value: str) -> None:
    with pytest.raises(SettingError, match=f"'{value}'"):
        trial(raw_tree, **{setting: value}).open_loader(torch.uint8)
