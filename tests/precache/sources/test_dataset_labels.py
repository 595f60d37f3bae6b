"""What a dataset's samples are labelled with, and their fields and splits."""

import functools
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from precache import convert, open_dataset, verify_deep
from precache.errors import SettingError, SourceError
from precache.sources.base import Scan
from tests.conftest import small_recipe
from tests.precache.sources.objects import Items, numbered, picture, scanned


@pytest.mark.parametrize(
    ("values", "classes", "names", "expected"),
    [
        ([1, 0, 1], ["zebra", "ant"], ("zebra", "ant"), [1, 0, 1]),  # the order of the dataset
        (["ant", "zebra", "ant"], ["zebra", "ant"], ("zebra", "ant"), [1, 0, 1]),
        ([2, 0, 2], ["a", "b", "c"], ("a", "b", "c"), [2, 0, 2]),  # a class without samples stays one
        ([10, 9, 10], None, ("9", "10"), [1, 0, 1]),  # whole numbers by their size
        # as in torchvision's ImageNet: synonyms, and two cranes
        (
            [0, 1, 2],
            [("crane",), ("tench", "Tinca"), ("crane",)],
            ("crane 0", "tench, Tinca", "crane 2"),
            [0, 1, 2],
        ),
        ([[0, 2], [], [1]], ["a", "b", "c"], ("a", "b", "c"), [[0, 2], [], [1]]),
    ],
)
def test_labels_index_the_classes_that_the_dataset_has(
    values: list[Any], classes: list[Any] | None, names: tuple[str, ...], expected: list[Any]
) -> None:
    scan = scanned(numbered(values, **({} if classes is None else {"classes": classes})))
    several = isinstance(expected[0], list)
    assert (scan.target, scan.classes) == ("classes" if several else "class", names)
    assert [ref.target if several else ref.label for ref in scan.samples] == expected


def test_numbers_with_fractions_are_numbers() -> None:
    assert scanned(numbered([0.5, 2.0, 1.0])).target == "number"
    assert scanned(numbered([1, 2, 3]), target="number").target == "number"
    assert scanned(numbered([1, 2, 3]), target="none").classes == ()


def test_targets_that_are_not_what_samples_say_are_not_believed() -> None:
    """Such as those before a transform, or of another split; be it in one row alone."""
    labels = [3, 1, 2, 3, 1, 2, 3]
    for attributes in ({"targets": [3, 1, 2, 3, 2, 2, 3]}, {"targets": [3, 1]}, {"labels": [*"xyzxyzx"]}):
        scan = scanned(numbered(labels, **attributes))
        assert [scan.classes[label] for label in scan.samples.labels] == [*map(str, labels)]
        assert "every sample was read" in scan.warnings[0]


def test_a_subset_has_the_classes_and_labels_of_the_whole() -> None:
    whole = numbered([0, 1, 1, 0], classes=["a", "b"], targets=[0, 1, 1, 0])
    subset = Items([whole.items[row] for row in (2, 0)], dataset=whole, indices=[2, 0])
    scan = scanned(subset)
    assert (scan.classes, scan.samples.labels.tolist()) == (("a", "b"), [1, 0])


CHANGED = 7
"""The row whose label the datasets below change, among 12 pictures in 3 classes."""


def _folder(tree: Path, *, own: Any = None, length: int | None = None, **named: Any) -> Any:
    """An ImageFolder, or of a subclass: `own` makes its `__getitem__` of the inherited one."""
    folder = pytest.importorskip("torchvision", reason="the extra 'loaders' is not installed").datasets
    methods: dict[str, Any] = {}
    if own is not None:
        methods["__getitem__"] = own(folder.ImageFolder.__getitem__)
    if length is not None:
        methods["__len__"] = lambda self: length
    kind = type("Own", (folder.ImageFolder,), methods) if methods else folder.ImageFolder
    return kind(tree, **named)


def _relabelled(inherited: Any) -> Any:
    @functools.wraps(inherited)
    def getter(self: Any, index: int) -> Any:
        image, label = inherited(self, index)
        return image, 0 if index == CHANGED else label

    return getter


def _subset(whole: Any, indices: Any, own: Any = None) -> Any:
    data = pytest.importorskip("torch.utils.data", reason="the extra 'loaders' is not installed")
    if own is None:
        return data.Subset(whole, indices)
    methods = {"__getitem__": own(data.Subset.__getitem__), "__getitems__": None}
    return type("Own", (data.Subset,), methods)(whole, indices)


