"""Masks and boxes follow their pictures through everything that is done to these, with every backend."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2

import loaders
from loaders.fields import follow_boxes, follow_mask
from precache import Recipe, convert, open_dataset
from precache.errors import SampleError, SettingError
from precache.formats import FORMATS
from precache.pictures.images import FITS
from precache.sources import SourceOptions
from tests.building import build_loader
from tests.labelled_pictures import BOX, PICTURES, check_labels, draw_boxed, draw_trees
from tests.loaders.arms import OF_SHARDS
from tests.precache.pictures.drawing import encoded
from tests.precache.sources.listed import listed_pictures

AUGMENTATIONS: dict[str, Any] = {
    "None": None,
    "crop": "crop",
    "train": "train",
    "strong": loaders.RandomAugmentation(scale=(0.3, 0.9), flip=1.0),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STORED = 32
OTHERS = [[1, 1, 5, 5], [30, 20, 33, 30], [-9, -9, -1, -1], [5, 5, 5, 20]]
"""Boxes beside BOX: in a corner, at an edge, outside, without an area."""
MakeFolder = Callable[..., Path]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return str(request.param)


def maker(root: Path, source: Any, options: SourceOptions) -> MakeFolder:
    """What converts `source` to a format and fit, once, shrunk without the ringing of Lanczos."""

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
    """Pictures with a bright square and its box."""
    pictures = tuple(encoded(draw_boxed(number)) for number in range(PICTURES))
    boxes = [[list(BOX), *OTHERS[: number % 5]] for number in range(PICTURES)]
    kinds = [list(range(len(row))) for row in boxes]
    source = listed_pictures(pictures, "none", None, {"box": boxes, "kind": kinds})
    return maker(tmp_path_factory.mktemp("boxed"), source, SourceOptions(boxes="box"))


def build(path: Path, backend: str = "shards", **settings: Any) -> loaders.Loader:
    defaults = {"batch_size": 5, "workers": 2, "size": 24, "crop_ratio": 24 / STORED}  # nothing is resized
    return build_loader(path, backend=backend, **{**defaults, **settings})


# Masks.


@pytest.mark.parametrize("augment", sorted(AUGMENTATIONS))
@pytest.mark.parametrize(("backend", "kind"), OF_SHARDS)
def test_a_mask_is_cropped_resized_and_mirrored_as_its_picture(
    backend: str, kind: str, augment: str, masked: MakeFolder, device: str
) -> None:
    seen, close = set(), []
    with build(masked(kind), backend, augment=AUGMENTATIONS[augment], device=device) as loader:
        for batch in (*loader, *loader):
            masks = batch.fields["mask"]
            assert masks.shape == (len(batch.ids), 24, 24)
            assert (masks.dtype, masks.device) == (torch.uint8, batch.images.device)
            assert set(masks.unique().tolist()) <= {0, 1, 2, 3}, "no mixture"
            seen |= set(batch.ids.tolist())
            # a picture that is enlarged is a mixture further from its labels' edges
            reach = 1 if augment in ("None", "crop") else 5
            for picture, mask in zip(batch.images[:, 0].cpu(), masks.cpu(), strict=True):
                check_labels(picture, mask, 4 if kind == "shards" else 40, reach)
                close.append((np.abs(picture.numpy() - mask.numpy() * 80.0) < 42).mean())
    assert np.mean(close) > 0.9
    assert seen == set(range(PICTURES))
    assert batch.to("meta").fields["mask"].device.type == "meta"


@pytest.mark.filterwarnings("ignore:.*is enlarged")
@pytest.mark.parametrize("fit", FITS)
def test_masks_follow_pictures_of_every_fit(fit: str, masked: MakeFolder, device: str) -> None:
    """Cut out, resized, and enlarged: then a picture is a mixture further from its labels' edges."""
    # what is served, of how much of the shorter side, and how far such a mixture reaches
    cases: list[tuple[Any, float, int]] = [(24, 1.0, 2), (24, 0.875, 2), (20, 0.9, 2), (48, 1.0, 3)]
    if fit == "keep-longer":
        cases = [(11, 1.0, 2), (10, 0.9, 2), (20, 1.0, 4)]  # of 11 pixels and more
    else:
        cases += [(24, 24 / STORED, 1), (STORED, 1.0, 1)]
        cases += [] if fit == "keep" else [((20, STORED), 1.0, 1)]
    for size, ratio, reach in cases:
        shown = 0.0
        with build(masked("shards", fit), size=size, crop_ratio=ratio, device=device) as loader:
            for batch in loader:
                for picture, mask in zip(batch.images.cpu(), batch.fields["mask"].cpu(), strict=True):
                    shown += check_labels(picture[0], mask, reach=reach)
        assert shown > 0, (size, ratio)


