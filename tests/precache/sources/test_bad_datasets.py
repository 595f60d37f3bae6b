"""Datasets that lie, break off and mix what they give, by seed."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from precache import SourceOptions
from precache.errors import ImageError, PrecacheError
from precache.sources import open_source
from tests.precache.sources.objects import Items, Tensor

DATASETS = 200
SQUARE = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
PICTURES: list[Any] = [
    *(SQUARE, Image.fromarray(SQUARE), Tensor(np.moveaxis(SQUARE, -1, 0))),
    *(b"", b"\xff\xd8\xff", "no.jpg", "\udcff\0", None, 3.5, object(), [], {}, {"bytes": b"x"}, {"path": 5}),
    *(SQUARE / 255, SQUARE[:0], SQUARE[None], np.array(["x"])),
    *(ValueError("a\nb"), KeyError(), OSError("broken"), MemoryError(), RecursionError(), StopIteration()),
]
LABELS: list[Any] = [
    *(0, 1, 2, -1, 2**70, 1.5, math.nan, math.inf, True, None, "", "a", "b", "\ud800", "a\nb", b"a"),
    *([0], [1, 2], [], ["a"], [[1]], (0, 1), {}, object()),
    *(np.int64(1), np.array([1, 2]), np.array(3), Tensor(np.array(1))),
]
OPTIONS: list[dict[str, Any]] = [
    *({}, {}, {}, {"target": "class"}, {"target": "classes"}, {"target": "number"}, {"target": "none"}),
    *({"separator": ","}, {"label": "label"}, {"label": "nothing"}, {"image": "image"}, {"split": "split"}),
    *({"fields": ("field",)}, {"fields": ("field", "label")}, {"split": "split", "fields": ("field",)}),
]
CLASSES: list[Any] = [None, None, ["a", "b", "c"], ["a", "a"], [("a", "b"), "c"], "abc", [], [1, 2], {"a": 0}]


def test_datasets_made_of_anything_end_in_one_line_or_in_pictures() -> None:
    right = 0
    for seed in range(DATASETS):
        rng = np.random.default_rng((seed, 13))
        dataset, options = _made(rng), OPTIONS[rng.integers(len(OPTIONS))]
        says = ""
        try:
            right += _read_all(dataset, options)
        except PrecacheError as error:
            says = str(error)
        assert "\n" not in says, seed
    assert right > DATASETS // 10, "some of them are whole"


def _read_all(dataset: Any, options: dict[str, Any]) -> int:
    scan = open_source(dataset, SourceOptions(**options)).scan()
    assert len(scan.samples) == len(dataset.items)
    assert scan.samples.labels.max() < max(1, len(scan.classes))
    for ref in scan.samples:
        says = ""
        try:
            assert isinstance(scan.source.read(ref, 10**6), bytes | Image.Image)
        except ImageError as error:
            says = str(error)
        assert "\n" not in says
    return 1


def _made(rng: np.random.Generator) -> Items:
    """Mostly of one kind; a few samples are of any other."""
    form, strange = rng.integers(3), rng.random() * 0.3
    usual = [0, 1, 2, "a", [0, 1], 1.5][rng.integers(6)]
    items = []
    for _ in range(int(rng.integers(1, 12))):
        value = PICTURES[rng.integers(len(PICTURES) if rng.random() < strange else 3)]
        label = LABELS[rng.integers(len(LABELS))] if rng.random() < strange else usual
        other = LABELS[rng.integers(len(LABELS))] if rng.random() < strange else usual
        mapping = {"image": value, "label": label, "split": "ab"[rng.integers(2)], "field": other}
        item: Any = (mapping, (value, label), value)[form]
        items.append(value if isinstance(value, Exception) else item)
    names = CLASSES[rng.integers(len(CLASSES))]
    attributes = {} if names is None else {"classes": names}
    if rng.random() < 0.2:
        attributes["targets"] = [usual] * len(items)
    return Items(items, **attributes)


def test_a_dataset_that_lies_about_its_length_gives_rejects(tmp_path: Path) -> None:
    class Longer(Items):
        def __len__(self) -> int:
            return 2 * len(self.items)

    scan = open_source(Longer([(SQUARE, 0)] * 3)).scan()
    assert [ref.bytes for ref in scan.samples] == [0, 0, 0, -1, -1, -1]
