"""Masks and boxes follow their pictures through everything that is done to these, with every backend."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

import loaders
from loaders.fields import follow_boxes, follow_mask
from precache import Recipe, convert, open_dataset
from precache.errors import DatasetError, SampleError, SettingError
from precache.formats import FORMATS
from precache.pictures.images import FITS
from precache.sources import SourceOptions
from tests.building import build_loader
from tests.labelled_pictures import (
    BOX,
    PICTURES,
    check_labels,
    draw_boxed,
    draw_trees,
)
from tests.precache.sources.listed import ListedSource, encoded

ARMS = [("shards", "shards"), ("webdataset", "webdataset"), ("dali", "webdataset"), ("dali", "dali")]
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


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return str(request.param)


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Pictures with masks, in that format and fit, shrunk without the ringing of Lanczos."""
    root = tmp_path_factory.mktemp("masked")
    trees = draw_trees(root)
    made: set[Path] = set()

    def make(name: str, fit: str = "crop") -> Path:
        path = root / name / fit
        if path not in made:
            made.add(path)
            shard_bytes = 5 * STORED * STORED * 3
            recipe = Recipe(format=name, size=STORED, fit=fit, resample="bilinear", shard_bytes=shard_bytes)
            convert(trees.photos, path, recipe, workers=0, options=SourceOptions(mask=str(trees.masks)))
        return path

    return make


def build(arm: tuple[str, str], path: Path, **settings: Any) -> loaders.Loader:
    if arm[0] == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")
    defaults = {"batch_size": 5, "workers": 2, "size": 24, "crop_ratio": 24 / STORED}  # nothing is resized
    return build_loader(path, backend=arm[0], **{**defaults, **settings})


@pytest.mark.parametrize("augment", sorted(AUGMENTATIONS))
@pytest.mark.parametrize("arm", ARMS, ids="-".join)
def test_a_mask_is_cropped_resized_and_mirrored_as_its_picture(
    arm: tuple[str, str], augment: str, masked: Callable[..., Path], device: str
) -> None:
    seen = set()
    close = []
    with build(arm, masked(arm[1]), augment=AUGMENTATIONS[augment], device=device) as loader:
        for batch in (*loader, *loader):
            masks = batch.fields["mask"]
            assert masks.shape == (len(batch.ids), 24, 24)
            assert (masks.dtype, masks.device) == (torch.uint8, batch.images.device)
            seen |= set(batch.ids.tolist())
            # a picture that is enlarged is a mixture further from its labels' edges
            reach = 1 if augment in ("None", "crop") else 5
            for picture, mask in zip(batch.images[:, 0].cpu(), masks.cpu(), strict=True):
                check_labels(picture, mask, 4 if arm[1] == "shards" else 40, reach)
                close.append((np.abs(picture.numpy() - mask.numpy() * 80.0) < 42).mean())
    assert np.mean(close) > 0.9
    assert seen == set(range(PICTURES))


@pytest.mark.filterwarnings("ignore:.*is enlarged")
@pytest.mark.parametrize("fit", FITS)
def test_masks_follow_pictures_of_every_fit(fit: str, masked: Callable[..., Path], device: str) -> None:
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
        settings = {"size": size, "crop_ratio": ratio, "device": device}
        with build(("shards", "shards"), masked("shards", fit), **settings) as loader:
            for batch in loader:
                for picture, mask in zip(batch.images.cpu(), batch.fields["mask"].cpu(), strict=True):
                    shown += check_labels(picture[0], mask, reach=reach)
        assert shown > 0, (size, ratio)


def test_a_mask_shows_what_resize_and_center_crop_show(masked: Callable[..., Path]) -> None:
    """Of the whole stored mask, one pixel aside at most."""
    path = masked("shards", "keep")
    dataset = open_dataset(path)
    stored = {
        sample.id: Image.fromarray(sample.mask)
        for shard in dataset.manifest.shards
        for sample in FORMATS["shards"].read_shard(dataset.shard_path(shard))
    }
    nearest = {"interpolation": v2.InterpolationMode.NEAREST}
    recipe = v2.Compose([v2.Resize(28, **nearest), v2.CenterCrop(24)])
    with build(("shards", "shards"), path, crop_ratio=24 / 28) as loader:
        for batch in loader:
            for i, mask in zip(batch.ids.tolist(), batch.fields["mask"], strict=True):
                assert np.array_equal(mask.numpy(), np.asarray(recipe(stored[i])))


