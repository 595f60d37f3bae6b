"""Protocol of a source of samples, and the scan that lists its samples.

A source lists its samples once, in the process that converts (`scan`). It is then pickled and sent to worker
processes, which read the pictures (`read`). `precache.sources` has the list of all kinds of sources.
"""

import hashlib
import os
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np
from PIL import Image

from precache.dataset import columns
from precache.dataset.columns import Column, Ints
from precache.dataset.index import Checksums, Sizes
from precache.errors import ImageError, SettingError
from precache.pictures.kinds import decoder_remedy, unreadable_extensions
from precache.recipe import Recipe
from precache.reporting import quantity, warn
from precache.storage import checksum_of

ANY_SIZE = 1 << 60
"""Value of `max_pixels` for a picture that has been converted before: its size was checked then."""
UNREADABLE = 0
"""Recorded checksum of a picture that could not be read."""
_FILE_SYSTEM_ENCODING = sys.getfilesystemencoding()
_FILE_SYSTEM_ERRORS = sys.getfilesystemencodeerrors()
_DECODED_PATHS = 4096  # how many paths are decoded to text at a time


@dataclass(frozen=True, slots=True)
class SampleRef:
    """A sample of a source as the scan lists it, before its picture is read.

    Attributes:
        id: rank in the sorted scan of files, or row of a table or a dataset; rank among the pictures that
            are left with `--without`, so a source finds its samples by `path` and `offset` alone.
        path: name of the sample in its source; in a tree the path from its root, with forward slashes.
        label: index of the sample's class; -1 if it has no class or several.
        bytes: size of the file; -1 for a missing file, which is rejected when it is read, and after a scan
            that did not ask for sizes.
        split: name of the split that the source puts the sample in; "" if it has no splits.
        modified_ns: time of the file's last write, as the file system counts; two samples that differ in it
            alone are equal.
        offset: where the source's `read` finds the picture, in units of the source: rows of tables,
            bytes of all tars joined, or samples in stored order.
        original_size: width and height in pixels of the picture that this one was converted from; None if
            this is the original.
        target: label of a sample that has not exactly one class: a list of class indices, or numbers.
        fields: values of the other columns by name, as JSON types.
    """

    id: int
    path: str
    label: int
    bytes: int
    split: str = ""
    modified_ns: int = field(default=0, compare=False)
    offset: int = 0
    original_size: tuple[int, int] | None = None
    target: Any = field(default=None, compare=False)
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class IgnoredPath:
    """A file, folder or member that is no sample, and the reason; `path` is as in `SampleRef`."""

    path: str
    reason: str


class Paths(Sequence[str]):
    """Sequence of paths that are decoded on access: 1,000,000 of them take 40 MB rather than 110.

    Args:
        content: encoded paths, one behind the other.
        ends: int64 [n], offset in `content` of the end of each path.
        prefix: text in front of each path.
        rows: rows of the paths that are in the sequence, in its order; None for all of them.
    """

    def __init__(self, content: bytes, ends: Ints, prefix: str = "", rows: Ints | None = None) -> None:
        self._content, self._prefix = content, prefix
        starts = np.concatenate((np.zeros(1, np.int64), ends[:-1])) if len(ends) else ends
        if rows is not None:
            starts, ends = starts[rows], ends[rows]
        self._starts, self._ends = starts, ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return self._decode(self._starts[index], self._ends[index])
        return self._prefix + os.fsdecode(self._content[self._starts[index] : self._ends[index]])

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _DECODED_PATHS):
            yield from self[start : start + _DECODED_PATHS]

    def _decode(self, starts: Ints, ends: Ints) -> list[str]:
        """Decode paths as `os.fsdecode` does, in half the time."""
        content, prefix = self._content, self._prefix
        encoding, errors = _FILE_SYSTEM_ENCODING, _FILE_SYSTEM_ERRORS
        ranges = zip(starts.tolist(), ends.tolist(), strict=True)
        return [prefix + content[start:end].decode(encoding, errors) for start, end in ranges]


