"""Backend `nvjpeg` on the CPU, by the same calls as on a GPU."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loaders.augment import Crops, RandomAugmentation
from loaders.batch import DecodedBatch, Request
from loaders.dataset import RAW, open_split
from loaders.read import nvjpeg
from precache.pictures.jpeg import psnr
from tests.building import build_loader
from tests.conftest import IMAGES, STORED_SIZE
from tests.precache.pictures.drawing import load

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.*TorchCodec")


def read(path: Path, crops: Crops | None = None, size: int = 40) -> tuple[DecodedBatch, list[int]]:
    """All of it, in a batch, and the ids of what is there."""
    with build_loader(path, workers=1) as loader:
        spec: Any = loader.spec
    data = open_split(path, "train")
    crops = crops or Crops(None if data.kind == RAW else STORED_SIZE, size)
    reader = nvjpeg.NvjpegReader(spec, data, crops, CPU)
    try:
        (batch,) = reader.read(iter([request := Request(0, np.arange(len(data)))]))
    finally:
        reader.close()
    return batch, data.ids[request.without(batch.refused).positions].tolist()


def served(path: Path, **settings: Any) -> dict[int, np.ndarray]:
    with build_loader(path, workers=1, **settings) as loader:
        return {
            int(i): x.permute(1, 2, 0).numpy() for b in loader for i, x in zip(b.ids, b.images, strict=True)
        }


def check_near(
    decoded: tuple[DecodedBatch, list[int]], expected: dict[int, np.ndarray], worst: float
) -> None:
    batch, ids = decoded
    assert sorted(ids) == sorted(expected)
    for sample_id, image in zip(ids, batch.images.numpy(), strict=True):
        assert psnr(image, expected[sample_id]) > worst


def test_a_raw_tree_is_decoded_and_resized_as_the_reference_does(raw_tree: Path) -> None:
    """torchvision's decoder upsamples colour as libjpeg-turbo does, so little is left between them."""
    data = open_split(raw_tree, "train")
    expected = {i: np.asarray(load(file, 40)) for i, file in zip(data.ids.tolist(), data.files, strict=True)}
    check_near(read(raw_tree), expected, 45)


@pytest.mark.parametrize("kind", ["webdataset", "dali", "keep-dali"])
def test_stored_jpegs_are_decoded_and_cropped_each_by_itself(
    kind: str, converted: dict[str, Path], shaped: dict[str, Path]
) -> None:
    folders = {**converted, **shaped}
    path, same = folders[kind], folders[kind.replace("dali", "webdataset")]
    if kind != "keep-dali":
        check_near(read(path, size=31), served(same, size=31), 45)
        return
    for augment, drawn in ((None, None), ("train", RandomAugmentation())):
        crops = Crops(None, (30, 40), drawn, seed=5)
        check_near(read(path, crops), served(same, size=(30, 40), augment=augment, seed=5), 40)
    (batch, _), shapes = read(path, Crops(None, None)), open_split(path, "train").shapes_at(slice(None))
    assert batch.images.numel() == int(shapes.prod(axis=1).sum()) * 3, "whole, one behind the other"


def test_what_cannot_be_decoded_is_refused_by_name_and_the_rest_is_served(
    raw_tree: Path, tmp_path: Path
) -> None:
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    bad = sorted(tree.glob("*/*.jpg"))[30:33]
    for path, content in zip(bad, (bad[0].read_bytes()[:300], b"<html>", b""), strict=True):
        path.write_bytes(content)
    batch, ids = read(tree)
    assert sorted(error.path for error in batch.refused.values()) == sorted(map(str, bad))
    assert len(ids) == len(batch.images) == IMAGES - 3
