"""Pictures of varying size and rectangles, served: what is cropped of each, by every backend."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms import CenterCrop, RandomResizedCrop, Resize
from torchvision.transforms.functional import InterpolationMode, resized_crop

from loaders.augment import RandomAugmentation
from loaders.augment.cpu import Crops
from loaders.augment.draw import crop_boxes, draw, uniforms, window_boxes
from loaders.batch import Request
from loaders.dataset import open_split
from loaders.read import cache, host_memory
from loaders.read.nvjpeg import NvjpegReader
from loaders.settings import LoaderSpec
from precache import convert, open_dataset
from precache.errors import DatasetError, ImageError, SettingError
from precache.formats import FORMATS, Sample
from precache.formats.shards import picture_starts
from precache.sources.tree import scan_tree
from precache.storage.output import publish
from tests.building import build_loader
from tests.conftest import IMAGES, RECTANGLE, STORED_SIZE, small_recipe
from tests.loaders.augment.test_augment import by_id, largest_gap

TRAIN = RandomAugmentation()
COUNT = 20_000
KEPT = [("shards", "shards"), ("webdataset", "webdataset"), ("dali", "webdataset"), ("dali", "dali")]


def served(path: Path, **settings: Any) -> dict[int, torch.Tensor]:
    """id -> [height, width, 3] of one epoch."""
    with build_loader(path, **{"workers": 1, "batch_size": 16, **settings}) as loader:
        return {i: image.permute(1, 2, 0) for i, image in by_id(list(loader)).items()}


def psnr(one: torch.Tensor, other: torch.Tensor) -> float:
    error = (one.float() - other.float()).square().mean().item()
    return float("inf") if error == 0 else 10 * np.log10(255**2 / error)


@pytest.fixture(scope="module")
def resized(raw_tree: Path) -> dict[int, Image.Image]:
    """The raw pictures, as torchvision's recipe begins: Resize(48)."""
    pictures = {}
    for sample in scan_tree(raw_tree).samples:
        with Image.open(raw_tree / sample.path) as image:
            upright = ImageOps.exif_transpose(image)
            if upright.mode == "RGB":
                pictures[sample.id] = Resize(STORED_SIZE)(upright)
    assert len(pictures) > IMAGES / 2
    return pictures


