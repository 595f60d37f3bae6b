"""What a dataset's samples are labelled with, and their fields and splits."""

from pathlib import Path

import numpy as np
import pytest

from precache import convert, open_dataset, verify_deep
from precache.errors import SettingError, SourceError
from tests.conftest import small_recipe
from tests.precache.sources.objects import Items, numbered, picture, scanned


def test_classes_keep_the_order_that_the_dataset_has() -> None:
    for labels in ([1, 0, 1], ["ant", "zebra", "ant"]):
        scan = scanned(numbered(labels, classes=["zebra", "ant"]))
        assert scan.classes == ("zebra", "ant")
        assert scan.samples.labels.tolist() == [1, 0, 1]
        assert scan.target == "class"


def test_a_class_without_samples_stays_a_class() -> None:
    scan = scanned(numbered([2, 0, 2], classes=["a", "b", "c"]))
    assert (scan.classes, scan.samples.labels.tolist()) == (("a", "b", "c"), [2, 0, 2])


def test_without_names_integers_name_their_classes_by_size() -> None:
    scan = scanned(numbered([10, 9, 10]))
    assert (scan.classes, scan.samples.labels.tolist()) == (("9", "10"), [1, 0, 1])


def test_lists_are_several_classes_and_numbers_with_fractions_are_numbers() -> None:
    scan = scanned(numbered([[0, 2], [], [1]], classes=["a", "b", "c"]))
    assert (scan.target, scan.classes) == ("classes", ("a", "b", "c"))
    assert scan.samples.targets is not None
    assert [scan.samples.targets.value(row) for row in range(3)] == [[0, 2], [], [1]]
    assert scanned(numbered([0.5, 2.0, 1.0])).target == "number"
    assert scanned(numbered([1, 2, 3]), target="number").target == "number"
    assert scanned(numbered([1, 2, 3]), target="none").classes == ()


def test_names_of_classes_are_told_apart() -> None:
    """As in torchvision's ImageNet: synonyms, and two cranes."""
    scan = scanned(numbered([0, 1, 2], classes=[("crane",), ("tench", "Tinca tinca"), ("crane",)]))
    assert scan.classes == ("crane 0", "tench, Tinca tinca", "crane 2")


def test_labels_are_taken_from_targets_and_no_other_sample_is_read() -> None:
    dataset = numbered([3, 1, 2] * 40, targets=np.array([3, 1, 2] * 40))
    assert scanned(dataset).samples.labels[:3].tolist() == [2, 0, 1]
    assert len(set(dataset.asked)) < 15


def test_targets_that_are_not_what_samples_say_are_not_believed() -> None:
    """Before a transform of targets, or of another split."""
    for attributes in ({"targets": [0, 0, 0]}, {"targets": [3, 1]}, {"labels": ["x", "y", "z"]}):
        scan = scanned(numbered([3, 1, 2], **attributes))
        assert scan.samples.labels.tolist() == [2, 0, 1]
        assert "all its samples were read" in scan.warnings[0]


def test_a_subset_has_the_classes_and_labels_of_the_whole() -> None:
    whole = numbered([0, 1, 1, 0], classes=["a", "b"], targets=[0, 1, 1, 0])
    subset = Items([whole.items[row] for row in (2, 0)], dataset=whole, indices=[2, 0])
    scan = scanned(subset)
    assert (scan.classes, scan.samples.labels.tolist(), scan.warnings) == (("a", "b"), [1, 0], ())


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
    with pytest.raises(SourceError, match="classes of split 'val' are not those of the others"):
        scanned(splits)
    with pytest.raises(SettingError, match="'my val' is no name of a split"):
        scanned({"my val": splits["train"]})
