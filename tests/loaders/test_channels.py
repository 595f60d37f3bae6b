"""Grey pictures in every reader, cache and augmentation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from loaders import RandomAugmentation
from precache import Recipe, convert, open_dataset
from precache.formats import FORMATS
from tests.building import build_loader

SIZE, STORED = 24, 32
Pictures = dict[int, np.ndarray]
"""id -> [height, width, 1]"""


class GreyShards:
    """Shards of 20 grey pictures."""

    def __init__(self, root: Path, fit: str) -> None:
        self.path = root / fit
        (root / "tree/class").mkdir(parents=True)
        for number in range(20):
            pixels = np.random.default_rng(number).integers(0, 256, (36 + number, 40, 4), np.uint8)
            Image.fromarray(pixels).save(root / f"tree/class/{number:02}.png")
        recipe = Recipe(format="shards", size=STORED, fit=fit, shard_bytes=9000, channels="grey")
        convert(root / "tree", self.path, recipe, workers=0)
        manifest, read = open_dataset(self.path).manifest, FORMATS["shards"].read_shard
        self.statistics = manifest.statistics["train"]
        self.pictures: Pictures = {
            s.id: s.pixels("") for shard in manifest.shards for s in read(self.path / shard.file_name)
        }

    def served(self, **settings: Any) -> Pictures:
        """Serve an epoch; by default pictures are cropped and not resized."""
        defaults = {"size": SIZE, "crop_ratio": SIZE / STORED, "batch_size": 6, "workers": 2}
        with build_loader(self.path, **{**defaults, **settings}) as loader:
            return {
                int(i): image.permute(1, 2, 0).numpy()
                for batch in loader
                for i, image in zip(batch.ids, batch.images, strict=True)
            }


@pytest.fixture(scope="module", params=["crop", "keep"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GreyShards:
    return GreyShards(tmp_path_factory.mktemp("grey"), request.param)


def middle(picture: np.ndarray, side: int) -> np.ndarray:
    top, left = (round((length - side) / 2) for length in picture.shape[:2])
    return picture[top : top + side, left : left + side]


def are_equal(a: Pictures, b: Pictures) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[i], b[i]) for i in a)


def test_the_centre_is_served_as_it_is_stored(stored: GreyShards) -> None:
    centres = {i: middle(picture, SIZE) for i, picture in stored.pictures.items()}
    assert {centre.shape for centre in centres.values()} == {(SIZE, SIZE, 1)}
    for settings in ({}, {"shuffle": "window"}, {"check": "never"}):
        assert are_equal(stored.served(**settings), centres)


def test_grey_is_resized_as_by_pillow(stored: GreyShards) -> None:
    """Pictures are resized, antialiased, and the middle is cut out of them."""
    served = stored.served(size=16, crop_ratio=0.8)
    for sample_id, pixels in stored.pictures.items():
        height, width = (20 * side // min(pixels.shape[:2]) for side in pixels.shape[:2])
        image = Image.fromarray(pixels[..., 0].astype(np.float32))
        whole = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
        difference = np.abs(served[sample_id][..., 0] - middle(whole, 16))
        assert difference.max() <= 1.01


def test_floats_of_grey_are_normalised(stored: GreyShards) -> None:
    plain = {i: picture / 255 for i, picture in stored.served().items()}
    for normalize, mean, std in (
        ("imagenet", 0.449, 0.226),
        ("dataset", stored.statistics.mean, stored.statistics.std),
        ((0.5, 0.25), 0.5, 0.25),
        (None, 0, 1),
    ):
        floats = stored.served(dtype="float32", normalize=normalize)
        assert all(np.allclose(floats[i], (plain[i] - mean) / std, atol=1e-4) for i in plain)


def test_jitter_changes_the_brightness_of_grey_but_has_no_hue_to_shift(stored: GreyShards) -> None:
    plain = stored.served(augment=RandomAugmentation())
    brighter = stored.served(augment=RandomAugmentation(brightness=0.5))
    assert any((brighter[i] != plain[i]).any() for i in plain)
    with pytest.warns(UserWarning, match="hue"):
        shifted = stored.served(augment=RandomAugmentation(hue=0.5))
    assert all((shifted[i] == plain[i]).all() for i in plain)