@pytest.fixture(scope="module")
def longer(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tree with its longer sides at 48 px."""
    root = tmp_path_factory.mktemp("longer")
    for name in FORMATS:
        convert(raw_tree, root / name, small_recipe(name, fit="keep-longer"), workers=0)
    return {name: root / name for name in FORMATS}


@pytest.mark.parametrize(("height", "width"), [(256, 341), (400, 256)])
def test_boxes_of_pictures_that_are_no_squares_are_distributed_as_torchvisions(
    height: int, width: int
) -> None:
    """Two samples of 20,000 from one distribution lie within 0.0193 in 999 of 1,000 cases."""
    torch.manual_seed(0)
    picture = torch.empty(3, height, width)
    theirs = np.array(
        [RandomResizedCrop.get_params(picture, (0.08, 1), (3 / 4, 4 / 3)) for _ in range(COUNT)]
    )
    shapes = np.tile((height, width), (COUNT, 1))
    ours = crop_boxes(shapes, uniforms(0, 0, np.arange(COUNT), 40), (0.08, 1.0), (3 / 4, 4 / 3))
    for column, their_column in enumerate((1, 0, 3, 2)):
        assert largest_gap(ours[:, column], theirs[:, their_column].astype(float)) < 0.0193
    assert (ours[:, 0] + ours[:, 2]).max() == width
    assert (ours[:, 1] + ours[:, 3]).max() == height
    assert np.array_equal(
        ours, crop_boxes((height, width), uniforms(0, 0, np.arange(COUNT), 40), (0.08, 1.0), (3 / 4, 4 / 3))
    )


def test_what_no_crop_fits_into_gives_torchvisions_fallback() -> None:
    shapes = np.array([(20, 400), (400, 20), (100, 100), (1, 900), (900, 1), (90, 100)])
    draws = uniforms(0, 0, np.arange(len(shapes)), 40)
    for ratio in ((3 / 4, 4 / 3), (3.0, 4.0), (0.2, 0.25)):
        boxes = crop_boxes(shapes, draws, (1.0, 1.0), ratio)
        for (height, width), box in zip(shapes.tolist(), boxes.tolist(), strict=True):
            picture = torch.empty(3, height, width)
            top, left, rows, columns = RandomResizedCrop.get_params(picture, (1.0, 1.0), ratio)
            rows, columns = max(1, rows), max(1, columns)  # torchvision cannot resize what is empty
            assert box[2:] == [columns, rows]
            if ratio[0] > 1 or height != width:
                assert abs(box[0] - left) <= 1
                assert abs(box[1] - top) <= 1


@pytest.mark.parametrize("size", [(7, 7), (8, 5), (5, 8), (1, 1), (12, 12), (11, 20)])
def test_the_centre_is_torchvisions_with_black_where_there_is_less(size: tuple[int, int]) -> None:
    for height in (5, 6, 7, 12):
        for width in (5, 8, 11):
            picture = torch.arange(1, height * width + 1).reshape(1, height, width)
            ((left, top, columns, rows),) = window_boxes((height, width), None, size).tolist()
            assert (rows, columns) == size
            black = torch.zeros((1, height + 40, width + 40), dtype=picture.dtype)
            black[:, 20 : 20 + height, 20 : 20 + width] = picture
            ours = black[:, 20 + top : 20 + top + rows, 20 + left : 20 + left + columns]
            assert torch.equal(ours, CenterCrop(size)(picture))


@pytest.mark.parametrize("size", [40, (30, 44)])
@pytest.mark.parametrize(("backend", "kind"), KEPT)
def test_train_crops_are_torchvisions_of_the_raw_picture(
    backend: str,
    kind: str,
    size: int | tuple[int, int],
    shaped: dict[str, Path],
    resized: dict[int, Image.Image],
) -> None:
    """Resize(48), then the box of RandomResizedCrop of all of it, resized once, mirrored or not."""
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    ours = served(shaped[f"keep-{kind}"], backend=backend, augment="train", size=size, seed=3)
    sides = [size, size] if isinstance(size, int) else list(size)
    outside = 0
    for sample_id, picture in resized.items():
        shape = np.array([picture.size[::-1]])
        draws = draw(TRAIN, shape, size, 3, 0, np.array([sample_id]))
        left, top, width, height = draws.boxes[0].tolist()
        outside += (
            left + width > (picture.width + STORED_SIZE) / 2 or left < (picture.width - STORED_SIZE) / 2
        )
        cropped = resized_crop(picture, top, left, height, width, sides, InterpolationMode.BILINEAR)
        expected = torch.from_numpy(np.array(cropped))
        expected = expected.flip(1) if draws.mirrored[0] else expected
        assert psnr(ours[sample_id], expected) > (50 if kind == "shards" else 34)
    assert outside > 10, "crops of what fit crop would have cut away"


@pytest.mark.parametrize("augment", [None, "crop", "train"])
@pytest.mark.parametrize(("backend", "kind"), KEPT)
def test_small_pictures_are_enlarged_or_have_black_around_them(
    backend: str, kind: str, augment: str | None, longer: dict[str, Path]
) -> None:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    ours = served(longer[kind], backend=backend, augment=augment, size=STORED_SIZE)
    stored = {}
    dataset = open_dataset(longer["shards"])
    for shard in dataset.manifest.shards:
        for sample in FORMATS["shards"].read_shard(dataset.shard_path(shard)):
            stored[sample.id] = torch.from_numpy(sample.pixels(""))
    assert ours.keys() == stored.keys()
    for sample_id, picture in ours.items():
        if augment == "train":
            assert picture[0].any()
            continue
        whole = Image.fromarray(stored[sample_id].numpy())
        whole = whole if augment else Resize(STORED_SIZE)(whole)
        expected = torch.from_numpy(np.array(CenterCrop(STORED_SIZE)(whole)))
        distance = max(psnr(picture, expected), psnr(picture, expected.flip(1)) if augment else 0)
        assert distance > (34 if kind != "shards" else 1000 if augment else 50)


@pytest.mark.parametrize(("backend", "kind"), KEPT)
def test_a_cache_keeps_whole_pictures_and_serves_the_same_crops(
    backend: str, kind: str, shaped: dict[str, Path]
) -> None:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    settings = {"backend": backend, "size": (30, 40), "augment": "train", "batch_size": 16, "workers": 2}
    with (
        build_loader(shaped[f"keep-{kind}"], **settings) as plain,
        build_loader(shaped[f"keep-{kind}"], cache="ram", **settings) as cached,
    ):
        for _ in range(3):
            for ours, theirs in zip(cached, plain, strict=True):
                assert torch.equal(ours.ids, theirs.ids)
                # DALI resizes what it decodes, the CPU what is kept
                assert psnr(ours.images, theirs.images) >= (50 if backend == "dali" else 1000)


def test_caches_of_one_size_keep_what_each_ratio_shows(raw_tree: Path, shaped: dict[str, Path]) -> None:
    """Two loaders at a time: what one has made of a picture is not what the other serves."""
    for path in (raw_tree, shaped["keep-shards"], shaped["keep-webdataset"]):
        settings = {"size": 32, "shuffle": False, "workers": 1, "batch_size": IMAGES}
        ratios = (1.0, 0.8)
        plain = [served(path, crop_ratio=ratio, **settings) for ratio in ratios]
        with (
            build_loader(path, crop_ratio=ratios[0], cache="ram", **settings) as all_of_it,
            build_loader(path, crop_ratio=ratios[1], cache="ram", **settings) as part_of_it,
        ):
            for _ in range(2):
                for loader, expected in zip((all_of_it, part_of_it), plain, strict=True):
                    found = by_id(list(loader))
                    assert all(torch.equal(found[i].permute(1, 2, 0), expected[i]) for i in expected)


def test_a_cache_of_varying_sizes_has_room_for_the_bytes_of_its_pictures_and_no_more(
    shaped: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = open_dataset(shaped["keep-shards"]).read_index().shapes
    assert shapes is not None
    needed = int((shapes.prod(axis=1) * 3).sum())
    settings = {"cache": "ram", "augment": "train", "size": 32, "workers": 1}
    monkeypatch.setattr(cache, "_RESERVED_SHARE", 0.0)
    monkeypatch.setattr(host_memory, "free_memory", lambda: (needed, needed))
    build_loader(shaped["keep-shards"], **settings).close()
    assert not caplog.messages
    monkeypatch.setattr(host_memory, "free_memory", lambda: (needed - 1, needed))
    build_loader(shaped["keep-shards"], **settings).close()
    assert "for which there is room" in caplog.text


@pytest.mark.parametrize("kind", ["raw", "keep-shards", "keep-webdataset", "keep-dali"])
def test_a_function_of_the_callers_gets_the_middle_of_pictures_of_varying_size(
    kind: str, raw_tree: Path, shaped: dict[str, Path]
) -> None:
    """As squares of size / crop_ratio, which are what is served of them without a function."""
    path = raw_tree if kind == "raw" else shaped[kind]
    if kind == "keep-dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    expected = served(path, size=40)
    given = served(
        path, augment=lambda images, ids, epoch: images[:, :30, :20], size=(30, 20), crop_ratio=0.5
    )
    assert {tuple(picture.shape) for picture in given.values()} == {(30, 20, 3)}
    given = served(path, augment=lambda images, ids, epoch: images[:, 2:34, 4:36], size=32, crop_ratio=0.8)
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[i], expected[i][2:34, 4:36]) for i in expected)


def test_a_function_of_the_callers_gets_all_of_what_is_stored_in_one_size(shaped: dict[str, Path]) -> None:
    with build_loader(
        shaped["rectangle-shards"], augment=lambda images, ids, epoch: images[:, :20, :44], workers=1
    ) as loader:
        assert loader.size == (20, 44)


@pytest.mark.parametrize("cache", ["none", "ram"])
@pytest.mark.parametrize("kind", ["shards", "webdataset", "dali"])
def test_more_than_is_stored_is_enlarged_or_has_black_around_it(
    kind: str, cache: str, shaped: dict[str, Path]
) -> None:
    """And one line says so."""
    if kind == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    path = shaped[f"rectangle-{kind}"]
    stored = served(path, size=RECTANGLE)
    size = (RECTANGLE[0] + 1, 80)  # of one row more than is there, none is above
    for augment, said in ((None, "is enlarged from them"), ("train", "is enlarged"), ("crop", "has black")):
        with pytest.warns(UserWarning, match=f"stores 60x36 pixels: size 80x37 .*{said}.* --size ") as caught:
            found = served(path, size=size, augment=augment, cache=cache, check="always")
        assert len(caught) == 1
        for i, picture in found.items():
            assert tuple(picture.shape) == (*size, 3)
            if augment == "crop":
                expected = torch.zeros_like(picture)
                expected[: RECTANGLE[0], 10:70] = stored[i]
                mirrored = stored[i].flip(1)
                assert torch.equal(picture[:36, 10:70], stored[i]) or torch.equal(
                    picture[:36, 10:70], mirrored
                )
                assert picture.sum() == expected.sum(), "black around"
            elif augment is None:
                whole = Image.fromarray(stored[i].numpy())
                enlarged = CenterCrop(size)(whole.resize((80, 48), Image.Resampling.BILINEAR))
                assert psnr(picture, torch.from_numpy(np.array(enlarged))) > 45
    with pytest.raises(SettingError, match="height of size must be an integer from 1 to 8,192, got 0"):
        build_loader(path, size=(0, 3))


def test_the_size_is_that_of_the_batches(shaped: dict[str, Path], raw_tree: Path) -> None:
    for path, asked, expected in (
        (shaped["rectangle-shards"], None, RECTANGLE),
        (shaped["rectangle-shards"], (20, 20), 20),
        (shaped["keep-shards"], None, STORED_SIZE),
        (shaped["keep-shards"], [20, 30], (20, 30)),
        (raw_tree, (20, 30), (20, 30)),
    ):
        for augment in (None, "train", "crop"):
            with build_loader(path, size=asked, augment=augment, workers=0, batch_size=35) as loader:
                assert loader.size == expected
                shape = next(iter(loader)).images.shape[2:]
                assert tuple(shape) == (expected if isinstance(expected, tuple) else (expected, expected))


def test_a_rectangle_of_a_raw_tree_is_cropped_from_a_larger_one(raw_tree: Path) -> None:
    centre, crops = (served(raw_tree, size=(30, 44), augment=a, workers=2) for a in (None, "train"))
    assert {tuple(picture.shape) for picture in crops.values()} == {(30, 44, 3)}
    assert sum(torch.equal(crops[i], centre[i]) for i in centre) < 5


@pytest.mark.parametrize("backend", ["webdataset", "dali"])
def test_a_jpeg_of_another_size_than_the_index_says_is_named(
    backend: str, shaped: dict[str, Path], tmp_path: Path
) -> None:
    """Without the checksums that would find it first."""
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    path = Path(shutil.copytree(shaped["keep-webdataset"], tmp_path / "copy"))
    entry = open_dataset(path).manifest.shards[0]
    form = FORMATS["webdataset"]
    stored = list(form.read_shard(path / entry.file_name))
    by_length = sorted(stored, key=lambda sample: len(sample.data))
    other = {by_length[0].id: by_length[-1].data}
    samples = [Sample(s.id, s.label, other.get(s.id, s.data), "", (48, 48)) for s in stored]
    publish(form.write_shard(path / entry.name, samples, len(samples), None))
    with (
        build_loader(path, backend=backend, check="never", workers=1, augment="train") as loader,
        pytest.raises(
            ImageError, match=f"sample {by_length[0].id}: is .*, expected .*; run 'precache verify'"
        ),
    ):
        list(loader)


def test_where_a_picture_lies_is_known_without_opening_its_shard(shaped: dict[str, Path]) -> None:
    data = open_split(shaped["keep-shards"], "train")
    for number, file in enumerate(data.files):
        content = Path(file).read_bytes()
        rows = data.shard_positions(number)
        starts = picture_starts(data.shapes_at(rows), data.pixel_bytes)
        for sample, start in zip(FORMATS["shards"].read_shard(Path(file)), starts.tolist(), strict=True):
            assert isinstance(sample.data, np.ndarray)
            assert content[start:].startswith(sample.data.tobytes())


@pytest.mark.filterwarnings("ignore:.*TorchCodec")
@pytest.mark.parametrize("augment", [None, "train", "whole"])
def test_nvjpeg_crops_each_picture_by_itself(augment: str | None, shaped: dict[str, Path]) -> None:
    """With torchvision's CPU decoder in the place of the GPU's."""
    path = shaped["keep-dali"]
    with build_loader(path, workers=1) as loader:
        spec: LoaderSpec = loader.spec  # type: ignore[attr-defined]
    data = open_split(path, "train")
    size = None if augment == "whole" else (30, 40)
    crops = Crops(None, size, TRAIN if augment == "train" else None, seed=5)
    reader = NvjpegReader(spec, data, crops, torch.device("cpu"))
    try:
        (batch,) = reader.read(iter([Request(0, np.arange(IMAGES))]))
    finally:
        reader.close()
    assert batch.ids.tolist() == data.ids.tolist()
    if size is None:
        shapes = data.shapes_at(slice(None)).tolist()
        pictures = torch.split(batch.images, [height * width * 3 for height, width in shapes])
        assert [len(part) for part in pictures] == [h * w * 3 for h, w in shapes]
        return
    theirs = served(path, size=size, augment=augment, seed=5)
    assert all(psnr(image, theirs[i]) > 40 for i, image in zip(batch.ids.tolist(), batch.images, strict=True))


def test_a_folder_of_another_version_of_the_shapes_is_refused(
    shaped: dict[str, Path], tmp_path: Path
) -> None:
    """The shards of a conversion at another size, which have as many bytes as any."""
    path = Path(shutil.copytree(shaped["rectangle-shards"], tmp_path / "copy"))
    turned = Path(shutil.copytree(shaped["rectangle-shards"], tmp_path / "turned"))
    for shard in open_dataset(turned).manifest.shards:
        content = (turned / shard.file_name).read_bytes()
        old, new = (f"[{shard.samples},{h},{w},3]".encode() for h, w in (RECTANGLE, RECTANGLE[::-1]))
        assert old in content
        (path / shard.file_name).write_bytes(content.replace(old, new, 1))
    with (
        build_loader(path, check="never", workers=1) as loader,
        pytest.raises(
            DatasetError, match="holds pictures of other sizes or channels than manifest and index say"
        ),
    ):
        list(loader)
