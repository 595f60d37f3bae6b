"""Datasets in memory as sources: pictures, labels, and samples that cannot be read."""

import functools
import io
import math
import os
import re
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from precache import convert
from precache.errors import ImageError, PrecacheError, SettingError, SourceError
from precache.sources import open_source
from precache.sources.memory import to_picture
from tests.conftest import small_recipe
from tests.precache.sources.objects import Items, Tensor, labelled_items, picture
from tests.precache.sources.tars import scan_of

GREY = np.arange(40, dtype=np.uint8).reshape(5, 8)
COLOUR = np.stack([GREY, GREY + 50, GREY + 100], axis=-1)
MAX_PIXELS = 10_000


PICTURES: list[tuple[Any, np.ndarray]] = [
    (GREY, GREY),
    (GREY[:, :, None], GREY),
    (COLOUR, COLOUR),
    (Tensor(np.moveaxis(COLOUR, -1, 0)), COLOUR),
    (Tensor(COLOUR), COLOUR),
    (Tensor(GREY[None]), GREY),
]
NO_PICTURES: list[tuple[Any, str]] = [
    (COLOUR / 255, "float64 [5, 8, 3]"),
    (np.moveaxis(COLOUR, -1, 0), "uint8 [3, 5, 8]"),
    ("nowhere.jpg", "'nowhere.jpg'"),
    (Image.new("L", (101, 100)), "10,100"),
]


def test_arrays_and_tensors_are_read_as_pictures() -> None:
    for value, expected in PICTURES:
        image = to_picture(value, "row 0", MAX_PIXELS)
        assert isinstance(image, Image.Image)
        assert np.array_equal(np.asarray(image), expected)


def test_values_that_are_no_pictures_are_refused_with_their_row() -> None:
    for value, detail in NO_PICTURES:
        with pytest.raises(ImageError, match=re.escape(detail)) as raised:
            to_picture(value, "row 0", MAX_PIXELS)
        assert raised.value.path == "row 0"


def test_unreadable_samples_are_rejected(tmp_path: Path) -> None:
    items: list[Any] = [(picture(row), row) for row in range(20)]
    items[0] = ValueError("corrupt\nrecord")
    items[4] = (COLOUR / 255, 4)
    items[5] = (tmp_path / "gone.jpg", 5)
    result = convert(Items(items), tmp_path / "out", small_recipe("shards"), workers=0, max_rejects=0.5)
    reasons = {rejected.id: rejected.reason for rejected in result.manifest.rejected}
    assert reasons.keys() == {0, 4, 5}
    assert reasons[0] == "cannot be read (ValueError: corrupt record)"


def test_a_sample_that_failed_during_the_scan_stays_rejected() -> None:
    items: list[Any] = [ValueError(), *((picture(row), row) for row in range(1, 20))]
    scan = scan_of(Items(items))
    items[0] = (picture(0), 0)
    with pytest.raises(ImageError):
        scan.source.read(scan.samples[0], MAX_PIXELS)


def test_a_failing_disk_is_an_error_and_rejects_nothing() -> None:
    items: list[Any] = [(picture(row), row) for row in range(20)]
    scan = scan_of(Items(items))
    items[9] = OSError(5, "Input/output error")
    with pytest.raises(SourceError, match="row 9", check=lambda error: not isinstance(error, ImageError)):
        scan.source.read(scan.samples[9], MAX_PIXELS)


class Zipped:
    """Dataset over the members of a zip, which it opens when it first reads one."""

    file: zipfile.ZipFile | None = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> tuple[Image.Image, int]:
        if self.file is None:
            self.file = zipfile.ZipFile(self.path)
        return Image.open(io.BytesIO(self.file.read(str(row)))), row % 2


class Reopening(Zipped):
    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}


class OpenedAtOnce(Reopening):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.file = zipfile.ZipFile(path)


