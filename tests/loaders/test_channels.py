"""Grey pictures, pictures with transparency and of 16 bits, in every reader, cache and augmentation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from loaders import RandomAugmentation
from precache import Recipe, convert, open_dataset
from precache.errors import SettingError
from precache.formats import FORMATS
from tests.building import build_loader

SIZE, STORED = 24, 32
KINDS: dict[str, dict[str, str]] = {
    "grey": {"channels": "grey"},
    "rgba": {"channels": "rgba"},
    "deep": {"channels": "grey", "dtype": "uint16"},
}
Pictures = dict[int, np.ndarray]
"""id -> [height, width, channels]"""


class ChannelShards:
    """Shards of 20 pictures of one of KINDS: grey, with transparency, or grey of 16 bits (`deep`)."""

    def __init__(self, root: Path, kind: str, fit: str) -> None:
        self.path, self.deep = root / f"{kind}-{fit}", kind == "deep"
        self.channels, self.max_value = (4 if kind == "rgba" else 1), (65535 if self.deep else 255)
        (root / kind / "class").mkdir(parents=True, exist_ok=True)
        for number in range(20):
            pixels = np.random.default_rng(number).integers(0, 256, (36 + number, 40, 4), np.uint8)
            picture = Image.fromarray(pixels.view(np.uint16)[..., 0] if self.deep else pixels)
            picture.save(root / kind / f"class/{number:02}.png")
        recipe = Recipe(format="shards", size=STORED, fit=fit, shard_bytes=9000, **KINDS[kind])
        convert(root / kind, self.path, recipe, workers=0)
        manifest, read = open_dataset(self.path).manifest, FORMATS["shards"].read_shard
        self.statistics = manifest.statistics["train"]
        self.pictures: Pictures = {
            s.id: s.pixels("") for shard in manifest.shards for s in read(self.path / shard.file_name)
        }

    def served(self, **settings: Any) -> Pictures:
        """Serve an epoch; by default pictures are cropped and not resized."""
        defaults = {"size": SIZE, "crop_ratio": SIZE / STORED, "dtype": "uint16" if self.deep else "uint8"}
        with build_loader(self.path, **{**defaults, "batch_size": 6, "workers": 2, **settings}) as loader:
            return {
                int(i): image.permute(1, 2, 0).numpy()
                for batch in loader
                for i, image in zip(batch.ids, batch.images, strict=True)
            }


@pytest.fixture(
    scope="module", params=[(kind, fit) for kind in KINDS for fit in ("crop", "keep")], ids="-".join
)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChannelShards:
    return ChannelShards(tmp_path_factory.mktemp("channels"), *request.param)


def middle(picture: np.ndarray, side: int) -> np.ndarray:
    top, left = (round((length - side) / 2) for length in picture.shape[:2])
    return picture[top : top + side, left : left + side]


def are_equal(a: Pictures, b: Pictures) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[i], b[i]) for i in a)


def test_the_centre_is_served_as_it_is_stored(stored: ChannelShards) -> None:
    centres = {i: middle(picture, SIZE) for i, picture in stored.pictures.items()}
    assert {centre.shape for centre in centres.values()} == {(SIZE, SIZE, stored.channels)}
    for settings in ({}, {"shuffle": "window"}, {"check": "never"}):
        assert are_equal(stored.served(**settings), centres)


def test_each_channel_is_resized_as_by_pillow(stored: ChannelShards) -> None:
    """Pictures are resized, antialiased, and the middle is cut out of them."""
    served = stored.served(size=16, crop_ratio=0.8)
    for sample_id, pixels in stored.pictures.items():
        height, width = (20 * side // min(pixels.shape[:2]) for side in pixels.shape[:2])
        for number, channel in enumerate(np.moveaxis(pixels, 2, 0)):
            image = Image.fromarray(channel.astype(np.float32))
            whole = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
            difference = np.abs(served[sample_id][..., number] - middle(whole, 16))
            assert difference.max() <= 1.01 * stored.max_value / 255


def test_floats_are_normalised_by_channel(stored: ChannelShards) -> None:
    plain = {i: picture / stored.max_value for i, picture in stored.served().items()}
    channels = stored.channels
    imagenet = {1: (0.449, 0.226), 4: ((0.485, 0.456, 0.406, 0), (0.229, 0.224, 0.225, 1))}[channels]
    for normalize, mean, std in (
        ("imagenet", *imagenet),
        ("dataset", stored.statistics.mean, stored.statistics.std),
        ((0.5, 0.25), 0.5, 0.25),
        (None, 0, 1),
    ):
        floats = stored.served(dtype="float32", normalize=normalize)
        assert all(np.allclose(floats[i], (plain[i] - mean) / std, atol=1e-4) for i in plain)


def test_dtype_or_jitter_that_does_not_fit_the_channels_is_refused(stored: ChannelShards) -> None:
    jitter = RandomAugmentation(brightness=0.1)
    settings: dict[str, Any] = {"dtype": "uint8"} if stored.deep else {"augment": jitter}
    with pytest.raises(SettingError, match="uint16" if stored.deep else "brightness"):
        stored.served(**settings)
