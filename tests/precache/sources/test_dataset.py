import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from precache import convert, open_dataset
from precache.engines import processes
from precache.errors import DatasetError, ImageError, SettingError, SourceError
from precache.sources import open_source
from precache.sources.dataset import picture_of
from precache.sources.tree import scan_tree
from tests.conftest import small_recipe
from tests.precache.sources.objects import Items, Tensor, numbered, pairs, picture, scanned

GREY = np.arange(40, dtype=np.uint8).reshape(5, 8)
COLOUR = np.stack([GREY, GREY + 50, GREY + 100], axis=-1)
MAX_PIXELS = 10_000


def shards(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]


def test_a_folder_dataset_gives_the_files_of_its_tree_undecoded(
    converted: dict[str, Path], raw_tree: Path, tmp_path: Path
) -> None:
    torchvision = pytest.importorskip("torchvision", reason="the extra 'loaders' is not installed")
    folder = torchvision.datasets.ImageFolder(raw_tree)
    source = open_source(folder)
    scan = source.scan()
    assert [sample.path for sample in scan.samples] == [sample.path for sample in scan_tree(raw_tree).samples]
    first = scan.samples[0]
    assert scan.source.read(first, MAX_PIXELS**2) == (raw_tree / first.path).read_bytes()
    assert source.paths == (raw_tree,)
    with pytest.raises(SettingError, match="overlap"):
        convert(folder, raw_tree / "out", small_recipe("shards"), workers=0)
    convert(folder, tmp_path / "out", small_recipe("shards"), workers=1)
    assert shards(tmp_path / "out") == shards(converted["shards"])
    assert len(pickle.dumps(scan.source)) < 2000, "workers get no list of a million files"


def test_a_folder_dataset_with_a_transform_is_asked_for_its_samples(raw_tree: Path) -> None:
    torchvision = pytest.importorskip("torchvision", reason="the extra 'loaders' is not installed")
    folder = torchvision.datasets.ImageFolder(raw_tree, transform=torchvision.transforms.Grayscale())
    scan = scanned(folder)
    picture = scan.source.read(scan.samples[0], 10**9)
    assert isinstance(picture, Image.Image)
    assert picture.mode == "L"


@pytest.mark.parametrize("unpacked", [False, True])
def test_a_dataset_that_cannot_be_sent_to_workers_says_workers_0(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unpacked: bool
) -> None:
    """As of a notebook's class: packed by its name, it is not found by a new process."""
    hindrance = _Unpacked() if unpacked else lambda: None
    dataset = Items(pairs(raw_tree), hindrance=hindrance)
    monkeypatch.setattr(processes, "_may_fork", lambda: False)
    with pytest.raises(SettingError, match=r"cannot be sent to worker processes .*workers=0"):
        convert(dataset, tmp_path / "out", small_recipe("shards"), workers=1)


class _Unpacked:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise AttributeError("Can't get attribute 'Mine' on <module '__main__'>")


VALUES = {
    "grey": (GREY, GREY),
    "grey with a channel": (GREY[:, :, None], GREY),
    "colour": (COLOUR, COLOUR),
    "tensor, channels first": (Tensor(np.moveaxis(COLOUR, -1, 0)), COLOUR),
    "tensor, channels last": (Tensor(COLOUR[:, :, :]), COLOUR),
    "grey tensor": (Tensor(GREY[None]), GREY),
    "flat tensor": (Tensor(GREY), GREY),
    "not contiguous": (COLOUR[:, ::-1], COLOUR[:, ::-1]),
}


@pytest.mark.parametrize("name", VALUES)
def test_arrays_and_tensors_are_pictures(name: str) -> None:
    value, expected = VALUES[name]
    picture = picture_of(value, "row 0", MAX_PIXELS)
    assert isinstance(picture, Image.Image)
    assert np.array_equal(np.asarray(picture), expected)


NO_PICTURES = {
    "floats": (COLOUR / 255, r"is float64 \[5, 8, 3\]; expected uint8"),
    "channels first": (np.moveaxis(COLOUR, -1, 0), r"is uint8 \[3, 5, 8\]; expected uint8 \[h, w\]"),
    "four axes": (COLOUR[None], "expected uint8"),
    "no pixels": (GREY[:0], "expected uint8"),
    "float tensor": (Tensor(COLOUR / 255), "leave out the transform"),
    "nothing": (None, "has no picture; expected"),
    "a number": (7, "has int 7, not a picture"),
    "no file": ("nowhere.jpg", "its picture 'nowhere.jpg' is not a file"),
    "NUL": ("a\0b", "is not a file"),
    "a folder": (".", "is not a file"),
    "a URL": ("https://example.org/a.jpg", "is not a file"),
    "empty mapping": ({"bytes": None, "path": None}, "has no picture; expected"),
    "too large": (Image.new("L", (101, 100)), "is too large"),
}


@pytest.mark.parametrize("name", NO_PICTURES)
def test_what_is_no_picture_is_said(name: str) -> None:
    value, says = NO_PICTURES[name]
    with pytest.raises(ImageError, match=says) as caught:
        picture_of(value, "row 0", MAX_PIXELS)
    assert str(caught.value).startswith("row 0: ")