def test_a_mask_has_its_own_labels_and_no_mixture_of_them(masked: Callable[..., Path]) -> None:
    with build(("shards", "shards"), masked("shards"), augment="train") as loader:
        for batch in loader:
            assert set(batch.fields["mask"].unique().tolist()) <= {0, 1, 2, 3}


@pytest.mark.parametrize("settings", [{"cache": "ram"}, {"check": "always"}, {"shuffle": False}], ids=str)
def test_masks_are_the_same_however_pictures_are_read(
    settings: dict[str, Any], masked: Callable[..., Path]
) -> None:
    path = masked("shards")
    found: dict[tuple[int, int], list[torch.Tensor]] = {}
    for number, more in enumerate(({}, settings, {**settings, "workers": 1})):
        with build(("shards", "shards"), path, augment="train", **more) as loader:
            for _ in range(2):
                for batch in loader:
                    for i, mask in zip(batch.ids.tolist(), batch.fields["mask"], strict=True):
                        epoch = loader.state_dict()["epoch"]
                        found.setdefault((epoch, i), []).append(mask)
        assert {len(masks) for masks in found.values()} == {number + 1}
    assert all(torch.equal(mask, masks[0]) for masks in found.values() for mask in masks)


def test_a_function_gets_all_of_the_picture_and_the_mask_is_of_that(masked: Callable[..., Path]) -> None:
    settings = {"augment": lambda images, ids, epoch: images, "size": None}
    with build(("shards", "shards"), masked("shards"), **settings) as loader:
        batch = next(iter(loader))
        assert batch.images.shape[2:] == batch.fields["mask"].shape[1:] == (STORED, STORED)


