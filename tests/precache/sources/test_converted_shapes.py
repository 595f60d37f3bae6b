"""A converted dataset as a source: other sizes, fits and channels; boxes and masks stay on what they mark."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from precache import Recipe, convert, open_dataset, verify_deep
from precache.dataset.boxes import placement
from precache.errors import SettingError
from tests.conftest import small_recipe
from tests.format_contract import stored

STEPS = [
    ("shards", {"fit": "keep"}, {"fit": "keep"}),
    ("dali", {"fit": "keep", "size": 250}, {"fit": "keep", "size": 250, "enlarge": True}),
    ("webdataset", {"fit": "keep", "size": 250, "enlarge": True}, {"fit": "keep", "size": 24}),
    ("shards", {"fit": "keep"}, {"size": 24}),
    ("dali", {"size": (40, 48)}, {"size": (20, 30), "fit": "pad"}),
    ("webdataset", {"channels": "grey"}, {"size": 24}),
]


@pytest.mark.parametrize(("name", "first", "second"), STEPS, ids=str)
def test_every_size_and_channel_is_converted_on_and_verified(
    raw_tree: Path, tmp_path: Path, name: str, first: dict[str, object], second: dict[str, object]
) -> None:
    convert(raw_tree, tmp_path / "one", small_recipe(name, **first), workers=0)
    convert(tmp_path / "one", tmp_path / "two", small_recipe("shards", **second), workers=0)
    assert not verify_deep(tmp_path / "two", tmp_path / "one", workers=0).problems
    if first == second:
        one, two = (
            {s.id: s.pixels("").tobytes() for _, s in stored(open_dataset(tmp_path / n))}
            for n in ("one", "two")
        )
        assert one == two


@pytest.mark.parametrize("fit", ["crop", "keep-longer"])
def test_enlarging_is_refused(fit: str, raw_tree: Path, tmp_path: Path) -> None:
    convert(raw_tree, tmp_path / "one", small_recipe("shards", fit=fit), workers=0)
    larger: list[dict[str, object]] = [{"size": 49}]
    if fit == "crop":
        larger.append({"size": 49, "fit": "keep", "enlarge": True})
    for settings in larger:
        with pytest.raises(SettingError, match=r"size 49 is more than the \d+x\d+ that .* stores"):
            convert(tmp_path / "one", tmp_path / "two", small_recipe("dali", **settings), workers=0)
    assert not (tmp_path / "two").exists()


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


@pytest.mark.parametrize(
    "second", [{"fit": "crop", "size": 40}, {"fit": "stretch", "size": 20}, {"fit": "pad", "size": (20, 40)}]
)
def test_boxes_and_masks_stay_on_what_they_mark(tmp_path: Path, second: dict[str, object]) -> None:
    """Crop, then something else, of one picture: where the original's size would say another place."""
    named = {"root": str(tmp_path / "pictures"), "fields": ("box",), "boxes": "box"}
    (tmp_path / "ids.txt").write_text("1")
    first = Recipe(format="shards", size=40, fit="crop")
    convert(
        spotted(tmp_path),
        tmp_path / "one",
        first,
        workers=0,
        mask=str(tmp_path / "masks"),
        **named,  # type: ignore
    )
    recipe = Recipe(format="shards", **second)  # type: ignore[arg-type]
    convert(tmp_path / "one", tmp_path / "two", recipe, workers=0, ids=str(tmp_path / "ids.txt"))
    assert not verify_deep(tmp_path / "two", tmp_path / "one", workers=0).problems
    dataset = open_dataset(tmp_path / "two")
    index, how = dataset.read_index(), dataset.manifest.recipe.rendering
    assert dataset.manifest.source_options["boxes"] == "box"
    ((_, sample),) = stored(dataset)
    x_scale, y_scale, x, y = placement(*index.source_sizes[0].tolist(), how)
    box = index.fields["box"].array(0)[0] * (x_scale, y_scale, x_scale, y_scale) + (x, y, x, y)
    bright = np.argwhere(sample.pixels("")[..., 0] > 127)
    top, left = bright.min(axis=0)
    bottom, right = bright.max(axis=0) + 1
    assert np.allclose(box, (left, top, right, bottom), atol=1)
    assert isinstance(sample.mask, np.ndarray)
    assert ((sample.mask > 127) == (sample.pixels("")[..., 0] > 127)).mean() > 0.95
