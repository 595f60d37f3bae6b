"""The loader contract over every backend and everything that it reads."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from loaders.dataset import open_split
from precache.pictures.sizes import Size, as_size, sides
from precache.sources.tree import scan_tree
from tests import loader_contract as contract
from tests import sampling_contract
from tests.building import build_loader
from tests.conftest import IMAGES, RECTANGLE, STORED_SIZE
from tests.loaders.ray_nodes import ON_RAY

RAW_SIZE = 40
# (backend, what it reads, distance in dB from the converter's pixels; JPEG costs what it costs)
ARMS = [
    ("pytorch", "raw", 60.0),
    ("shards", "shards", math.inf),
    ("webdataset", "webdataset", 34.0),
    ("dali", "dali", 34.0),
]
"""The whole contract is asked of these."""
OTHER_ARMS = [
    ("dali", "raw", 42.0),
    ("dali", "webdataset", 34.0),
    ("nvjpeg", "raw", 40.0),
    ("nvjpeg", "webdataset", 34.0),
    ("synthetic", "raw", None),
    ("synthetic", "webdataset", None),
    # the centre of all that is kept is what a crop has kept, within 1 in 255
    ("shards", "keep-shards", 50.0),
    ("webdataset", "keep-webdataset", 34.0),
    ("dali", "keep-dali", 34.0),
    ("nvjpeg", "keep-webdataset", 34.0),
    ("shards", "rectangle-shards", math.inf),
    ("webdataset", "rectangle-webdataset", 34.0),
    ("dali", "rectangle-webdataset", 34.0),
    ("dali", "rectangle-dali", 34.0),
    ("nvjpeg", "rectangle-dali", 34.0),
    ("synthetic", "rectangle-shards", None),
    ("shards", "grey-shards", math.inf),
    ("webdataset", "grey-webdataset", 34.0),
    ("dali", "grey-dali", 34.0),
    ("nvjpeg", "grey-webdataset", 34.0),
    ("synthetic", "grey-shards", None),
    ("ray-pytorch", "raw", 60.0),
    ("ray-shards", "shards", math.inf),
    *(
        pytest.param(arm, marks=pytest.mark.slow)
        for arm in (
            ("ray-webdataset", "webdataset", 34.0),
            ("ray-shards", "keep-shards", 50.0),
            ("ray-webdataset", "keep-webdataset", 34.0),
            ("ray-webdataset", "grey-webdataset", 34.0),
        )
    ),
]
"""Of these every sample is looked for, and its pixels."""
RECTANGLES_OF_A_TREE = [
    ("pytorch", "raw", 55.0),  # within 1 in 255; stock Pillow gives one picture 14% of such values
    ("dali", "raw", 42.0),
    ("nvjpeg", "raw", 40.0),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Arm:
    """One backend over one folder."""

    def __init__(
        self, backend: str, path: Path, worst_psnr: float | None, device: str, size: Size | None = None
    ) -> None:
        if backend == "dali":
            reason = "DALI is not installed: pip install nvidia-dali-cuda120"
            pytest.importorskip("nvidia.dali", reason=reason)
        if backend == "nvjpeg" and device == "cpu":
            pytest.skip("decodes on a GPU")
        self.path = path
        self.worst_psnr = worst_psnr
        self.channels = "grey" if path.name.startswith("grey") else "rgb"
        self.raw = not (path / "dataset.json").exists()
        shaped = RECTANGLE if path.name.startswith("rectangle") else STORED_SIZE
        self.size: Size = size or (RAW_SIZE if self.raw else shaped)
        reading = {"engine": "ray" if backend.startswith(ON_RAY) else "local", "workers": 2}
        backend = backend.removeprefix(ON_RAY)
        self.build: contract.Build = partial(
            build_loader, path, backend=backend, device=device, size=self.size, batch_size=16, **reading
        )


@pytest.fixture
def folders(raw_tree: Path, converted: dict[str, Path], shaped: dict[str, Path]) -> dict[str, Path]:
    """What the arms read, by name."""
    return {"raw": raw_tree, **converted, **shaped}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return str(request.param)


@pytest.fixture(params=ARMS, ids=lambda arm: f"{arm[0]}-{arm[1]}")
def arm(request: pytest.FixtureRequest, folders: dict[str, Path], device: str) -> Arm:
    backend, kind, worst_psnr = request.param
    return Arm(backend, folders[kind], worst_psnr, device)


@pytest.fixture
def samples(raw_tree: Path) -> list[tuple[int, int]]:
    """(id, label) of all."""
    return [(sample.id, sample.label) for sample in scan_tree(raw_tree).samples]


@pytest.mark.parametrize("given", [*ARMS, *OTHER_ARMS], ids=lambda arm: f"{arm[0]}-{arm[1]}")
def test_every_sample_is_served_once_an_epoch_with_the_converters_pixels(
    given: tuple[str, str, float | None],
    folders: dict[str, Path],
    device: str,
    raw_tree: Path,
    request: pytest.FixtureRequest,
) -> None:
    backend, kind, worst_psnr = given
    if backend.startswith(ON_RAY):
        request.getfixturevalue("ray_cluster")
    arm = Arm(backend, folders[kind], worst_psnr, device)
    contract.check_samples(arm.build, raw_tree, arm.size, worst_psnr, arm.channels)


@pytest.mark.parametrize("given", RECTANGLES_OF_A_TREE, ids=lambda arm: arm[0])
def test_a_tree_is_served_in_rectangles(given: tuple[str, str, float], device: str, raw_tree: Path) -> None:
    arm = Arm(given[0], raw_tree, given[2], device, RECTANGLE)
    contract.check_samples(arm.build, raw_tree, RECTANGLE, arm.worst_psnr)


def test_order_depends_on_seed_and_epoch_alone(arm: Arm) -> None:
    contract.check_order_depends_on_seed_and_epoch_alone(arm.build)


def test_without_shuffle_the_order_is_the_stored_one(arm: Arm) -> None:
    stored = open_split(arm.path, "train").ids.tolist()
    assert (stored == sorted(stored)) == arm.raw
    contract.check_without_shuffle_the_order_is_the_stored_one(arm.build, stored)


def test_floats_are_normalised(arm: Arm) -> None:
    contract.check_floats_are_normalised(arm.build)


def test_ranks_share_each_epoch(arm: Arm, samples: list[tuple[int, int]]) -> None:
    contract.check_ranks_share_each_epoch(arm.build, [sample_id for sample_id, _ in samples])


def test_threads_take_turns(arm: Arm) -> None:
    contract.check_threads_take_turns(arm.build)


def test_a_part_is_served_as_if_it_were_all(arm: Arm, samples: list[tuple[int, int]]) -> None:
    sampling_contract.check_a_part(arm.build, samples, full=arm.raw or arm.path.name == "shards")


def test_weights_draw_with_replacement(arm: Arm, samples: list[tuple[int, int]]) -> None:
    sampling_contract.check_weights(arm.build, samples)


def test_views_are_drawn_independently(arm: Arm) -> None:
    for cache in ("none",) if arm.raw else ("none", "ram"):
        sampling_contract.check_views(partial(arm.build, cache=cache))


def test_set_size_serves_the_next_epoch_in_another_size(arm: Arm) -> None:
    half = as_size(*(side // 2 for side in sides(arm.size)))
    sampling_contract.check_set_size(arm.build, (arm.size, half))


@pytest.mark.parametrize("cache", ["ram", "device"])
def test_a_cache_changes_nothing_but_the_reading(arm: Arm, cache: str) -> None:
    weights = np.arange(IMAGES) % 3 if cache == "ram" else None  # a third never comes
    contract.check_a_cache_changes_nothing_but_the_reading(partial(arm.build, weights=weights), cache)


def test_backends_with_the_same_shuffle_serve_the_same_order(
    raw_tree: Path, converted: dict[str, Path]
) -> None:
    """Of what one plan wrote, and of the raw tree; which draws by ids, and what is converted by positions."""

    def served(path: Path, **settings: object) -> list[int]:
        with build_loader(path, **{"workers": 1, "batch_size": 16, **settings}) as loader:
            return contract.ids_of(loader)

    full = served(raw_tree, shuffle="full")
    window = served(converted["shards"], shuffle="window")
    assert served(converted["webdataset"]) == window
    pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")
    assert served(converted["dali"]) == window
    assert served(converted["webdataset"], backend="dali") == window
    assert served(raw_tree, backend="dali", shuffle="full") == full


def test_where_nothing_is_resized_the_middle_of_what_is_stored_is_served(arm: Arm) -> None:
    """As 224 of 256: to the byte."""
    if arm.raw:
        pytest.skip("nothing is stored")
    exact = {"size": 42, "crop_ratio": 0.875}
    with arm.build(shuffle=False) as whole, arm.build(shuffle=False, **exact) as crop:
        part = slice(3, 3 + 42)
        for all_of_it, part_of_it in zip(whole, crop, strict=True):
            assert torch.equal(all_of_it.images[:, :, part, part], part_of_it.images)


@pytest.mark.parametrize("with_exif", [False, True])
def test_orientation_in_xmp_is_applied_by_every_backend(tmp_path: Path, with_exif: bool) -> None:
    """Pillow reads it there where EXIF has none, DALI does not."""
    pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    (tmp_path / "class").mkdir()
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><d tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
    picture = Image.new("RGB", (60, 40), "black")
    picture.paste("white", (0, 0, 20, 40))
    exif = Image.Exif()
    exif[0x010E] = "a description"
    more: dict[str, Any] = {"exif": exif} if with_exif else {}
    picture.save(tmp_path / "class/a.jpg", quality=95, xmp=xmp, **more)
    served = []
    for backend in ("pytorch", "dali"):
        with build_loader(tmp_path, backend=backend, size=32, workers=0) as loader:
            served.append(next(iter(loader)).images.int())
    assert served[0][0, :, 0].min() > 200, "turned: the white left side is on top"
    assert (served[0] - served[1]).abs().max() < 16


def test_served_pixels_are_the_callers_to_keep(arm: Arm) -> None:
    """No backend hands out a buffer that it writes to again."""
    with arm.build(batch_size=8, shuffle=False) as loader:
        kept = list(loader)
        copies = [batch.images.clone() for batch in loader]
    assert all(torch.equal(k.images, c) for k, c in zip(kept, copies, strict=True))
    assert len({batch.images.data_ptr() for batch in kept}) == len(kept)
