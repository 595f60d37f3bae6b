"""What is known of every sample of a dataset without opening a shard, in two safetensors files.

`index.safetensors`, of the samples, in written order:

    ids               int64  [n]     ranks in the sorted scan of the source
    labels            int64  [n]     indices of the manifest's classes
    source_sizes      int32  [n, 2]  width and height of the upright source picture, in pixels
    checksums         uint64 [n]     XXH3-64 of what is stored: the pixels of `shards`, else the JPEG
    source_checksums  uint64 [n]     XXH3-64 of the source file
    paths             uint8  [sum]   paths in the source, one behind the other
    path_ends         int64  [n]     where each of them ends
    value:NAME        see `precache.dataset.columns`: the field of this name; ends:NAME where it has ends
    targets, target_ends             likewise, where the samples are not labelled with one class each
    shapes            int32  [n, 2]  height and width of what is stored, in pixels, where these vary
    mask_checksums    uint64 [n]     XXH3-64 of the pixels of the masks, where there are any
    removed           uint8  [n]     1: an update found the picture gone or changed, and it is served no more;
                                     only where there are such

`source.safetensors`, of all pictures of the source, rejected ones too, by their ids:

    bytes             int64  [m]     sizes of the files
    modified_ns       int64  [m]     when they were last written, as the file system counts
    checksums         uint64 [m]     XXH3-64 of the files

An update (see `precache.conversion.update`) writes both anew, with its number in their names, since somebody
may be reading the ones before: `index-00001.safetensors`.

The rows of a shard are one range of each column, and of each of these `precache.dataset.shard_table` has a
checksum: who needs those of a few shards alone reads no more, see `precache.dataset.index_rows`.

It tells whether a source is still what it was, and is no part of a dataset's identity: a copy of a tree
has other times.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from precache.dataset import columns
from precache.dataset.arrays import REMEDY as REMEDY  # noqa: PLC0414 (exported)
from precache.dataset.arrays import Arrays, damaged, read_arrays, write_arrays
from precache.dataset.arrays import checksum_of as checksum_of  # noqa: PLC0414 (exported)
from precache.dataset.columns import Column
from precache.dataset.files import FileEntry
from precache.errors import SampleError

INDEX_NAME = "index.safetensors"
SOURCE_STATE_NAME = "source.safetensors"
Ints: TypeAlias = npt.NDArray[np.int64]
Sizes: TypeAlias = npt.NDArray[np.int32]
Checksums: TypeAlias = npt.NDArray[np.uint64]


class RowChecksums(NamedTuple):
    """What tells whether rows of an index are as they were written.

    Attributes:
        header: XXH3-64 of its header.
        columns: uint64 [shards, columns], XXH3-64 of each shard's rows of each column, by the columns' names.
    """

    header: int
    columns: Checksums


@dataclass(frozen=True, slots=True, eq=False)
class SampleIndex:
    """The columns of `index.safetensors`, see there."""

    ids: Ints
    labels: Ints
    source_sizes: Sizes
    checksums: Checksums
    source_checksums: Checksums
    paths: bytes
    path_ends: Ints
    targets: Column | None = None
    fields: Mapping[str, Column] = field(default_factory=dict)
    shapes: Sizes | None = None
    mask_checksums: Checksums | None = None
    removed: npt.NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, rows: npt.NDArray[np.bool_]) -> "SampleIndex":
        """The samples of the rows that are True."""
        lengths = np.diff(self.path_ends, prepend=0)
        return SampleIndex(
            ids=self.ids[rows],
            labels=self.labels[rows],
            source_sizes=self.source_sizes[rows],
            checksums=self.checksums[rows],
            source_checksums=self.source_checksums[rows],
            paths=np.frombuffer(self.paths, np.uint8)[np.repeat(rows, lengths)].tobytes(),
            path_ends=np.cumsum(lengths[rows]),
            targets=None if self.targets is None else self.targets.select(rows),
            fields=columns.select(self.fields, rows),
            shapes=None if self.shapes is None else self.shapes[rows],
            mask_checksums=None if self.mask_checksums is None else self.mask_checksums[rows],
            removed=None if self.removed is None else self.removed[rows],
        )

    def at(self, rows: Ints) -> "SampleIndex":
        """The samples of these rows, int64 [m], ascending."""
        chosen = np.zeros(len(self), np.bool_)
        chosen[rows] = True
        return self.select(chosen)

    def join(self, other: "SampleIndex") -> "SampleIndex":
        """Its samples, then those of `other`, which has the same columns; without `removed`."""
        names = {column.name for column in fields(self)} - {"path_ends", "removed"}
        return SampleIndex(
            **{name: _join(getattr(self, name), getattr(other, name)) for name in names},
            path_ends=np.concatenate((self.path_ends, other.path_ends + len(self.paths))),
        )

    @property
    def served(self) -> npt.NDArray[np.bool_]:
        """bool [n]: those that are not removed."""
        return np.ones(len(self), np.bool_) if self.removed is None else ~self.removed

    def check(self, row: int, stored: bytes | npt.NDArray[np.uint8], file: str, damage: str = "") -> None:
        """Compare what was read of the sample at `row`, from the shard `file`, with what was written.

        Args:
            damage: what the format's own checksum says is wrong with it, see `StoredSample`.

        Raises:
            SampleError: they differ, or it is damaged.
        """
        if damage or checksum_of(stored) != self.checksums[row]:
            raise self.error(row, file, damage)

    def check_mask(self, row: int, mask: npt.NDArray[np.uint8], file: str) -> None:
        """As `check`, of the pixels of its mask."""
        if self.mask_checksums is not None and checksum_of(mask) != self.mask_checksums[row]:
            raise self.error(row, file, f"its mask changed since it was written (checksum); {REMEDY}")

    def error(self, row: int, file: str, damage: str = "") -> SampleError:
        """What to raise of the damaged sample at `row`, see `check`."""
        reason = damage or f"its bytes changed since they were written (checksum); {REMEDY}"
        return SampleError(f"{file}: sample {self.ids[row]} ({self.path(row)})", reason)

    def path(self, row: int) -> str:
        """The path in the source of the sample at `row`."""
        start = int(self.path_ends[row - 1]) if row else 0
        return os.fsdecode(self.paths[start : int(self.path_ends[row])])


@dataclass(frozen=True, slots=True, eq=False)
class SourceState:
    """The columns of `source.safetensors`, see there."""

    bytes: Ints
    modified_ns: Ints
    checksums: Checksums

    def __len__(self) -> int:
        return len(self.bytes)


def _join(one: Any, other: Any) -> Any:
    if isinstance(one, Mapping):
        return {name: _join(value, other[name]) for name, value in one.items()}
    if one is None or isinstance(one, bytes):
        return None if one is None else one + other
    return one.join(other) if isinstance(one, Column) else np.concatenate((one, other))


def name_after(name: str, updates: int) -> str:
    """Of INDEX_NAME or SOURCE_STATE_NAME in a dataset that was updated so many times."""
    return name.replace(".", f"-{updates:05d}.") if updates else name


def write_index(
    folder: Path, index: SampleIndex, shard_samples: Ints, updates: int = 0
) -> tuple[FileEntry, RowChecksums]:
    """Write the index of a dataset of so many updates, whose shards hold so many samples, into `folder`."""
    arrays = _to_arrays(index)
    entry, header = write_arrays(folder / name_after(INDEX_NAME, updates), arrays)
    starts = np.concatenate(([0], np.cumsum(shard_samples)))
    sums = [_checksums(arrays[name], *_bounds(name, arrays, starts)) for name in sorted(arrays)]
    return entry, RowChecksums(header.checksum, np.array(sums, np.uint64).T.reshape(len(shard_samples), -1))


def ends_of(name: str) -> str:
    """The name of the column that says where each sample's values of column `name` end, if it has one."""
    if name.startswith(columns.VALUES):
        return columns.ENDS + name.removeprefix(columns.VALUES)
    return {"paths": "path_ends", "targets": "target_ends"}.get(name, "")


