"""`loaders.ImageDataset` is ImageFolder to the code that uses it, over every format."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

from loaders import ImageDataset
from precache.errors import PrecacheError, SampleError
from precache.formats import FORMATS
from precache.pictures import images
from tests.building import build_loader
from tests.conftest import IMAGES, STORED_SIZE
from tests.damage import flip_a_bit

EACH_FORMAT = pytest.mark.parametrize("kind", FORMATS)


def test_it_is_image_folder_to_who_uses_it(tmp_path: Path) -> None:
    """Of pictures that ImageFolder sees as we do: it knows no EXIF, and files by their endings alone."""
    for number in range(12):
        folder = tmp_path / f"class {number % 3}"
        folder.mkdir(exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (30 + number, 40, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.{'png' if number % 2 else 'jpg'}")
    settings: dict[str, Any] = {"transform": transforms.Resize(20), "target_transform": lambda y: 2 - y}
    theirs, ours = ImageFolder(str(tmp_path), **settings), ImageDataset(tmp_path, **settings)
    for name in ("classes", "class_to_idx", "targets", "samples", "imgs", "root"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs) == 12
    for (picture, label), (expected, expected_label) in zip(ours, theirs, strict=True):
        assert (label, type(label)) == (expected_label, int)
        assert isinstance(picture, Image.Image)
        assert (picture.mode, picture.size) == (expected.mode, expected.size)
        assert picture.tobytes() == expected.tobytes()


@EACH_FORMAT
def test_samples_are_those_that_a_loader_serves(
    kind: str, converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the system gives what is asked for in pieces, as a network's file system may."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, start: pread(file, min(count, 999), start))
    pictures, tensors = (ImageDataset(converted[kind], decode=decode) for decode in ("pil", "tensor"))
    with build_loader(converted[kind], shuffle=False, workers=1, batch_size=IMAGES) as loader:
        (batch,) = loader
        paths = [loader.path_of(i) for i in batch.ids]
    assert (tensors.ids == batch.ids.numpy()).all()
    assert tensors.targets == batch.labels.tolist() == [label for _, label in pictures]
    assert tensors.samples == list(zip(paths, tensors.targets, strict=True))
    for served, (picture, _), (tensor, _) in zip(batch.images, pictures, tensors, strict=True):
        assert (tensor.shape, tensor.dtype) == ((3, STORED_SIZE, STORED_SIZE), torch.uint8)
        assert torch.equal(tensor, served)
        assert torch.equal(pil_to_tensor(picture), tensor)
        tensor.zero_()  # the caller's own
    assert not [file for file in psutil.Process().open_files() if file.path.startswith(f"{tensors.root}/")]
    assert torch.equal(tensors[3][0], batch.images[3])


def test_a_raw_tree_gives_each_picture_in_full_size_and_upright(raw_tree: Path) -> None:
    pictures, tensors = (ImageDataset(raw_tree, decode=decode) for decode in ("pil", "tensor"))
    for (path, _), (picture, _), (tensor, _) in zip(pictures.samples, pictures, tensors, strict=True):
        expected = images.decode(Path(path).read_bytes(), path)
        assert (picture.mode, picture.tobytes()) == ("RGB", expected.tobytes())
        assert torch.equal(tensor, pil_to_tensor(picture))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_serve_each_sample_once(method: str, raw_tree: Path, converted: dict[str, Path]) -> None:
    folders = [raw_tree, *converted.values()]
    each = [ImageDataset(path, transform=transforms.Resize((8, 8)), decode="tensor") for path in folders]
    for dataset in each:
        dataset[0]  # of which workers inherit what was opened
    each += [pickle.loads(pickle.dumps(dataset)) for dataset in each]
    loader: DataLoader[Any] = DataLoader(
        ConcatDataset(each), batch_size=8, num_workers=2, multiprocessing_context=method
    )
    served = [
        label for pictures, labels in loader for label in labels.tolist() if pictures.shape[2:] == (8, 8)
    ]
    assert served == [label for dataset in each for label in dataset.targets]


@EACH_FORMAT
def test_what_is_damaged_is_named_also_in_a_worker(
    kind: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    """A sample alone, or the shard that is short or gone."""
    folder = Path(shutil.copytree(converted[kind], tmp_path / kind))
    shard, bad = flip_a_bit(folder, shard_number=1, row=1)
    read, unread = ImageDataset(folder, transform=pil_to_tensor), ImageDataset(folder)
    position = read.ids.tolist().index(bad)
    for _ in range(2):
        with pytest.raises(SampleError, match=f"{shard}: sample {bad} .*checksum"):
            read[position]
    assert all(read[number][0].shape[0] == 3 for number in range(IMAGES) if number != position)
    with pytest.raises(SampleError, match=rf"^{shard}: sample {bad} \([^\n]*$"):
        list(DataLoader(read, batch_size=None, num_workers=1))
    for change in (lambda: os.truncate(shard, 100), shard.unlink):
        change()
        for dataset in (read, unread):
            with pytest.raises(PrecacheError, match=shard.name):
                dataset[position]
