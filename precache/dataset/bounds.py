"""Checks of the content of a manifest and of its index, made once when each is read and before it is used.

Checksums find damage, not lies: a dataset may come from a stranger, who computes them anew. So every count is
compared with the number of bytes in the file before memory is allocated, and every number with its range.
The checks raise ValueError; the code that reads the file turns it into a DatasetError that names the path.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from precache.dataset.columns import KINDS, TARGETS, Column
from precache.pictures.images import MAX_KEPT_SIDE
from precache.pictures.jpeg import MAX_EXPANSION

Ints: TypeAlias = npt.NDArray[np.int64]
ArrayType: TypeAlias = tuple[np.dtype[Any], tuple[int, ...]]
"""Dtype and shape of an array in a file."""
_COUNT = range(1 << 62)
_TEXTS_PER_BLOCK = 1 << 16
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
    "is_tree": bool,
    "fields": {str: KINDS},
    "statistics": {str: {"mean": [float], "std": [float], "pixels": _COUNT}},
    "splits": [str],
}
"""Form of `dataset.json`.

A range or a tuple allows any of its values, `float` a share from 0 to 1, `[form]` a list of any length, and
`{str: form}` any keys.
"""
_INT, _BYTE = np.dtype(np.int64), np.dtype(np.uint8)
_ColumnForm: TypeAlias = tuple[Any, tuple[str | int, ...]]
_COLUMNS: dict[str, _ColumnForm] = {
    "ids": (np.int64, ("samples",)),
    "labels": (np.int64, ("samples",)),
    "source_sizes": (np.int32, ("samples", 2)),
    "checksums": (np.uint64, ("samples",)),
    "paths": (np.uint8, ("bytes of paths",)),
    "ends:paths": (np.int64, ("samples",)),
    "shapes": (np.int32, ("samples", 2)),
    "shard:splits": (np.int32, ("shards",)),
    "shard:numbers": (np.int64, ("shards",)),
    "shard:samples": (np.int64, ("shards",)),
    "shard:bytes": (np.int64, ("shards", "files")),
    "shard:crc32c": (np.uint32, ("shards", "files")),
    "shard:largest": (np.int32, ("shards", 2)),
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
"""Dtype and shape of each column of an index; a name in a shape stands for one number throughout the index.
Targets and fields are not listed: their kinds say which dtypes and shapes they may have."""
_TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    "class": {},
    "classes": {"targets": ("ragged",)},
    "number": {"targets": ("int", "float", "vector")},
    "none": {},
}
"""Columns that hold the targets, by `target` of the manifest: name -> kinds that the column may be of."""


def check_content(content: Any) -> None:
    """Raise ValueError unless a manifest's content has the form of `dataset.json` and its parts agree."""
    _check_form(content, _FORM, "the manifest")
    splits = content["splits"]
    if not splits or len(set(splits)) < len(splits) or set(splits) != set(content["samples_per_class"]):
        raise ValueError(f"splits {splits!r:.99} are not those of samples_per_class")
    if unknown := sorted(set(content["statistics"]) - set(splits)):
        raise ValueError(f"statistics of the split {unknown[0]!r:.99}, which there is not")
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
        for item in value:
            _check_form(item, form[0], f"one of {name}")
    elif isinstance(form, dict):
        for key, item in value.items():
            _check_form(item, form[str if str in form else key], f"{name}: {key!r:.99}")


def check_columns(
    columns: Mapping[str, ArrayType], content: Mapping[str, Any], shard_files: int, *, has_shapes: bool
) -> None:
    """Raise ValueError unless the columns of an index are those that its manifest requires.

    Args:
        columns: dtype and shape of each column of the index.
        content: content of the manifest, which `check_content` has accepted.
        shard_files: number of files of each shard.
        has_shapes: whether the stored pictures have sizes of their own.
    """
    required = _required_columns(content, has_shapes=has_shapes)
    kinds = {**_TARGETS[content["target"]]}
    kinds |= {f"value:{name}": (kind,) for name, kind in content["fields"].items()}
    for name, allowed_kinds in kinds.items():
        dtype, shape = columns.get(name, (_INT, ()))
        has_ends = f"ends:{name}" in columns
        are_indices = dtype == _INT and len(shape) == 1
        must_be_indices = content["target"] == "classes" and name == "targets"
        if (must_be_indices and not are_indices) or _kind(dtype, shape, has_ends) not in allowed_kinds:
            expected_kinds = " or ".join(allowed_kinds)
            raise ValueError(f"column {name!r:.99} is {dtype} {[*shape]}, expected {expected_kinds}")
        required[name] = dtype, (shape if has_ends else ("samples", *shape[1:]))
        if has_ends:
            required[f"ends:{name}"] = np.int64, ("samples",)
    for name in sorted(required.keys() ^ columns.keys()):
        problem = "is missing" if name in required else "is none of such an index"
        raise ValueError(f"column {name!r:.99} {problem}")
    counts = {
        "files": shard_files,
        "rejected": content["counts"]["rejected"],
        "ignored": content["counts"]["ignored"],
    }
    for name, (dtype, shape) in columns.items():
        required_dtype, sides = required[name]
        if dtype != np.dtype(required_dtype) or len(shape) != len(sides):
            raise ValueError(
                f"column {name!r:.99} is {dtype} {[*shape]}, expected {np.dtype(required_dtype)}"
            )
        for count, side in zip(shape, sides, strict=True):
            # the first column whose shape has a name sets the number for which that name stands
            expected = counts.setdefault(side, count) if isinstance(side, str) else side
            if count != expected:
                raise ValueError(f"column {name!r:.99} has {count:,} {side}, expected {expected:,}")


