"""What is peculiar to datasets: what is a picture, what labels say, and samples that cannot be read."""

import functools
import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from precache import convert
from precache.errors import ImageError, PrecacheError, SettingError, SourceError
from precache.sources import open_source
from precache.sources.picture_values import picture_of
from tests.conftest import small_recipe
from tests.precache.sources.archives import scan_of
from tests.precache.sources.objects import Items, Tensor, numbered, picture

GREY = np.arange(40, dtype=np.uint8).reshape(5, 8)
COLOUR = np.stack([GREY, GREY + 50, GREY + 100], axis=-1)
MAX_PIXELS = 10_000


def shards(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]


PICTURES: list[tuple[Any, Any]] = [
    (GREY, GREY),
    (GREY[:, :, None], GREY),
    (COLOUR, COLOUR),
    (Tensor(np.moveaxis(COLOUR, -1, 0)), COLOUR),
    (Tensor(COLOUR), COLOUR),
    (Tensor(GREY[None]), GREY),
    (COLOUR / 255, "is float64 [5, 8, 3]; expected uint8"),
    (np.moveaxis(COLOUR, -1, 0), "is uint8 [3, 5, 8]; expected uint8 [h, w]"),
    ("nowhere.jpg", "'nowhere.jpg' is not a file"),
    (Image.new("L", (101, 100)), "is too large"),
]


def test_arrays_and_tensors_are_pictures_and_what_is_none_is_said() -> None:
    for value, expected in PICTURES:
        if isinstance(expected, str):
            with pytest.raises(ImageError, match=f"^row 0: .*{re.escape(expected)}"):
                picture_of(value, "row 0", MAX_PIXELS)
        else:
            found = picture_of(value, "row 0", MAX_PIXELS)
            assert isinstance(found, Image.Image)
            assert np.array_equal(np.asarray(found), expected)


def test_a_sample_that_cannot_be_read_is_a_reject_named_by_its_row(tmp_path: Path) -> None:
    """Also what is read now and failed when the dataset was listed; but a disk that fails rejects nothing."""
    items: list[Any] = [(picture(row), row) for row in range(20)]
    items[0], items[4], items[5] = (
        ValueError("corrupt\nrecord"),
        (COLOUR / 255, 4),
        (tmp_path / "gone.jpg", 5),
    )
    dataset = Items(items)
    result = convert(dataset, tmp_path / "out", small_recipe("shards"), workers=0, max_rejects=0.5)
    reasons = {rejected.id: rejected.reason for rejected in result.manifest.rejected}
    assert reasons.keys() == {0, 4, 5}
    assert reasons[0] == "cannot be read (ValueError: corrupt record)"
    scan = scan_of(dataset)
    items[0], items[9] = (picture(0), 0), OSError(5, "Input/output error")
    with pytest.raises(ImageError, match="could not be read when the dataset was listed"):
        scan.source.read(scan.samples[0], MAX_PIXELS)
    with pytest.raises(SourceError, match=r"row 9: cannot be read \(Input/output error\)"):
        scan.source.read(scan.samples[9], MAX_PIXELS)


class _Random(Items):
    def __getitem__(self, row: int) -> Any:
        super().__getitem__(row)
        return picture(len(self.asked) % 256), row % 2


def test_a_random_transform_is_refused_and_other_pictures_are_told_apart() -> None:
    with pytest.raises(SourceError, match="changes each time it is read"):
        scan_of(_Random([0] * 20))
    one, other = numbered([0, 1] * 20), Items([(picture(row + 1), row % 2) for row in range(40)])
    assert scan_of(one).digest == scan_of(numbered([0, 1] * 20)).digest != scan_of(other).digest