@dataclass(slots=True, eq=False)
class Samples(Sequence[SampleRef]):
    """Samples of a source as columns: 1,000,000 samples take some 80 MB, as objects ten times that.

    `samples[row]` is a `SampleRef`, whose attributes the columns hold.

    Attributes:
        ids: int64 [n], ascending.
        labels: int64 [n].
        file_bytes: int64 [n]; -1 after a scan that did not ask for sizes.
        modified_ns: int64 [n]; 0 after such a scan.
        splits: int64 [n], indices into `split_names`.
        split_names: names of the splits; "" alone for a source without splits.
        paths: encoded paths, one behind the other.
        path_ends: int64 [n], offset in `paths` of the end of each path.
        offsets: int64 [n]; default zeros.
        targets: labels of samples that have not exactly one class: `ragged` class indices, or numbers;
            None if each sample has one class, or no label.
        fields: columns of the fields by name.
        original_sizes: int32 [n, 2], width and height; None if the pictures are originals.
    """

    ids: Ints
    labels: Ints
    file_bytes: Ints
    modified_ns: Ints
    splits: Ints
    split_names: tuple[str, ...]
    paths: bytes
    path_ends: Ints
    offsets: Ints = None  # type: ignore[assignment]  # __post_init__ makes zeros of it
    targets: Column | None = None
    fields: dict[str, Column] = field(default_factory=dict)
    original_sizes: Sizes | None = None

    def __post_init__(self) -> None:
        self.split_names = tuple(self.split_names)
        if self.offsets is None:
            self.offsets = np.zeros(len(self.ids), np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> SampleRef:  # type: ignore[override]  # no slices
        index = range(len(self))[index]
        start = int(self.path_ends[index - 1]) if index else 0
        path = self.paths[start : int(self.path_ends[index])]
        return SampleRef(
            int(self.ids[index]),
            os.fsdecode(path),
            int(self.labels[index]),
            int(self.file_bytes[index]),
            self.split_names[self.splits[index]],
            int(self.modified_ns[index]),
            int(self.offsets[index]),
            None if self.original_sizes is None else tuple(self.original_sizes[index].tolist()),
            None if self.targets is None else self.targets.row_value(index),
            columns.row_values(self.fields, index) if self.fields else {},
        )

    @property
    def path_column(self) -> Column:
        """The paths as a column of text."""
        return Column(np.frombuffer(self.paths, np.uint8), self.path_ends)

    def list_paths(self, prefix: str = "", rows: Ints | None = None) -> Paths:
        """Return the paths of the samples, or of those at `rows`, with `prefix` in front of each."""
        return Paths(self.paths, self.path_ends, prefix, rows)

    def select(
        self, rows: Ints, splits: Ints | None = None, split_names: Sequence[str] | None = None
    ) -> "Samples":
        """Return the samples at `rows`, with new splits if these are given."""
        paths = self.path_column.select(rows)
        assert paths.ends is not None
        return Samples(
            ids=self.ids[rows],
            labels=self.labels[rows],
            file_bytes=self.file_bytes[rows],
            modified_ns=self.modified_ns[rows],
            splits=self.splits[rows] if splits is None else splits,
            split_names=self.split_names if split_names is None else tuple(split_names),
            paths=paths.values.tobytes(),
            path_ends=paths.ends,
            offsets=self.offsets[rows],
            targets=None if self.targets is None else self.targets.select(rows),
            fields=columns.select_rows(self.fields, rows),
            original_sizes=None if self.original_sizes is None else self.original_sizes[rows],
        )


class SampleList:
    """List of samples that a source appends to while it is scanned; each takes some 50 bytes and its path.

    Attributes:
        file_bytes, modified_ns, offsets: columns as in `Samples`, with a value for each sample so far.
        split_of: number of each split by its name, in the order of their first samples.
    """

    def __init__(self) -> None:
        self._paths, self._path_ends = bytearray(), array("q")
        self.file_bytes, self.modified_ns, self.offsets, self._splits = (array("q") for _ in range(4))
        self.split_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.offsets)

    def path(self, row: int) -> str:
        """Return the path of a sample."""
        start = self._path_ends[row - 1] if row else 0
        return os.fsdecode(bytes(self._paths[start : self._path_ends[row]]))

    def add(
        self, path: str, file_bytes: int = 0, modified_ns: int = 0, offset: int = 0, split: str = ""
    ) -> None:
        """Append a sample; see `SampleRef` for the arguments."""
        self._paths += os.fsencode(path)
        self._path_ends.append(len(self._paths))
        self.file_bytes.append(file_bytes)
        self.modified_ns.append(modified_ns)
        self.offsets.append(offset)
        self._splits.append(self.split_of.setdefault(split, len(self.split_of)))

    def add_files(
        self,
        paths: Sequence[str],
        splits: Sequence[str] | str,
        file_bytes: Sequence[int] = (),
        modified_ns: Sequence[int] = (),
        offsets: Sequence[int] = (),
    ) -> None:
        """Append a sample for each of `paths`.

        Args:
            paths: paths, of which none has a NUL.
            splits: split of each sample, or of all.
            file_bytes, modified_ns, offsets: see `SampleRef`; empty if they are not known yet.
        """
        if not paths:
            return
        count = len(paths)
        encoded = os.fsencode("\0".join(paths)).split(b"\0")
        self._path_ends.extend(accumulate(map(len, encoded[1:]), initial=len(self._paths) + len(encoded[0])))
        self._paths += b"".join(encoded)
        self.file_bytes.extend(file_bytes or repeat(-1, count))
        self.modified_ns.extend(modified_ns or repeat(0, count))
        self.offsets.extend(offsets or repeat(0, count))
        if isinstance(splits, str):
            number = self.split_of.setdefault(splits, len(self.split_of))
            self._splits.extend(repeat(number, count))
        else:
            self._splits.extend(self.split_of.setdefault(split, len(self.split_of)) for split in splits)

    def samples(
        self, labels: Ints, targets: Column | None = None, fields: Mapping[str, Column] | None = None
    ) -> Samples:
        """Return the samples as columns; no sample can be added after that.

        Ids are the ranks in the list, and splits are numbered in the order of their names.
        """
        names = sorted(self.split_of)
        rank = np.empty(len(names), np.int64)
        rank[[self.split_of[name] for name in names]] = np.arange(len(names))
        return Samples(
            ids=np.arange(len(self)),
            labels=labels,
            file_bytes=np.frombuffer(self.file_bytes, np.int64),
            modified_ns=np.frombuffer(self.modified_ns, np.int64),
            splits=rank[np.frombuffer(self._splits, np.int64)],
            split_names=tuple(names),
            paths=bytes(self._paths),
            path_ends=np.frombuffer(self._path_ends, np.int64),
            offsets=np.frombuffer(self.offsets, np.int64),
            targets=targets,
            fields=dict(fields or {}),
        )