class ReopeningInPlace(OpenedAtOnce):
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class Numbered(Reopening):
    """Reads by the number of an open file, which pickle takes for a number like any other."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.descriptor = os.open(path, os.O_RDONLY)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "descriptor": self.descriptor}

    def __getitem__(self, row: int) -> tuple[Image.Image, int]:
        os.lseek(self.descriptor, 0, os.SEEK_CUR)
        return super().__getitem__(row)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (Reopening, ""),
        (OpenedAtOnce, ""),
        (ReopeningInPlace, ""),
        (Zipped, "__getstate__"),
        (Numbered, "anew in each worker process"),
    ],
)
def test_a_dataset_with_an_open_file_is_read_by_workers_or_refused(
    kind: type[Zipped], remedy: str, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / "pictures.zip", "w") as file:
        for row in range(20):
            content = io.BytesIO()
            picture(row).save(content, "PNG")
            file.writestr(str(row), content.getvalue())
    recipe = small_recipe("shards", shard_bytes=1)
    dataset = kind(tmp_path / "pictures.zip")
    with pytest.raises(PrecacheError) if remedy else nullcontext() as raised:
        samples = convert(dataset, tmp_path / "out", recipe, workers=2).manifest.samples
    if raised is None:
        assert samples == 20
    else:
        assert remedy in raised.value.remedy
        assert "workers=0" in raised.value.remedy
    convert(dataset, tmp_path / "out", recipe, workers=0)


class _Random(Items):
    """A dataset whose transform is random."""

    def __getitem__(self, row: int) -> Any:
        super().__getitem__(row)
        return picture(len(self.reads) % 256), row % 2


def test_a_random_transform_is_refused() -> None:
    with pytest.raises(SourceError, check=lambda error: "transform" in error.remedy):
        scan_of(_Random([0] * 20))


def test_the_digest_covers_a_few_pictures() -> None:
    digest = scan_of(labelled_items([0, 1] * 20)).digest
    assert scan_of(labelled_items([0, 1] * 20)).digest == digest
    assert scan_of(Items([(picture(row + 1), row % 2) for row in range(40)])).digest != digest


TWO = ["a", "b"]
BAD: list[tuple[Any, list[str]]] = [
    (Items([{"image": picture(0), "class": 0, "target": 1}]), ["'class', 'target'", "--label"]),
    (labelled_items([0, 7, 1], classes=TWO), ["row 1: 'label': 7"]),
    (labelled_items(["a", None]), ["row 1: 'label'"]),
    (Items([(picture(0), 1), (picture(1),)]), ["row 1", "'label'"]),
    (Items([(picture(0),), (picture(1), 1)]), ["row 0", "'label'"]),
    (Items([{"image": picture(0)}, {"image": picture(1), "label": 1}]), ["row 0", "'label'"]),
    (
        {"train": labelled_items([0], classes=TWO), "val": labelled_items([0], classes=["b", "a"])},
        ["split val", "'b'", "'a'"],
    ),
]
"""A dataset, and the rows, names and flags that its error must have."""


@pytest.mark.parametrize(("dataset", "details"), BAD)
def test_a_bad_dataset_is_refused_in_one_line(dataset: Any, details: list[str]) -> None:
    with pytest.raises((SettingError, SourceError)) as raised:
        scan_of(dataset)
    line = str(raised.value)
    assert "\n" not in line
    assert [detail for detail in details if detail not in line] == []


STRANGE: list[Any] = [
    *(-1, 2**70, math.nan, math.inf, True, None, "", "\ud800", "a\nb", b"a", object(), {}, {"path": 5}),
    *([1, 2], [], ["a"], [[1]], (0, 1), np.int64(1), np.array([1, 2]), np.array(3), np.array(["x"])),
    *(Tensor(np.array(1)), ValueError("a\nb"), KeyError(), RecursionError(), StopIteration()),
]


@pytest.mark.parametrize("usual", [0, "a", [0, 1], 1.5])
@pytest.mark.parametrize("options", [{}, {"target": "class"}, {"target": "number"}, {"fields": ("field",)}])
def test_strange_values_are_samples_or_errors_in_one_line(usual: Any, options: dict[str, Any]) -> None:
    """Each value is used as a label and a field, as a picture, and in the place of a sample."""
    for strange in STRANGE:
        whole = {"image": COLOUR, "label": usual, "field": usual}
        for other in ({**whole, "label": strange, "field": strange}, {**whole, "image": strange}, strange):
            for classes in ({}, {"classes": ["a", "b", "c"]}, {"classes": [1, 2]}):
                line = ""
                try:
                    scan = scan_of(Items([whole, other, whole], **classes), **options)
                    assert len(scan.samples) + len(scan.ignored) == 3
                    assert scan.samples.labels.max() < max(1, len(scan.classes))
                    for ref in scan.samples:
                        scan.source.read(ref, MAX_PIXELS)
                except PrecacheError as error:
                    line = str(error)
                assert "\n" not in line


def test_labels_index_the_classes_of_the_dataset() -> None:
    cranes = [("crane",), ("tench", "T"), ("crane",)]  # tuples of synonyms, as in torchvision's ImageNet
    for values, classes, names, expected in (
        ([1, 0, 1], ["zebra", "ant"], ("zebra", "ant"), [1, 0, 1]),  # the order of the dataset
        (["ant", "zebra"], ["zebra", "ant"], ("zebra", "ant"), [1, 0]),
        ([2, 0, 2], ["a", "b", "c"], ("a", "b", "c"), [2, 0, 2]),  # a class without samples stays one
        ([0, 1, 2], cranes, ("crane 0", "tench, T", "crane 2"), [0, 1, 2]),
        ([[], ["0"], ["1"]], ["1", "0"], ("1", "0"), [[], [1], [0]]),  # digits for names
    ):
        scan = scan_of(labelled_items(values, classes=classes))
        assert scan.classes == names
        assert [ref.label if scan.target == "class" else ref.target for ref in scan.samples] == expected


def test_samples_labelled_minus_one_have_no_label() -> None:
    """Test splits on Hugging Face have the label -1."""
    for values, options, labels, warning in (
        ([0, -1, 1], {}, {0: 0, 2: 1}, "1 sample of 3"),
        ([0, None, 1], {"target": "class"}, {0: 0, 2: 1}, "1 sample of 3"),
        ([-1, -1], {}, {0: -1, 1: -1}, "no labels"),
        ([0, -1], {"target": "none"}, {0: -1, 1: -1}, ""),
    ):
        scan = scan_of(labelled_items(values, classes=TWO), **options)
        assert {ref.id: ref.label for ref in scan.samples} == labels
        assert warning in " ".join(scan.warnings)


def test_negative_labels_are_refused_where_they_cannot_be_missing() -> None:
    for values, options in (([0, -2], {}), ([[0], [-1]], {}), ([-1, -1], {"target": "class"})):
        with pytest.raises(SourceError, match=r"'label': -\d"):
            scan_of(labelled_items(values, classes=TWO), **options)


def test_minus_one_is_a_class_or_a_number_without_class_names() -> None:
    assert scan_of(labelled_items([0.5, -1], classes=TWO)).target == "number"
    scan = scan_of(labelled_items([0, -1]))
    assert scan.classes == ("-1", "0")
    assert any("-1" in warning for warning in scan.warnings)


CHANGED = 7
"""Row whose label `override_getitem` changes, among 12 pictures in 3 classes."""


def override_getitem(dataset: Any) -> Any:
    """Give a dataset a subclass whose `__getitem__` returns another label for one row."""
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
    "its own __getitem__": lambda folder, subset: override_getitem(folder()),
    "a transform": lambda folder, subset: folder(transform=lambda image: image.convert("L")),
    "a target_transform": lambda folder, subset: folder(target_transform=lambda label: min(label, 1)),
    "a subset of a subset": lambda folder, subset: subset(subset(folder(), np.array(SHUFFLED)), [5, 0, 0]),
    "a subset of another __getitem__": lambda folder, subset: subset(override_getitem(folder()), SHUFFLED),
    "a subset with its own": lambda folder, subset: override_getitem(subset(folder(), range(12))),
    "other targets": lambda folder, subset: labelled_items(
        [2, 1, 0], classes=["a", "b", "c"], targets=[2, 1, 1]
    ),
}
"""Function of ImageFolder and Subset that makes a dataset."""


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
        stored = scan.source.read(ref, 1000)
        if isinstance(stored, bytes):
            stored = Image.open(io.BytesIO(stored))
        assert (stored.mode, stored.getpixel((0, 0))) == (image.mode, image.getpixel((0, 0)))


def test_a_mapping_of_datasets_has_their_names_as_splits() -> None:
    train, val = labelled_items([0, 1], classes=TWO), labelled_items([1], classes=TWO)
    scan = open_source({"train": train, "val": val}).scan()
    samples = [(ref.id, ref.split, ref.label) for ref in scan.samples]
    assert samples == [(0, "train", 0), (1, "train", 1), (2, "val", 1)]