TWO = ["a", "b"]
BAD: list[tuple[Any, list[str]]] = [
    (Items([{"image": picture(0), "class": 0, "target": 1}]), ["'class', 'target'", "--label"]),
    (numbered([0, 7, 1], classes=TWO), ["row 1: 'label': 7 is not a class"]),
    (numbered(["a", None]), ["row 1: 'label': is empty"]),
    (Items([(picture(0), 1), (picture(1),)]), ["row 1: has no 'label'"]),
    (Items([(picture(0),), (picture(1), 1)]), ["row 0: has no 'label'"]),
    (Items([{"image": picture(0)}, {"image": picture(1), "label": 1}]), ["row 0: has no 'label'"]),
    (
        {"train": numbered([0], classes=TWO), "val": numbered([0], classes=["b", "a"])},
        ["split val", "'b'", "'a'"],
    ),
]


def test_bad_input_is_said_in_one_line() -> None:
    for dataset, mentions in BAD:
        with pytest.raises((SettingError, SourceError)) as caught:
            scan_of(dataset)
        assert [mention for mention in mentions if mention not in str(caught.value)] == []


STRANGE: list[Any] = [
    *(-1, 2**70, math.nan, math.inf, True, None, "", "\ud800", "a\nb", b"a", object(), {}, {"path": 5}),
    *([1, 2], [], ["a"], [[1]], (0, 1), np.int64(1), np.array([1, 2]), np.array(3), np.array(["x"])),
    *(Tensor(np.array(1)), ValueError("a\nb"), KeyError(), RecursionError(), StopIteration()),
]


@pytest.mark.parametrize("usual", [0, "a", [0, 1], 1.5])
@pytest.mark.parametrize("options", [{}, {"target": "class"}, {"target": "number"}, {"fields": ("field",)}])
def test_anything_among_samples_ends_in_one_line_or_in_pictures(usual: Any, options: dict[str, Any]) -> None:
    """As a label and a field; as a picture; and in the place of a sample."""
    for strange in STRANGE:
        whole = {"image": COLOUR, "label": usual, "field": usual}
        for other in ({**whole, "label": strange, "field": strange}, {**whole, "image": strange}, strange):
            for classes in ({}, {"classes": ["a", "b", "c"]}, {"classes": [1, 2]}):
                says = ""
                try:
                    scan = scan_of(Items([whole, other, whole], **classes), **options)
                    assert len(scan.samples) + len(scan.ignored) == 3
                    assert scan.samples.labels.max() < max(1, len(scan.classes))
                    for ref in scan.samples:
                        scan.source.read(ref, MAX_PIXELS)
                except PrecacheError as error:
                    says = str(error)
                assert "\n" not in says


# Labels, fields and splits.


def test_labels_index_the_classes_that_the_dataset_has() -> None:
    cranes = [
        ("crane",),
        ("tench", "T"),
        ("crane",),
    ]  # as in torchvision's ImageNet
    for values, classes, names, expected in (
        ([1, 0, 1], ["zebra", "ant"], ("zebra", "ant"), [1, 0, 1]),  # the order of the dataset
        (["ant", "zebra"], ["zebra", "ant"], ("zebra", "ant"), [1, 0]),
        ([2, 0, 2], ["a", "b", "c"], ("a", "b", "c"), [2, 0, 2]),  # a class without samples stays one
        ([0, 1, 2], cranes, ("crane 0", "tench, T", "crane 2"), [0, 1, 2]),
        ([[], ["0"], ["1"]], ["1", "0"], ("1", "0"), [[], [1], [0]]),  # digits for names
    ):
        scan = scan_of(numbered(values, classes=classes))
        assert scan.classes == names
        assert [ref.label if scan.target == "class" else ref.target for ref in scan.samples] == expected


