"""Backend `nvjpeg`: its own logic, with torchvision's CPU decoder in the place of the GPU's."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from loaders.augment.cpu import Crops
from loaders.batch import DecodedBatch, Request
from loaders.dataset import RAW, open_split
from loaders.read.nvjpeg import NvjpegReader
from loaders.settings import LoaderSpec
from precache.errors import SettingError
from tests.building import build_loader
from tests.conftest import IMAGES, STORED_SIZE
from tests.precache.pictures.drawing import load

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.*TorchCodec")


def read(path: Path, stored: int, size: int) -> list[DecodedBatch]:
    with build_loader(path, workers=1) as loader:
        spec: LoaderSpec = loader.spec  # type: ignore[attr-defined]
    data = open_split(path, "train")
    positions = np.array_split(np.arange(len(data.ids)), 5)
    requests: Iterator[Request] = iter([Request(0, part) for part in positions])
    reader = NvjpegReader(spec, data, Crops(None if data.kind == RAW else stored, size), CPU)
    try:
        return list(reader.read(requests))
    finally:
        reader.close()


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    error = np.square(one.astype(float) - other).mean()
    return float("inf") if error == 0 else 10 * np.log10(255**2 / error)


def test_a_raw_tree_is_decoded_and_resized_as_the_reference_does(raw_tree: Path) -> None:
    """torchvision's decoder upsamples colour as libjpeg-turbo does, so little is left between them."""
    data = open_split(raw_tree, "train")
    served = {
        int(i): image
        for batch in read(raw_tree, 40, 40)
        for i, image in zip(batch.ids, batch.images, strict=True)
    }
    assert len(served) == IMAGES
    for sample_id, label, file in zip(data.ids.tolist(), data.labels.tolist(), data.files, strict=True):
        assert psnr(served[sample_id].numpy(), load(file, 40)) > 45, (file, label)


@pytest.mark.parametrize("kind", ["webdataset", "dali"])
def test_stored_jpegs_are_decoded_and_cropped(converted: dict[str, Path], kind: str) -> None:
    ours = read(converted[kind], STORED_SIZE, 31)
    with build_loader(converted["webdataset"], shuffle=False, size=31, workers=1) as loader:
        theirs = {int(i): x for batch in loader for i, x in zip(batch.ids, batch.images, strict=True)}
    assert sum(len(batch.ids) for batch in ours) == IMAGES
    for batch in ours:
        assert batch.images.shape[1:] == (31, 31, 3)
        for sample_id, image in zip(batch.ids.tolist(), batch.images, strict=True):
            assert psnr(image.numpy(), theirs[sample_id].permute(1, 2, 0).numpy()) > 45


def test_what_cannot_be_decoded_is_refused_by_name_and_the_rest_is_served(
    raw_tree: Path, tmp_path: Path
) -> None:
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    bad = sorted(tree.glob("*/*.jpg"))[30:33]
    content = bad[0].read_bytes()
    bad[0].write_bytes(content[: len(content) // 2])
    bad[1].write_bytes(b"<html>")
    bad[2].write_bytes(b"")
    data = open_split(tree, "train")
    positions = np.arange(len(data.ids))
    with build_loader(tree, workers=1) as loader:
        spec: LoaderSpec = loader.spec  # type: ignore[attr-defined]
    reader = NvjpegReader(spec, data, Crops(40, 40), CPU)
    (batch,) = reader.read(iter([Request(0, positions)]))
    reader.close()
    assert sorted(error.path for error in batch.refused.values()) == sorted(map(str, bad))
    assert len(batch.ids) == IMAGES - 3
    assert not set(batch.ids.tolist()) & set(batch.refused)


def test_it_is_refused_without_a_gpu(raw_tree: Path) -> None:
    with pytest.raises(SettingError, match="backend 'nvjpeg' decodes on a GPU, device is 'cpu'"):
        build_loader(raw_tree, backend="nvjpeg")
