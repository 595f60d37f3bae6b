"""`cache="device"` changes neither order nor pixels, whatever a simulated GPU has room for."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.augment.crops import Crops, View
from loaders.augment.policies import RandomAugmentation
from loaders.batch import Request
from loaders.dataset import open_split
from loaders.read import cache, shards
from precache import Recipe, convert
from precache.errors import SampleError, SettingError
from precache.example_data.sample_tree import make_sample
from tests import loader_contract as contract
from tests.building import build_loader
from tests.cuda.simulator import simulated
from tests.damage import flip_a_bit

SAMPLES, SIDE = 22, 24
PICTURE_BYTES = SIDE * SIDE * 3
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "raw": ("raw", {"workers": 0}),
    "shards": ("shards", {}),
    "shards-window": ("shards", {"shuffle": "window"}),
    "shards-weights": ("shards", {"weights": np.arange(SAMPLES) % 3}),  # a third never comes
    "shards-train": ("shards", {"augment": RandomAugmentation(views=2), "size": 12}),
    "shards-skip": ("damaged", {"on_error": "skip"}),
    "webdataset": ("webdataset", {}),
    "keep-shards": ("keep", {}),
}
"""Case -> (folder of `paths`, settings)."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of 22 pictures, one of them with a damaged sample: simulated operations are slow."""
    root = tmp_path_factory.mktemp("small")
    make_sample(root / "raw", images=SAMPLES, classes=3, seed=2, like="caltech", workers=0)
    for folder, name in (("shards", "shards"), ("webdataset", "webdataset"), ("damaged", "shards")):
        recipe = Recipe(format=name, size=SIDE, fit="crop", shard_bytes=4 * PICTURE_BYTES)
        convert(root / "raw", root / folder, recipe, workers=0)
    convert(root / "raw", root / "keep", Recipe(format="shards", size=SIDE, fit="keep"), workers=0)
    flip_a_bit(root / "damaged", row=1)
    return {path.name: path for path in root.iterdir()}


def build(path: Path, **settings: Any) -> Any:
    return build_loader(path, **{"batch_size": 8, "workers": 1, "device": "cuda", "size": SIDE, **settings})


@pytest.mark.parametrize("room", [SAMPLES + 5, 12])
@pytest.mark.parametrize("case", CASES)
def test_a_cache_changes_no_order_and_no_pixels(
    case: str, room: int, paths: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A cache of a part serves the rest from the reader."""
    folder, settings = CASES[case]
    with simulated("all late", room * PICTURE_BYTES):
        contract.check_a_cache_changes_nothing_but_the_reading(partial(build, paths[folder], **settings))
    assert (f"keeps 10 of {SAMPLES} samples" in caplog.text) == (room == 12)


def test_a_damaged_sample_raises_in_every_epoch_of_a_cache(paths: dict[str, Path]) -> None:
    with simulated("at once"), build(paths["damaged"], cache="device") as loader:
        for _ in range(3):
            with pytest.raises(SampleError):
                list(loader)


def test_a_nearly_full_cache_does_not_read_epochs_ahead(paths: dict[str, Path]) -> None:
    """Windows of shards are read ahead although hardly any of their samples is needed."""
    data, crops = open_split(paths["shards"], "train"), Crops(SIDE, (View(SIDE),))
    epochs, requested = 40, 0

    def requests() -> Iterator[Request]:
        nonlocal requested
        for requested in range(epochs * SAMPLES):
            yield Request(requested // SAMPLES, np.array([requested % SAMPLES]))

    with simulated("at once", SAMPLES * PICTURE_BYTES):  # a tenth of it stays free
        with build(paths["shards"], shuffle="window", cache="device") as loader:
            spec = loader.spec
        open_shards = partial(shards.ShardsReader, spec, data)
        with closing(cache.open_cached(open_shards, spec, data, crops)) as reader:
            for number, batch in enumerate(reader.read(requests())):
                assert len(batch.views[0]) == 1
                assert requested - number < 600
    assert number + 1 == epochs * SAMPLES


def test_a_cache_that_cannot_be_is_refused(paths: dict[str, Path]) -> None:
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("shards", {"device": "cpu"}, "device is 'cpu'"),
        ("raw", {"augment": "train"}, "vary"),
        ("keep", {"augment": "crop"}, "vary"),
        ("shards", {"size": 200, "augment": None}, "no room on cuda:0"),
    ]
    for folder, settings, mention in refused:
        with simulated("at once", 2 * PICTURE_BYTES), pytest.raises(SettingError, match=mention):
            build(paths[folder], cache="device", **settings)
