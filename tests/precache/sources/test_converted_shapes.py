"""A converted dataset as a source: other sizes, fits and channels; boxes and masks stay on what they mark."""

from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from precache import Recipe, convert, open_dataset, verify_deep
from precache.dataset.boxes import placement
from precache.errors import SettingError
from precache.formats import FORMATS
from tests.conftest import small_recipe
from tests.format_contract import stored
from tests.precache.sources.test_converted import pixels

STEPS = {
    "as they are": ({"fit": "keep"}, {"fit": "keep"}),
    "enlarged": ({"fit": "keep", "size": 250}, {"fit": "keep", "size": 250, "enlarge": True}),
    "of enlarged": ({"fit": "keep", "size": 250, "enlarge": True}, {"fit": "keep", "size": 250}),
    "smaller": ({"fit": "keep"}, {"fit": "keep", "size": 24}),
    "cropped": ({"fit": "keep"}, {"size": 24}),
    "kept of cropped": ({}, {"fit": "keep", "size": 24}),
    "a rectangle": ({"size": (40, 48)}, {"size": (20, 30), "fit": "pad"}),
    "grey": ({"channels": "grey"}, {"channels": "grey", "size": 24}),
    "colour of grey": ({"channels": "grey"}, {"size": 24}),
}


@pytest.mark.parametrize(("step", "name"), list(zip(STEPS, cycle(FORMATS), strict=False)))
def test_every_size_and_channel_is_converted_on_and_verified(
    raw_tree: Path, tmp_path: Path, step: str, name: str
) -> None:
    first, second = STEPS[step]
    convert(raw_tree, tmp_path / "one", small_recipe(name, **first), workers=0)
    convert(tmp_path / "one", tmp_path / "two", small_recipe("shards", **second), workers=0)
    report = verify_deep(tmp_path / "two", tmp_path / "one", workers=0)
    assert not report.problems
    if step == "as they are":
        assert pixels(open_dataset(tmp_path / "two")) == pixels(open_dataset(tmp_path / "one"))


def test_enlarging_pictures_of_varying_size_is_refused(raw_tree: Path, tmp_path: Path) -> None:
    convert(raw_tree, tmp_path / "one", small_recipe("shards", fit="keep-longer"), workers=0)
    with pytest.raises(SettingError, match=r"size 48 is more than the \d+x\d+ that .* stores"):
        convert(tmp_path / "one", tmp_path / "two", small_recipe("dali"), workers=0)
    convert(tmp_path / "one", tmp_path / "two", small_recipe("dali", fit="pad"), workers=0)


SPOT = (40, 20, 60, 30)  # left, top, right, bottom, on pictures of 120 x 80


def spotted(folder: Path) -> Path:
    """A table of black pictures, each with a white spot, its box and its mask."""
    (folder / "pictures").mkdir()
    (folder / "masks").mkdir()
    left, top, right, bottom = SPOT
    lines = ["image,box"]
    for number in range(3):
        spot = np.zeros((80, 120), np.uint8)
        spot[top:bottom, left:right] = 255
        Image.fromarray(spot).save(folder / "pictures" / f"{number}.png")
        Image.fromarray(spot).save(folder / "masks" / f"{number}.png")
        lines.append(f'{number}.png,"[{list(SPOT)}]"')
    (folder / "labels.csv").write_text("\n".join(lines))
    return folder / "labels.csv"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "second", [{"fit": "crop", "size": 40}, {"fit": "stretch", "size": 20}, {"fit": "pad", "size": (20, 40)}]
)
def test_boxes_and_masks_stay_on_what_they_mark(
    tmp_path: Path, second: dict[str, object], masked: bool
) -> None:
    """Crop, then something else: where the original's size would say another place."""
    mask = {"mask": str(tmp_path / "masks")} if masked else {}
    named = {"root": str(tmp_path / "pictures"), "fields": ("box",), "boxes": "box", **mask}
    first = Recipe(format="shards", size=40, fit="crop")
    convert(spotted(tmp_path), tmp_path / "one", first, workers=0, **named)
    convert(tmp_path / "one", tmp_path / "two", Recipe(format="shards", **second), workers=0)
    assert not verify_deep(tmp_path / "two", tmp_path / "one", workers=0).problems
    dataset = open_dataset(tmp_path / "two")
    index, how = dataset.read_index(), dataset.manifest.recipe.rendering
    assert dataset.manifest.source_options["boxes"] == "box"
    (_, sample), *_ = stored(dataset)
    x_scale, y_scale, x, y = placement(*index.source_sizes[0].tolist(), how)
    box = index.fields["box"].array(0)[0] * (x_scale, y_scale, x_scale, y_scale) + (x, y, x, y)
    bright = np.argwhere(sample.pixels("")[..., 0] > 127)
    top, left = bright.min(axis=0)
    bottom, right = bright.max(axis=0) + 1
    assert np.allclose(box, (left, top, right, bottom), atol=1)
    if masked:
        assert isinstance(sample.mask, np.ndarray)
        assert ((sample.mask > 127) == (sample.pixels("")[..., 0] > 127)).mean() > 0.95


def test_a_subset_keeps_its_masks(tmp_path: Path) -> None:
    named = {"root": str(tmp_path / "pictures"), "mask": str(tmp_path / "masks")}
    convert(spotted(tmp_path), tmp_path / "one", Recipe(format="dali", size=40), workers=0, **named)
    recipe = Recipe(format="webdataset", size=40)
    (tmp_path / "ids.txt").write_text("1")
    convert(tmp_path / "one", tmp_path / "two", recipe, workers=0, ids=str(tmp_path / "ids.txt"))
    assert not verify_deep(tmp_path / "two", tmp_path / "one", workers=0).problems
    (_, sample), *others = stored(open_dataset(tmp_path / "two"))
    assert sample.mask is not None
    assert not others
