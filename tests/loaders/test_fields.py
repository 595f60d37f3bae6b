"""Targets and fields of every kind, served by every backend over every format."""

import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loaders
from loaders import Batch
from precache import Recipe, convert, open_dataset
from tests import loader_contract as contract
from tests.building import build_loader
from tests.damage import flip_a_bit
from tests.precache.sources.listed import CLASSES, FIELDS, SAMPLES, TARGETS, listed

ARMS = [
    ("shards", "shards"),
    ("webdataset", "webdataset"),
    ("dali", "webdataset"),
    ("dali", "dali"),
    ("nvjpeg", "dali"),
    ("synthetic", "shards"),
]
SIZE = 16
MakeFolder = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """The listed pictures, labelled so, in that format."""
    made: dict[tuple[str, str], Path] = {}

    def make(target: str, name: str) -> Path:
        if (target, name) not in made:
            path = made[target, name] = tmp_path_factory.mktemp("fields") / name
            recipe = Recipe(format=name, size=SIZE, fit="crop", shard_bytes=7 * SIZE * SIZE * 3)
            convert(listed(target), path, recipe, workers=0)
        return made[target, name]

    return make


@pytest.fixture(params=ARMS, ids="-".join)
def arm(request: pytest.FixtureRequest) -> tuple[str, str]:
    backend, kind = request.param
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")
    if backend == "nvjpeg" and not torch.cuda.is_available():
        pytest.skip("decodes on a GPU")
    return backend, kind


def build_of(arm: tuple[str, str], path: Path, **settings: Any) -> contract.Build:
    device = "cuda" if arm[0] == "nvjpeg" else "cpu"
    return partial(build_loader, path, backend=arm[0], device=device, batch_size=5, workers=2, **settings)


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_sample_has_its_target_and_fields(
    target: str, arm: tuple[str, str], folder: MakeFolder
) -> None:
    build = build_of(arm, folder(target, arm[1]), augment="train", size=8)
    contract.check_targets_and_fields(build, len(CLASSES), target, TARGETS[target], FIELDS)


@pytest.mark.parametrize("settings", [{"cache": "ram"}, {"cache": "device"}, {"shuffle": False}], ids=str)
def test_targets_and_fields_are_those_of_the_samples_in_every_order(
    settings: dict[str, Any], arm: tuple[str, str], folder: MakeFolder
) -> None:
    build = build_of(arm, folder("classes", arm[1]), **settings)
    build = partial(build, last="pad", rank=1, world_size=3)
    contract.check_targets_and_fields(build, len(CLASSES), "classes", TARGETS["classes"], FIELDS)


@pytest.mark.parametrize("kind", ["shards", "webdataset", "dali"])
def test_a_sample_that_is_left_out_takes_its_fields_along(
    kind: str, folder: MakeFolder, tmp_path: Path
) -> None:
    if kind == "dali":
        pytest.importorskip("nvidia.dali")
    path = tmp_path / kind
    shutil.copytree(folder("number", kind), path)
    _, damaged = flip_a_bit(path)
    build = build_of((kind, kind), path, on_error="skip")
    contract.check_targets_and_fields(build, 0, "number", TARGETS["number"], FIELDS)
    with build() as loader:
        assert sorted(contract.ids_of(loader)) == [i for i in range(SAMPLES) if i != damaged]


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_loader_says_what_its_samples_are_labelled_with(target: str, folder: MakeFolder) -> None:
    path = folder(target, "shards")
    ids = open_dataset(path).read_index("train").ids.tolist()
    with loaders.build(path, batch_size=4) as loader:
        classes = CLASSES if target.startswith("class") else ()
        dataset: Any = loader.dataset
        assert loader.classes == dataset.classes == classes
        assert loader.class_to_idx == {name: number for number, name in enumerate(classes)}
        values = TARGETS[target] or [-1] * SAMPLES
        assert dataset.targets == [values[i] for i in ids]


def test_what_is_served_is_the_callers(folder: MakeFolder) -> None:
    """Written to, it changes neither the next epoch nor another batch."""
    with loaders.build(folder("number", "shards"), batch_size=SAMPLES, shuffle=False) as loader:
        first = next(iter(loader))
        first.fields["place"].zero_()
        first.fields["tokens"][3].zero_()
        first.labels.zero_()
        again = next(iter(loader))
        ids = again.ids.tolist()
        contract.check_field(again.fields["place"], [FIELDS["place"][i] for i in ids])
        contract.check_field(again.fields["tokens"], [FIELDS["tokens"][i] for i in ids])
        assert torch.count_nonzero(again.labels) == SAMPLES - 1


def test_a_batch_with_fields_goes_to_another_process_and_back(folder: MakeFolder) -> None:
    with loaders.build(folder("classes", "shards"), batch_size=6) as loader:
        batch = next(iter(loader))
    other = pickle.loads(pickle.dumps(batch))
    assert type(other) is Batch
    contract.check_field(other.fields["corners"], [FIELDS["corners"][i] for i in batch.ids.tolist()])
    assert torch.equal(other.labels, batch.labels)


def test_a_number_keeps_its_64_bits_as_a_field_and_has_32_as_a_target(tmp_path: Path) -> None:
    values = [2**53 + row for row in range(SAMPLES)]
    source = listed("number", {"large": values, "exact": [row + 1e-12 for row in range(SAMPLES)]})
    convert(source, tmp_path / "out", Recipe(format="shards", size=4, fit="crop"), workers=0)
    with loaders.build(tmp_path / "out", batch_size=SAMPLES) as loader:
        batch = next(iter(loader))
        ids = batch.ids.tolist()
        assert batch.fields["large"].tolist() == [values[i] for i in ids]
        assert batch.fields["exact"].tolist() == [i + 1e-12 for i in ids]
        assert np.allclose(batch.labels, [i / 3 for i in ids])


@pytest.mark.parametrize("values", [["a.png"] * SAMPLES, [[[1, 2]]] * SAMPLES, list(range(SAMPLES))], ids=str)
def test_a_field_called_mask_is_a_field_like_others(values: list[Any], tmp_path: Path) -> None:
    convert(
        listed("none", {"mask": values}),
        tmp_path / "out",
        Recipe(format="shards", size=4, fit="crop"),
        workers=0,
    )
    with loaders.build(tmp_path / "out", batch_size=SAMPLES) as loader:
        batch = next(iter(loader))
    moved = batch.to("meta")
    assert moved.images.device.type == "meta"
    contract.check_field(moved.fields["mask"], [values[i] for i in batch.ids.tolist()])


def test_frameworks_keep_fields_and_labels_of_any_kind(folder: MakeFolder) -> None:
    """Lightning's and Accelerate's own functions, which move what a DataLoader gives."""
    lightning = pytest.importorskip("pytorch_lightning.utilities", reason="pip install pytorch-lightning")
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")
    built: Any = loaders.build(folder("classes", "shards"), batch_size=6)
    with built as loader:
        prepared = accelerate.Accelerator(cpu=True).prepare_data_loader(loader)
        batch = next(iter(prepared))
        for moved in (
            batch,
            lightning.move_data_to_device(batch, torch.device("cpu")),
            accelerate.utils.send_to_device(batch, torch.device("cpu")),
            next(iter(torch.utils.data.DataLoader(loader, batch_size=None))),
        ):
            ids = moved.ids.tolist()
            assert moved.labels.shape == (6, len(CLASSES))
            for name, values in FIELDS.items():
                contract.check_field(moved.fields[name], [values[i] for i in ids])
