"""Grey pictures, and those with transparency, on every way that pixels take through a loader."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from loaders import RandomAugmentation
from loaders.augment.device import BatchAugmentation
from precache import Recipe, convert, open_dataset
from precache.errors import SettingError
from precache.formats import FORMATS
from tests.building import build_loader
from tests.damage import flip_a_bit

SIZE, STORED = 24, 32
COUNTS = {"grey": 1, "rgba": 4, "deep": 1}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """(channels, fit) -> shards of 20 pictures with transparency, or `deep`: grey of 16 bits."""
    root = tmp_path_factory.mktemp("channels")
    for number in range(20):
        folder = root / "tree" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (36 + number, 40, 4), dtype=np.uint8)
        Image.fromarray(pixels).resize((STORED + number, 40)).save(folder / f"{number}.png")
        deep = root / "deep" / "ab"[number % 2]
        deep.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.view(np.uint16)[..., 0]).save(deep / f"{number}.png")
    made = {}
    for channels in ("grey", "rgba", "deep"):
        for fit in ("crop", "keep"):
            path = made[channels, fit] = root / f"{channels}-{fit}"
            kind = {"channels": "grey", "dtype": "uint16"} if channels == "deep" else {"channels": channels}
            recipe = Recipe(format="shards", size=STORED, fit=fit, shard_bytes=9000, **kind)
            convert(root / ("deep" if channels == "deep" else "tree"), path, recipe, workers=0)
    return made


def pictures(path: Path) -> dict[int, np.ndarray]:
    manifest = open_dataset(path).manifest
    read_shard = FORMATS["shards"].read_shard
    return {s.id: s.pixels("") for shard in manifest.shards for s in read_shard(path / shard.file_name)}


def served(path: Path, **settings: Any) -> dict[int, torch.Tensor]:
    deep = {"dtype": "uint16"} if path.name.startswith("deep") else {}
    exact = {"size": SIZE, "crop_ratio": SIZE / STORED}  # nothing is resized
    settings = {**exact, "batch_size": 6, "workers": 2, **deep, **settings}
    with build_loader(path, **settings) as loader:
        return {int(i): image for batch in loader for i, image in zip(batch.ids, batch.images, strict=True)}


BOTH = [(channels, fit) for channels in COUNTS for fit in ("crop", "keep")]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("settings", [{}, {"cache": "ram"}, {"shuffle": "window"}, {"check": "never"}])
def test_the_centre_is_served_as_it_is_stored(
    stored: dict[tuple[str, str], Path], kind: tuple[str, str], settings: dict[str, Any]
) -> None:
    expected = pictures(stored[kind])
    found = served(stored[kind], **settings)
    assert found.keys() == expected.keys()
    for sample_id, picture in found.items():
        height, width, channels = expected[sample_id].shape
        top, left = round((height - SIZE) / 2), round((width - SIZE) / 2)
        part = expected[sample_id][top : top + SIZE, left : left + SIZE]
        assert np.array_equal(picture.permute(1, 2, 0).numpy(), part)
        assert channels == COUNTS[kind[0]]


@pytest.mark.parametrize("kind", BOTH)
def test_each_channel_is_resized_as_by_pillow(
    stored: dict[tuple[str, str], Path], kind: tuple[str, str]
) -> None:
    """Antialiased, values of 16 bits as well; then the middle."""
    most = 257 if kind[0] == "deep" else 1.01
    found = served(stored[kind], size=16, crop_ratio=0.8)
    for sample_id, pixels in pictures(stored[kind]).items():
        height, width = (20 * side // min(pixels.shape[:2]) for side in pixels.shape[:2])
        top, left = round((height - 16) / 2), round((width - 16) / 2)
        for number, channel in enumerate(np.moveaxis(pixels, 2, 0)):
            whole = Image.fromarray(channel.astype(np.float32)).resize(
                (width, height), Image.Resampling.BILINEAR
            )
            part = np.asarray(whole)[top : top + 16, left : left + 16]
            assert np.abs(found[sample_id][number].numpy() - part).max() <= most


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("augment", ["train", "crop"])
def test_a_cache_serves_what_the_files_do(
    stored: dict[tuple[str, str], Path], kind: tuple[str, str], augment: str
) -> None:
    """And another seed something else."""
    cached = served(stored[kind], augment=augment, cache="ram", seed=3)
    plain = served(stored[kind], augment=augment, seed=3)
    assert all(torch.equal(plain[i], cached[i]) for i in plain)
    assert len({tuple(picture.shape) for picture in plain.values()}) == 1
    other = served(stored[kind], augment=augment, seed=4)
    assert any(not torch.equal(plain[i], other[i]) for i in plain)


@pytest.mark.parametrize("channels", COUNTS)
def test_a_device_augments_as_the_cpu_does(stored: dict[tuple[str, str], Path], channels: str) -> None:
    """To within what rounding of positions costs."""
    path = stored[channels, "crop"]
    expected, found = pictures(path), served(path, augment="train", seed=5)
    ids = sorted(expected)
    batch = torch.from_numpy(np.stack([expected[i] for i in ids]))
    on_device = BatchAugmentation(RandomAugmentation(), 5, SIZE)(batch, torch.tensor(ids), 0)
    assert on_device.shape == (len(ids), SIZE, SIZE, COUNTS[channels])
    for picture, sample_id in zip(on_device, ids, strict=True):
        difference = (picture.permute(2, 0, 1).int() - found[sample_id].int()).abs()
        assert difference.float().mean() < (256 if channels == "deep" else 1)


@pytest.mark.parametrize("kind", BOTH)
def test_floats_are_normalised_by_channel(stored: dict[tuple[str, str], Path], kind: tuple[str, str]) -> None:
    statistics = open_dataset(stored[kind]).manifest.statistics["train"]
    plain = {i: picture.to(torch.int32) for i, picture in served(stored[kind]).items()}
    most = 65535 if kind[0] == "deep" else 255
    for normalize, mean, std in (
        ("dataset", statistics.mean, statistics.std),
        ((0.5, 0.25), (0.5,) * COUNTS[kind[0]], (0.25,) * COUNTS[kind[0]]),
        (None, (0.0,), (1.0,)),
    ):
        floats = served(stored[kind], dtype="float32", normalize=normalize)
        shift, scale = (torch.tensor(part).view(-1, 1, 1) for part in (mean, std))
        assert all(torch.allclose(floats[i], (plain[i] / most - shift) / scale, atol=1e-4) for i in plain)


@pytest.mark.parametrize("channels", ["grey", "rgba"])
def test_what_is_for_rgb_alone_is_refused(stored: dict[tuple[str, str], Path], channels: str) -> None:
    path = stored[channels, "crop"]
    count = COUNTS[channels]
    with pytest.raises(
        SettingError, match=f"'imagenet' is for RGB.* {count}-channel .*; give normalize='dataset'"
    ):
        build_loader(path, dtype="float32")
    for setting in ("brightness", "contrast", "saturation", "hue"):
        with pytest.raises(SettingError, match=f"augment: brightness.*are for RGB.* {count}-channel"):
            build_loader(path, augment=RandomAugmentation(**{setting: 0.1}))
    with pytest.raises(SettingError, match=f"normalize has 3 numbers each, the channels of .* are {count}"):
        build_loader(path, dtype="float32", normalize=([0.5] * 3, [0.5] * 3))


@pytest.mark.parametrize("channels", COUNTS)
def test_a_function_gets_and_gives_all_channels(stored: dict[tuple[str, str], Path], channels: str) -> None:
    path, count = stored[channels, "crop"], COUNTS[channels]
    dtype = "uint16" if channels == "deep" else "uint8"
    mirrored = served(path, augment=lambda images, ids, epoch: images.flip(2), size=None)
    expected = pictures(path)
    assert all(np.array_equal(mirrored[i].permute(1, 2, 0).numpy()[:, ::-1], expected[i]) for i in expected)
    for function in (lambda x, i, e: x.permute(0, 3, 1, 2), lambda x, i, e: x[..., :1].expand(-1, -1, -1, 3)):
        with pytest.raises(SettingError, match=rf"must return {dtype} \[6, 24, 24, {count}\]"):
            served(path, augment=function)


def test_a_damaged_picture_is_left_out(stored: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    for kind in BOTH:
        path = Path(shutil.copytree(stored[kind], tmp_path / "-".join(kind)))
        _, bad = flip_a_bit(path, shard_number=0, row=0)
        assert sorted([*served(path, on_error="skip"), bad]) == list(range(20))


def test_integers_of_another_dtype_are_refused(stored: dict[tuple[str, str], Path]) -> None:
    deep, grey = stored["deep", "crop"], stored["grey", "crop"]
    with pytest.raises(
        SettingError, match=r"dtype uint8: .* holds pictures of uint16; ask for dtype='uint16'"
    ):
        build_loader(deep)
    with pytest.raises(
        SettingError, match=r"dtype uint16: .* holds pictures of uint8; ask for dtype='uint8'"
    ):
        build_loader(grey, dtype="uint16")
    (picture, *_) = served(deep).values()
    assert picture.dtype == torch.uint16