def _bounds(name: str, arrays: Arrays, starts: Ints) -> tuple[Ints, Ints]:
    """Where the values of each shard begin and end in a column; its samples are the rows from `starts` on."""
    if (ends := arrays.get(ends_of(name))) is not None:
        starts = np.concatenate((np.zeros(1, np.int64), ends))[starts]
    return starts[:-1], starts[1:]


def _checksums(array: npt.NDArray[Any], first: Ints, last: Ints) -> list[int]:
    rows = np.ascontiguousarray(array)
    row_bytes = rows.itemsize * math.prod(rows.shape[1:])
    content = rows.reshape(-1).view(np.uint8).data
    ranges = zip((first * row_bytes).tolist(), (last * row_bytes).tolist(), strict=True)
    return [checksum_of(content[start:stop]) for start, stop in ranges]


def _to_arrays(index: SampleIndex) -> Arrays:
    arrays: Arrays = {
        "ids": index.ids,
        "labels": index.labels,
        "source_sizes": index.source_sizes,
        "checksums": index.checksums,
        "source_checksums": index.source_checksums,
        "paths": np.frombuffer(index.paths, np.uint8),
        "path_ends": index.path_ends,
    }
    for name, column in index.fields.items():
        arrays |= columns.to_arrays(name, column)
    if index.targets is not None:
        arrays["targets"] = index.targets.values
        if index.targets.ends is not None:
            arrays["target_ends"] = index.targets.ends
    if index.shapes is not None:
        arrays["shapes"] = index.shapes
    if index.mask_checksums is not None:
        arrays["mask_checksums"] = index.mask_checksums
    if index.removed is not None and index.removed.any():
        arrays["removed"] = index.removed.astype(np.uint8)
    return arrays