@pytest.mark.parametrize("arm", ARMS, ids="-".join)
def test_a_mask_that_changed_on_disk_is_not_served(
    arm: tuple[str, str], masked: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "out"
    shutil.copytree(masked(arm[1]), path)
    damaged = spoil_a_mask(path)
    with build(arm, path) as loader, pytest.raises(SampleError, match=f"sample {damaged}") as caught:
        list(loader)
    assert "mask" in str(caught.value) or arm[1] == "dali", "the record's own checksum knows no parts"
    with build(arm, path, on_error="skip") as loader:
        for _ in range(2):
            served = [i for batch in loader for i in check_whole(batch)]
            assert sorted(served) == [i for i in range(PICTURES) if i != damaged]


INDEX_DAMAGE: dict[str, Callable[[Path], Any]] = {
    "missing": lambda index: index.unlink(),
    "cut": lambda index: index.write_bytes(index.read_bytes()[:20]),
    "no text": lambda index: index.write_bytes(b"\xff\0" * 50),
    "huge": lambda index: index.write_text(re.sub(r"\d{4,}", "9" * 25, index.read_text())),
    "lines swapped": lambda index: index.write_text("\n".join(swapped(index.read_text().split("\n")))),
}


def swapped(lines: list[str]) -> list[str]:
    return [lines[0], lines[2], lines[1], *lines[3:]]


@pytest.mark.parametrize("damage", sorted(INDEX_DAMAGE))
@pytest.mark.parametrize("arm", ARMS[1::2], ids="-".join)
def test_a_damaged_index_serves_no_other_mask(
    arm: tuple[str, str], damage: str, masked: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "out"
    shutil.copytree(masked(arm[1]), path)
    INDEX_DAMAGE[damage](path / "train-00001.idx")
    with (
        build(arm, path) as loader,
        pytest.raises(DatasetError, match=r"train-00001.*precache verify") as caught,
    ):
        list(loader)
    assert "\n" not in str(caught.value)


def check_whole(batch: loaders.Batch) -> list[int]:
    ids: list[int] = batch.ids.tolist()
    assert len(ids) == len(batch.images) == len(batch.labels) == len(batch.fields["mask"])
    for picture, mask in zip(batch.images, batch.fields["mask"], strict=True):
        check_labels(picture[0], mask, 40)
    return ids


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


def test_what_moves_a_batch_moves_its_masks(masked: Callable[..., Path]) -> None:
    with build(("shards", "shards"), masked("shards")) as loader:
        batch = next(iter(loader)).to("meta")
    assert batch.fields["mask"].device.type == "meta"


# Boxes.


@pytest.fixture(scope="module")
def boxed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Pictures with a bright square and its box, in that format and fit."""
    root = tmp_path_factory.mktemp("boxed")
    made: set[Path] = set()

    def make(name: str, fit: str = "crop") -> Path:
        path = root / name / fit
        if path not in made:
            made.add(path)
            pictures = tuple(encoded(draw_boxed(number)) for number in range(PICTURES))
            boxes = [[list(BOX), *OTHERS[: number % 5]] for number in range(PICTURES)]
            kinds = [list(range(len(row))) for row in boxes]
            source = ListedSource(pictures, "none", None, {"box": boxes, "kind": kinds})
            shard_bytes = 5 * STORED * STORED * 3
            recipe = Recipe(format=name, size=STORED, fit=fit, resample="bilinear", shard_bytes=shard_bytes)
            convert(source, path, recipe, workers=0, options=SourceOptions(boxes="box"))
        return path

    return make


@pytest.mark.parametrize("augment", sorted(AUGMENTATIONS))
@pytest.mark.parametrize("fit", FITS)
def test_a_box_is_where_its_bright_square_is(
    fit: str, augment: str, boxed: Callable[..., Path], device: str
) -> None:
    """To within a pixel, after every crop, resize and flip; and gone where the square is."""
    settings = {"augment": AUGMENTATIONS[augment], "device": device}
    with build(("shards", "shards"), boxed("shards", fit), **settings) as loader:
        for batch in (*loader, *loader, *loader):
            for row, picture in enumerate(batch.images[:, 0].cpu().numpy()):
                boxes, kept = batch.fields["box"][row], batch.fields["box_kept"][row]
                assert (boxes.dtype, boxes.shape) == (torch.float32, (len(kept), 4))
                assert kept.dtype == torch.int64
                assert ((boxes >= 0) & (boxes <= 24)).all()
                assert (kept[1:] > kept[:-1]).all()
                assert kept.tolist() == [i for i in kept.tolist() if i < len(batch.fields["kind"][row])]
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


@pytest.mark.parametrize("arm", ARMS, ids="-".join)
def test_boxes_are_the_same_with_every_backend(arm: tuple[str, str], boxed: Callable[..., Path]) -> None:
    found = []
    for backend in (("shards", "shards"), arm):
        with build(backend, boxed(backend[1]), augment="train") as loader:
            batches = list(loader)
        found.append(
            {
                i: (batch.fields["box"][row].tolist(), batch.fields["box_kept"][row].tolist())
                for batch in batches
                for row, i in enumerate(batch.ids.tolist())
            }
        )
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("fields", "boxes", "message"),
    [
        ({"a": [1] * 3}, "b", "boxes 'b' is not one of the fields \\(a\\); name it with --field"),
        ({"b": ["x"] * 3}, "b", "must be lists of .* for each picture, got text"),
        ({"b": [[1, 2, 3, 4]] * 3}, "b", "must be lists of .* for each picture, got \\[4\\]"),
        ({"b": [[[1, 2, 3]]] * 3}, "b", "must be lists of .* for each picture, got \\[3\\]"),
        ({"b": [[[1, 2, 3, 4]]] * 3, "b_kept": [1] * 3}, "b", "field 'b_kept': this name is taken"),
    ],
)
def test_what_is_no_list_of_boxes_is_refused(
    fields: dict[str, Any], boxes: str, message: str, tmp_path: Path
) -> None:
    source = ListedSource(tuple(encoded(draw_boxed(number)) for number in range(3)), "none", None, fields)
    with pytest.raises(SettingError, match=message):
        convert(source, tmp_path / "out", Recipe(format="shards"), options=SourceOptions(boxes=boxes))
    assert not (tmp_path / "out").exists()


def test_pictures_without_any_box_have_lists_without_any(tmp_path: Path) -> None:
    pictures = tuple(encoded(draw_boxed(number)) for number in range(4))
    source = ListedSource(pictures, "none", None, {"box": [[]] * 4})
    convert(
        source,
        tmp_path / "out",
        Recipe(format="shards", size=8, fit="crop"),
        options=SourceOptions(boxes="box"),
    )
    with loaders.build(tmp_path / "out", batch_size=4) as loader:
        batch = next(iter(loader))
        assert [boxes.shape for boxes in batch.fields["box"]] == [(0, 4)] * 4


def test_a_mask_is_taken_from_the_pixels_below_the_centres() -> None:
    mask = np.arange(16, dtype=np.uint8).reshape(4, 4)
    out = np.empty((2, 2), np.uint8)
    follow_mask(mask, np.array([0, 0, 4, 4]), mirrored=True, out=out)
    assert out.tolist() == [[7, 5], [15, 13]]
    follow_mask(mask, np.array([-1, 3, 2, 2]), mirrored=False, out=out)
    assert out.tolist() == [[0, 12], [0, 0]]
    follow_mask(mask, np.array([0.6, 1.25, 2.5, 2.5]), mirrored=False, out=out)
    assert out.tolist() == [[5, 6], [13, 14]], "at 1.225 and 2.475, and at 1.875 and 3.125"


@pytest.mark.parametrize("seed", range(40))
def test_any_crop_of_a_mask_is_sampled_at_the_centres(seed: int) -> None:
    random = np.random.default_rng(seed)
    height, width, rows, columns = random.integers(1, 60, 4).tolist()
    mask = random.integers(0, 256, (height + 5, width + 7)).astype(np.uint8)
    out = np.empty((rows, columns), np.uint8)
    follow_mask(mask, np.array([4, 3, width, height]), mirrored=bool(seed % 2), out=out)
    down, across = (2 * np.arange(rows) + 1) * height, (2 * np.arange(columns) + 1) * width
    expected = mask[np.ix_(3 + down // (2 * rows), 4 + across // (2 * columns))]
    # on the border of two pixels either is as near
    clear = np.ix_(down % (2 * rows) > 0, across % (2 * columns) > 0)
    assert np.array_equal((out[:, ::-1] if seed % 2 else out)[clear], expected[clear])


def test_boxes_are_cut_off_and_dropped() -> None:
    boxes = np.array([[0, 0, 4, 4], [6, 6, 9, 9], [2, 2, 2, 8], [3, 1, 5, 3]])
    cut, kept = follow_boxes(boxes, np.array([2, 0, 4, 4]), mirrored=True, size=(8, 4))
    assert kept.tolist() == [0, 3]
    assert cut.tolist() == [[2, 0, 4, 8], [1, 2, 3, 6]]


@pytest.mark.parametrize("settings", [{"views": 2}, {"weights": "balanced"}, {"classes": ["a"]}], ids=str)
def test_masks_go_with_the_first_view_of_whatever_is_chosen(
    settings: dict[str, Any], masked: Callable[..., Path], tmp_path: Path
) -> None:
    """Also where one is left out, and where a sample comes again and is drawn anew."""
    path = tmp_path / "out"
    shutil.copytree(masked("shards"), path)
    damaged = spoil_a_mask(path)
    with build(("shards", "shards"), path, augment="crop", on_error="skip", **settings) as loader:
        for batch in (*loader, *loader):
            assert damaged not in check_whole(batch)
            assert {len(view) for view in batch.views} == {len(batch.ids)}
            assert not any(torch.equal(batch.images, view) for view in batch.views[1:])
