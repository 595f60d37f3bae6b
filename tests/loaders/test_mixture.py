"""Several datasets served as one: shares, classes, and the contract of any loader."""

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from precache import Recipe, convert
from precache.errors import SettingError
from tests import loader_contract as contract
from tests.building import build_loader
from tests.conftest import IMAGES, STORED_SIZE
from tests.damage import flip_a_bit

OTHERS = 40


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Dataset of 40 pictures in two formats, with a class of `raw_tree` and a new one that sorts first."""
    root = tmp_path_factory.mktemp("other")
    rng = np.random.default_rng((1, 63))
    for number in range(OTHERS):
        folder = root / "raw" / ("000.new" if number % 4 else "002.basket")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (STORED_SIZE, STORED_SIZE, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    for kind in ("shards", "webdataset"):
        recipe = Recipe(format=kind, size=STORED_SIZE, fit="crop", shard_bytes=8 * STORED_SIZE**2 * 3)
        convert(root / "raw", root / kind, recipe, workers=0)
    return {kind: root / kind for kind in ("shards", "webdataset")}


@pytest.fixture(params=["raw shards", "webdataset shards", "dali webdataset"])
def paths(
    request: pytest.FixtureRequest, raw_tree: Path, converted: dict[str, Path], other: dict[str, Path]
) -> list[Path]:
    """Paths of a dataset of 70 pictures and one of 40."""
    first, second = request.param.split()
    if first == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")
    return [{"raw": raw_tree, **converted}[first], other[second]]


@pytest.fixture
def build(paths: list[Path]) -> contract.Build:
    """Function that builds a mixture with shares of 3 to 1."""
    return partial(build_loader, paths, shares=(3, 1), size=STORED_SIZE, workers=0, batch_size=16)


def pairs(batches: Any) -> list[tuple[int, int]]:
    """Return (dataset, id) of each sample."""
    return [
        (int(d), int(i)) for batch in batches for d, i in zip(batch.fields["dataset"], batch.ids, strict=True)
    ]


def test_every_batch_holds_the_shares_of_its_datasets(build: contract.Build) -> None:
    with build() as loader:
        assert loader.samples == IMAGES + round(IMAGES / 3)
        served = []
        for _ in range(4):
            batches = list(loader)
            assert len(batches) == len(loader) == math.ceil(loader.samples / 16)
            for batch in batches:
                numbers = batch.fields["dataset"]
                assert (numbers.shape, numbers.dtype) == (batch.ids.shape, torch.int64)
                assert abs(int((numbers == 1).sum()) - len(batch.ids) / 4) <= 1
            served.append(pairs(batches))
            assert sorted(i for d, i in served[-1] if d == 0) == list(range(IMAGES))
        others = [i for epoch in served for d, i in epoch if d == 1]
        for start in range(0, len(others) - OTHERS + 1, OTHERS):
            epoch = others[start : start + OTHERS]
            assert sorted(epoch) == list(range(OTHERS)), "no sample comes again before all others"
        assert loader.path_of(3, 0) != loader.path_of(3, dataset=1)


def test_pictures_and_labels_are_those_of_their_dataset(build: contract.Build, paths: list[Path]) -> None:
    def cut(images: torch.Tensor, ids: torch.Tensor, epoch: int, view: int) -> torch.Tensor:
        return images[:, :32, :32].flip(1 + view)

    settings = {"augment": cut, "size": 32, "views": 2}
    with build(**settings) as loader:
        mixed, classes = list(loader), loader.classes
    assert classes[:5] == tuple(sorted(classes[:5]))
    assert classes[5:] == ("000.new",)
    expected = {}
    for number, path in enumerate(paths):
        with build_loader(path, workers=2, batch_size=16, **settings) as loader:
            for batch in loader:
                for row, sample_id in enumerate(batch.ids.tolist()):
                    label = classes.index(loader.classes[int(batch.labels[row])])
                    expected[number, sample_id] = [label, *(view[row] for view in batch.views)]
    for batch in mixed:
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        for row, place in enumerate(pairs([batch])):
            label, *views = expected[place]
            assert int(batch.labels[row]) == label
            assert all(torch.equal(v[row], e) for v, e in zip(batch.views, views, strict=True))


def test_a_mixture_holds_the_loader_contract(build: contract.Build) -> None:
    """The state machine tests mixtures, too, but without shares."""
    contract.check_order_depends_on_seed_and_epoch_alone(build)
    contract.check_resume(build)
    contract.check_floats_are_normalised(build)
    with build(batch_size=24) as whole:
        expected = [sorted(pairs([batch])) for batch in whole]
    ranks = [build(batch_size=8, rank=rank, world_size=3) for rank in range(3)]
    assert [sorted(pairs(batches)) for batches in zip(*ranks, strict=True)] == expected
    for loader in ranks:
        loader.close()


def test_skipping_a_sample_keeps_the_order_of_the_mixture(
    converted: dict[str, Path], other: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(other["shards"], tmp_path / "damaged"))
    _, bad = flip_a_bit(folder)
    settings: dict[str, Any] = {"workers": 1, "batch_size": 16}
    with (
        build_loader([converted["shards"], folder], on_error="skip", **settings) as loader,
        build_loader([converted["shards"], other["shards"]], **settings) as whole,
    ):
        for batch, expected in zip(loader, whole, strict=True):
            is_good = torch.tensor([place != (1, bad) for place in pairs([expected])])
            assert pairs([batch]) == [place for place in pairs([expected]) if place != (1, bad)]
            for name in ("images", "labels", "padding"):
                assert torch.equal(getattr(batch, name), getattr(expected, name)[is_good])


def test_wrong_shares_or_settings_of_a_mixture_are_refused(
    converted: dict[str, Path], other: dict[str, Path]
) -> None:
    both = [converted["shards"], other["shards"]]
    wrong_settings: list[dict[str, Any]] = [
        {"shares": (1, 2, 3)},
        {"shares": (1, 0)},
        {"shares": 0.5},
        {"shares": (1e-300, 1)},
        {"weights": "balanced"},
        {"classes": ["000.new"]},
    ]
    for settings in wrong_settings:
        (name,) = settings
        with pytest.raises(SettingError, match=rf"\b{name}\b"):
            build_loader(both, workers=1, **settings)
