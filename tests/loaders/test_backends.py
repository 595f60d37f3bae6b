"""The loader contract over every backend and everything that it reads."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from loaders.dataset import open_split
from precache.pictures.images import Size, as_size, sides
from tests import loader_contract as contract
from tests import sampling_contract
from tests.building import build_loader
from tests.conftest import IMAGES, RECTANGLE, STORED_SIZE

RAW_SIZE = 40
# (backend, what it reads, smallest distance in dB from the converter's pixels, which JPEG changes)
Case = tuple[str, str, float | None]
CASES: list[Case] = [
    ("pytorch", "raw", 60.0),
    ("shards", "shards", math.inf),
    ("webdataset", "webdataset", 34.0),
    ("dali", "dali", 34.0),
    ("processes-shards", "shards", math.inf),
]
"""Cases that the whole contract is tested with; before the backend is an engine other than `local`."""
LIST_CASES: list[Case] = [(backend, f"list-{kind}", worst_psnr) for backend, kind, worst_psnr in CASES]
"""Cases of a list of two datasets, with which samples, pixels and orders are tested."""
SYNTHETIC = ("synthetic", "shards", None)
OTHER_CASES: list[Case] = [
    ("dali", "raw", 42.0),
    ("dali", "webdataset", 34.0),
    ("synthetic", "raw", None),
    SYNTHETIC,
    ("pytorch", "rectangle-raw", 55.0),  # within 1 in 255; stock Pillow gives one picture 14% of such values
    ("dali", "rectangle-raw", 42.0),
    # the centre of a picture stored by fit keep equals one stored by fit crop, within 1 in 255
    ("shards", "keep-shards", 50.0),
    ("webdataset", "keep-webdataset", 34.0),
    ("dali", "keep-dali", 34.0),
    *(
        (backend, f"{shape}-{kind}", worst_psnr)
        for shape in ("rectangle", "grey")
        for backend, kind, worst_psnr in (*CASES[1:4], SYNTHETIC)
    ),
    ("processes-webdataset", "keep-webdataset", 34.0),
    ("processes-webdataset", "grey-webdataset", 34.0),
    ("ray-pytorch", "raw", 60.0),
    ("ray-shards", "list-shards", math.inf),
]
"""Cases of which samples and pixels alone are compared."""
NO_DALI = "DALI is not installed: pip install nvidia-dali-cuda120"


class BackendCase:
    """Backend over a folder or two; `build` builds its loaders, and is the argument of the contracts.

    Attributes:
        trees: trees of the pictures.
        samples: (id, label) of every sample.
    """

    def __init__(self, case: Case, folders: dict[str, Path], other: dict[str, Path], device: str) -> None:
        backend, kind, self.worst_psnr = case
        engine, _, name = backend.rpartition("-")
        if name == "dali":
            pytest.importorskip("nvidia.dali", reason=NO_DALI)
        self.kind = kind.removeprefix("list-")
        self.paths, self.trees = [folders[self.kind]], [folders["raw"]]
        if kind.startswith("list"):
            self.paths.append(other[self.kind])
            self.trees.append(other["raw"])
        self.samples = [(i, label) for i, (label, _) in contract.list_samples(self.trees).items()]
        self.is_raw = self.kind == "raw"
        self.channels = "grey" if kind.startswith("grey") else "rgb"
        shape: Size = RECTANGLE if kind.startswith("rectangle") else STORED_SIZE
        self.size = RAW_SIZE if self.is_raw else shape
        self.build: contract.Build = partial(
            build_loader,
            self.paths if kind.startswith("list") else self.paths[0],
            backend=name,
            device=device,
            size=self.size,
            batch_size=16,
            workers=1,
            engine=engine or "local",
        )
        if engine == "processes":  # for which 0 workers are no setting
            build = self.build
            self.build = lambda workers=1, **settings: build(workers=max(1, workers), **settings)


@pytest.fixture
def folders(raw_tree: Path, converted: dict[str, Path], shaped: dict[str, Path]) -> dict[str, Path]:
    """Path of each folder that a backend reads, by name."""
    return {"raw": raw_tree, "rectangle-raw": raw_tree, **converted, **shaped}


def name_case(case: Case) -> str:
    return f"{case[0]}-{case[1]}"


also_over_lists = pytest.mark.parametrize("opened", [*CASES, *LIST_CASES], ids=name_case, indirect=True)


@pytest.fixture(params=CASES, ids=name_case)
def opened(
    request: pytest.FixtureRequest, folders: dict[str, Path], other: dict[str, Path], device: str
) -> BackendCase:
    return BackendCase(request.param, folders, other, device)


@pytest.mark.parametrize("case", [*CASES, *LIST_CASES, *OTHER_CASES], ids=name_case)
def test_every_sample_is_served_once_an_epoch_with_the_converters_pixels(
    case: Case,
    folders: dict[str, Path],
    other: dict[str, Path],
    device: str,
    request: pytest.FixtureRequest,
) -> None:
    if case[0].startswith("ray-"):
        request.getfixturevalue("ray_cluster")
    opened = BackendCase(case, folders, other, device)
    build = partial(opened.build, workers=2)
    contract.check_samples(build, opened.trees, opened.size, opened.worst_psnr, opened.channels)


@pytest.mark.parametrize(
    "check",
    [
        contract.check_floats_are_normalised,
        contract.check_torchs_defaults_change_nothing,
        contract.check_threads_take_turns,
        contract.check_a_fork_shares_no_batch,
        sampling_contract.check_views,
    ],
)
def test_a_backend_holds_the_loader_contract(opened: BackendCase, check: Any) -> None:
    check(opened.build)


@also_over_lists
def test_the_order_depends_on_seed_and_epoch_alone(opened: BackendCase) -> None:
    contract.check_order_depends_on_seed_and_epoch_alone(opened.build)


@also_over_lists
def test_without_shuffle_the_order_is_the_stored_one(opened: BackendCase) -> None:
    stored = [
        IMAGES * number + i
        for number, path in enumerate(opened.paths)
        for i in open_split(path, "train").ids.tolist()
    ]
    assert (stored == sorted(stored)) == opened.is_raw
    contract.check_without_shuffle_the_order_is_the_stored_one(opened.build, stored)


@also_over_lists
def test_a_subset_is_served_like_a_whole_split(opened: BackendCase) -> None:
    contract.check_ranks_share_each_epoch(opened.build, [sample_id for sample_id, _ in opened.samples])
    sampling_contract.check_a_part(opened.build, opened.samples, full=opened.kind in ("raw", "shards"))


@also_over_lists
def test_weights_draw_with_replacement(opened: BackendCase) -> None:
    sampling_contract.check_weights(opened.build, opened.samples)


def test_set_size_serves_the_next_epoch_in_another_size(opened: BackendCase) -> None:
    half = as_size(*(side // 2 for side in sides(opened.size)))
    sampling_contract.check_set_size(opened.build, (opened.size, half))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", [*CASES, *LIST_CASES], ids=name_case)
def test_a_cache_changes_no_order_and_no_pixels(
    case: Case, folders: dict[str, Path], other: dict[str, Path]
) -> None:
    """Without a GPU, `tests/cuda/test_cache.py` tests it on a simulated one."""
    opened = BackendCase(case, folders, other, "cuda")
    contract.check_a_cache_changes_nothing_but_the_reading(opened.build)
    if not opened.is_raw:
        sampling_contract.check_views(partial(opened.build, cache="device"))


def test_orientation_in_xmp_is_applied_by_every_backend(tmp_path: Path) -> None:
    """Pillow reads the orientation in XMP if EXIF has none, DALI does not."""
    pytest.importorskip("nvidia.dali", reason=NO_DALI)
    (tmp_path / "class").mkdir()
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><d tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
    picture = Image.new("RGB", (60, 40), "black")
    picture.paste("white", (0, 0, 20, 40))
    picture.save(tmp_path / "class/a.jpg", quality=95, xmp=xmp)
    for backend in ("pytorch", "dali"):
        with build_loader(tmp_path, backend=backend, size=32, workers=0) as loader:
            (image,) = next(iter(loader)).images
        assert image[:, 0].min() > 200, "turned: the white left side is on top"
        assert image[:, 16:].max() < 50