def _required_columns(content: Mapping[str, Any], *, has_shapes: bool) -> dict[str, _ColumnForm]:
    """Select the columns of `_COLUMNS` that an index must have by its manifest."""
    left_out = {part for part in ("rejected", "ignored") if not content["counts"][part]}
    if not has_shapes:
        left_out |= {"shapes", "shard:largest"}
    return {
        name: column
        for name, column in _COLUMNS.items()
        if name not in left_out and name.removeprefix("ends:").partition(":")[0] not in left_out
    }


def _kind(dtype: np.dtype[Any], shape: tuple[int, ...], has_ends: bool) -> str:
    """Kind of a column of this dtype and shape, one of KINDS; empty if it is of no kind."""
    if dtype == _BYTE:
        return "text" if has_ends and len(shape) == 1 else ""
    if dtype not in (_INT, np.dtype(np.float64)) or len(shape) not in (1, 2):
        return ""
    if has_ends:
        return "ragged"
    if len(shape) == 2:
        return "vector"
    return "int" if dtype == _INT else "float"


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Limits that the values of the columns of samples are checked against when a column is first used.

    Attributes:
        ids: upper bound of the ids, exclusive.
        classes: number of classes.
        target: kind of label, one of TARGETS.
        channels: number of channels of the stored pictures.
        starts: int64 [shards], row of each shard's first sample.
        max_bytes: int64 [shards], bytes that the pixels of a shard can have, see `max_pixels_bytes`.
        largest: int32 [shards, 2], greatest height and width of a picture in each shard; None where all
            pictures have one size.
    """

    ids: int
    classes: int
    target: str
    channels: int
    starts: Ints
    max_bytes: Ints
    largest: npt.NDArray[np.int32] | None

    def check(self, name: str, column: Column) -> None:
        """Raise ValueError if a value of the column of this name, with a row per sample, is out of range."""
        values = column.values
        low, high = {
            "ids": (0, self.ids),
            "labels": (0, self.classes) if self.target == "class" else (-1, 0),
            "targets": (0, self.classes) if self.target == "classes" else (None, None),
            "source_sizes": (1, None),
            "shapes": (1, MAX_KEPT_SIDE + 1),
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
            pixels_bytes = np.add.reduceat(pixels, self.starts) * self.channels
            too_large = np.maximum.reduceat(values, self.starts) > self.largest
            wrong_shards = (pixels_bytes > self.max_bytes) | too_large.any(axis=1)
            if wrong_shards.any():
                number = int(wrong_shards.argmax())
                raise ValueError(f"the shapes of the pictures in shard {number:,} exceed what it can hold")


def _are_distinct(ids: Ints) -> bool:
    """Whether all ids are different; none is negative."""
    limit = int(ids.max(initial=-1)) + 1
    if limit > ids.nbytes:  # a few of very many ids, or a lie: a table of all ids would take too much memory
        ranked = np.sort(ids)
        return not (ranked[1:] == ranked[:-1]).any()
    is_used = np.zeros(limit, np.bool_)  # thirty times as fast as sorting ten million ids
    is_used[ids] = True
    return int(is_used.sum()) == len(ids)


def _check_text(column: Column) -> None:
    """Raise ValueError unless every text of the column is UTF-8."""
    values, ends = column.values, column.ends
    assert ends is not None
    begin = 0
    for first in range(0, len(ends), _TEXTS_PER_BLOCK):  # decoded texts take memory
        part = ends[first : first + _TEXTS_PER_BLOCK]
        stop = int(part[-1])
        values[begin:stop].tobytes().decode()
        starts = part[part < len(values)]
        if ((values[starts] & 0xC0) == 0x80).any():
            raise ValueError("a text ends within a character")
        begin = stop


def max_pixels_bytes(shard_bytes: Ints, *, holds_pixels: bool) -> Ints:
    """Compute the most bytes of pixels that shards of these sizes can hold, int64 [shards].

    Args:
        shard_bytes: int64 [shards], size of each shard's file in bytes.
        holds_pixels: whether the shards hold pixels; else they hold JPEGs, which expand when decoded.
    """
    return shard_bytes if holds_pixels else np.minimum(shard_bytes, 1 << 48) * MAX_EXPANSION
