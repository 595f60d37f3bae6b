"""What a manifest and its index may say: looked at once, where each is read, before anything relies on it.

Checksums tell damage, not lies: a dataset may come from a stranger, who computes them anew. So every count is
compared with the bytes that there are before memory is asked for, and every number with what it stands for.
Here ValueError says what is wrong; who reads the file makes a DatasetError of it that names its path.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from precache.dataset.columns import KINDS, TARGETS, Column
from precache.pictures.images import MAX_KEPT_SIDE
from precache.pictures.jpeg import MOST_EXPANSION

Ints: TypeAlias = npt.NDArray[np.int64]
Place: TypeAlias = tuple[np.dtype[Any], tuple[int, ...]]
"""What an array of a file is: dtype and shape."""
_COUNT = range(1 << 62)
_TEXTS = 1 << 16
_FORM: dict[str, Any] = {
    "version": int,
    "checksum": str,
    "counts": dict.fromkeys(("scanned", "converted", "rejected", "ignored"), _COUNT),
    "recipe": {str: object},  # `Recipe` looks at its values
    "made_by": {str: str},
    "source_digest": str,
    "source_bytes": _COUNT,
    "classes": [str],
    "samples_per_class": {str: [_COUNT]},
    # `FileEntry` looks at the first three
    "index": {"name": str, "bytes": _COUNT, "crc32c": str, "header": str, "columns": {str: str}},
    "source_options": {str: object},
    "target": TARGETS,
    "fields": {str: KINDS},
    "statistics": {str: {"mean": [float], "std": [float], "pixels": _COUNT}},
    "next_id": _COUNT,
    "updates": [{"added": _COUNT, "removed": _COUNT, "made_by": {str: str}}],
    "removed": {str: _COUNT},
    "splits": [str],
}
"""What `dataset.json` holds. A range, tuple: one of it; a float: a share, 0 to 1; {str: ...}: any keys."""
_INT, _BYTE = np.dtype(np.int64), np.dtype(np.uint8)
_COLUMNS: dict[str, tuple[Any, tuple[str | int, ...]]] = {
    "ids": (np.int64, ("samples",)),
    "labels": (np.int64, ("samples",)),
    "source_sizes": (np.int32, ("samples", 2)),
    "checksums": (np.uint64, ("samples",)),
    "paths": (np.uint8, ("bytes of paths",)),
    "ends:paths": (np.int64, ("samples",)),
    "shapes": (np.int32, ("samples", 2)),
    "mask_checksums": (np.uint64, ("samples",)),
    "removed": (np.uint8, ("samples",)),
    "shard:splits": (np.int32, ("shards",)),
    "shard:numbers": (np.int64, ("shards",)),
    "shard:samples": (np.int64, ("shards",)),
    "shard:bytes": (np.int64, ("shards", "files")),
    "shard:crc32c": (np.uint32, ("shards", "files")),
    "shard:largest": (np.int32, ("shards", 2)),
    "source:bytes": (np.int64, ("pictures",)),
    "source:modified_ns": (np.int64, ("pictures",)),
    "source:checksums": (np.uint64, ("pictures",)),
    "rejected:ids": (np.int64, ("rejected",)),
    **{
        name: column
        for part in ("rejected", "ignored")
        for text in ("paths", "reasons")
        for name, column in (
            (f"{part}:{text}", (np.uint8, (f"bytes of {part}:{text}",))),
            (f"ends:{part}:{text}", (np.int64, (part,))),
        )
    },
}
"""Dtype and shape of the columns of an index; those of targets and fields are told by their kinds."""
_TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    "class": {},
    "classes": {"targets": ("ragged",)},
    "number": {"targets": ("int", "float", "vector")},
    "none": {},
}
"""Kinds of the column of targets."""


def check_content(content: Any) -> None:
    """Compare the content of a manifest with its form, and its parts with each other."""
    _check_form(content, _FORM, "the manifest")
    splits = content["splits"]
    if not splits or len(set(splits)) < len(splits) or set(splits) != set(content["samples_per_class"]):
        raise ValueError(f"splits {splits!r:.99} are not those of samples_per_class")
    for name in ("statistics", "removed"):
        if unknown := sorted(set(content[name]) - set(splits)):
            raise ValueError(f"{name} of the split {unknown[0]!r:.99}, which there is not")
    if any(len(counts) != len(content["classes"]) for counts in content["samples_per_class"].values()):
        raise ValueError("samples_per_class has other classes")
    for name, option in content["source_options"].items():
        are_texts = all(isinstance(word, str) for word in (option if isinstance(option, list) else [option]))
        if not are_texts and not (type(option) is int and option in _COUNT):
            raise ValueError(f"source_options: {name!r:.99} is {option!r:.99}")


def _check_form(value: Any, form: Any, name: str) -> None:
    if isinstance(form, range):
        right = type(value) is int and value in form
    elif isinstance(form, tuple):
        right = isinstance(value, str) and value in form
    elif form is float:
        right = type(value) in (int, float) and 0 <= value <= 1
    elif isinstance(form, dict):
        right = isinstance(value, dict) and (str in form or value.keys() == form.keys())
    else:
        right = isinstance(value, list if isinstance(form, list) else form)
    if not right:
        raise ValueError(f"{name} is {value!r:.99}")
    if isinstance(form, list):
        for each in value:
            _check_form(each, form[0], f"one of {name}")
    elif isinstance(form, dict):
        for key, each in value.items():
            _check_form(each, form[str if str in form else key], f"{name}: {key!r:.99}")


def check_places(
    places: Mapping[str, Place], content: Mapping[str, Any], sizes: Mapping[str, int], varies: bool
) -> None:
    """Compare the columns of an index with what the manifest says that they are.

    Args:
        sizes: how many `files` a shard has.
        varies: whether the stored pictures have sizes of their own.
    """
    left_out = {part for part in ("rejected", "ignored") if not content["counts"][part]}
    left_out |= {"shapes", "shard:largest"} if not varies else set()
    left_out |= {"removed"} if not content["removed"] else set()
    due = {
        name: column
        for name, column in _COLUMNS.items()
        if name not in left_out and name.removeprefix("ends:").partition(":")[0] not in left_out
    }
    kinds = {**_TARGETS[content["target"]]}
    kinds |= {f"value:{name}": (kind,) for name, kind in content["fields"].items()}
    for name, known in kinds.items():
        dtype, shape = places.get(name, (_INT, ()))
        has_ends = f"ends:{name}" in places
        are_indices = dtype == _INT and len(shape) == 1
        wrong = content["target"] == "classes" and name == "targets" and not are_indices
        if wrong or _kind(dtype, shape, has_ends) not in known:
            raise ValueError(f"column {name!r:.99} is {dtype} {[*shape]}, expected {' or '.join(known)}")
        due[name] = dtype, (shape if has_ends else ("samples", *shape[1:]))
        if has_ends:
            due[f"ends:{name}"] = np.int64, ("samples",)
    for name in sorted(due.keys() ^ places.keys()):
        if name != "mask_checksums":
            problem = "is missing" if name in due else "is none of such an index"
            raise ValueError(f"column {name!r:.99} {problem}")
    found = {**sizes, **{part: content["counts"][part] for part in ("rejected", "ignored")}}
    for name, (dtype, shape) in places.items():
        as_written, sides = due[name]
        if dtype != np.dtype(as_written) or len(shape) != len(sides):
            raise ValueError(f"column {name!r:.99} is {dtype} {[*shape]}, expected {np.dtype(as_written)}")
        for count, side in zip(shape, sides, strict=True):
            expected = found.setdefault(side, count) if isinstance(side, str) else side
            if count != expected:
                raise ValueError(f"column {name!r:.99} has {count:,} {side}, expected {expected:,}")
    boxes = f"value:{content['source_options'].get('boxes')}"
    if "boxes" in content["source_options"]:
        shape = places[boxes][1] if kinds.get(boxes) == ("ragged",) else ()
        if shape[1:] != (4,) and shape[:1] != (0,):
            raise ValueError(f"{boxes!r:.99} is no field of boxes")


def _kind(dtype: np.dtype[Any], shape: tuple[int, ...], has_ends: bool) -> str:
    """One of KINDS, or nothing."""
    number = dtype in (_INT, np.dtype(np.float64))
    if not has_ends:
        wide = {1: "int" if dtype == _INT else "float", 2: "vector"}
        return wide.get(len(shape), "") if number else ""
    if dtype == _BYTE:
        return "text" if len(shape) == 1 else ""
    return "ragged" if number and len(shape) in (1, 2) else ""


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """What the columns of samples are compared with when they are first asked for.

    Attributes:
        ids: above all of them.
        classes: how many there are.
        target: one of TARGETS.
        pixel_bytes: of a stored pixel.
        starts: int64 [shards], the row of each shard's first sample.
        most_bytes: int64 [shards], that the pixels of a shard can have, see `most_pixels_bytes`.
        largest: int32 [shards, 2], height and width that none of its pictures exceeds; None: all of one size.
    """

    ids: int
    classes: int
    target: str
    pixel_bytes: int
    starts: Ints
    most_bytes: Ints
    largest: npt.NDArray[np.int32] | None

    def check(self, name: str, column: Column) -> None:
        """Compare a column of all samples."""
        values = column.values
        low, high = {
            "ids": (0, self.ids),
            "labels": (0, self.classes) if self.target == "class" else (-1, 0),
            "targets": (0, self.classes) if self.target == "classes" else (None, None),
            "source_sizes": (1, None),
            "shapes": (1, MAX_KEPT_SIDE + 1),
            "removed": (0, 2),
        }.get(name, (None, None))
        if low is not None and len(values) and values.min() < low:
            raise ValueError(f"{values.min():,} in column {name}")
        if high is not None and len(values) and values.max() >= high:
            raise ValueError(f"{values.max():,} in column {name}, expected less than {high:,}")
        if name == "ids" and not _are_distinct(values):
            raise ValueError("a sample is there twice")
        if column.kind == "text" and name != "paths":
            _check_text(column)
        if name == "shapes":
            assert self.largest is not None
            pixels = np.multiply(values[:, 0], values[:, 1], dtype=np.int64)
            pixels_bytes = np.add.reduceat(pixels, self.starts) * self.pixel_bytes
            too_large = np.maximum.reduceat(values, self.starts) > self.largest
            wrong = (pixels_bytes > self.most_bytes) | too_large.any(axis=1)
            if wrong.any():
                raise ValueError(
                    f"the shapes of the pictures in shard {int(wrong.argmax()):,} exceed what it can hold"
                )


def _are_distinct(ids: Ints) -> bool:
    """Whether no id, from 0 on, is there twice."""
    above = int(ids.max(initial=-1)) + 1
    if above > ids.nbytes:  # few of many, or a lie
        ranked = np.sort(ids)
        return not (ranked[1:] == ranked[:-1]).any()
    seen = np.zeros(above, np.bool_)  # thirty times as fast as to sort ten million
    seen[ids] = True
    return int(seen.sum()) == len(ids)


def _check_text(column: Column) -> None:
    values, ends = column.values, column.ends
    assert ends is not None
    begin = 0
    for first in range(0, len(ends), _TEXTS):  # some at a time: decoded, they take memory
        part = ends[first : first + _TEXTS]
        stop = int(part[-1])
        values[begin:stop].tobytes().decode()
        starts = part[part < len(values)]
        if ((values[starts] & 0xC0) == 0x80).any():
            raise ValueError("a text ends within a character")
        begin = stop


def most_pixels_bytes(shard_bytes: Ints, *, holds_pixels: bool) -> Ints:
    """int64 [shards], the most bytes of pixels that shards of so many bytes hold."""
    return shard_bytes if holds_pixels else np.minimum(shard_bytes, 1 << 48) * MOST_EXPANSION