def test_pictures_alone_have_no_labels() -> None:
    scan = scanned(Items([picture(1), picture(2)]))
    assert (scan.target, scan.classes, scan.samples.labels.tolist()) == ("none", (), [-1, -1])


def test_a_sample_that_cannot_be_read_is_a_reject_named_by_its_row(tmp_path: Path) -> None:
    items: list[Any] = [(picture(row), "ab"[row % 2]) for row in range(6)]
    items[0] = ValueError("corrupt\nrecord")
    items[4] = (COLOUR / 255, "a")
    items[5] = (tmp_path / "gone.jpg", "b")
    result = convert(Items(items), tmp_path / "out", small_recipe("shards"), workers=0, max_rejects=0.5)
    reasons = {rejected.id: rejected.reason for rejected in result.manifest.rejected}
    assert reasons[0] == "cannot be read (ValueError: corrupt record)"
    assert "is float64" in reasons[4]
    assert "gone.jpg' is not a file" in reasons[5]
    assert sorted(open_dataset(tmp_path / "out").read_index().ids.tolist()) == [1, 2, 3]


def test_a_sample_that_could_not_be_listed_is_not_stored_with_another_label() -> None:
    items: list[Any] = [(picture(row), row) for row in range(3)]
    items[1] = OSError("a moment ago")
    dataset = Items(items)
    scan = scanned(dataset)
    items[1] = (picture(1), 1)
    with pytest.raises(ImageError, match="could not be read when the dataset was listed"):
        scan.source.read(scan.samples[1], MAX_PIXELS)


def test_a_disk_that_fails_does_not_reject_a_picture() -> None:
    items: list[Any] = [(picture(row), row) for row in range(20)]
    scan = scanned(Items(items))
    items[9] = OSError(5, "Input/output error")
    with pytest.raises(SourceError, match=r"row 9: cannot be read \(Input/output error\)"):
        scan.source.read(scan.samples[9], MAX_PIXELS)


def test_the_same_fault_in_all_samples_stops_at_max_rejects(tmp_path: Path) -> None:
    floats = Items([(COLOUR / 255, 0)] * 300)
    with pytest.raises(DatasetError, match=r"stopped, .* rejected and at most 3 may be.*is float64"):
        convert(floats, tmp_path / "out", small_recipe("shards"), workers=0)


class _Random(Items):
    def __getitem__(self, row: int) -> Any:
        super().__getitem__(row)
        return picture(len(self.asked) % 256), row % 2


def test_a_random_transform_is_refused() -> None:
    with pytest.raises(SourceError, match="changes each time it is read"):
        scanned(_Random([0] * 20))


def test_datasets_of_other_pictures_are_told_apart() -> None:
    one, other = numbered([0, 1] * 20), Items([(picture(row + 1), row % 2) for row in range(40)])
    assert scanned(one).digest != scanned(other).digest
    assert scanned(one).digest == scanned(numbered([0, 1] * 20)).digest


TWO = ["a", "b"]
BAD = {
    "empty": (lambda: Items([]), {}, "has no samples"),
    "nothing readable": (
        lambda: Items([ValueError("broken")] * 30),
        {},
        "row 0: .*broken.*nor can the 15 after",
    ),
    "no dataset": (lambda: 7, {}, "int is not a source; expected a path, or a dataset"),
    "a class": (lambda: Items, {}, "is not a source"),
    "no splits": (dict, {}, "a mapping without splits"),
    "unknown key": (
        lambda: Items([{"image": picture(0)}]),
        {"label": "species"},
        "no column 'species'.*has 'image'",
    ),
    "no image": (
        lambda: Items([{"foto": picture(0)}]),
        {},
        "no column may be the pictures.*'foto'",
    ),
    "named tuples": (lambda: numbered([0]), {"label": "species"}, r"tuples \(picture, label\).*'species'"),
    "option of a tree": (lambda: numbered([0]), {"class_depth": 2}, "--class-depth is not for a dataset"),
    "no class": (
        lambda: numbered([0, 7, 1], classes=TWO),
        {},
        "row 1: 'label': 7 is not a class; expected 0 to",
    ),
    "without labels": (
        lambda: numbered([-1, -1], classes=TWO),
        {},
        "row 0: 'label': -1 is not a class.*'none'",
    ),
    "no such name": (lambda: numbered(["a", "c"], classes=TWO), {}, "row 1: 'label': c is not a class"),
    "mixed": (lambda: numbered([0, "a", 1]), {}, "row 1: 'label': 'a' is text, other rows have a number"),
    "empty label": (lambda: numbered(["a", None]), {}, "row 1: 'label': is empty"),
    "of other shapes": (lambda: Items([(picture(0), 1), (picture(1),)]), {}, "row 1: is not a pair"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_said_in_one_line(name: str, tmp_path: Path) -> None:
    make, options, says = BAD[name]
    with pytest.raises((SettingError, SourceError), match=says) as caught:
        convert(make(), tmp_path / "out", small_recipe("shards"), workers=0, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