def write_source_state(folder: Path, state: SourceState, updates: int = 0) -> FileEntry:
    """Write the state of the source into `folder`, of a dataset of so many updates."""
    arrays: Arrays = {
        "bytes": state.bytes,
        "modified_ns": state.modified_ns,
        "checksums": state.checksums,
    }
    return write_arrays(folder / name_after(SOURCE_STATE_NAME, updates), arrays)[0]


def read_index(folder: Path, entry: FileEntry) -> SampleIndex:
    """The index that `entry` of a manifest describes.

    Raises:
        DatasetError: it cannot be read, or is not as it was written.
    """
    arrays = read_arrays(folder / entry.name, entry)
    required = {
        "ids": np.int64,
        "labels": np.int64,
        "source_sizes": np.int32,
        "checksums": np.uint64,
        "source_checksums": np.uint64,
        "path_ends": np.int64,
    }
    optional = {"shapes": np.int32, "mask_checksums": np.uint64, "removed": np.uint8}
    required |= {name: dtype for name, dtype in optional.items() if name in arrays}
    samples = len(arrays.get("ids", ()))
    wrong = [
        name
        for name, dtype in required.items()
        if name not in arrays
        or arrays[name].dtype != dtype
        or arrays[name].shape != ((samples, 2) if name in ("source_sizes", "shapes") else (samples,))
    ]
    if wrong:
        raise damaged(folder / entry.name, f"column {wrong[0]} is missing or of another shape")
    paths = arrays.get("paths")
    ends = arrays["path_ends"]
    if (
        paths is None
        or paths.dtype != np.uint8
        or paths.ndim != 1
        or np.any(np.diff(ends, prepend=0) < 0)
        or (ends[-1] if samples else 0) != len(paths)
    ):
        raise damaged(folder / entry.name, "its paths do not add up")
    try:
        named = columns.from_arrays(arrays)
        targets = Column(arrays["targets"], arrays.get("target_ends")) if "targets" in arrays else None
    except ValueError as error:
        raise damaged(folder / entry.name, f"a field has {error}") from error
    known = (*named.values(), *([] if targets is None else [targets]))
    if any(len(column) != samples for column in known):
        raise damaged(folder / entry.name, "a field has another number of values")
    return SampleIndex(
        ids=arrays["ids"],
        labels=arrays["labels"],
        source_sizes=arrays["source_sizes"],
        checksums=arrays["checksums"],
        source_checksums=arrays["source_checksums"],
        paths=paths.tobytes(),
        path_ends=ends,
        targets=targets,
        shapes=arrays.get("shapes"),
        mask_checksums=arrays.get("mask_checksums"),
        fields=named,
        removed=arrays["removed"].astype(np.bool_) if "removed" in arrays else None,
    )


def read_source_state(folder: Path, entry: FileEntry) -> SourceState:
    """The state of the source that `entry` of a manifest describes.

    Raises:
        DatasetError: it cannot be read, or is not as it was written.
    """
    arrays = read_arrays(folder / entry.name, entry)
    required = {"bytes": np.int64, "modified_ns": np.int64, "checksums": np.uint64}
    shapes = {arrays[name].shape if name in arrays else None for name in required}
    if len(shapes) != 1 or any(arrays[name].dtype != dtype for name, dtype in required.items()):
        raise damaged(folder / entry.name, "its columns are not as this project writes them")
    return SourceState(*(arrays[name] for name in required))