def test_a_mask_shows_what_resize_and_center_crop_show(masked: MakeFolder) -> None:
    path = masked("shards", "keep")
    dataset = open_dataset(path)
    read = FORMATS["shards"].read_shard
    stored = {s.id: s.mask for shard in dataset.manifest.shards for s in read(dataset.shard_path(shard))}
    nearest = {"interpolation": v2.InterpolationMode.NEAREST}
    recipe = v2.Compose([v2.Resize(28, **nearest), v2.CenterCrop(24)])
    with build(path, crop_ratio=24 / 28) as loader:
        for batch in loader:
            for i, mask in zip(batch.ids.tolist(), batch.fields["mask"], strict=True):
                assert np.array_equal(mask.numpy(), np.asarray(recipe(Image.fromarray(stored[i]))))
    with build(masked("shards"), augment=lambda images, ids, epoch: images, size=None) as loader:
        batch = next(iter(loader))  # a function gets all of the picture
        assert batch.images.shape[2:] == batch.fields["mask"].shape[1:] == (STORED, STORED)


def spoil_a_mask(path: Path) -> int:
    """Change one bit in the middle of a mask; its sample's id."""
    dataset = open_dataset(path)
    shard = dataset.shard_path(dataset.manifest.shards[1])
    sample = list(FORMATS[dataset.manifest.recipe.format].read_shard(shard))[2]
    assert sample.mask is not None
    stored = sample.mask if isinstance(sample.mask, bytes) else sample.mask.tobytes()
    content = bytearray(shard.read_bytes())
    content[content.rindex(stored) + len(stored) // 2] ^= 1
    shard.write_bytes(content)
    return sample.id


def check_whole(batch: loaders.Batch) -> list[int]:
    ids: list[int] = batch.ids.tolist()
    assert len(ids) == len(batch.images) == len(batch.labels) == len(batch.fields["mask"])
    for picture, mask in zip(batch.images, batch.fields["mask"], strict=True):
        check_labels(picture[0], mask, 40)
    return ids


@pytest.mark.parametrize(("backend", "kind"), OF_SHARDS)
def test_a_mask_that_changed_on_disk_is_not_served(
    backend: str, kind: str, masked: MakeFolder, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(masked(kind), tmp_path / "out"))
    damaged = spoil_a_mask(path)
    with build(path, backend) as loader, pytest.raises(SampleError, match=f"sample {damaged}") as caught:
        list(loader)
    assert "mask" in str(caught.value) or kind == "dali", "the record's own checksum knows no parts"
    with build(path, backend, on_error="skip") as loader:
        for _ in range(2):
            served = [i for batch in loader for i in check_whole(batch)]
            assert sorted(served) == [i for i in range(PICTURES) if i != damaged]


@pytest.mark.parametrize("how", [{"views": 2}, {"weights": "balanced"}, {"classes": ["a"]}], ids=str)
def test_masks_go_with_the_first_view_of_whatever_is_chosen(
    how: dict[str, Any], masked: MakeFolder, tmp_path: Path
) -> None:
    """Also where one is left out, and where a sample comes again and is drawn anew."""
    path = Path(shutil.copytree(masked("shards"), tmp_path / "out"))
    damaged = spoil_a_mask(path)
    with build(path, augment="crop", on_error="skip", **how) as loader:
        for batch in (*loader, *loader):
            assert damaged not in check_whole(batch)
            assert {len(view) for view in batch.views} == {len(batch.ids)}
            assert not any(torch.equal(batch.images, view) for view in batch.views[1:])


@settings(deadline=None)
@given(shape=st.tuples(*[st.integers(1, 60)] * 4), mirrored=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_any_crop_of_a_mask_is_sampled_at_the_centres(
    shape: tuple[int, int, int, int], mirrored: bool, seed: int
) -> None:
    height, width, rows, columns = shape
    mask = np.random.default_rng(seed).integers(0, 256, (height + 5, width + 7)).astype(np.uint8)
    out = np.empty((rows, columns), np.uint8)
    follow_mask(mask, np.array([4, 3, width, height]), mirrored=mirrored, out=out)
    down, across = (2 * np.arange(rows) + 1) * height, (2 * np.arange(columns) + 1) * width
    expected = mask[np.ix_(3 + down // (2 * rows), 4 + across // (2 * columns))]
    # on the border of two pixels either is as near
    clear = np.ix_(down % (2 * rows) > 0, across % (2 * columns) > 0)
    assert np.array_equal((out[:, ::-1] if mirrored else out)[clear], expected[clear])


def test_a_crop_of_a_mask_may_reach_beyond_it_or_begin_between_pixels() -> None:
    mask = np.arange(16, dtype=np.uint8).reshape(4, 4)
    out = np.empty((2, 2), np.uint8)
    follow_mask(mask, np.array([-1, 3, 2, 2]), mirrored=False, out=out)
    assert out.tolist() == [[0, 12], [0, 0]]
    follow_mask(mask, np.array([0.6, 1.25, 2.5, 2.5]), mirrored=False, out=out)
    assert out.tolist() == [[5, 6], [13, 14]], "at 1.225 and 2.475, and at 1.875 and 3.125"


# Boxes.


@pytest.mark.parametrize("augment", sorted(AUGMENTATIONS))
@pytest.mark.parametrize("fit", FITS)
def test_a_box_is_where_its_bright_square_is(fit: str, augment: str, boxed: MakeFolder, device: str) -> None:
    """To within a pixel, after every crop, resize and flip; and gone where the square is."""
    with build(boxed("shards", fit), augment=AUGMENTATIONS[augment], device=device) as loader:
        for batch in (*loader, *loader):
            for row, picture in enumerate(batch.images[:, 0].cpu().numpy()):
                boxes, kept = batch.fields["box"][row], batch.fields["box_kept"][row]
                assert (boxes.dtype, boxes.shape) == (torch.float32, (len(kept), 4))
                assert kept.dtype == torch.int64
                assert ((boxes >= 0) & (boxes <= 24)).all()
                assert (kept[1:] > kept[:-1]).all()
                assert set(kept.tolist()) < set(range(len(batch.fields["kind"][row]) + 1))
                assert not {3, 4} & set(kept.tolist()), "outside, and without an area"
                check_box(picture > 127, boxes[kept == 0])


def check_box(bright: Any, boxes: torch.Tensor) -> None:
    """The bright pixels are those in the box, one of them more or less."""
    if not bright.any():
        assert all((box[2] - box[0]) * (box[3] - box[1]) < 24 * 2 for box in boxes)
        return
    rows, columns = np.flatnonzero(bright.any(axis=1)), np.flatnonzero(bright.any(axis=0))
    found = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
    left, top, right, bottom = boxes[0].tolist()
    # of a strip, a half is as dark as its edge
    assert np.abs(boxes[0].numpy() - found).max() <= (1 if min(right - left, bottom - top) > 3 else 2)


@pytest.mark.parametrize(("backend", "kind"), OF_SHARDS[1:])
def test_boxes_are_the_same_with_every_backend(backend: str, kind: str, boxed: MakeFolder) -> None:
    found = []
    for path, name in ((boxed("shards"), "shards"), (boxed(kind), backend)):
        with build(path, name, augment="train") as loader:
            found.append(
                {
                    i: (batch.fields["box"][row].tolist(), batch.fields["box_kept"][row].tolist())
                    for batch in loader
                    for row, i in enumerate(batch.ids.tolist())
                }
            )
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"a": [1] * 3}, "box.*name it with --field"),
        ({"b": ["x"] * 3}, "must be lists of .* got text"),
        ({"b": [[1, 2, 3, 4]] * 3}, "must be lists of .* got \\[4\\]"),
        ({"b": [[[1, 2, 3]]] * 3}, "must be lists of .* got \\[3\\]"),
        ({"b": [[[1, 2, 3, 4]]] * 3, "b_kept": [1] * 3}, "b_kept"),
    ],
)
def test_what_is_no_list_of_boxes_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = listed_pictures(tuple(encoded(draw_boxed(number)) for number in range(3)), "none", None, fields)
    with pytest.raises(SettingError, match=message):
        convert(source, tmp_path / "out", Recipe(format="shards"), options=SourceOptions(boxes="b"))
    assert not (tmp_path / "out").exists()


def test_pictures_without_any_box_have_lists_without_any(tmp_path: Path) -> None:
    pictures = tuple(encoded(draw_boxed(number)) for number in range(4))
    source = listed_pictures(pictures, "none", None, {"box": [[]] * 4})
    with build(maker(tmp_path, source, SourceOptions(boxes="box"))("shards"), batch_size=4) as loader:
        assert [boxes.shape for boxes in next(iter(loader)).fields["box"]] == [(0, 4)] * 4


def test_boxes_are_cut_off_and_dropped() -> None:
    boxes = np.array([[0, 0, 4, 4], [6, 6, 9, 9], [2, 2, 2, 8], [3, 1, 5, 3]])
    cut, kept = follow_boxes(boxes, np.array([2, 0, 4, 4]), mirrored=True, size=(8, 4))
    assert kept.tolist() == [0, 3]
    assert cut.tolist() == [[2, 0, 4, 8], [1, 2, 3, 6]]
