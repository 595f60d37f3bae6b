"""Masks and boxes are cropped, resized and mirrored with their pictures, by every backend."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import loaders
from precache import Recipe, convert, open_dataset
from precache.errors import SampleError
from precache.formats import FORMATS
from precache.pictures.images import FITS
from precache.sources import SourceOptions
from tests import loader_contract as contract
from tests.building import build_loader
from tests.labelled_pictures import BOXES, PICTURES, STEP, check_labels, draw_box_picture, draw_trees
from tests.loaders.cases import CONVERTED_CASES, backend_params
from tests.precache.pictures.drawing import encode_image
from tests.precache.sources.examples import source_of_pictures

AUGMENTATIONS: dict[str, Any] = {
    "None": None,
    "crop": "crop",
    "train": "train",
    "strong": loaders.RandomAugmentation(scale=(0.3, 0.9), flip=1.0),
}
STORED = 32
OTHERS = [[1, 1, 5, 5], [30, 20, 33, 30], [-9, -9, -1, -1], [5, 5, 5, 20]]
"""Boxes in addition to the first: in a corner, at an edge, outside, without an area."""
MakeFolder = Callable[..., Path]


def maker(root: Path, source: Any, options: SourceOptions) -> MakeFolder:
    """Return a function that converts `source` to a format and fit, once; bilinear, which does not ring."""

    def make(name: str, fit: str = "crop") -> Path:
        path, shard_bytes = root / name / fit, 5 * STORED * STORED * 3
        if not path.exists():
            recipe = Recipe(format=name, size=STORED, fit=fit, resample="bilinear", shard_bytes=shard_bytes)
            convert(source, path, recipe, workers=0, options=options)
        return path

    return make


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """Pictures with masks."""
    root = tmp_path_factory.mktemp("masked")
    trees = draw_trees(root)
    return maker(root, trees.photos, SourceOptions(mask=str(trees.masks)))


@pytest.fixture(scope="module")
def boxed(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """Pictures with a bright square and its box, and a black one without any."""
    drawn = [*map(draw_box_picture, range(PICTURES)), Image.new("RGB", (50, 50))]
    boxes = [*([list(BOXES[number % len(BOXES)]), *OTHERS[: number % 5]] for number in range(PICTURES)), []]
    kinds = [list(range(len(row))) for row in boxes]
    source = source_of_pictures(tuple(map(encode_image, drawn)), "none", None, {"box": boxes, "kind": kinds})
    return maker(tmp_path_factory.mktemp("boxed"), source, SourceOptions(boxes="box"))


def build(path: Path, backend: str = "shards", **settings: Any) -> loaders.Loader:
    defaults = {"batch_size": 5, "workers": 2, "size": 24, "crop_ratio": 24 / STORED}  # nothing is resized
    return build_loader(path, backend=backend, **{**defaults, **settings})


# Masks.


@pytest.mark.parametrize("augment", sorted(AUGMENTATIONS))
@pytest.mark.parametrize(("backend", "kind"), CONVERTED_CASES)
def test_a_mask_is_cropped_resized_and_mirrored_as_its_picture(
    backend: str, kind: str, augment: str, masked: MakeFolder, device: str
) -> None:
    served_ids, close = set(), []
    # enlarging a picture mixes the greys of two labels further from their common edge
    reach = 1 if augment in ("None", "crop") else 5
    with build(masked(kind), backend, augment=AUGMENTATIONS[augment], device=device) as loader:
        for batch in (*loader, *loader):
            check_masks(batch, 4 if kind == "shards" else 40, reach)
            served_ids |= set(batch.ids.tolist())
            greys = batch.fields["mask"].cpu().float() * STEP
            close.append(((batch.images[:, 0].cpu() - greys).abs() < 42).float().mean())
    assert np.mean(close) > 0.9
    assert served_ids == set(range(PICTURES))


@pytest.mark.filterwarnings("ignore:.*is enlarged")
@pytest.mark.parametrize("fit", FITS)
def test_masks_follow_pictures_of_every_fit(fit: str, masked: MakeFolder, device: str) -> None:
    """Pictures are cut out, resized and enlarged."""
    # (size, crop ratio, pixels around a label's edge in which resizing mixes greys)
    cases: list[tuple[Any, float, int]] = [(24, 0.875, 2), (48, 1.0, 3), (STORED, 1.0, 1)]
    if fit == "keep-longer":
        cases = [(10, 0.9, 2), (20, 1.0, 4)]  # shorter sides have 11 pixels and more
    for size, ratio, reach in cases:
        with build(masked("shards", fit), size=size, crop_ratio=ratio, device=device) as loader:
            shares = [check_masks(batch, reach=reach) for batch in loader]
        assert sum(shares) > 0, (size, ratio)


def check_masks(batch: loaders.Batch, tolerance: float = 4, reach: int = 1) -> float:
    """Compare pictures and masks where one label is all around; return the share of such pixels, summed."""
    masks = batch.fields["mask"]
    assert len(batch.ids) == len(batch.images) == len(batch.labels) == len(masks)
    assert (masks.dtype, masks.device) == (torch.uint8, batch.images.device)
    assert set(masks.unique().tolist()) <= {0, 1, 2, 3}, "no values between two labels"
    pairs = zip(batch.images[:, 0].cpu(), masks.cpu(), strict=True)
    return sum(check_labels(picture, mask, tolerance, reach) for picture, mask in pairs)


def spoil_a_mask(path: Path) -> int:
    """Change one bit in the middle of a mask, and return its sample's id."""
    dataset = open_dataset(path)
    shard = dataset.shard_path(dataset.manifest.shards[1])
    sample = list(FORMATS[dataset.manifest.recipe.format].read_shard(shard))[2]
    assert sample.mask is not None
    stored = sample.mask if isinstance(sample.mask, bytes) else sample.mask.tobytes()
    content = bytearray(shard.read_bytes())
    content[content.rindex(stored) + len(stored) // 2] ^= 1
    shard.write_bytes(content)
    return sample.id


@pytest.mark.parametrize(("backend", "kind"), CONVERTED_CASES)
def test_a_changed_mask_is_not_served(backend: str, kind: str, masked: MakeFolder, tmp_path: Path) -> None:
    """The picture of a damaged mask is not served either."""
    path = Path(shutil.copytree(masked(kind), tmp_path / "out"))
    damaged = spoil_a_mask(path)
    with build(path, backend) as loader, pytest.raises(SampleError, match=f"sample {damaged}") as caught:
        list(loader)
    assert "mask" in str(caught.value) or kind == "dali", "the record's own checksum knows no parts"
    with build(path, backend, on_error="skip", augment="crop", views=2) as loader:
        ids: list[int] = []
        for batch in loader:
            check_masks(batch, 40)
            assert {len(view) for view in batch.views} == {len(batch.ids)}
            ids += batch.ids.tolist()
        assert sorted(ids) == [i for i in range(PICTURES) if i != damaged]


# Boxes.


@pytest.mark.filterwarnings("ignore:.*has black around")
@pytest.mark.parametrize("augment", sorted(AUGMENTATIONS))
@pytest.mark.parametrize(
    ("backend", "kind", "fit"),
    backend_params(
        *(("shards", "shards", fit) for fit in FITS),
        *((backend, backend, "crop") for backend in ("webdataset", "dali")),
    ),
)
def test_a_box_is_where_its_bright_square_is(
    backend: str, kind: str, fit: str, augment: str, boxed: MakeFolder, device: str
) -> None:
    """Boxes are right to within a pixel after every crop, resize and flip, and left out with their square.

    None is in the black border of a picture that is smaller than what is served.
    """
    for size in (24, 40) if augment == "crop" else (24,):
        check_boxes(boxed(kind, fit), backend, size, AUGMENTATIONS[augment], device)


def check_boxes(path: Path, backend: str, size: int, augment: Any, device: str) -> None:
    with build(
        path, backend, size=size, crop_ratio=min(1, size / STORED), augment=augment, device=device
    ) as loader:
        for batch in (*loader, *loader):
            for row, picture in enumerate(batch.images[:, 0].cpu().numpy()):
                boxes, numbers = batch.fields["box"][row], batch.fields["box_kept"][row]
                assert (boxes.dtype, boxes.shape) == (torch.float32, (len(numbers), 4))
                assert numbers.dtype == torch.int64
                assert ((boxes >= 0) & (boxes <= size)).all()
                assert (numbers[1:] > numbers[:-1]).all()
                assert set(numbers.tolist()) < set(range(len(batch.fields["kind"][row]) + 1))
                assert not {3, 4} & set(numbers.tolist()), "outside, and without an area"
                check_box(picture > 127, boxes[numbers == 0])


@pytest.mark.parametrize("fixture", ["masked", "boxed"])
def test_masks_and_boxes_do_not_depend_on_dtype(fixture: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(fixture)("shards")
    contract.check_floats_are_normalised(partial(build, path, size=STORED, crop_ratio=1.0))


def check_box(bright: Any, boxes: torch.Tensor) -> None:
    """Check that the bright pixels are those in the box, give or take one at each edge."""
    if not bright.any():
        assert all((box[2] - box[0]) * (box[3] - box[1]) < 24 * 2 for box in boxes)
        return
    rows, columns = np.flatnonzero(bright.any(axis=1)), np.flatnonzero(bright.any(axis=0))
    bright_box = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
    left, top, right, bottom = boxes[0].tolist()
    # a narrow strip may be as dark as its edges
    assert np.abs(boxes[0].numpy() - bright_box).max() <= (1 if min(right - left, bottom - top) > 3 else 2)
