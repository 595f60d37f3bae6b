"""Grey pictures, those with transparency and of 16 bits, on every way that pixels take through a loader."""

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
        folder, deep = (root / tree / "ab"[number % 2] for tree in ("tree", "deep"))
        folder.mkdir(parents=True, exist_ok=True)
        deep.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (36 + number, 40, 4), dtype=np.uint8)
        Image.fromarray(pixels).resize((STORED + number, 40)).save(folder / f"{number}.png")
        Image.fromarray(pixels.view(np.uint16)[..., 0]).save(deep / f"{number}.png")
    made = {}
    for channels in COUNTS:
        for fit in ("crop", "keep"):
            path = made[channels, fit] = root / f"{channels}-{fit}"
            kind = {"channels": "grey", "dtype": "uint16"} if channels == "deep" else {"channels": channels}
            recipe = Recipe(format="shards", size=STORED, fit=fit, shard_bytes=9000, **kind)
            convert(root / ("deep" if channels == "deep" else "tree"), path, recipe, workers=0)
    return made


@pytest.fixture(params=[(channels, fit) for channels in COUNTS for fit in ("crop", "keep")], ids="-".join)
def path(request: pytest.FixtureRequest, stored: dict[tuple[str, str], Path]) -> Path:
    return stored[request.param]


def pictures(path: Path) -> dict[int, np.ndarray]:
    manifest = open_dataset(path).manifest
    read_shard = FORMATS["shards"].read_shard
    return {s.id: s.pixels("") for shard in manifest.shards for s in read_shard(path / shard.file_name)}


def channels_of(path: Path) -> int:
    return COUNTS[path.name.partition("-")[0]]


def served(path: Path, **settings: Any) -> dict[int, torch.Tensor]:
    deep = {"dtype": "uint16"} if path.name.startswith("deep") else {}
    exact = {"size": SIZE, "crop_ratio": SIZE / STORED}  # nothing is resized
    with build_loader(path, **{**exact, "batch_size": 6, "workers": 2, **deep, **settings}) as loader:
        return {int(i): image for batch in loader for i, image in zip(batch.ids, batch.images, strict=True)}


def test_the_centre_is_served_as_it_is_stored(path: Path) -> None:
    expected = pictures(path)
    for settings in ({}, {"cache": "ram"}, {"shuffle": "window"}, {"check": "never"}):
        found = served(path, **settings)
        assert found.keys() == expected.keys()
        for sample_id, picture in found.items():
            height, width, channels = expected[sample_id].shape
            top, left = round((height - SIZE) / 2), round((width - SIZE) / 2)
            part = expected[sample_id][top : top + SIZE, left : left + SIZE]
            assert np.array_equal(picture.permute(1, 2, 0).numpy(), part)
            assert channels == channels_of(path)


def test_each_channel_is_resized_as_by_pillow(path: Path) -> None:
    """Antialiased, values of 16 bits as well; then the middle."""
    most = 257 if path.name.startswith("deep") else 1.01
    found = served(path, size=16, crop_ratio=0.8)
    for sample_id, pixels in pictures(path).items():
        height, width = (20 * side // min(pixels.shape[:2]) for side in pixels.shape[:2])
        top, left = round((height - 16) / 2), round((width - 16) / 2)
        for number, channel in enumerate(np.moveaxis(pixels, 2, 0)):
            image = Image.fromarray(channel.astype(np.float32))
            whole = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
            part = whole[top : top + 16, left : left + 16]
            assert np.abs(found[sample_id][number].numpy() - part).max() <= most


@pytest.mark.parametrize("augment", ["train", "crop"])
def test_a_cache_serves_what_the_files_do(path: Path, augment: str) -> None:
    """And another seed something else."""
    cached, plain, other = (
        served(path, augment=augment, cache=cache, seed=seed)
        for cache, seed in (("ram", 3), ("none", 3), ("none", 4))
    )
    assert all(torch.equal(plain[i], cached[i]) for i in plain)
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


def test_floats_are_normalised_by_channel(path: Path) -> None:
    statistics, count = open_dataset(path).manifest.statistics["train"], channels_of(path)
    most = 65535 if path.name.startswith("deep") else 255
    plain = {i: picture.to(torch.int32) / most for i, picture in served(path).items()}
    for normalize, mean, std in (
        ("dataset", statistics.mean, statistics.std),
        ((0.5, 0.25), (0.5,) * count, (0.25,) * count),
        (None, (0.0,), (1.0,)),
    ):
        floats = served(path, dtype="float32", normalize=normalize)
        shift, scale = (torch.tensor(part).view(-1, 1, 1) for part in (mean, std))
        assert all(torch.allclose(floats[i], (plain[i] - shift) / scale, atol=1e-4) for i in plain)


@pytest.mark.parametrize("channels", COUNTS)
def test_a_function_gets_and_gives_all_channels(stored: dict[tuple[str, str], Path], channels: str) -> None:
    path, count = stored[channels, "crop"], COUNTS[channels]
    mirrored = served(path, augment=lambda images, ids, epoch: images.flip(2), size=None)
    expected = pictures(path)
    assert all(np.array_equal(mirrored[i].permute(1, 2, 0).numpy()[:, ::-1], expected[i]) for i in expected)
    for function in (lambda x, i, e: x.permute(0, 3, 1, 2), lambda x, i, e: x[..., :1].expand(-1, -1, -1, 3)):
        with pytest.raises(SettingError, match=rf"must return .* \[6, 24, 24, {count}\]"):
            served(path, augment=function)


def test_a_damaged_picture_is_left_out(path: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(path, tmp_path / path.name))
    _, bad = flip_a_bit(copy, shard_number=0, row=0)
    assert sorted([*served(copy, on_error="skip"), bad]) == list(range(20))


@pytest.mark.parametrize(
    ("channels", "settings", "message"),
    [
        ("rgba", {"dtype": "float32"}, "RGB.* 4-channel .*; give normalize='dataset'"),
        ("grey", {"dtype": "float32", "normalize": ([0.5] * 3, [0.5] * 3)}, "normalize.* are 1"),
        ("grey", {"augment": RandomAugmentation(hue=0.1)}, "augment: .*for RGB.* 1-channel"),
        ("rgba", {"augment": RandomAugmentation(brightness=0.1)}, "augment: .*for RGB.* 4-channel"),
        ("deep", {}, "dtype uint8: .* uint16; ask for dtype='uint16'"),
        ("grey", {"dtype": "uint16"}, "dtype uint16: .* uint8; ask for dtype='uint8'"),
    ],
)
def test_what_such_pictures_cannot_be_served_as_is_refused(
    channels: str, settings: dict[str, Any], message: str, stored: dict[tuple[str, str], Path]
) -> None:
    with pytest.raises(SettingError, match=message):
        build_loader(stored[channels, "crop"], **settings)