def test_whole_numbers_below_the_classes_are_samples_without_a_label() -> None:
    """Test splits of Hugging Face are labelled so; without names of classes nothing says what -1 is."""
    for values, options, labels, warned in (
        ([0, -1, 1], {}, {0: 0, 2: 1}, "1 sample of 3"),
        ([0, None, 1], {"target": "class"}, {0: 0, 2: 1}, "1 sample of 3"),
        ([-1, -1], {}, {0: -1, 1: -1}, "no labels"),
        ([0, -1], {"target": "none"}, {0: -1, 1: -1}, ""),
    ):
        scan = scan_of(numbered(values, classes=TWO), **options)
        assert {ref.id: ref.label for ref in scan.samples} == labels
        assert warned in " ".join(scan.warnings)
    for values in ([0, -2], [[0], [-1]]):
        with pytest.raises(SourceError, match=r"row 1: 'label': -\d is not a class"):
            scan_of(numbered(values, classes=TWO))
    with pytest.raises(SourceError, match="-1 is not a class"):
        scan_of(numbered([-1, -1], classes=TWO), target="class")
    assert scan_of(numbered([0.5, -1], classes=TWO)).target == "number"
    scan = scan_of(numbered([0, -1]))
    assert scan.classes == ("-1", "0")
    assert any("the class -1" in warning for warning in scan.warnings)


CHANGED = 7
"""The row whose label the datasets below change, among 12 pictures in 3 classes."""


def _relabelled(dataset: Any) -> Any:
    """One whose class gives another label than the inherited one."""
    inherited = type(dataset).__getitem__

    @functools.wraps(inherited)
    def getter(self: Any, index: int) -> Any:
        image, label = inherited(self, index)
        return image, 0 if index == CHANGED else label

    dataset.__class__ = type("Own", (type(dataset),), {"__getitem__": getter, "__getitems__": None})
    return dataset


SHUFFLED = [9, 2, 7, 0, 11, 4]
DATASETS: dict[str, Callable[[Any, Any], Any]] = {
    "as it is": lambda folder, subset: folder(),
    "its own __getitem__": lambda folder, subset: _relabelled(folder()),
    "a transform": lambda folder, subset: folder(transform=lambda image: image.convert("L")),
    "a target_transform": lambda folder, subset: folder(target_transform=lambda label: min(label, 1)),
    "a subset of a subset": lambda folder, subset: subset(subset(folder(), np.array(SHUFFLED)), [5, 0, 0]),
    "a subset of another __getitem__": lambda folder, subset: subset(_relabelled(folder()), SHUFFLED),
    "a subset with its own": lambda folder, subset: _relabelled(subset(folder(), range(12))),
    "targets that are others": lambda folder, subset: numbered(
        [2, 1, 0], classes=["a", "b", "c"], targets=[2, 1, 1]
    ),
}


@pytest.mark.parametrize("name", DATASETS)
def test_labels_are_those_of_getitem_and_names_those_of_classes(name: str, tmp_path: Path) -> None:
    for row in range(12):
        (tmp_path / "abc"[row // 4]).mkdir(exist_ok=True)
        picture(row).save(tmp_path / "abc"[row // 4] / f"{row:02}.png")
    reason = "the extra 'loaders' is not installed"
    folder = pytest.importorskip("torchvision", reason=reason).datasets.ImageFolder
    subset = pytest.importorskip("torch.utils.data", reason=reason).Subset
    dataset = DATASETS[name](functools.partial(folder, tmp_path), subset)
    scan, samples = scan_of(dataset), [dataset[row] for row in range(len(dataset))]
    assert scan.samples.labels.tolist() == [label for _, label in samples]
    whole = dataset
    while not hasattr(whole, "classes"):
        whole = whole.dataset
    assert list(scan.classes) == whole.classes
    for ref, (image, _) in zip(scan.samples, samples, strict=True):
        read = scan.source.read(ref, 1000)
        read = Image.open(io.BytesIO(read)) if isinstance(read, bytes) else read
        assert (read.mode, read.getpixel((0, 0))) == (image.mode, image.getpixel((0, 0)))


def test_datasets_by_split_are_splits() -> None:
    parts = open_source({"train": numbered([0, 1], classes=TWO), "val": numbered([1], classes=TWO)}).scan()
    found = [(ref.id, ref.split, ref.label) for ref in parts.samples]
    assert found == [(0, "train", 0), (1, "train", 1), (2, "val", 1)]