class Source(Protocol):
    """Source of samples, which nothing writes to.

    Worker processes read from a pickled copy: it holds no open file, and takes few bytes for each sample. The
    path of a sample stays the same while others come and go, since `--without` finds pictures by their paths.
    A change is noticed by `SampleRef.bytes` and `modified_ns`, and by what `read` raises. The samples of a
    scan are a `SampleList`; `precache.sources.targets.scan_rows` makes the scan of it where samples have
    labels and fields in columns.

    A source may also have a method `prepare(scan, recipe)`, which adapts the scan to the recipe, see
    `prepare_scan`.
    """

    @property
    def root(self) -> Path:
        """Folder or file of the source, by which messages name it."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """Folders and files that the source reads; no conversion may write into them."""

    def scan(self) -> "Scan":
        """List the samples.

        Raises:
            SourceError: there are no samples, or something cannot be read (then `__cause__` is an OSError).
            SettingError: an option does not fit the source.
        """

    def read(self, ref: SampleRef, max_pixels: int) -> "bytes | Image.Image":
        """Return the picture as it was scanned: encoded, or decoded if the source stores it decoded.

        Raises:
            ImageError: the picture is missing, or larger than a picture of `max_pixels` can be.
            SourceError: the picture cannot be read now, or has changed since the scan.
        """

    def where(self, ref: SampleRef) -> str:
        """Return the picture's name for messages: its path, or its row or member and the path of its file."""


def warn_of_undecodable(scan: "Scan") -> None:
    """Warn of pictures whose extension names a format that this Pillow cannot decode."""
    counts = Counter[str]()
    for suffix, kind in unreadable_extensions().items():
        counts[kind] += int(scan.samples.path_column.ends_with([suffix]).sum())
    for kind, count in counts.items():
        if not count:
            continue
        pictures = quantity(count, "picture is", "pictures are")
        warn(
            f"{scan.root}: {pictures} named as {kind}, for which this Pillow has no decoder, and will be "
            f"left out; {decoder_remedy(kind)}"
        )


