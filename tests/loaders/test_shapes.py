"""Crops of pictures of varying sizes and of rectangles, by every backend."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import CenterCrop, RandomResizedCrop, Resize

from loaders.augment.draws import uniforms
from loaders.augment.geometry import random_boxes
from precache import convert, open_dataset
from precache.errors import DatasetError, SettingError
from precache.formats import FORMATS
from precache.pictures.jpeg import psnr
from tests.building import build_loader
from tests.conftest import RECTANGLE, STORED_SIZE, small_recipe
from tests.loaders.cases import CONVERTED_CASES
from tests.loaders.test_augment import by_id, largest_gap

COUNT = 20_000
Pictures = dict[int, np.ndarray]


def served(path: Path, **settings: Any) -> Pictures:
    """Serve an epoch, and return the pictures by id, uint8 [height, width, 3]."""
    with build_loader(path, **{"workers": 1, "batch_size": 16, **settings}) as loader:
        return {i: image.permute(1, 2, 0).numpy() for i, image in by_id(list(loader)).items()}


def are_equal(a: Pictures, b: Pictures) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[i], b[i]) for i in a)


@pytest.fixture(scope="module")
def longer(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Conversions of the tree with longer sides of 48 pixels, by format."""
    root = tmp_path_factory.mktemp("longer")
    for name in FORMATS:
        convert(raw_tree, root / name, small_recipe(name, fit="keep-longer"), workers=0)
    return {name: root / name for name in FORMATS}


def test_random_boxes_of_rectangles_are_distributed_as_in_torchvision() -> None:
    """Two samples of 20,000 from one distribution lie within 0.0193 in 999 of 1,000 cases."""
    torch.manual_seed(0)
    height, width = 400, 256
    picture = torch.empty(3, height, width)
    torchvisions = np.array(
        [RandomResizedCrop.get_params(picture, (0.08, 1), (3 / 4, 4 / 3)) for _ in range(COUNT)]
    )
    shapes = np.tile((height, width), (COUNT, 1))
    boxes = random_boxes(shapes, uniforms(0, 0, np.arange(COUNT), 40), (0.08, 1.0), (3 / 4, 4 / 3))
    for column, torchvisions_column in enumerate((1, 0, 3, 2)):
        assert largest_gap(boxes[:, column], torchvisions[:, torchvisions_column].astype(float)) < 0.0193
    assert (boxes[:, 0] + boxes[:, 2]).max() == width
    assert (boxes[:, 1] + boxes[:, 3]).max() == height


@pytest.mark.parametrize(("backend", "kind"), CONVERTED_CASES)
def test_small_pictures_are_enlarged_or_have_black_around_them(
    backend: str, kind: str, longer: dict[str, Path]
) -> None:
    dataset = open_dataset(longer["shards"])
    read = FORMATS["shards"].read_shard
    stored = {s.id: s.pixels("") for part in dataset.manifest.shards for s in read(dataset.shard_path(part))}
    for augment in (None, "crop"):
        pictures = served(longer[kind], backend=backend, augment=augment, size=STORED_SIZE)
        assert pictures.keys() == stored.keys()
        for sample_id, picture in pictures.items():
            whole = Image.fromarray(stored[sample_id])
            if augment is None:
                whole = Resize(STORED_SIZE)(whole)
            expected = np.array(CenterCrop(STORED_SIZE)(whole))
            distance = psnr(picture, expected)
            if augment == "crop":  # which may have mirrored it
                distance = max(distance, psnr(picture, expected[:, ::-1]))
            min_distance = 50 if augment is None else 1000
            assert distance > (min_distance if kind == "shards" else 34)


def test_shards_of_another_shape_than_the_index_says_are_refused(
    shaped: dict[str, Path], tmp_path: Path
) -> None:
    """Shards of a conversion with height and width exchanged have as many bytes as the right ones."""
    path = Path(shutil.copytree(shaped["rectangle-shards"], tmp_path / "copy"))
    for shard in open_dataset(path).manifest.shards:
        content = (path / shard.file_name).read_bytes()
        old, new = (f"[{shard.samples},{h},{w},3]".encode() for h, w in (RECTANGLE, RECTANGLE[::-1]))
        assert old in content
        (path / shard.file_name).write_bytes(content.replace(old, new, 1))
    with (
        build_loader(path, check="never", workers=1) as loader,
        pytest.raises(DatasetError, match=str(path)),
    ):
        list(loader)


def test_extreme_shapes_fall_back_as_in_torchvision() -> None:
    shapes = np.array([(20, 400), (400, 20), (100, 100), (1, 900), (900, 1), (90, 100)])
    draws = uniforms(0, 0, np.arange(len(shapes)), 40)
    for ratio in ((3 / 4, 4 / 3), (3.0, 4.0), (0.2, 0.25)):
        boxes = random_boxes(shapes, draws, (1.0, 1.0), ratio)
        for (height, width), box in zip(shapes.tolist(), boxes.tolist(), strict=True):
            picture = torch.empty(3, height, width)
            top, left, rows, columns = RandomResizedCrop.get_params(picture, (1.0, 1.0), ratio)
            assert box[2:] == [max(1, columns), max(1, rows)]  # torchvision cannot resize what is empty
            if ratio[0] > 1 or height != width:
                assert max(abs(box[0] - left), abs(box[1] - top)) <= 1


def test_loader_size_is_that_of_its_batches(shaped: dict[str, Path], raw_tree: Path) -> None:
    for path, size, expected in (
        (raw_tree, None, 224),
        (raw_tree, (20, 30), (20, 30)),
        (shaped["rectangle-shards"], None, RECTANGLE),
        (shaped["rectangle-shards"], (20, 20), 20),
        (shaped["keep-shards"], None, STORED_SIZE),
        (shaped["keep-shards"], [20, 30], (20, 30)),
    ):
        for augment in (None, "train", "crop"):
            with build_loader(path, size=size, augment=augment, workers=0, batch_size=35) as loader:
                assert loader.size == expected
                shape = next(iter(loader)).images.shape[2:]
                assert tuple(shape) == (expected if isinstance(expected, tuple) else (expected, expected))
    path = shaped["rectangle-shards"]
    with build_loader(path, augment=lambda images, ids, epoch: images[:, :20, :44], workers=1) as loader:
        assert loader.size == (20, 44), "a function gets whole pictures if they are stored in one size"


def test_a_size_without_height_is_refused(shaped: dict[str, Path]) -> None:
    with pytest.raises(SettingError, match=r"\bsize\b"):
        build_loader(shaped["rectangle-shards"], size=(0, 3))