def _edited(whole: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(whole, name, value)
    return whole


SHUFFLED = [9, 2, 7, 0, 11, 4]
DATASETS: dict[str, Any] = {
    "as it is": _folder,
    "its own __getitem__": lambda tree: _folder(tree, own=_relabelled),
    "its own __len__": lambda tree: _folder(tree, length=5),
    "a transform": lambda tree: _folder(tree, transform=Image.Image.copy),
    "a target_transform": lambda tree: _folder(tree, target_transform=lambda label: min(label, 1)),
    "targets that nobody reads": lambda tree: _edited(_folder(tree), targets=[0] * 12),
    "the same with a transform": lambda tree: _edited(
        _folder(tree, transform=Image.Image.copy), targets=[0] * 12
    ),
    "a subset": lambda tree: _subset(_folder(tree), np.array(SHUFFLED)),
    "a subset of a subset": lambda tree: _subset(_subset(_folder(tree), SHUFFLED), [5, 0, 0]),
    "a subset of another __getitem__": lambda tree: _subset(_folder(tree, own=_relabelled), SHUFFLED),
    "a subset with its own": lambda tree: _subset(_folder(tree), range(12), own=_relabelled),
    "a subset of a target_transform": lambda tree: _subset(
        _folder(tree, target_transform=lambda label: min(label, 1)), [0, CHANGED + 2, 2, 4, 5, CHANGED]
    ),
    "a subset with other classes": lambda tree: _edited(
        _subset(_folder(tree), range(12), own=_relabelled), classes=["x", "y", "z"]
    ),
    "any other": lambda tree: numbered([2, 1, 0, 1], classes=["a", "b", "c"], targets=[2, 1, 1, 1]),
    "digits for names": lambda tree: numbered([[], ["0"], ["1"]], classes=["1", "0"]),
}


@pytest.mark.parametrize("name", DATASETS)
def test_every_label_is_what_the_sample_says_and_its_name_that_of_classes(name: str, tmp_path: Path) -> None:
    for row in range(12):
        (tmp_path / "abc"[row // 4]).mkdir(exist_ok=True)
        picture(row).save(tmp_path / "abc"[row // 4] / f"{row:02}.png")
    dataset = DATASETS[name](tmp_path)
    scan, samples = scanned(dataset), [dataset[row] for row in range(len(dataset))]
    if scan.target == "classes":
        assert scan.samples.targets is not None
        names = [[scan.classes[n] for n in scan.samples.targets.value(row)] for row in range(len(samples))]
        assert names == [label for _, label in samples]
        return
    assert scan.samples.labels.tolist() == [label for _, label in samples]
    whole = dataset
    while not hasattr(whole, "classes"):
        whole = whole.dataset
    assert list(scan.classes) == whole.classes
    for ref, (image, _) in zip(scan.samples, samples, strict=True):
        read = scan.source.read(ref, 1000)
        read = Image.open(io.BytesIO(read)) if isinstance(read, bytes) else read
        assert read.getpixel((0, 0)) == image.getpixel((0, 0))


def test_a_key_of_labels_is_guessed_or_missed_aloud() -> None:
    def scan_of(*keys: str, **options: Any) -> Scan:
        return scanned(
            Items([{"image": picture(row)} | dict.fromkeys(keys, row) for row in range(2)]), **options
        )

    assert scan_of("label").classes == scan_of("class").classes == ("0", "1")
    assert "taken from" not in " ".join(scan_of("label").warnings)
    assert "labels are taken from 'class'" in scan_of("class").warnings[0]
    assert "pictures get no labels" in scan_of("species").warnings[0]
    assert scan_of("species", target="none").warnings == scan_of().warnings == ()
    with pytest.raises(SettingError, match=r"'class', 'target'; say which with --label"):
        scan_of("class", "target")


def test_mappings_have_fields_and_splits(tmp_path: Path) -> None:
    items = [
        {
            "img": picture(row),
            "label": row % 2,
            "caption": f"n° {row}",
            "box": [[1, 2, 3, row]] * row,
            "part": part,
        }
        for row, part in enumerate(["train", "val", "train"])
    ]
    named = {"label": "label", "split": "part", "fields": ("caption", "box")}
    convert(Items(items), tmp_path / "out", small_recipe("webdataset"), workers=0, **named)
    dataset = open_dataset(tmp_path / "out")
    assert dataset.manifest.fields == {"caption": "text", "box": "ragged"}
    index = dataset.read_index("val")
    assert (index.ids.tolist(), index.fields["caption"].value(0)) == ([1], "n° 1")
    assert not verify_deep(tmp_path / "out", Items(items), workers=0).problems


def test_datasets_by_split_are_splits(tmp_path: Path) -> None:
    splits = {"train": numbered([0, 1], classes=["a", "b"]), "val": numbered([1], classes=["a", "b"])}
    manifest = convert(splits, tmp_path / "out", small_recipe("dali"), workers=0).manifest
    assert manifest.samples_per_class == {"train": (1, 1), "val": (0, 1)}
    assert open_dataset(tmp_path / "out").read_index("val").ids.tolist() == [2]
    splits["val"] = numbered([1], classes=["b", "a"])
    with pytest.raises(SourceError, match="split 'val' has other classes than the others"):
        scanned(splits)
    with pytest.raises(SettingError, match="'my val' is not a valid split name"):
        scanned({"my val": splits["train"]})