@dataclass(frozen=True, slots=True)
class Scan:
    """Result of scanning a source: its samples and classes, ignored files and warnings.

    Attributes:
        source: the source that was scanned, ready to be read.
        classes: names of the classes, which labels index; sorted unless the source has its own order.
        samples: samples of the source; those of a tree are sorted by split, class, folder and file name.
        ignored: files, folders or members that are not samples, with the reasons.
        scanned: number of files, members or rows that were looked at; each is a sample or ignored.
        digest: SHA-256 (hex) over paths, sizes, targets and fields of the samples, which tells two sources
            apart without reading pictures; over paths alone for a tree that was listed without sizes.
        warnings: lines about classes without pictures, files left out that look like pictures, one folder
            under two names, and folders that may be splits or classes.
        target: kind of the labels, one of `precache.dataset.columns.TARGETS`.
        is_tree: whether the samples are files of a tree, or were converted from such files.
        deeper: number of a tree's pictures that lie in a folder inside their class folder.
    """

    source: Source
    classes: tuple[str, ...]
    samples: Samples
    ignored: tuple[IgnoredPath, ...]
    scanned: int
    digest: str
    warnings: tuple[str, ...] = ()
    target: str = "class"
    is_tree: bool = False
    deeper: int = 0

    @property
    def root(self) -> Path:
        """Folder or file of the source, by which messages name it."""
        return self.source.root


def prepare_scan(scan: Scan, recipe: Recipe) -> Scan:
    """Adapt the scan to the recipe, if the source has `prepare`; else return it unchanged.

    Raises:
        SettingError: the source cannot be converted by this recipe.
    """
    prepare = getattr(scan.source, "prepare", None)
    return scan if prepare is None else prepare(scan, recipe)


def picture_checksum(picture: bytes | Image.Image) -> int:
    """Return the XXH3-64 of a file's bytes, or of the pixels if `Source.read` gave a decoded picture."""
    return checksum_of(picture if isinstance(picture, bytes) else picture.tobytes())


def scan_digest(samples: Samples, classes: Sequence[str]) -> str:
    """Return `Scan.digest` for any source but a tree, which hashes paths and sizes alone."""
    digest = hashlib.sha256(samples.paths)
    for numbers in (samples.ids, samples.path_ends, samples.file_bytes, samples.labels, samples.splits):
        digest.update(numbers.tobytes())
    digest.update(repr((samples.split_names, tuple(classes))).encode())
    for name, column in sorted({**samples.fields, "": samples.targets}.items()):
        if column is not None:
            digest.update(name.encode(errors="surrogateescape") + b"\0")
            digest.update(column.content())
    return digest.hexdigest()


def changed_pictures(scan: Scan, rows: Ints, modified_ns: Ints, checksums: Checksums) -> Iterator[str]:
    """Yield the names, for messages, of those pictures that have other bytes than before, at the same size.

    A picture whose time of the last write is still the same is taken for unchanged. One with another time, as
    in a copy of the tree, is read, and its checksum is compared.

    Args:
        rows: int64 [n], rows of the scan's samples to look at.
        modified_ns: int64 [n], earlier times of their last write.
        checksums: uint64 [n], earlier XXH3-64 of the files, or UNREADABLE.

    Raises:
        SourceError: a picture cannot be read.
    """
    for position in np.flatnonzero(scan.samples.modified_ns[rows] != modified_ns).tolist():
        ref = scan.samples[int(rows[position])]
        before = checksums[position]
        if before != UNREADABLE and _current_checksum(scan, ref) != before:
            yield scan.source.where(ref)


def _current_checksum(scan: Scan, ref: SampleRef) -> int | None:
    """Return the checksum of the picture as it is now, of any size; None if it cannot be read any more."""
    try:
        return picture_checksum(scan.source.read(ref, ANY_SIZE))
    except ImageError:
        return None


def check_no_overlap(source: Source, destination: Path) -> None:
    """Raise SettingError if source and destination overlap: the source is never written to."""
    for path in source.paths:
        if paths_overlap(path, destination):
            raise SettingError(
                f"{destination} and the source {path} overlap", remedy="choose a DST beside it"
            )


def paths_overlap(first: Path, second: Path) -> bool:
    """Return whether the two are the same folder or file, or one lies inside the other."""
    first, second = Path(os.path.realpath(first)), Path(os.path.realpath(second))
    return first == second or first in second.parents or second in first.parents
